"""Rulings: what the founder, or a delegate, has said of one peer.

    ruling   ["ruling", run id, verdict, peer id, serial, key of the signer]

The serial grows with every ruling that a signer makes; which ruling holds, the register decides
(register.py).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from protocol.address.peer_id import public_key_from_peer_id
from protocol.errors import RemoteProtocolError

from .sealed import KEY_BYTES, Sign, check, opened, seal

RULING: Final = "ruling"
MAX_SERIAL: Final = (1 << 53) - 1


class Verdict(StrEnum):
    """What a ruling says of its peer."""

    ADMIT = "admit"
    BAN = "ban"
    DELEGATE = "delegate"
    """It is admitted, and may admit, ban and invite; only the founder says so."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """See the top of the file.

    Attributes:
        signer: Ed25519 public key.
        sealed: the statement.
    """

    verdict: Verdict
    peer_id: str
    serial: int
    signer: bytes
    sealed: bytes

    @classmethod
    def made(
        cls, run_id: str, verdict: Verdict, peer_id: str, serial: int, signer: bytes, sign: Sign
    ) -> Self:
        """A new ruling.

        Args:
            signer: the public key that belongs to `sign`.

        Raises:
            RemoteProtocolError: that is no peer id.
        """
        public_key_from_peer_id(peer_id)
        sealed = seal([RULING, run_id, str(verdict), peer_id, serial, signer], sign)
        return cls(verdict, peer_id, serial, signer, sealed)

    @classmethod
    def read(cls, data: bytes, run_id: str) -> Self:
        """A ruling of this run, its signature checked.

        Raises:
            RemoteProtocolError
        """
        fields, body, signature = opened(data)
        match fields:
            case ["ruling", str(run), str(verdict), str(peer_id), int(serial), bytes(signer)]:
                known = run == run_id and verdict in tuple(Verdict) and 0 < serial <= MAX_SERIAL
                if known and len(signer) == KEY_BYTES:
                    public_key_from_peer_id(peer_id)
                    check(signer, body, signature)
                    return cls(Verdict(verdict), peer_id, serial, signer, data)
        raise RemoteProtocolError("not a ruling of this run")
