"""Signed directory records: who is in a group, and where to reach them.

A record is stored in the directory under (key, subkey): the key is a shard of its group, the
subkey is its peer's id.

    key     blake3("loco/v1/" + name + "/" + shard); the name is the digest of the group, with
            "/" and the run's secret in hex where not everybody may join;
            shard = first byte of blake3(peer id) mod RECORD_SHARDS
    place   sha1(key): where the distributed hash table keeps the key
    value   body + Ed25519 signature of ("loco record 1", place, peer id, body)
    body    msgpack [version, incarnation, [binary addresses, best first], expires_s]

Every node of the table must be able to refuse what is not a record, for groups that it has never
heard of too. It sees the place, the subkey and the value, and the peer id holds the public key;
so the signature covers the place rather than the key, and nothing else is needed to check it.
(A preimage of the place would let a record of one group stand in another; SHA-1 has no known
preimage attack, and such a record would still be its own peer's.)

Rules:
- A value has at most MAX_RECORD_BYTES: every operation on a key moves all records under it.
- Exactly one encoding: what does not encode to the same bytes again is refused.
- The expiry is inside the signature, so nobody else can keep a record alive or bury it.
- Wall time orders nothing but expiry; which of two records is the newer says the incarnation.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import blake3
import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from protocol.address.multiaddr import address_from_bytes, address_to_bytes
from protocol.address.peer_id import MAX_PEER_ID_TEXT, SIGNATURE_BYTES, public_key_from_peer_id
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.limits import MAX_RECORD_ADDRESSES, MAX_RECORD_BYTES, RECORD_SHARDS

RECORD_VERSION: Final = 1
MAX_INCARNATION: Final = (1 << 63) - 1
MAX_EXPIRES_S: Final = 1e11
"""Latest Unix time of expiry; the directory sets the bound that follows the clock."""
_MAX_BODY_BYTES: Final = MAX_RECORD_BYTES - SIGNATURE_BYTES
_CONTEXT: Final = b"loco record 1\0"

Sign = Callable[[bytes], bytes]
"""Ed25519 signature (64 bytes) of the data under our own key."""
Verify = Callable[[str, bytes, bytes], bool]
"""Whether (peer id, data, signature) belong together."""


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """What a peer says of itself in the directory.

    Attributes:
        incarnation: grows with each start of the same identity.
        addresses: multiaddr text without the peer id, best first.
        expires_s: Unix time of the swarm.
    """

    peer_id: str
    incarnation: int
    addresses: tuple[str, ...]
    expires_s: float


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
    """Where the hash table keeps a key (20 bytes)."""
    return hashlib.sha1(key, usedforsecurity=False).digest()


def verify_with_peer_id(peer_id: str, data: bytes, signature: bytes) -> bool:
    """Whether `signature` is that of the key inside `peer_id`."""
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
    body = _fitting_body(record)
    return body + sign(_signed_bytes(place_of(key), record.peer_id, body))


def decode_record(
    key: bytes, subkey: str, value: bytes, verify: Verify = verify_with_peer_id
) -> PeerRecord:
    """The record in a value found under (key, subkey).

    Raises:
        RemoteProtocolError: anything about it is wrong.
    """
    return decode_record_at(place_of(key), subkey, value, verify)


def decode_record_at(
    place: bytes, subkey: str, value: bytes, verify: Verify = verify_with_peer_id
) -> PeerRecord:
    """Decode and check a record as `decode_record` does, from the key's place (20 bytes) alone.

    Raises:
        RemoteProtocolError: anything about it is wrong.
    """
    if not SIGNATURE_BYTES < len(value) <= MAX_RECORD_BYTES:
        raise RemoteProtocolError(
            f"a record of {len(value)} bytes; at most {MAX_RECORD_BYTES} are allowed"
        )
    if len(subkey) > MAX_PEER_ID_TEXT or not subkey.isascii():
        raise RemoteProtocolError(f"a record under {subkey[:MAX_PEER_ID_TEXT]!r}, no peer id")
    body, signature = value[:-SIGNATURE_BYTES], value[-SIGNATURE_BYTES:]
    record = _read_body(subkey, body)
    if not verify(subkey, _signed_bytes(place, subkey, body), signature):
        raise RemoteProtocolError(f"the record's signature is not that of {subkey}")
    return record


@lru_cache(maxsize=8192)
def valid_record_at(place: bytes, subkey: str, value: bytes) -> PeerRecord | None:
    """The record, if it passes the usual check of `decode_record_at`; None when it does not.

    The answer is remembered, for checking a signature takes long.
    """
    try:
        return decode_record_at(place, subkey, value)
    except RemoteProtocolError:
        return None


def _signed_bytes(place: bytes, peer_id: str, body: bytes) -> bytes:
    name = peer_id.encode()
    return _CONTEXT + place + len(name).to_bytes(2, "big") + name + body


def _fitting_body(record: PeerRecord) -> bytes:
    if not 0 <= record.incarnation <= MAX_INCARNATION or not 0 < record.expires_s < MAX_EXPIRES_S:
        raise LocalProtocolError(f"a record cannot hold these numbers: {record!r}")
    kept: list[bytes] = []
    for address in record.addresses:
        kept = _with_address(kept, address, record)
    if not kept:
        raise LocalProtocolError(f"none of the addresses {record.addresses} fits into a record")
    return _pack_body(record.incarnation, kept, record.expires_s)


def _with_address(kept: list[bytes], address: str, record: PeerRecord) -> list[bytes]:
    try:
        binary = address_to_bytes(_without_own_id(address, record.peer_id))
    except ValueError:
        return kept  # one that others could not read; there may be better ones
    longer = [*kept, binary]
    fits = len(_pack_body(record.incarnation, longer, record.expires_s)) <= _MAX_BODY_BYTES
    return longer if fits and len(longer) <= MAX_RECORD_ADDRESSES and binary not in kept else kept


def _without_own_id(address: str, peer_id: str) -> str:
    return address.removesuffix(f"/p2p/{peer_id}")


def _pack_body(incarnation: int, addresses: list[bytes], expires_s: float) -> bytes:
    packed: bytes = msgpack.packb([RECORD_VERSION, incarnation, addresses, float(expires_s)])
    return packed


def _read_body(peer_id: str, body: bytes) -> PeerRecord:
    try:
        fields = msgpack.unpackb(body, strict_map_key=True, max_ext_len=0, max_map_len=0)
    except Exception as error:
        raise RemoteProtocolError(f"a record that is not msgpack: {error}") from error
    if not isinstance(fields, list) or len(fields) != 4 or fields[0] != RECORD_VERSION:
        raise RemoteProtocolError(f"not a record of version {RECORD_VERSION}")
    incarnation, addresses, expires_s = fields[1:]
    _check_numbers(incarnation, expires_s)
    texts = _read_addresses(addresses)
    if _pack_body(incarnation, addresses, expires_s) != body:
        raise RemoteProtocolError("a record that is not in canonical form")
    return PeerRecord(peer_id, incarnation, texts, expires_s)


def _check_numbers(incarnation: Any, expires_s: Any) -> None:
    if type(incarnation) is not int or not 0 <= incarnation <= MAX_INCARNATION:
        raise RemoteProtocolError(f"{incarnation!r} is not an incarnation")
    if (
        type(expires_s) is not float
        or not math.isfinite(expires_s)
        or not 0 < expires_s < MAX_EXPIRES_S
    ):
        raise RemoteProtocolError(f"{expires_s!r} is not a time of expiry")


def _read_addresses(addresses: Any) -> tuple[str, ...]:
    if not isinstance(addresses, list) or not 1 <= len(addresses) <= MAX_RECORD_ADDRESSES:
        raise RemoteProtocolError(f"a record holds 1 to {MAX_RECORD_ADDRESSES} addresses")
    if not all(type(address) is bytes for address in addresses):
        raise RemoteProtocolError("a record's addresses are binary")
    try:
        return tuple(address_from_bytes(address) for address in addresses)
    except ValueError as error:
        raise RemoteProtocolError(f"a record's address cannot be read: {error}") from error
