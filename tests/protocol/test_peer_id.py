"""Peer ids: text, bytes and key, one from the other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.address.peer_id import (
    MAX_PEER_ID_TEXT,
    peer_id_from_bytes,
    peer_id_from_public_key,
    peer_id_to_bytes,
    public_key_from_peer_id,
)
from protocol.errors import RemoteProtocolError

# The Ed25519 key is that of the libp2p peer id specification's test vectors.
SPEC_PUBLIC_KEY = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
SPEC_PEER_ID = "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"
RSA_PEER_ID = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
SECP256K1_PEER_ID = "16Uiu2HAmLhLvBoYaoZfaMUKuibM6ac163GwKY74c5kiSLg5KvLpY"


def test_a_known_key_has_the_known_peer_id() -> None:
    assert peer_id_from_public_key(SPEC_PUBLIC_KEY) == SPEC_PEER_ID
    assert public_key_from_peer_id(SPEC_PEER_ID) == SPEC_PUBLIC_KEY


@given(st.binary(min_size=32, max_size=32))
def test_every_key_survives_the_way_there_and_back(key: bytes) -> None:
    peer_id = peer_id_from_public_key(key)
    assert len(peer_id) == 52
    assert public_key_from_peer_id(peer_id) == key
    assert peer_id_from_bytes(peer_id_to_bytes(peer_id)) == peer_id


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (RSA_PEER_ID, "only a hash of its key"),
        (SECP256K1_PEER_ID, "secp256k1"),
        ("", "1 to 64 characters"),
        ("1" * (MAX_PEER_ID_TEXT + 1), "1 to 64 characters"),
        ("12D3KooW0", "'0' is not a base58 character"),
        ("12D3KooW", "not an Ed25519 peer id"),
        (SPEC_PEER_ID[:-1], "not an Ed25519 peer id"),
    ],
)
def test_what_is_no_ed25519_peer_id_is_refused_with_a_reason(text: str, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        peer_id_to_bytes(text)


@given(st.binary(max_size=60))
def test_other_bytes_are_refused_and_nothing_worse(data: bytes) -> None:
    try:
        peer_id = peer_id_from_bytes(data)
    except RemoteProtocolError:
        return
    assert peer_id_to_bytes(peer_id) == data


@given(st.text(max_size=70))
def test_other_texts_are_refused_and_nothing_worse(text: str) -> None:
    try:
        data = peer_id_to_bytes(text)
    except RemoteProtocolError:
        return
    assert peer_id_from_bytes(data) == text


def test_a_key_of_another_length_is_our_mistake() -> None:
    with pytest.raises(ValueError, match="32 bytes, not 31"):
        peer_id_from_public_key(bytes(31))
