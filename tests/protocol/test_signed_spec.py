"""A signed spec is believed when, and only when, its founder signed it."""

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.errors import RemoteProtocolError
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import DOMAIN, MAX_SIGNED_SPEC_BYTES, SignedSpec

FOUNDER = Ed25519PrivateKey.from_private_bytes(b"f" * 32)
OTHER = Ed25519PrivateKey.from_private_bytes(b"o" * 32)


def signed(spec: RunSpec | None = None, by: Ed25519PrivateKey = FOUNDER) -> SignedSpec:
    return SignedSpec.signed_by(spec or RunSpec(), by.public_key().public_bytes_raw(), by.sign)


def test_round_trip_keeps_everything() -> None:
    original = signed(RunSpec(name="mine", seed=7))
    received = SignedSpec.from_bytes(original.to_bytes(), original.run_id)
    assert received == original
    assert received.spec() == RunSpec(name="mine", seed=7)
    assert received.run_id == RunSpec(name="mine", seed=7).run_id(original.founder_public_key)


def test_run_id_depends_on_the_founder() -> None:
    assert signed(by=OTHER).run_id != signed().run_id


def test_another_runs_spec_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="was asked for"):
        SignedSpec.from_bytes(signed(RunSpec(seed=1)).to_bytes(), signed().run_id)


@pytest.mark.parametrize("offset", [5, 40, -40, -1])
def test_every_changed_byte_is_noticed(offset: int) -> None:
    data = bytearray(signed().to_bytes())
    data[offset] ^= 1
    with pytest.raises(RemoteProtocolError):
        SignedSpec.from_bytes(bytes(data))


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
    with pytest.raises(RemoteProtocolError, match="did you mean 'seed'"):
        SignedSpec.from_bytes(nonsense.to_bytes())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        msgpack.packb([1, b"", b"k" * 32]),
        msgpack.packb([2, b"", b"k" * 32, b"s" * 64]),
        msgpack.packb([1, "text", b"k" * 32, b"s" * 64]),
        msgpack.packb([1, b"", b"k" * 31, b"s" * 64]),
        msgpack.packb([1, b"", b"k" * 32, b"s" * 64]) + b"more",
        msgpack.packb({"a": 1}),
        bytes(MAX_SIGNED_SPEC_BYTES + 1),
    ],
)
def test_malformed_bytes_are_their_fault(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        SignedSpec.from_bytes(data)
