"""libp2p peer ids of Ed25519 keys: text, bytes and public key, one from the other.

A peer id is a multihash of the key's protobuf form. Ed25519 keys are short enough for the
*identity* hash, so the id holds the whole key, and anybody who knows it can check a signature
(libp2p specs, peer-ids):

    00        multihash: identity
    24        length of what follows: 36
    08 01     field 1, key type: Ed25519
    12 20     field 2, 32 bytes
    ..        the public key

The text form is the base58 of those 38 bytes (`12D3KooW...`). Ids of other key types hold only a
hash of their key, so records signed by them could not be verified: they raise
`RemoteProtocolError`, as what is no peer id does.
"""

from collections.abc import Callable
from typing import Final

from protocol.errors import RemoteProtocolError

PUBLIC_KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
KEY_PROTOBUF_PREFIX: Final = bytes.fromhex("08011220")
"""Start of an Ed25519 public key's protobuf form; the key follows."""
MAX_PEER_ID_TEXT: Final = 64
"""Longest text looked at: Ed25519 peer ids have 52 characters, other kinds at most 53."""

Sign = Callable[[bytes], bytes]
"""Ed25519 signature (64 bytes) of the data under our own key."""

_PREFIX: Final = bytes.fromhex("0024") + KEY_PROTOBUF_PREFIX
_ALPHABET: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DIGIT: Final = {character: value for value, character in enumerate(_ALPHABET)}


def peer_id_from_public_key(public_key: bytes) -> str:
    """The peer id of an Ed25519 public key (32 bytes)."""
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise ValueError(
            f"an Ed25519 public key has {PUBLIC_KEY_BYTES} bytes, not {len(public_key)}"
        )
    return _base58_encode(_PREFIX + public_key)


def public_key_from_peer_id(peer_id: str) -> bytes:
    """The Ed25519 public key (32 bytes) inside a peer id."""
    return peer_id_to_bytes(peer_id)[len(_PREFIX) :]


def peer_id_to_bytes(peer_id: str) -> bytes:
    """The binary form (38 bytes)."""
    data = _base58_decode(peer_id)
    _check(data, repr(peer_id))
    return data


def peer_id_from_bytes(data: bytes) -> str:
    _check(data, data.hex() or "nothing")
    return _base58_encode(data)


def _check(data: bytes, shown: str) -> None:
    if data[:2] == b"\x12\x20" and len(data) == 34:
        raise RemoteProtocolError(
            f"peer id {shown} holds only a hash of its key (RSA or ECDSA); peers need an Ed25519 "
            "identity"
        )
    if data[:1] == b"\x00" and data[2:4] == b"\x08\x02":
        raise RemoteProtocolError(
            f"peer id {shown} is of a secp256k1 key; peers need an Ed25519 identity"
        )
    if len(data) != len(_PREFIX) + PUBLIC_KEY_BYTES or not data.startswith(_PREFIX):
        raise RemoteProtocolError(f"{shown} is not an Ed25519 peer id (they begin with 12D3KooW)")


def _base58_encode(data: bytes) -> str:
    number = int.from_bytes(data, "big")
    text = ""
    while number:
        number, digit = divmod(number, 58)
        text = _ALPHABET[digit] + text
    num_zeros = len(data) - len(data.lstrip(b"\0"))
    return _ALPHABET[0] * num_zeros + text


def _base58_decode(text: str) -> bytes:
    if not text or len(text) > MAX_PEER_ID_TEXT:
        raise RemoteProtocolError(
            f"a peer id has 1 to {MAX_PEER_ID_TEXT} characters, this text has {len(text)}"
        )
    number = 0
    for character in text:
        if character not in _DIGIT:
            raise RemoteProtocolError(
                f"{text!r} is not a peer id: {character!r} is not a base58 character"
            )
        number = number * 58 + _DIGIT[character]
    num_zeros = len(text) - len(text.lstrip(_ALPHABET[0]))
    return bytes(num_zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")
