"""Slots for what comes in: whoever is welcome and sends nothing does not keep one for long."""

from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest
import trio

from peer.codec import BLOCK, get_codec
from peer.network.conversation import Conversation, StreamStalled
from peer.stages.transfers import FLOOR_S, BoundaryReceiver, StageSession, Unusual
from peer.training.shared import BoundaryRing, code_memory
from protocol.address.peer_id import peer_id_from_public_key
from protocol.errors import Refused, RemoteProtocolError, StreamLost
from protocol.microbatch.iterations import SEVERAL
from protocol.microbatch.sizes import FACTOR, LARGEST
from protocol.microbatch.trainer_messages import Freed
from protocol.outcomes import RefusalReason
from protocol.schedule.deadline import FIRST_OBSERVATIONS, KEPT_WAITS
from protocol.wire.stage_messages import Boundary, BoundaryKept, Credit
from protocol.wire.versions import STAGE
from simulation.network import LinkModel, SimulatedInternet
from simulation.work import SimulatedWork

LINK = LinkModel(latency_s=0.1, bandwidth_bytes_per_s=1e6)
US, THEM = (peer_id_from_public_key(bytes([n]) * 32) for n in (1, 2))
PATIENCE_S, SLOTS, LOOK_S = 600.0, 4, 0.5
CODEC = get_codec("fp32")
SLOT_BYTES = CODEC.code_bytes(BLOCK)
GRADIENT = (THEM, 1, True)


class Taker:
    """Takes one boundary from each stream, and notes how long each failure took."""

    def __init__(self):
        ring = BoundaryRing(code_memory(), CODEC, BLOCK, SLOTS)
        self.session, self.receiver = (
            StageSession(ring),
            BoundaryReceiver(SimulatedWork(LOOK_S), PATIENCE_S),
        )
        self.begun = 0
        self.took_s = []
        self.waited_s = []
        self.refused = []

    async def serve(self, stream):
        began_s = trio.current_time()
        async with Conversation(stream) as talk:
            try:
                slot, _, took_s = await self.receiver.receive(
                    talk, self.session, GRADIENT, 0.0, self._begins
                )
                self.session.send(Freed(slot))
                self.took_s.append((took_s, trio.current_time() - began_s))
            except StreamStalled:
                self.waited_s.append(trio.current_time() - began_s)
            except (RemoteProtocolError, Unusual) as error:
                self.refused.append(str(error))

    def _begins(self):
        self.begun += 1


def num_free(taker: Taker) -> int:
    """Inbound slots that nobody fills or reads."""
    return taker.session._free.statistics().current_buffer_used


@asynccontextmanager
async def taking():
    """A taker, and a function that opens a stream and sends what is welcome after a while."""
    internet, taker = SimulatedInternet(1, link=LINK), Taker()
    async with internet.open_network(US) as ours, internet.open_network(THEM) as theirs:
        await ours.serve(STAGE, taker.serve)
        await theirs.connect(US, ours.addresses)

        async def bring(after_s, codes=bytes(SLOT_BYTES)):
            async with Conversation(await theirs.open_stream(US, STAGE)) as talk:
                await talk.receive(Credit)
                await trio.sleep(after_s)
                await talk.send(Boundary(None), codes)
                with suppress(StreamLost):
                    await talk.receive(BoundaryKept, timeout_s=1.0)

        async def keep_silent():
            async with Conversation(await theirs.open_stream(US, STAGE)) as talk:
                await talk.receive(Credit)
                await trio.sleep(2 * PATIENCE_S)

        yield taker, bring, keep_silent


@pytest.mark.parametrize(
    ("usual_s", "patience_s"), [(1.0, FLOOR_S), (20.0, 2 * SEVERAL * 20.0), (100.0, PATIENCE_S)]
)
async def test_what_is_welcome_has_to_begin_within_a_few_times_the_usual(
    usual_s, patience_s, autojump_clock
):
    async with taking() as (taker, bring, keep_silent):
        for _ in range(FIRST_OBSERVATIONS):
            await bring(usual_s)
        assert taker.begun == FIRST_OBSERVATIONS
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(keep_silent)
            await trio.sleep(1.0)
            assert num_free(taker) == SLOTS - 2
        assert taker.waited_s == pytest.approx([patience_s] * 2, rel=0.05)
        assert num_free(taker) == SLOTS


async def test_before_enough_was_seen_the_patience_holds(autojump_clock):
    async with taking() as (taker, _, keep_silent):
        await keep_silent()
        assert taker.waited_s == [pytest.approx(PATIENCE_S, abs=1.0)]


@pytest.mark.slow
async def test_machines_that_have_become_slow_are_waited_for_in_the_end(autojump_clock):
    async with taking() as (taker, bring, _):
        for _ in range(KEPT_WAITS):
            await bring(1.0)
        for _ in range(KEPT_WAITS):
            with suppress(StreamLost):
                await bring(2 * FLOOR_S)
        assert 0 < len(taker.waited_s) < KEPT_WAITS
        assert taker.begun == 2 * KEPT_WAITS - len(taker.waited_s)


async def test_what_holds_no_finite_values_is_refused_before_a_trainer_sees_it(autojump_clock):
    async with taking() as (taker, bring, _):
        await bring(1.0)
        await bring(1.0, b"\xff" * SLOT_BYTES)
        assert taker.refused == ["a boundary's values are not finite, or huge: inf"]
        assert num_free(taker) == SLOTS


def of_size(size):
    return np.full(BLOCK, size, np.float32).tobytes()


async def test_what_is_larger_than_any_honest_boundary_is_refused_from_the_first_on(autojump_clock):
    async with taking() as (taker, bring, _):
        await bring(1.0, of_size(2 * LARGEST))
        assert taker.refused == ["a boundary's values are not finite, or huge: 2.1e+06"]
        assert num_free(taker) == SLOTS


async def test_the_sender_of_what_is_far_larger_than_usual_is_told_so(autojump_clock):
    async with taking() as (taker, bring, _):
        await bring(1.0, of_size(1.0))
        with pytest.raises(Refused) as refused:
            await bring(1.0, of_size(2 * FACTOR))
        assert refused.value.reason is RefusalReason.IMPLAUSIBLE
        assert taker.refused == ["a boundary of 512 is far larger than those of others"]
        assert num_free(taker) == SLOTS


async def test_a_look_at_the_values_holds_up_nobody_and_is_no_time_of_the_line(autojump_clock):
    async with taking() as (taker, bring, _):
        await bring(0.0)
        ((of_the_line_s, in_all_s),) = taker.took_s
        assert of_the_line_s < LINK.latency_s
        assert in_all_s > 2 * LINK.latency_s + LOOK_S
