"""A signed spec is believed when, and only when, its founder signed it."""

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.errors import InvalidRunSpec, RemoteProtocolError
from protocol.run.run_spec import RunSpec, run_id_of
from protocol.run.signed_spec import DOMAIN, SignedSpec

FOUNDER = Ed25519PrivateKey.from_private_bytes(b"f" * 32)
OTHER = Ed25519PrivateKey.from_private_bytes(b"o" * 32)


def signed(spec: RunSpec | None = None, by: Ed25519PrivateKey = FOUNDER) -> SignedSpec:
    return SignedSpec.signed_by(spec or RunSpec(), by.public_key().public_bytes_raw(), by.sign)


def test_it_is_the_founders_spec_of_this_run() -> None:
    original = signed(RunSpec(name="mine", seed=7))
    original.verify(original.run_id)
    assert original.spec() == RunSpec(name="mine", seed=7)
    assert original.run_id == run_id_of(
        RunSpec(name="mine", seed=7).to_bytes(), original.founder_public_key
    )


def test_run_id_depends_on_the_founder() -> None:
    assert signed(by=OTHER).run_id != signed().run_id


def test_another_runs_spec_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="was asked for"):
        signed(RunSpec(seed=1)).verify(signed().run_id)


@pytest.mark.parametrize("field", ["spec_bytes", "founder_public_key", "signature"])
@pytest.mark.parametrize("offset", [5, -1])
def test_every_changed_byte_is_noticed(field: str, offset: int) -> None:
    data = bytearray(getattr(signed(), field))
    data[offset] ^= 1
    with pytest.raises(RemoteProtocolError):
        replace(signed(), **{field: bytes(data)}).verify()


@pytest.mark.parametrize("key", [b"", b"k" * 31, b"k" * 33])
def test_a_key_of_another_length_is_their_fault(key: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        replace(signed(), founder_public_key=key).verify()


def test_a_signature_without_the_domain_does_not_count() -> None:
    spec_bytes = RunSpec().to_bytes()
    key = FOUNDER.public_key().public_bytes_raw()
    bare = SignedSpec(spec_bytes, key, FOUNDER.sign(spec_bytes))
    with pytest.raises(RemoteProtocolError, match="signature"):
        bare.verify()
    SignedSpec(spec_bytes, key, FOUNDER.sign(DOMAIN + spec_bytes)).verify()


def test_a_signed_spec_that_cannot_be_used_is_refused() -> None:
    key = FOUNDER.public_key().public_bytes_raw()
    nonsense = SignedSpec(b'{"sead":1}', key, FOUNDER.sign(DOMAIN + b'{"sead":1}'))
    nonsense.verify()
    with pytest.raises(InvalidRunSpec, match="did you mean 'seed'"):
        nonsense.spec()
