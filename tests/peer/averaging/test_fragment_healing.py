"""Questions about what others hold, and what comes of the answers."""

from dataclasses import replace

import pytest
import trio
import trio.testing
from owner_worlds import FRAGMENT, GROUP, IDS, outer_copy

from peer.averaging.diloco.fragment_healing import FragmentHealing
from peer.network.conversation import Conversation
from peer.network.simulated import SimulatedInternet
from peer.ports.simulated import SimulatedWork
from protocol.outcomes import RefusalReason
from protocol.wire.fragment_messages import ChunkStamp
from protocol.wire.messages import GetResult, GetStamps, Refusal, Stamps
from protocol.wire.versions import FRAGMENT as PROTOCOL

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
            GROUP,
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


def never(*_: object) -> None:
    raise AssertionError("nothing came that could be put")


async def never_written(*_: object) -> None:
    raise AssertionError("nothing came that could be written")


@pytest.mark.parametrize(
    ("is_over", "digest", "asks"),
    [(False, bytes(16), False), (True, bytes(16), True), (True, b"\xff" * 16, False)],
    ids=["the next result decides", "lower at the end", "higher at the end"],
)
async def test_of_two_equal_histories_the_lower_digest_wins_when_the_run_is_over(
    is_over, digest, asks, autojump_clock, nursery
):
    internet, outer = SimulatedInternet(1), outer_copy()
    asked = []

    async def serve(stream) -> None:
        async with Conversation(stream) as talk:
            await talk.receive(GetStamps)
            ours = [outer.ledgers[FRAGMENT].stamp(chunk) for chunk in (0, 1)]
            other = replace(ours[0], digest=digest)
            stamps = (ChunkStamp.of(0, other), ChunkStamp.of(1, ours[1]))
            await talk.send(Stamps(FRAGMENT, stamps, (1, 1)))
            await talk.receive(GetResult)
            await talk.refuse(RefusalReason.UNAVAILABLE, "no")

    async def serve_any(stream) -> None:
        asked.append(stream)
        if len(asked) == 1:
            await serve(stream)

    async with internet.open_network(IDS[0]) as ours, internet.open_network(IDS[1]) as theirs:
        await ours.connect(IDS[1], theirs.addresses)
        await theirs.serve(PROTOCOL, serve_any)
        healing = FragmentHealing(
            GROUP,
            network=ours,
            work=SimulatedWork(),
            outer=outer,
            write=never_written,
            put=never,
            is_over=lambda: is_over,
        )
        await nursery.start(healing.run)
        healing.ask(FRAGMENT, IDS[1])
        await trio.sleep(5)
        assert len(asked) == 1 + asks
        assert healing.statistics().diverged == asks
        nursery.cancel_scope.cancel()
