"""A run spec with its founder's signature: what a joiner takes from anybody and believes.

The founder signs the canonical bytes of the run spec with the Ed25519 key of its identity. The run
id is the digest of the founder's public key and those bytes (protocol/run/run_spec.py), so somebody
who holds the run id needs no further trust: a spec that hashes to it is the one meant, and the
signature shows that the founder meant it to be used.

Rules:
- What is signed opens with `DOMAIN`, so that no signature made for anything else can pass for one
  of a run spec.
- On the wire: msgpack [version, spec bytes, founder's public key, signature], nothing after it.
- `from_bytes` returns only what was verified; there is no unverified `SignedSpec` made from a
  peer's bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from protocol.address.peer_id import PUBLIC_KEY_BYTES, SIGNATURE_BYTES
from protocol.errors import InvalidRunSpec, RemoteProtocolError
from protocol.limits import MAX_SPEC_BYTES

from .run_spec import RunSpec, parse_bytes, run_id_of

DOMAIN: Final = b"loco/v1/run-spec\0"
MAX_SIGNED_SPEC_BYTES: Final = MAX_SPEC_BYTES + 256
"""Longest encoded `SignedSpec`: the spec, a key, a signature and msgpack's framing."""
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class SignedSpec:
    """Canonical bytes of a run spec under the founder's signature.

    Attributes:
        spec_bytes: as `RunSpec.to_bytes` writes them.
        founder_public_key: Ed25519, 32 bytes.
        signature: Ed25519 over `DOMAIN + spec_bytes`, 64 bytes.
    """

    spec_bytes: bytes
    founder_public_key: bytes
    signature: bytes

    @classmethod
    def signed_by(cls, spec: RunSpec, public_key: bytes, sign: Callable[[bytes], bytes]) -> Self:
        """Sign `spec` as its founder.

        Args:
            public_key: the founder's, Ed25519, 32 bytes.
            sign: signs with the key that belongs to it.
        """
        spec_bytes = spec.to_bytes()
        return cls(spec_bytes, public_key, sign(DOMAIN + spec_bytes))

    @property
    def run_id(self) -> str:
        return run_id_of(self.spec_bytes, self.founder_public_key)

    def verify(self, run_id: str | None = None) -> None:
        """Check the signature and, when given, that this is the spec of `run_id`.

        Raises:
            RemoteProtocolError: the signature is not the founder's, or it is another run's spec.
        """
        if run_id is not None and self.run_id != run_id:
            raise RemoteProtocolError(
                f"run spec of run {self.run_id}, but run {run_id} was asked for"
            )
        try:
            key = Ed25519PublicKey.from_public_bytes(self.founder_public_key)
            key.verify(self.signature, DOMAIN + self.spec_bytes)
        except (InvalidSignature, ValueError) as error:
            raise RemoteProtocolError("the run spec's signature is not its founder's") from error

    def spec(self) -> RunSpec:
        """The run spec itself.

        Raises:
            InvalidRunSpec: signed, but not a spec that this version can use.
        """
        return parse_bytes(self.spec_bytes)

    def to_bytes(self) -> bytes:
        fields = [_VERSION, self.spec_bytes, self.founder_public_key, self.signature]
        encoded: bytes = msgpack.packb(fields)
        return encoded

    @classmethod
    def from_bytes(cls, data: bytes, run_id: str | None = None) -> Self:
        """Decode and verify what a peer sent.

        Raises:
            RemoteProtocolError: malformed, too long, badly signed, another run's, or not a run
                spec.
        """
        signed = cls(*_decoded(data))
        signed.verify(run_id)
        try:
            signed.spec()
        except InvalidRunSpec as error:
            raise RemoteProtocolError(f"signed run spec cannot be used: {error}") from error
        return signed


def _decoded(data: bytes) -> tuple[bytes, bytes, bytes]:
    if len(data) > MAX_SIGNED_SPEC_BYTES:
        raise RemoteProtocolError(f"signed run spec of {len(data)} bytes")
    try:
        fields = msgpack.unpackb(data)
    except ValueError as error:  # every decoding error of msgpack is one
        raise RemoteProtocolError("signed run spec is not msgpack") from error
    match fields:
        case [version, bytes(spec), bytes(key), bytes(signature)] if version == _VERSION:
            if len(key) == PUBLIC_KEY_BYTES and len(signature) == SIGNATURE_BYTES:
                return spec, key, signature
    raise RemoteProtocolError("signed run spec has the wrong fields")
