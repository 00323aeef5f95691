"""A run spec with its founder's signature, by which a joiner may take it from anybody.

A spec whose digest is the run id (protocol/run/run_spec.py) is the one meant. The signature shows
that the founder meant it to be used. The signed bytes open with `DOMAIN`, so that no signature made
for anything else passes for one of a run spec.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from protocol.errors import RemoteProtocolError

from .run_spec import RunSpec, parse_bytes, run_id_of

DOMAIN: Final = b"loco/v1/run-spec\0"


@dataclass(frozen=True, slots=True)
class SignedSpec:
    """A run spec that its founder has signed.

    Attributes:
        founder_public_key: Ed25519, 32 bytes.
        signature: Ed25519 over `DOMAIN + spec_bytes`, 64 bytes.
    """

    spec_bytes: bytes
    founder_public_key: bytes
    signature: bytes

    @classmethod
    def signed_by(cls, spec: RunSpec, public_key: bytes, sign: Callable[[bytes], bytes]) -> Self:
        """`sign` signs with the key that belongs to `public_key`."""
        spec_bytes = spec.to_bytes()
        return cls(spec_bytes, public_key, sign(DOMAIN + spec_bytes))

    @property
    def run_id(self) -> str:
        return run_id_of(self.spec_bytes, self.founder_public_key)

    def verify(self, run_id: str | None = None) -> None:
        """Check the signature, and the run id if one is given. Raises RemoteProtocolError."""
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
        """Raises InvalidRunSpec: signed, but not a spec that this version can use."""
        return parse_bytes(self.spec_bytes)
