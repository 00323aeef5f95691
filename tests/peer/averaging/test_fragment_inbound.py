"""What a peer may not send on a fragment stream is told from what it may, before anybody acts."""

import pytest
from msgspec.structs import replace
from owner_worlds import FRAGMENT, GROUP, IDENTITIES, IDS, codes_of, contribution, outer_copy
from pipe_streams import pipe

from peer.averaging.diloco.fragment_messages import FragmentInbound, OtherGroup
from peer.codec import code_digest
from peer.network.conversation import Conversation
from protocol.errors import RemoteProtocolError
from protocol.wire.fragment_messages import (
    ChunkResult,
    FragmentSettled,
    GetChunkState,
    GetResult,
    GetStamps,
    NoResult,
    Result,
    mask_of,
    signed_contribution,
    signed_result,
)
from protocol.wire.frames import encode_frame
from protocol.wire.messages import encode_message
from simulation.work import SimulatedWork

OUTER = outer_copy("int8")


def result(**changes) -> Result:
    codes = codes_of(OUTER, 1, 2.0)
    stamp = OUTER.first_stamps()[FRAGMENT][1]
    digest = code_digest(OUTER.codec, memoryview(codes))
    chunk = ChunkResult(1, stamp.steps, stamp.weight, stamp.digest, mask_of([0]), digest)
    unsigned = Result(
        GROUP, FRAGMENT, 7, IDS[0], 1, (IDS[1],), (1,), (bytes(16),), (chunk,), (1,), bytes(64)
    )
    return signed_result(replace(unsigned, **changes), IDENTITIES[0].sign)


async def received(message, payload=b""):
    ours, theirs = map(Conversation, pipe(*IDS[:2]))
    await ours.send(message, payload)
    return await FragmentInbound(GROUP, OUTER, SimulatedWork()).next(theirs)


async def test_what_is_right_comes_through():
    message, codes = contribution(OUTER, {0: 1.0, 1: 2.0})
    assert (await received(message, codes))[1].keys() == {0, 1}
    assert (await received(result(), codes_of(OUTER, 1, 2.0)))[1].keys() == {1}
    settled = FragmentSettled(GROUP, FRAGMENT, 7, bytes(16))
    assert await received(settled) == (settled, {})


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (GetStamps(GROUP, 1), "no fragment 1"),
        (GetChunkState(GROUP, FRAGMENT, 2), "of a fragment of 2"),
    ],
)
async def test_questions_about_what_is_not_there_are_refused(message, sentence):
    with pytest.raises(RemoteProtocolError, match=sentence):
        await received(message)


@pytest.mark.parametrize(
    "message",
    [
        contribution(OUTER, {0: 1.0})[0],
        result(),
        NoResult(GROUP, FRAGMENT, 7),
        FragmentSettled(GROUP, FRAGMENT, 7, bytes(16)),
        GetStamps(GROUP, FRAGMENT),
        GetResult(GROUP, FRAGMENT, 7, 1),
        GetChunkState(GROUP, FRAGMENT, 1),
    ],
    ids=lambda message: type(message).__name__,
)
async def test_nothing_that_is_meant_for_another_group_comes_through(message):
    with pytest.raises(OtherGroup, match="cd" * 16):
        await received(replace(message, group="cd" * 16))


async def test_codes_of_a_wrong_length_are_refused_before_they_come():
    message, codes = contribution(OUTER, {0: 1.0})
    ours, theirs = pipe(*IDS[:2])
    await ours.send_all(encode_frame(encode_message(message), len(codes) + 1))
    with pytest.raises(RemoteProtocolError, match="expected"):
        await FragmentInbound(GROUP, OUTER, SimulatedWork()).next(Conversation(theirs))


async def test_codes_that_were_changed_are_refused():
    message, codes = contribution(OUTER, {0: 1.0})
    with pytest.raises(RemoteProtocolError, match="digest"):
        await received(message, bytes([codes[0] ^ 1]) + codes[1:])


async def test_codes_that_are_no_numbers_are_refused():
    message, codes = contribution(OUTER, {0: 1.0})
    spoilt = codes[:-2] + b"\xc0\x7f"  # a scale that is NaN
    with pytest.raises(RemoteProtocolError, match="not finite"):
        digest = code_digest(OUTER.codec, memoryview(spoilt))
        lie = replace(message, digests=(digest,))
        await received(signed_contribution(lie, IDENTITIES[0].sign), spoilt)


async def test_a_contribution_that_its_sender_has_not_signed_is_refused():
    message, codes = contribution(OUTER, {0: 1.0})
    for forged in (replace(message, steps=2), replace(message, lengths=())):
        with pytest.raises(RemoteProtocolError, match="not signed"):
            await received(forged, codes)


@pytest.mark.parametrize("factor", [0.1, 0.99, 1.01])
async def test_a_contribution_that_is_not_as_long_as_it_says_is_refused(factor):
    message, codes = contribution(OUTER, {0: 1.0})
    lie = replace(message, lengths=(message.lengths[0] * factor,))
    with pytest.raises(RemoteProtocolError, match="as long"):
        await received(signed_contribution(lie, IDENTITIES[0].sign), codes)


@pytest.mark.parametrize(
    "forged",
    [
        replace(result(), cycle=8),
        replace(result(), contributors=(IDS[2],)),
        replace(result(), owner=IDS[1]),
        result(weights=(1, 1)),
        replace(result(), signature=bytes(64)),
    ],
    ids=["cycle", "contributors", "owner", "counts", "signature"],
)
async def test_a_result_that_its_owner_has_not_signed_so_is_refused(forged):
    with pytest.raises(RemoteProtocolError, match="not signed"):
        await received(forged, codes_of(OUTER, 1, 2.0))


async def test_a_result_with_other_codes_than_signed_is_refused():
    with pytest.raises(RemoteProtocolError, match="digest"):
        await received(result(), codes_of(OUTER, 1, 3.0))


async def test_a_result_that_names_a_chunk_twice_or_carries_more_than_it_says_is_refused():
    chunk = result().chunks[0]
    with pytest.raises(RemoteProtocolError, match="chunks"):
        await received(result(chunks=(chunk, chunk)), codes_of(OUTER, 1, 2.0))
    with pytest.raises(RemoteProtocolError, match="says nothing"):
        await received(result(carried=(0,)), codes_of(OUTER, 0, 2.0))


async def test_a_stream_of_garbage_ends():
    ours, theirs = pipe(*IDS[:2])
    await ours.send_all(b"\xff" * 64)
    with pytest.raises(RemoteProtocolError):
        await FragmentInbound(GROUP, OUTER, SimulatedWork()).next(Conversation(theirs))
