"""Answers to our questions that make no sense change nothing, and end nothing."""

import pytest
import trio
import trio.testing
from owner_worlds import FRAGMENT, IDS, RUN, outer_copy

from peer.averaging.fragment_healing import FragmentHealing
from peer.network.conversation import Conversation
from peer.network.simulated import SimulatedInternet
from peer.simulated_ports import SimulatedWork
from protocol.fragment_messages import ChunkStamp
from protocol.messages import GetStamps, Refusal, Stamps
from protocol.outcomes import RefusalReason
from protocol.versions import FRAGMENT as PROTOCOL

AHEAD = [ChunkStamp(chunk, 9, 9, bytes(16)) for chunk in range(3)]


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
async def test_stamps_that_make_no_sense_are_none(answer, autojump_clock, nursery):
    internet, outer, put = SimulatedInternet(1), outer_copy(), []
    async with internet.open_network(IDS[0]) as ours, internet.open_network(IDS[1]) as theirs:
        await ours.connect(IDS[1], theirs.addresses)
        asked = []

        async def serve(stream) -> None:
            talk = Conversation(stream)
            asked.append(await talk.receive(GetStamps))
            await talk.send(answer)
            await trio.sleep(1)

        await theirs.serve(PROTOCOL, serve)

        async def write(function, *args) -> None:
            await trio.lowlevel.checkpoint()
            function(*args)

        healing = FragmentHealing(
            RUN,
            network=ours,
            work=SimulatedWork(),
            outer=outer,
            write=write,
            put=lambda fragment, item: put.append(item),
            is_over=lambda: False,
        )
        await nursery.start(healing.run)
        healing.ask(FRAGMENT, IDS[1])
        await healing.adopt_stamps([IDS[1]])
        await trio.sleep(5)
        assert len(asked) == 2
        assert put == []
        assert healing.statistics().diverged == 0
        nursery.cancel_scope.cancel()
