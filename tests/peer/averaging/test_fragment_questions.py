"""Questions about what others hold, and what is made of the answers."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from owner_worlds import FRAGMENT, GROUP, IDS, outer_copy

from peer.averaging.diloco.averages import FragmentAudits
from peer.averaging.diloco.fragment_messages import FragmentQuestions
from peer.network.conversation import Conversation
from protocol.diloco.audits import Leaf
from protocol.errors import LocoError
from protocol.limits import READERS
from protocol.outcomes import RefusalReason
from protocol.wire.fields import Message
from protocol.wire.fragment_messages import (
    ChunkStateReply,
    GetChunkState,
    GetOpening,
    GetResult,
    GetStamps,
    Opening,
    Stamp,
    Stamps,
)
from protocol.wire.messages import Refusal
from protocol.wire.versions import FRAGMENT as PROTOCOL
from simulation.network import SimulatedInternet
from simulation.work import SimulatedWork

AHEAD = [Stamp(chunk, 9, 9, bytes(16)) for chunk in range(3)]
OUTER = outer_copy()
VALUES = bytes(8 * OUTER.chunk_values(FRAGMENT, 1))


async def asked(
    question: type[Message],
    answer: Message,
    payload: bytes,
    ask: Callable[[FragmentQuestions], Awaitable[Any]],
) -> Any:
    """What is made of the answer that another peer gives to the question."""
    internet = SimulatedInternet(1)
    async with internet.open_network(IDS[0]) as ours, internet.open_network(IDS[1]) as theirs:
        await ours.connect(IDS[1], theirs.addresses)

        async def serve(stream) -> None:
            async with Conversation(stream) as talk:
                await talk.receive(question)
                await talk.send(answer, payload)

        await theirs.serve(PROTOCOL, serve)
        return await ask(FragmentQuestions(GROUP, ours, OUTER, SimulatedWork()))


async def stamps_of(questions: FragmentQuestions) -> Stamps:
    async with questions.stream_to(IDS[1]) as talk:
        return await questions.stamps(talk, FRAGMENT)


async def test_stamps_are_taken_with_their_cycles(autojump_clock):
    answer = Stamps(FRAGMENT, (AHEAD[0], AHEAD[1]), (1, 2))
    assert await asked(GetStamps, answer, b"", stamps_of) == answer


@pytest.mark.parametrize(
    "answer",
    [
        Stamps(FRAGMENT, (AHEAD[0], AHEAD[2]), (1, 1)),
        Stamps(FRAGMENT, (AHEAD[0], AHEAD[0]), (1, 1)),
        Stamps(FRAGMENT, (AHEAD[0],), (1,)),
        Stamps(FRAGMENT, (AHEAD[0], AHEAD[1]), (1,)),
        Stamps(FRAGMENT + 1, (AHEAD[0], AHEAD[1]), (1, 1)),
        Refusal(RefusalReason.UNAVAILABLE, "no"),
    ],
    ids=["no such chunk", "twice", "too few", "cycles missing", "another fragment", "refused"],
)
async def test_stamps_that_make_no_sense_are_none(answer, autojump_clock):
    async def ask(questions: FragmentQuestions) -> None:
        with pytest.raises(LocoError):
            await stamps_of(questions)

    await asked(GetStamps, answer, b"", ask)


async def test_a_result_that_is_refused_is_none(autojump_clock):
    async def ask(questions: FragmentQuestions) -> Any:
        async with questions.stream_to(IDS[1]) as talk:
            return await questions.result(talk, GetResult(GROUP, FRAGMENT, 3, 1))

    answer = await asked(GetResult, Refusal(RefusalReason.UNAVAILABLE, "no"), b"", ask)
    assert answer == (None, {})


@pytest.mark.parametrize(
    ("answer", "payload"),
    [
        (ChunkStateReply(FRAGMENT, 4, AHEAD[1]), VALUES),
        (ChunkStateReply(FRAGMENT, 4, AHEAD[0]), VALUES),
        (ChunkStateReply(FRAGMENT + 1, 4, AHEAD[1]), VALUES),
        (ChunkStateReply(FRAGMENT, 4, AHEAD[1]), VALUES[:-8]),
        (Refusal(RefusalReason.UNAVAILABLE, "no"), b""),
    ],
    ids=["right", "another chunk", "another fragment", "too short", "refused"],
)
async def test_a_chunk_is_fetched_if_it_is_the_one_that_was_asked_for(
    answer, payload, autojump_clock, request
):
    async def ask(questions: FragmentQuestions) -> Any:
        with suppress(LocoError):
            return await questions.fetch(IDS[1], GetChunkState(GROUP, FRAGMENT, 1))
        return None

    made = await asked(GetChunkState, answer, payload, ask)
    is_right = request.node.callspec.id == "right"
    assert made == ((answer, {1: memoryview(VALUES)}) if is_right else None)


async def test_so_many_chunks_as_a_peer_gives_at_once_are_asked_of_it(autojump_clock):
    internet, under_way, most = SimulatedInternet(1), set[object](), 0
    async with internet.open_network(IDS[0]) as ours, internet.open_network(IDS[1]) as theirs:

        async def serve(stream) -> None:
            nonlocal most
            async with Conversation(stream) as talk:
                under_way.add(talk)
                most = max(most, len(under_way))
                await talk.receive(GetChunkState)
                await trio.sleep(1.0)
                under_way.discard(talk)
                await talk.send(ChunkStateReply(FRAGMENT, 4, AHEAD[1]), VALUES)

        await ours.connect(IDS[1], theirs.addresses)
        await theirs.serve(PROTOCOL, serve)
        questions = FragmentQuestions(GROUP, ours, OUTER, SimulatedWork())
        async with trio.open_nursery() as nursery:
            for _ in range(3 * READERS.per_peer):
                nursery.start_soon(questions.fetch, IDS[1], GetChunkState(GROUP, FRAGMENT, 1))
    assert most == READERS.per_peer
    assert not questions._turns


async def test_an_owner_that_opens_to_many_already_is_asked_again(autojump_clock):
    internet, asked = SimulatedInternet(1), list[GetOpening]()
    async with internet.open_network(IDS[0]) as ours, internet.open_network(IDS[1]) as theirs:

        async def serve(stream) -> None:
            async with Conversation(stream) as talk:
                asked.append((await talk.receive(GetOpening))[0])
                if len(asked) < 3:
                    await talk.refuse(RefusalReason.TOO_MANY, "I serve 16 readers already")
                else:
                    await talk.send(Opening(), b"opened")

        await ours.connect(IDS[1], theirs.addresses)
        await theirs.serve(PROTOCOL, serve)
        audits = FragmentAudits(GROUP, ours, OUTER, SimulatedWork(), trims=False)
        result: Any = SimpleNamespace(fragment=FRAGMENT, cycle=1, owner=IDS[1])
        assert await audits._opening(Leaf(result, 0, 0, 1)) == b"opened"


async def test_a_peer_that_cannot_be_reached_has_no_chunk(autojump_clock):
    async with SimulatedInternet(1).open_network(IDS[0]) as ours:
        questions = FragmentQuestions(GROUP, ours, OUTER, SimulatedWork())
        with pytest.raises(LocoError):
            await questions.fetch(IDS[1], GetChunkState(GROUP, FRAGMENT, 1))
