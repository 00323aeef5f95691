"""Signed directory records: who is in a group, and where to reach them.

A record is stored in the directory under (key, subkey): the key is a shard of its group, the
subkey is its peer's id.

    key     blake3("loco/v1/" + name + "/" + shard); the name is the digest of the group, with
            "/" and the run's secret in hex where not everybody may join;
            shard = first byte of blake3(peer id) mod RECORD_SHARDS
    place   sha1(key): where the distributed hash table keeps the key
    value   body + Ed25519 signature of ("loco record 1", place, peer id, body)
    body    msgpack [version, incarnation, [binary addresses, best first], expires_s]

Every node of the table must be able to refuse what is not a record, also for groups that it has
never heard of. It sees the place, the subkey and the value, and the peer id holds the public key;
so the signature covers the place rather than the key, and nothing else is needed to check it.
(A preimage of the place would let a record of one group stand in another; SHA-1 has no known
preimage attack, and such a record would still be its own peer's.)

Rules:
- A value has at most MAX_RECORD_BYTES: every operation on a key moves all records under it.
- A record has one encoding: what does not encode to the same bytes again is refused.
- The expiry is inside the signature, so nobody else can keep a record alive or bury it.
- Wall time orders nothing but expiry; of two records the higher incarnation is the newer.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Final, Literal

import blake3
import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec import Meta, Struct

from protocol.address.multiaddr import InvalidAddress, address_from_bytes, address_to_bytes
from protocol.address.peer_id import (
    MAX_PEER_ID_TEXT,
    SIGNATURE_BYTES,
    Sign,
    public_key_from_peer_id,
)
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.limits import (
    MAX_COUNT,
    MAX_EXPIRES_S,
    MAX_RECORD_ADDRESSES,
    MAX_RECORD_BYTES,
    RECORD_SHARDS,
)

_CONTEXT: Final = b"loco record 1\0"

Verify = Callable[[str, bytes, bytes], bool]
"""Whether (peer id, data, signature) belong together."""


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """A peer's record of itself in the directory.

    Attributes:
        incarnation: grows with each start of the same identity.
        addresses: without the peer id, best first.
        expires_s: Unix time of the swarm.
    """

    peer_id: str
    incarnation: int
    addresses: tuple[str, ...]
    expires_s: float


class _Body(Struct, array_like=True, frozen=True):
    version: Literal[1]
    incarnation: Annotated[int, Meta(ge=0, le=MAX_COUNT)]
    addresses: Annotated[tuple[bytes, ...], Meta(min_length=1, max_length=MAX_RECORD_ADDRESSES)]
    expires_s: Annotated[float, Meta(gt=0, lt=MAX_EXPIRES_S)]


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Body).decode


@lru_cache(maxsize=64)
def record_keys(name: str) -> tuple[bytes, ...]:
    """The keys (32 bytes each) of all shards of the group with this name."""
    return tuple(
        blake3.blake3(f"loco/v1/{name}/{shard}".encode()).digest() for shard in range(RECORD_SHARDS)
    )


def record_key(name: str, peer_id: str) -> bytes:
    """The key (32 bytes) under which this peer's record of the group with this name is stored."""
    shard = blake3.blake3(peer_id.encode()).digest(length=1)[0] % RECORD_SHARDS
    return record_keys(name)[shard]


def place_of(key: bytes) -> bytes:
    """The place (20 bytes) at which the table keeps a key; of a peer id, where its node stands."""
    return hashlib.sha1(key, usedforsecurity=False).digest()


def verify_with_peer_id(peer_id: str, data: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public_key_from_peer_id(peer_id)).verify(signature, data)
    except (InvalidSignature, ValueError, RemoteProtocolError):
        return False
    return True


def encode_record(record: PeerRecord, key: bytes, sign: Sign) -> bytes:
    """The value to store under `key` and the peer's id: at most MAX_RECORD_BYTES.

    As many addresses as fit are kept, best first; a `/p2p/` part at their end is dropped.

    Raises:
        LocalProtocolError: no address fits, or a number is out of bounds.
    """
    kept: tuple[bytes, ...] = ()
    body = b""
    for address in record.addresses:
        try:
            binary = address_to_bytes(address.removesuffix(f"/p2p/{record.peer_id}"))
        except InvalidAddress:
            continue  # one that others could not read; there may be better ones
        if binary in kept or len(kept) == MAX_RECORD_ADDRESSES:
            continue
        longer = _encode(_Body(1, record.incarnation, (*kept, binary), float(record.expires_s)))
        if len(longer) <= MAX_RECORD_BYTES - SIGNATURE_BYTES:
            body, kept = longer, (*kept, binary)
    try:
        _decode(body)
    except msgspec.MsgspecError as error:
        raise LocalProtocolError(f"nothing of {record!r} fits into a record: {error}") from error
    return body + sign(_signed_bytes(place_of(key), record.peer_id, body))


def decode_record_at(
    place: bytes, subkey: str, value: bytes, verify: Verify = verify_with_peer_id
) -> PeerRecord:
    """The record in a value found under a key's place and a subkey. Raises RemoteProtocolError."""
    if not SIGNATURE_BYTES < len(value) <= MAX_RECORD_BYTES:
        raise RemoteProtocolError(
            f"a record of {len(value)} bytes; at most {MAX_RECORD_BYTES} are allowed"
        )
    if len(subkey) > MAX_PEER_ID_TEXT or not subkey.isascii():
        raise RemoteProtocolError(f"a record under {subkey[:MAX_PEER_ID_TEXT]!r}, no peer id")
    body, signature = value[:-SIGNATURE_BYTES], value[-SIGNATURE_BYTES:]
    try:
        read = _decode(body)
        texts = tuple(address_from_bytes(address) for address in read.addresses)
    except (msgspec.MsgspecError, InvalidAddress) as error:
        raise RemoteProtocolError(f"a record that cannot be read: {error}") from error
    if _encode(read) != body:
        raise RemoteProtocolError("a record that is not in canonical form")
    if not verify(subkey, _signed_bytes(place, subkey, body), signature):
        raise RemoteProtocolError(f"the record's signature is not that of {subkey}")
    return PeerRecord(subkey, read.incarnation, texts, read.expires_s)


@lru_cache(maxsize=8192)
def valid_record_at(place: bytes, subkey: str, value: bytes) -> PeerRecord | None:
    """The record, None where it is not valid; remembered, since checking a signature takes long."""
    try:
        return decode_record_at(place, subkey, value)
    except RemoteProtocolError:
        return None


def _signed_bytes(place: bytes, peer_id: str, body: bytes) -> bytes:
    name = peer_id.encode()
    return _CONTEXT + place + len(name).to_bytes(2, "big") + name + body
