"""Microbatches over streams: each stage changes them, and nobody waits for the dead."""

from contextlib import suppress

import pytest
import trio
from msgspec.structs import replace
from stage_worlds import BACKWARD_S, FORWARD_S, LINK, RUN_ID, SLOT_BYTES, StageWorld

from peer.network.conversation import Conversation
from peer.observe.event_names import EventName
from peer.stages.exchange import PATIENCE_S, TICK_S
from peer.training.shared import SLOTS
from protocol.errors import Refused, RemoteProtocolError, StreamLost
from protocol.membership.group import Group
from protocol.membership.view import Progress
from protocol.microbatch.core import MicrobatchEvent
from protocol.microbatch.relay import GONE_S
from protocol.outcomes import RefusalReason
from protocol.run.layout import part_of_stage
from protocol.run.run_spec import RunSpec
from protocol.wire.frames import encode_frame
from protocol.wire.messages import encode_message
from protocol.wire.stage_messages import (
    Announcement,
    Boundary,
    Credit,
    Direction,
    Hop,
    Lost,
    Microbatch,
    Noted,
    Path,
)
from protocol.wire.versions import STAGE
from simulation.virtual_time import run_in_virtual_time


@pytest.mark.slow
async def test_microbatches_come_back_through_all_stages(autojump_clock):
    async with StageWorld((2, 2, 1)).running() as world:
        await world.wait_done()
        for peer in world.of_stage(0):
            assert peer.trainer.came_back == [{4}] * 12  # two stages, there and back
            assert +peer.facts.microbatches == {MicrobatchEvent.BEGUN: 12, MicrobatchEvent.DONE: 12}
        for stage in (1, 2):
            steps = [peer.trainer.steps[:2] for peer in world.of_stage(stage)]
            assert [sum(each) for each in zip(*steps, strict=True)] == [8, 8]
        assert all(peer.trainer.most_held <= SLOTS for peer in world.peers)
        assert trio.current_time() < 30


@pytest.mark.slow
async def test_a_relay_holds_no_more_than_it_has_slots(autojump_clock):
    async with StageWorld((3, 1), iterations=2, microbatches=8).running() as world:
        await world.wait_done()
        (relay,) = world.of_stage(1)
        assert relay.trainer.most_held == SLOTS
        assert relay.facts.microbatches[MicrobatchEvent.DONE] >= 24
        assert all(len(peer.trainer.came_back) == 16 for peer in world.of_stage(0))


@pytest.mark.slow
async def test_a_relay_that_dies_costs_what_it_held(autojump_clock):
    async with StageWorld((2, 2, 2), iterations=4).running() as world:
        relay = world.of_stage(1)[0]
        while not relay.trainer.held:  # the first is on its way to the second stage
            await trio.sleep(0.01)
        world.kill(relay)
        await world.wait_done()
        assert trio.current_time() < 30
        for peer in world.of_stage(0):
            counts = peer.facts.microbatches
            assert (
                counts[MicrobatchEvent.DONE] + counts[MicrobatchEvent.LOST]
                == counts[MicrobatchEvent.BEGUN]
                == 16
            )
            assert len(peer.trainer.came_back) == counts[MicrobatchEvent.DONE]
        again = sum(peer.facts.microbatches[MicrobatchEvent.AGAIN] for peer in world.of_stage(0))
        lost = sum(peer.facts.microbatches[MicrobatchEvent.LOST] for peer in world.of_stage(0))
        assert again > 0
        assert lost == 0


@pytest.mark.slow
async def test_a_relay_that_dies_with_gradients_in_hand_has_a_stand_in(autojump_clock):
    """Every microbatch comes back through the same number of stages, none twice."""
    async with StageWorld((2, 2, 2), iterations=6).running() as world:
        relay = world.of_stage(1)[0]
        while relay.facts.microbatches[MicrobatchEvent.DONE] < 3 or not relay.trainer.held:
            await trio.sleep(0.01)
        world.kill(relay)
        await world.wait_done()
        assert trio.current_time() < 30
        for peer in world.of_stage(0):
            assert peer.facts.microbatches[MicrobatchEvent.DONE] == 24
            assert peer.trainer.came_back == [{4}] * 24
            assert not peer.trainer.dropped
        counts = [peer.facts.microbatches for peer in world.of_stage(0)]
        lost = sum(each[MicrobatchEvent.MENDED] + each[MicrobatchEvent.AGAIN] for each in counts)
        stand_in = world.of_stage(1)[1]
        assert 0 < stand_in.facts.microbatches[MicrobatchEvent.REPLAYED] <= lost


