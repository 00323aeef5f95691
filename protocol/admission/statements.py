"""Sealed statements: bytes under an Ed25519 signature, of one form only.

    statement   msgpack [body, signature]
    body        msgpack [kind, ...fields]; what signs it is found in the body

A signature covers DOMAIN and the body: one that was made for anything else cannot pass for one of a
statement. What does not encode to the same bytes again is refused, so statements can be compared as
bytes.

A ruling is what the founder, or a delegate, has said of one peer.

    ruling   ["ruling", run id, verdict, peer id, serial, key of the signer]

The serial grows with every ruling on that peer; the register (register.py) decides which ruling
holds.

The holder of an invitation may enter, without anybody having to know its peer id before.

    invitation   ["invitation", run id, key of the signer, key of the guest, expires_s, uses]
    pass         ["pass", invitation, peer id], signed with the guest's key
    token        "loco1-" + base64url of msgpack [invitation, seed of the guest's key]

The token is a secret between two people. A peer never shows the token but a *pass*, which the
token's key has signed for that peer alone: a peer that sees a pass cannot enter with it.

An invitation is good until it expires, for so many peers. Each member counts the passes that it has
seen, and members tell each other of passes at once. So two peers that enter at two ends of the
swarm at the same moment may both be the last one.

A successor is the run in which the founder goes on with the model of this one, and which peers that
want it join when this one is over. Of two the one with the higher version counts.

    successor   ["successor", run id, version, run id of the successor, address, founder's key]
"""

import base64
import binascii
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Self

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from protocol.address.multiaddr import InvalidAddress, split_peer_id, to_bytes
from protocol.address.peer_id import (
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Sign,
    public_key_from_peer_id,
)
from protocol.errors import LocoError, RemoteProtocolError
from protocol.limits import MAX_EXPIRES_S, MAX_STATEMENT_BYTES

DOMAIN: Final = b"loco/v1/admission\0"
_RUN_ID: Final = re.compile("[0-9a-f]{32}")


def seal(fields: list[Any], sign: Sign) -> bytes:
    body: bytes = msgpack.packb(fields)
    sealed: bytes = msgpack.packb([body, sign(DOMAIN + body)])
    return sealed


def opened(data: bytes) -> tuple[list[Any], bytes, bytes]:
    """Fields, body and signature of a statement, not yet checked. Raises RemoteProtocolError."""
    if len(data) > MAX_STATEMENT_BYTES:
        raise RemoteProtocolError(f"a statement of {len(data)} bytes")
    try:
        body, signature = msgpack.unpackb(data, max_map_len=0, max_ext_len=0)
        fields = msgpack.unpackb(body, max_map_len=0, max_ext_len=0)
        again = msgpack.packb([msgpack.packb(fields), signature])
    except Exception as error:  # whatever a stranger's bytes may do to the decoder
        raise RemoteProtocolError(f"not a statement: {error}") from error
    is_list = isinstance(fields, list) and isinstance(signature, bytes)
    if not is_list or len(signature) != SIGNATURE_BYTES or again != data:
        raise RemoteProtocolError("a statement that is not in canonical form")
    return fields, body, signature


def check(key: bytes, body: bytes, signature: bytes) -> None:
    """Raises RemoteProtocolError: this key did not sign this body."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, DOMAIN + body)
    except (InvalidSignature, ValueError) as error:
        raise RemoteProtocolError("a statement's signature is not its signer's") from error


MAX_SERIAL: Final = (1 << 53) - 1


class Verdict(StrEnum):
    """The word of a ruling about its peer."""

    ADMIT = "admit"
    BAN = "ban"
    DELEGATE = "delegate"
    """The peer is admitted, and may admit, ban and invite; only the founder says so."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """A signer's word about a peer; `signer` is an Ed25519 public key."""

    verdict: Verdict
    peer_id: str
    serial: int
    signer: bytes
    sealed: bytes

    @classmethod
    def made(
        cls, run_id: str, verdict: Verdict, peer_id: str, serial: int, signer: bytes, sign: Sign
    ) -> Self:
        """Raises RemoteProtocolError: that is no peer id."""
        public_key_from_peer_id(peer_id)
        sealed = seal(["ruling", run_id, str(verdict), peer_id, serial, signer], sign)
        return cls(verdict, peer_id, serial, signer, sealed)

    @classmethod
    def read(cls, data: bytes, run_id: str) -> Self:
        """A ruling of this run, its signature checked. Raises RemoteProtocolError."""
        fields, body, signature = opened(data)
        match fields:
            case ["ruling", str(run), str(verdict), str(peer_id), int(serial), bytes(signer)]:
                known = run == run_id and verdict in tuple(Verdict) and 0 < serial <= MAX_SERIAL
                if known and len(signer) == PUBLIC_KEY_BYTES:
                    public_key_from_peer_id(peer_id)
                    check(signer, body, signature)
                    return cls(Verdict(verdict), peer_id, serial, signer, data)
        raise RemoteProtocolError("not a ruling of this run")


SUCCESSOR: Final = "successor"


