"""Signed link vectors: one encoding, one signer, bounds on everything."""

import msgpack
import pytest
from msgspec.structs import replace
from routing_worlds import RUN_ID, SIGNERS, WORK

from protocol.address.peer_id import SIGNATURE_BYTES
from protocol.errors import RemoteProtocolError
from protocol.limits import MAX_LINK_VECTOR_BYTES, MAX_LINKS
from protocol.routing.measures import (
    MAX_US,
    LinkTimes,
    LinkVector,
    decode_vector,
    encode_vector,
)

ME, OTHER = SIGNERS[:2]
VECTOR = LinkVector(ME.peer_id, 3, 7, 2, 4, WORK, (LinkTimes(OTHER.peer_id, 40_000, 2_000, 0),))


def encoded(vector=VECTOR, run_id=RUN_ID, sign=ME.sign):
    return encode_vector(vector, run_id, sign)


def test_a_vector_comes_back_as_it_was():
    assert decode_vector(encoded(), RUN_ID) == VECTOR


@pytest.mark.parametrize(
    "data",
    [
        encoded(replace(VECTOR, peer_id=OTHER.peer_id, links=())),
        encoded(run_id="cd" * 16),
        encoded(sign=OTHER.sign),
        encoded()[:-1] + b"x",
    ],
    ids=["another peer's", "another run's", "another signer", "changed"],
)
def test_only_its_peer_can_have_signed_it(data):
    with pytest.raises(RemoteProtocolError):
        decode_vector(data, RUN_ID)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(VECTOR, stage=64),
        replace(VECTOR, slots=0),
        replace(VECTOR, number=-1),
        replace(VECTOR, work=replace(WORK, forward_us=MAX_US + 1)),
        replace(VECTOR, links=(LinkTimes(OTHER.peer_id, -1),)),
        replace(VECTOR, links=(LinkTimes(OTHER.peer_id),) * 2),
        replace(VECTOR, links=(LinkTimes(ME.peer_id),)),
        replace(VECTOR, links=tuple(LinkTimes(f"p{i:03}") for i in range(MAX_LINKS + 1))),
        replace(VECTOR, links=(LinkTimes("x" * 129),)),
    ],
)
def test_what_is_out_of_bounds_is_refused(wrong):
    with pytest.raises(RemoteProtocolError):
        decode_vector(encoded(wrong), RUN_ID)


@pytest.mark.parametrize("body", [b"", b"\xc1", msgpack.packb([1, 2]), msgpack.packb({"a": 1})])
def test_what_is_no_vector_is_refused(body):
    with pytest.raises(RemoteProtocolError):
        decode_vector(body + bytes(SIGNATURE_BYTES), RUN_ID)


def test_another_encoding_of_the_same_is_refused():
    body = encoded()[:-SIGNATURE_BYTES]
    assert body[0] == 0x97  # a list of seven
    longer = b"\xdc\x00\x07" + body[1:]
    with pytest.raises(RemoteProtocolError, match="canonical"):
        decode_vector(longer + bytes(SIGNATURE_BYTES), RUN_ID)


def test_the_largest_vector_fits():
    links = tuple(LinkTimes(f"{i:0128}", MAX_US, MAX_US, MAX_US) for i in range(MAX_LINKS))
    assert len(encoded(replace(VECTOR, links=links))) <= MAX_LINK_VECTOR_BYTES