@pytest.mark.long
@pytest.mark.slow
async def test_a_data_peer_that_announces_nothing_holds_relays_up_for_less_than_one_patience(
    autojump_clock,
):
    """Of 15 iterations that are left, each would last for PATIENCE_S."""
    async with StageWorld((2, 1), iterations=20).running() as world:
        (relay,) = world.of_stage(1)
        while len(relay.trainer.steps) < 5:
            await trio.sleep(0.1)
        group = Group(RUN_ID, part_of_stage(0)).digest
        silent = Progress("training", group=group)
        relay.roster.heard(trio.current_time(), "silent", 1, progress=silent)
        before_s = trio.current_time()
        await world.wait_done()
        assert trio.current_time() - before_s < PATIENCE_S / 4
        for peer in world.of_stage(0):
            assert peer.trainer.came_back == [{2}] * 80
            assert not peer.trainer.dropped


@pytest.mark.slow
async def test_what_a_data_peer_announces_before_its_beat_says_that_it_trains_stands(
    autojump_clock,
):
    """One ends its first iteration, then that beat comes, and then the other ends its own."""
    async with StageWorld((2, 1), microbatches=2).running() as world:
        (slow, fast), (relay,) = world.of_stage(0), world.of_stage(1)
        group, send = Group(RUN_ID, part_of_stage(0)).digest, slow.trainer.send
        goes_on = trio.Event()

        async def send_late(command):
            await goes_on.wait()
            await send(command)

        def beat(state):
            progress = Progress(state, group=group)
            relay.roster.heard(trio.current_time(), fast.peer_id, 1, progress=progress)

        slow.trainer.send = send_late
        beat("downloading")
        with trio.fail_after(PATIENCE_S / 4):
            while fast.facts.microbatches[MicrobatchEvent.DONE] < world.microbatches:
                await trio.sleep(0.01)
            await trio.sleep(2 * TICK_S)
            beat("training")
            await trio.sleep(2 * TICK_S)
            goes_on.set()
            await world.wait_done()
        for peer in (slow, fast):
            assert peer.trainer.came_back == [{2}] * 6


async def test_what_a_data_peer_that_died_had_at_a_relay_leaves_it(autojump_clock):
    async with StageWorld((1, 1)).running() as world:
        (data_peer,), (relay,) = world.of_stage(0), world.of_stage(1)
        data_peer.trainer.send = _swallow
        await trio.sleep(2.0)  # all that the relay has room for is at the loss
        assert len(relay.trainer.held) == SLOTS
        world.kill(data_peer)
        await trio.sleep(GONE_S / 2)
        assert len(relay.trainer.held) == SLOTS
        await trio.sleep(GONE_S / 2 + 2 * TICK_S)
        assert not relay.trainer.held


async def _swallow(_command):
    await trio.lowlevel.checkpoint()


async def test_data_peers_wait_for_a_stage_that_nobody_holds(autojump_clock):
    async with StageWorld((1, 1), iterations=2).running() as world:
        (data_peer,), (relay,) = world.of_stage(0), world.of_stage(1)
        await trio.sleep(0.2)
        world.kill(relay)
        await trio.sleep(10 * PATIENCE_S)
        assert not data_peer.trainer.done.is_set()
        assert data_peer.facts.doing == "waiting for a peer that holds stage 1"


@pytest.mark.slow
async def test_they_train_without_it_where_paths_may_leave_it_out(autojump_clock):
    async with StageWorld((1, 1, 1, 1), iterations=8, visited=3).running() as world:
        (data_peer,), (relay,) = world.of_stage(0), world.of_stage(2)
        data_peer.facts.nominal_step = 7.0
        while not relay.trainer.held:
            await trio.sleep(0.01)
        world.kill(relay)
        await trio.sleep(20)
        assert data_peer.facts.doing == "training without stage 2, which nobody holds"
        assert data_peer.told == [(EventName.STAGE_LEFT_OUT, {"stage": 2, "step": 7})]
        await world.wait_done()
        counts = data_peer.facts.microbatches
        assert (
            counts[MicrobatchEvent.DONE] + counts[MicrobatchEvent.LOST]
            == counts[MicrobatchEvent.BEGUN]
            == 32
        )
        assert counts[MicrobatchEvent.DONE] >= counts[MicrobatchEvent.WITHOUT] >= 24
        assert set(map(frozenset, data_peer.trainer.came_back)) == {frozenset({4})}