@dataclass(frozen=True, slots=True)
class Successor:
    """The run in which a founder goes on with the model of its own; `signer` is its key.

    Attributes:
        version: counts up, so that a founder can name another one.
        run_id: of the run that comes next.
        address: of a peer of that, with its id.
    """

    version: int
    run_id: str
    address: str
    signer: bytes
    sealed: bytes

    @classmethod
    def made(
        cls, run_id: str, version: int, successor: str, address: str, signer: bytes, sign: Sign
    ) -> Self:
        """Raises RemoteProtocolError: that is no other run, or no address of a peer of it."""
        fields = [SUCCESSOR, run_id, version, successor, address, signer]
        return cls.read(seal(fields, sign), run_id)

    @classmethod
    def read(cls, data: bytes, run_id: str) -> Self:
        """The successor that this names for the run, its signature checked. Raises as `made`."""
        fields, body, signature = opened(data)
        match fields:
            case ["successor", str(run), int(version), str(other), str(address), bytes(signer)]:
                known = run == run_id != other and 0 < version <= MAX_SERIAL
                if known and _RUN_ID.fullmatch(other) and len(signer) == PUBLIC_KEY_BYTES:
                    _check_names_peer(address)
                    check(signer, body, signature)
                    return cls(version, other, address, signer, data)
        raise RemoteProtocolError("no successor of this run")

    def to_json(self) -> dict[str, str]:
        return {"run_id": self.run_id, "address": self.address}

    def comes_after(self, other: "Successor | None") -> bool:
        return other is None or (self.version, self.sealed) > (other.version, other.sealed)


def _check_names_peer(address: str) -> None:
    """Raises RemoteProtocolError: this does not say which peer answers there."""
    try:
        to_bytes(address)
        names_peer = split_peer_id(address)[1] is not None
    except InvalidAddress as error:
        raise RemoteProtocolError(str(error)) from error
    if not names_peer:
        raise RemoteProtocolError(f"{address} names no peer")


def is_successor(data: bytes) -> bool:
    """Raises RemoteProtocolError."""
    return opened(data)[0][:1] == [SUCCESSOR]


TOKEN_PREFIX: Final = "loco1-"  # noqa: S105 - what every token begins with
MAX_USES: Final = 4096


class BadToken(LocoError):
    """The text is no invitation; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """Lets the holder of a key join, until a time.

    Attributes:
        signer, guest: Ed25519 public keys.
        expires_s: Unix time of the swarm.
        uses: peers that may enter with it.
        sealed: the statement.
    """

    run_id: str
    signer: bytes
    guest: bytes
    expires_s: int
    uses: int
    sealed: bytes

    @classmethod
    def read(cls, data: bytes) -> Self:
        """An invitation, its signature checked. Raises RemoteProtocolError."""
        fields, body, signature = opened(data)
        match fields:
            case ["invitation", str(run), bytes(signer), bytes(guest), int(expires), int(uses)]:
                keys = len(signer) == PUBLIC_KEY_BYTES == len(guest)
                if keys and 0 <= expires <= MAX_EXPIRES_S and 1 <= uses <= MAX_USES:
                    check(signer, body, signature)
                    return cls(run, signer, guest, expires, uses, data)
        raise RemoteProtocolError("not an invitation")


@dataclass(frozen=True, slots=True)
class Pass:
    invitation: Invitation
    peer_id: str
    sealed: bytes

    @classmethod
    def read(cls, data: bytes, run_id: str) -> Self:
        """A pass for this run, its signatures checked. Raises RemoteProtocolError."""
        fields, body, signature = opened(data)
        match fields:
            case ["pass", bytes(sealed), str(peer_id)]:
                invitation = Invitation.read(sealed)
                if invitation.run_id != run_id:
                    raise RemoteProtocolError("an invitation to another run")
                public_key_from_peer_id(peer_id)
                check(invitation.guest, body, signature)
                return cls(invitation, peer_id, data)
        raise RemoteProtocolError("not a pass")


@dataclass(frozen=True, slots=True)
class Token:
    """An invitation and the key of a guest; its text is shown on request alone.

    Attributes:
        seed: of the guest's private key, 32 random bytes.
    """

    invitation: Invitation
    seed: bytes

    @classmethod
    def made(
        cls, run_id: str, expires_s: int, uses: int, *, seed: bytes, signer: bytes, sign: Sign
    ) -> Self:
        """A new invitation; `signer` is the public key that belongs to `sign`."""
        guest = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
        sealed = seal(["invitation", run_id, signer, guest, expires_s, uses], sign)
        return cls(Invitation(run_id, signer, guest, expires_s, uses, sealed), seed)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises BadToken."""
        said = text.strip()
        advice = "copy the whole word that `loco-peer invite` printed"
        if not said.startswith(TOKEN_PREFIX):
            raise BadToken(f"not an invitation: it begins with '{TOKEN_PREFIX}'; {advice}")
        coded = said.removeprefix(TOKEN_PREFIX)
        try:
            data = base64.urlsafe_b64decode(coded + "=" * (-len(coded) % 4))
            sealed, seed = msgpack.unpackb(data, max_map_len=0, max_ext_len=0)
            key = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
            invitation = Invitation.read(sealed)
        except (binascii.Error, ValueError, TypeError, RemoteProtocolError) as error:
            raise BadToken(f"a damaged invitation ({error}); {advice}") from error
        if invitation.guest != key:
            raise BadToken(f"a damaged invitation; {advice}")
        return cls(invitation, seed)

    def __repr__(self) -> str:
        return f"<Token of an invitation for {self.invitation.uses}>"

    @property
    def text(self) -> str:
        data: bytes = msgpack.packb([self.invitation.sealed, self.seed])
        return TOKEN_PREFIX + base64.urlsafe_b64encode(data).decode().rstrip("=")

    def pass_for(self, peer_id: str) -> Pass:
        key = Ed25519PrivateKey.from_private_bytes(self.seed)
        sealed = seal(["pass", self.invitation.sealed, peer_id], key.sign)
        return Pass(self.invitation, peer_id, sealed)
