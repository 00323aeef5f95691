"""Averages of fragments among many: as many can be told as there may be, and none counts more."""

import msgpack
import pytest
from msgspec.structs import replace

from protocol.diloco.collecting import Collection
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.limits import (
    MAX_CHUNKS_PER_FRAGMENT,
    MAX_CONTRIBUTORS,
    MAX_HEADER_BYTES,
    MAX_LINKS,
)
from protocol.wire.fragment_messages import ChunkResult, Result, Stamp, mask_of
from protocol.wire.messages import decode_message, encode_message

SHORT = b"d" * 16
PEERS = tuple(f"12D3KooW{number:044}" for number in range(MAX_CONTRIBUTORS))


def result_of(peers: tuple[str, ...], num_chunks: int = 1) -> Result:
    mask = mask_of(range(len(peers)))
    chunks = tuple(
        ChunkResult(chunk, 1 << 40, 1 << 50, SHORT, mask, SHORT) for chunk in range(num_chunks)
    )
    weights = (1,) * len(peers)
    statements = (SHORT,) * len(peers)
    return Result("ab" * 16, 1, 7, peers[0], 1, peers, weights, statements, chunks, (0,), bytes(64))


def test_there_may_be_as_many_contributors_as_links_and_a_result_can_tell_them_all():
    assert MAX_CONTRIBUTORS > 2 * MAX_LINKS
    result = result_of(PEERS, MAX_CHUNKS_PER_FRAGMENT)
    header = encode_message(result)
    assert len(header) < MAX_HEADER_BYTES
    assert decode_message(header) == result
    assert result.contributors_of(result.chunks[0]) == PEERS
    assert result.chunks[0].rank.weight == MAX_CONTRIBUTORS
    assert result.is_genuine(lambda *_: True)


@pytest.mark.parametrize("places", [[0], [7], [8], [0, 63, 64, 255]])
def test_a_mask_tells_who_is_in_an_average(places):
    result = result_of(PEERS)
    (chunk,) = result.chunks
    assert replace(chunk, mask=mask_of(places)).places == tuple(places)


@pytest.mark.parametrize("mask", [b"", b"\0", b"\1\0", bytes(32) + b"\1"])
def test_a_mask_of_nobody_or_of_too_many_is_not_taken(mask):
    tree = msgpack.unpackb(encode_message(result_of(PEERS)))
    tree["chunks"][0]["mask"] = mask
    with pytest.raises(RemoteProtocolError, match="mask|chunks"):
        decode_message(msgpack.packb(tree))


@pytest.mark.parametrize(
    "mask", [b"", b"\0", b"\1\0", mask_of([MAX_CONTRIBUTORS])], ids=["none", "0", "long", "beyond"]
)
def test_a_mask_of_nobody_or_of_too_many_cannot_be_said(mask):
    with pytest.raises((ValueError, LocalProtocolError), match="mask"):
        chunk = replace(result_of(PEERS).chunks[0], mask=mask)
        encode_message(replace(result_of(PEERS), chunks=(chunk,)))


def test_no_weight_is_above_that_of_any_other_peer():
    with pytest.raises(LocalProtocolError, match="weights"):
        encode_message(replace(result_of(PEERS[:2]), weights=(1, 2)))


def test_a_result_that_names_a_contributor_twice_or_one_that_is_not_there_is_none():
    twice = result_of((PEERS[0], PEERS[0]))
    assert not twice.is_genuine(lambda *_: True)
    chunk = replace(twice.chunks[0], mask=mask_of([2]))
    assert not replace(result_of(PEERS[:2]), chunks=(chunk,)).is_genuine(lambda *_: True)


def test_a_collection_says_when_no_further_peer_can_be_named():
    collection = Collection(PEERS)
    base = Stamp(0, 0, 0, SHORT)
    for peer in PEERS[:-1]:
        assert collection.add(peer, {0: base})
    assert not collection.is_full
    collection.add(PEERS[-1], {0: base})
    assert collection.is_full
    assert len(collection.admitted(0).contributors) == MAX_CONTRIBUTORS