async def ask(world, stranger, peer, message):
    """A stranger's message on a stream of its own."""
    await stranger.connect(peer.peer_id, peer.network.addresses)
    talk = Conversation(await stranger.open_stream(peer.peer_id, STAGE))
    await talk.send(message)
    return talk


def group_of(stage):
    return Group("ab" * 16, f"stage/{stage}").digest


def hop_to(relay, origin, iteration=1, index=1):
    """A forward to the only relay of a path."""
    path = Path((relay.peer_id,), (1,))
    return Hop(Microbatch(origin, iteration, index), Direction.FORWARD, path, 1)


STRANGER = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


@pytest.mark.slow
async def test_strangers_learn_nothing_and_break_nothing(autojump_clock):
    async with StageWorld((1, 1)).running() as world, world.internet.open_network(STRANGER) as me:
        (data_peer,), (relay,) = world.of_stage(0), world.of_stage(1)
        await trio.sleep(0.5)
        theirs = hop_to(relay, data_peer.peer_id)
        loop = replace(theirs, path=Path((relay.peer_id,) * 2, (1, 1)))
        for message in (theirs, loop):
            talk = await ask(world, me, relay, message)
            with pytest.raises(StreamLost):
                await talk.receive(Credit, timeout_s=5.0)
        own = hop_to(relay, STRANGER)
        for strange in (
            own,
            Announcement(10**9),
            Lost(Microbatch(STRANGER, 1, 1)),
        ):
            talk = await ask(world, me, relay, strange)
            with pytest.raises(Refused, match="no data peer"):
                await talk.receive(Credit, Noted, timeout_s=5.0)
        assert relay.exchange._core.newest_for(data_peer.peer_id) < 10
        # What was meant for the stage that a peer held before is refused, and held against nobody.
        elsewhere = replace(theirs, path=Path((relay.peer_id,), (2,)))
        for peer, said in ((relay, elsewhere), (data_peer, Announcement(1))):
            talk = await ask(world, me, peer, said)
            with pytest.raises(Refused) as refused:
                await talk.receive(Noted, Credit, timeout_s=5.0)
            assert refused.value.reason is RefusalReason.OTHER_GROUP
        await world.wait_done()
        assert len(data_peer.trainer.came_back) == 12


@pytest.mark.slow
async def test_a_path_that_goes_back_to_a_lower_stage_is_refused(autojump_clock):
    """Slots could be waited for in a circle. Some runs of older versions had such paths."""
    async with (
        StageWorld((1, 1, 1)).running() as world,
        world.internet.open_network(STRANGER) as me,
    ):
        (first,), (second,) = world.of_stage(1), world.of_stage(2)
        second.roster.heard(0.0, STRANGER, 1, progress=Progress("idle", group=group_of(0)))
        await trio.sleep(0.5)
        path = Path((second.peer_id, first.peer_id), (2, 1))
        talk = await ask(world, me, second, replace(hop_to(second, STRANGER), path=path))
        with pytest.raises(Refused, match="stages must rise along a path") as refused:
            await talk.receive(Credit, timeout_s=5.0)
        assert refused.value.reason is RefusalReason.IMPLAUSIBLE
        await world.wait_done()


@pytest.mark.parametrize("stages", [(1, 2), ()])
def test_a_path_names_the_stage_of_each_relay(stages):
    hop = Hop(Microbatch(STRANGER, 1, 1), Direction.FORWARD, Path(("me",), (1,)), 1)
    hop.check(STRANGER, "me")
    with pytest.raises(RemoteProtocolError, match="stage"):
        replace(hop, path=Path(("me",), stages)).check(STRANGER, "me")


@pytest.mark.slow
async def test_a_boundary_that_breaks_off_gives_its_slot_back(autojump_clock):
    """A data peer takes credit again and again, and sends half of what it offered."""
    async with StageWorld((1, 1)).running() as world, world.internet.open_network(STRANGER) as me:
        (data_peer,), (relay,) = world.of_stage(0), world.of_stage(1)
        idle = Progress("finished", group=group_of(0))
        relay.roster.heard(0.0, STRANGER, 1, progress=idle)
        await trio.sleep(0.5)
        for index in range(40):
            iteration = relay.exchange._core.iteration or 1
            talk = await ask(world, me, relay, hop_to(relay, STRANGER, iteration, index))
            with suppress(Refused), trio.move_on_after(1.0):
                await talk.receive(Credit)
                await talk.send(Boundary(None), bytes(SLOT_BYTES // 2))
            await talk.aclose()
        await world.wait_done()
        assert len(data_peer.trainer.came_back) + len(data_peer.trainer.dropped) == 12
        assert relay.exchange._session._free.statistics().current_buffer_used >= 7


@pytest.mark.slow
async def test_what_was_offered_on_for_a_boundary_that_breaks_off_is_taken_back(autojump_clock):
    """A data peer sends the beginnings of what it offered, and nothing more."""
    async with (
        StageWorld((1, 1, 1)).running() as world,
        world.internet.open_network(STRANGER) as me,
    ):
        first, second = world.of_stage(1) + world.of_stage(2)
        for relay in (first, second):
            relay.roster.heard(0.0, STRANGER, 1, progress=Progress("idle", group=group_of(0)))
        await trio.sleep(1.0)
        path, frame = Path((first.peer_id, second.peer_id), (1, 2)), encode_message(Boundary(None))
        for index in range(6):
            hop = Hop(Microbatch(STRANGER, 1, index), Direction.SCORE, path, 1)
            await me.connect(first.peer_id, first.network.addresses)
            stream = await me.open_stream(first.peer_id, STAGE)
            async with Conversation(stream) as talk:
                await talk.send(hop)
                await talk.receive(Credit)
                await stream.send_all(encode_frame(frame, SLOT_BYTES) + b"x")
                await trio.sleep(1.0)
                ahead = first.exchange._boundary_sender._ahead
                assert [hop for hop in ahead if hop.microbatch.origin == STRANGER]
        await trio.sleep(1.0)
        assert not [hop for hop in ahead if hop.microbatch.origin == STRANGER]
        await world.wait_done()


async def _time_of(iterations):
    async with StageWorld((1, 1, 1), iterations=iterations, microbatches=1).running() as world:
        began_s = trio.current_time()
        await world.wait_done()
        return trio.current_time() - began_s


def test_a_hop_takes_the_latency_once():
    """What is offered ahead waits for nothing but work; two hops follow on none, and wait.

    A boundary now and then waits for a small thing on its line: hence the tolerance. Were nothing
    offered ahead, an iteration would take 0.4 s more.
    """

    async def measured():
        return (await _time_of(4) - await _time_of(1)) / 3

    took_s = run_in_virtual_time(1, measured)
    hops, work_s = 6, 2 * (FORWARD_S + BACKWARD_S)
    offered_s = 2 * 2 * LINK.latency_s
    assert took_s == pytest.approx(hops * LINK.latency_s + offered_s + work_s, abs=0.15)


async def test_a_relay_does_not_end_before_the_last_data_peer_that_trains(autojump_clock):
    async with StageWorld((2, 1), iterations=1).running() as world:
        (relay,) = world.of_stage(1)
        await world.wait_done()
        total = RunSpec().training.total_steps

        def said(data_peer, state, step):
            group = Group(RUN_ID, part_of_stage(0)).digest
            progress = Progress(state, step=step, group=group)
            relay.roster.heard(trio.current_time(), data_peer.peer_id, 1, progress=progress)

        one, other = world.of_stage(0)
        said(one, "finished", total)
        said(other, "training", total - 1)
        assert relay.exchange.step_of(total - 2.0) == total - 2.0
        assert relay.exchange.step_of(total + 0.5) == total - 1.0
        said(other, "training", total)
        assert relay.exchange.step_of(total + 0.5) == total
        said(other, "training", total - 1)
        assert relay.exchange.step_of(total + 0.5) == total - 1.0
        await trio.sleep(PATIENCE_S + 1)
        said(other, "training", total - 1)
        assert relay.exchange.step_of(total + 0.5) == total
        said(one, "training", total - 2)  # as after an amendment: the run goes on
        said(other, "training", total - 2)
        assert relay.exchange.step_of(total + 0.5) == total - 2
        said(one, "finished", total)
        assert relay.exchange.step_of(total + 0.5) == total - 1
