"""What a run has reached is not lost: by a second start, a young run's death, a line that is down.

Real daemon parts on simulated ports; a home is a folder that outlives its peer.
"""

import json
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from swarm_worlds import simulated, start, toy_spec

from peer.daemon.checkpointing import FIRST_AFTER_S, RETRY_S, Checkpointing, CheckpointPlan
from peer.daemon.control_requests import amend as amend_run
from peer.daemon.links import SILENCE_S
from peer.daemon.report import REPEAT_S
from peer.daemon.returning import RememberedPeers
from peer.facts import Facts, PeerState
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.process.rejoin import JoinAgain
from peer.rounds.loop import RoundLoop
from peer.state.checkpoints import CheckpointStore, NoRoom
from peer.training.messages import StepChosen
from protocol.admission.statements import Verdict
from protocol.errors import LocoError, Refused
from protocol.membership.returning import LISTEN_S, UNREACHED_S
from protocol.membership.view import Roster
from protocol.outcomes import RefusalReason
from protocol.schedule.rounds import LOST_LAG_ROUNDS
from simulation.machine import Machine
from simulation.swarm import CHECKPOINTS_KEPT, SimulatedPeer, SimulatedSwarm, open_swarm
from simulation.trainer import SimulatedSpeed
from simulation.work import SimulatedWork

pytestmark = pytest.mark.slow


def rounds_of(peer: SimulatedPeer) -> RoundLoop | None:
    training = peer.peer.training
    return None if training is None else training.rounds


@simulated()
async def test_how_a_step_is_computed_is_told_when_it_changes(tmp_path: Path) -> None:
    async with open_swarm(1, toy_spec(4), tmp_path) as swarm:
        await start(swarm, "a")
        rounds = rounds_of(swarm["a"])
        assert rounds is not None
        assert rounds._line is not None
        await rounds._take(rounds._line, StepChosen(("not compiled",)))
        (told,) = swarm["a"].events(EventName.STEP_CHOSEN)
        assert told["detail"] == "not compiled"


KEEPS = Machine(checkpoint_every_s=5.0)
ROUNDS = 40
H = toy_spec(1).sync.round_steps
WAYS = pytest.mark.parametrize("method", ["noloco", "diloco", "streaming"])


async def train(swarm: SimulatedSwarm, *names: str, machine: Machine = KEEPS) -> None:
    await start(swarm, *names, machine_of=dict.fromkeys(names, machine))
    written = lambda: all(swarm[n].events(EventName.CHECKPOINT_WRITTEN) for n in names)
    await swarm.until(written)


async def kill(swarm: SimulatedSwarm, *names: str) -> None:
    for name in names:
        swarm.kill(name)
        await swarm[name].ended.wait()


async def back(swarm: SimulatedSwarm, name: str, *, alone: bool = False) -> SimulatedPeer:
    peer = swarm.resume(name, alone=alone)
    await swarm.until(lambda: hasattr(peer, "facts"))
    return peer


def trains(peer: SimulatedPeer) -> bool:
    return peer.ready.is_set() and peer.facts.state is PeerState.TRAINING


def kept(folder: Path) -> dict[str, int]:
    """The checkpoints of a home: folder and step."""
    return kept_in(folder / "checkpoints")


def kept_in(checkpoints: Path) -> dict[str, int]:
    paths = checkpoints.glob("*/manifest.json")
    return {path.parent.name: int(json.loads(path.read_text())["step"]) for path in paths}


def seconds_to(peer: SimulatedPeer, name: EventName) -> float:
    """From its start to the first event of this name."""
    came, first = peer.events(EventName.DAEMON_STARTED)[0], peer.events(name)[0]
    return float(first["monotonic_s"] - came["monotonic_s"])


@WAYS
@pytest.mark.parametrize("names", ["a", "ab"])
@simulated()
async def test_a_finished_run_stays_finished_however_often_it_is_started(tmp_path, method, names):
    async with open_swarm(1, toy_spec(4, method=method), tmp_path) as swarm:
        await start(swarm, *names, machine_of=dict.fromkeys(names, KEEPS))
        await swarm.finished()
        weights = {name: swarm[name].slow_weights() for name in names}
        before = {name: kept(tmp_path / name) for name in names}
        for _ in range(CHECKPOINTS_KEPT + 2):
            await kill(swarm, *names)
            for name in names:
                swarm.resume(name)
            await swarm.finished()
            for name in names:
                assert swarm[name].facts.state is PeerState.FINISHED
                assert not swarm[name].events(EventName.ROUND_CLOSED)
                assert kept(tmp_path / name) == before[name]
                assert np.array_equal(swarm[name].slow_weights(), weights[name])


@simulated()
async def test_a_checkpoint_before_the_first_round_says_where_its_weights_stand(tmp_path):
    """Written when a peer leaves as soon as it has joined, or has just lost its trainer."""
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        await train(swarm, "a")
        joiner = swarm.join("b", Machine(checkpoint_every_s=0.0))
        await swarm.until(lambda: bool(joiner.events(EventName.TRAINER_STARTED)))
        await swarm.until(lambda: rounds_of(joiner) is not None)
        joiner.peer.request_stop()
        await joiner.ended.wait()
        written = joiner.events(EventName.CHECKPOINT_WRITTEN)
        received = joiner.events(EventName.STATE_RECEIVED)[0]["round"]
        assert [event["step"] >= received * H > 0 for event in written] == [True]


@simulated()
async def test_a_founder_that_leaves_before_its_first_step_writes_nothing(tmp_path):
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        founder = swarm.found("a", KEEPS)
        await swarm.until(lambda: bool(founder.events(EventName.ROUND_OPENED)))
        founder.peer.request_stop()
        await founder.ended.wait()
        assert founder.facts.nominal_step == 0
        assert not kept(tmp_path / "a")


@simulated()
async def test_the_first_checkpoints_come_soon(tmp_path):
    spec, long_steps = toy_spec(1000, inner_steps=10), SimulatedSpeed(step_s=3.0)
    async with open_swarm(1, spec, tmp_path) as swarm:
        await train(swarm, "a", machine=Machine(long_steps, checkpoint_every_s=600.0))
        alone = swarm["a"]
        await swarm.until(lambda: len(alone.events(EventName.CHECKPOINT_WRITTEN)) == 4)
        began_s = alone.events(EventName.TRAINER_STARTED)[0]["monotonic_s"]
        written = alone.events(EventName.CHECKPOINT_WRITTEN)
        at_s = [event["monotonic_s"] - began_s for event in written]
        round_s = 30.0
        for expected_s, found_s in zip((*FIRST_AFTER_S, 900.0), at_s, strict=True):
            assert expected_s - 1 <= found_s < expected_s + 4 * round_s


@simulated()
async def test_early_checkpoints_come_later_where_writing_takes_long(tmp_path):
    slow_disk = Machine(SimulatedSpeed(step_s=3.0), checkpoint_every_s=600.0, work_s=4.0)
    async with open_swarm(1, toy_spec(1000, inner_steps=10), tmp_path) as swarm:
        await train(swarm, "a", machine=slow_disk)
        alone = swarm["a"]
        await swarm.until(lambda: len(alone.events(EventName.CHECKPOINT_WRITTEN)) == 3)
        written = alone.events(EventName.CHECKPOINT_WRITTEN)
        for one, next_ in pairwise(written):
            assert next_["monotonic_s"] - one["monotonic_s"] >= one["seconds"] / 0.05


@simulated()
async def test_a_founder_that_dies_in_its_first_round_begins_anew_and_says_so(tmp_path):
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        swarm.found("a", KEEPS)
        await swarm.until(lambda: bool(swarm["a"].events(EventName.ROUND_OPENED)))
        first = swarm["a"].slow_weights()
        await kill(swarm, "a")
        assert not kept(tmp_path / "a")
        again = await back(swarm, "a")
        await swarm.until(lambda: bool(again.events(EventName.ROUND_OPENED)))
        assert np.array_equal(again.slow_weights(), first)
        (event,) = again.events(EventName.RUN_BEGUN_ANEW)
        assert "no checkpoint" in event["detail"]
        assert seconds_to(again, EventName.RUN_BEGUN_ANEW) < LISTEN_S + 2
        newcomer = swarm.join("b", through=["a"])
        await swarm.until(lambda: trains(newcomer))


@simulated()
async def test_a_founder_without_a_checkpoint_follows_those_who_have_a_state(tmp_path):
    async with open_swarm(1, toy_spec(10 * ROUNDS), tmp_path) as swarm:
        await train(swarm, "a", "b", "c")
        await kill(swarm, "a")
        for path in (tmp_path / "a" / "checkpoints").iterdir():
            path.rename(tmp_path / f"lost-{path.name}")
        founder = await back(swarm, "a")
        await swarm.until(lambda: trains(founder))
        assert not founder.events(EventName.RUN_BEGUN_ANEW)
        assert founder.events(EventName.STATE_RECEIVED)


@simulated()
async def test_others_without_a_checkpoint_begin_nothing_anew(tmp_path):
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        await train(swarm, "a", "b", machine=Machine(checkpoint_every_s=5.0))
        await kill(swarm, "a", "b")
        for path in (tmp_path / "b" / "checkpoints").iterdir():
            path.rename(tmp_path / f"lost-{path.name}")
        joiner = await back(swarm, "b", alone=True)
        await trio.sleep(2 * UNREACHED_S)
        assert not joiner.ready.is_set()
        founder = await back(swarm, "a")
        await swarm.until(lambda: trains(founder) and trains(joiner))
        assert founder.events(EventName.RUN_RESUMED)


@simulated()
async def test_a_peer_that_reaches_no_neighbour_waits_before_it_leads_and_says_why(tmp_path):
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        await train(swarm, "a", "b", "c")
        await kill(swarm, "a", "b", "c")
        alone = await back(swarm, "b")
        await swarm.until(lambda: trains(alone))
        told = alone.events(EventName.NEIGHBOURS_AWAITED)
        assert len(told) == pytest.approx(UNREACHED_S / REPEAT_S, abs=1)
        assert {event["neighbours"] for event in told} == {2}
        assert told[-1]["detail"]
        assert seconds_to(alone, EventName.RUN_RESUMED) == pytest.approx(UNREACHED_S, abs=2)


@simulated()
async def test_a_peer_that_is_told_to_go_on_alone_does(tmp_path):
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        await train(swarm, "a", "b", "c")
        await kill(swarm, "a", "b", "c")
        alone = await back(swarm, "b", alone=True)
        await swarm.until(lambda: trains(alone))
        assert not alone.events(EventName.NEIGHBOURS_AWAITED)
        assert seconds_to(alone, EventName.RUN_RESUMED) == pytest.approx(LISTEN_S, abs=2)


@simulated()
async def test_a_peer_that_was_banned_while_it_was_off_ends_with_the_reason(tmp_path):
    async with open_swarm(1, toy_spec(10 * ROUNDS), tmp_path) as swarm:
        await train(swarm, "a", "b", "c")
        await kill(swarm, "c")
        door = swarm["a"].parts.admission
        swarm["a"].links.tell_statements(door.rule(Verdict.BAN, swarm["c"].peer_id))
        await swarm.until(lambda: bool(swarm["b"].events(EventName.PEER_RULED_ON)))
        banned = await back(swarm, "c")
        await banned.ended.wait()
        assert isinstance(banned.failure, Refused)
        assert banned.failure.reason is RefusalReason.NOT_ADMITTED
        told = banned.events(EventName.REFUSED_BY_PEER)
        assert {event["remote"] for event in told} <= {swarm["a"].peer_id, swarm["b"].peer_id}
        assert "banned" in told[0]["detail"]
        assert kept(tmp_path / "c"), "what it has stays"


@simulated()
async def test_one_that_refuses_sends_nobody_away_whom_another_takes_in(tmp_path):
    async with open_swarm(1, toy_spec(10 * ROUNDS), tmp_path) as swarm:
        await train(swarm, "a", "b", "c")
        await kill(swarm, "c")
        swarm["a"].parts.admission.rule(Verdict.BAN, swarm["c"].peer_id)  # and nobody else is told
        again = await back(swarm, "c")
        await swarm.until(lambda: again.ended.is_set() or trains(again))
        assert again.failure is None
        assert again.events(EventName.REFUSED_BY_PEER)


@simulated()
async def test_an_amendment_is_refused_when_the_run_is_over_and_by_one_that_is_back(tmp_path):
    async def amend(peer: SimulatedPeer) -> None:
        values = {"training.total_steps": 999}
        await amend_run(peer.parts, {"values": values, "at_round": None, "dry_run": False})

    async with open_swarm(1, toy_spec(4), tmp_path) as swarm:
        await train(swarm, "a", "b")
        await kill(swarm, "a", "b")
        founder = await back(swarm, "a")
        await swarm.until(lambda: founder.facts.state is PeerState.RETURNING)
        await swarm.until(lambda: founder.facts.held is not None)
        with pytest.raises(LocoError, match="does not know the run's current step yet"):
            await amend(founder)
        await swarm.finished("a")
        await kill(swarm, "a")
        founder = await back(swarm, "a")
        await swarm.until(lambda: founder.facts.run_over)
        with pytest.raises(LocoError, match="has ended"):
            await amend(founder)


@simulated()
async def test_the_loss_of_the_part_that_gives_way_is_said_in_steps(tmp_path):
    async with open_swarm(1, toy_spec(1000 * ROUNDS), tmp_path) as swarm:
        slow = Machine(SimulatedSpeed(step_s=1.0), checkpoint_every_s=5.0)
        await start(swarm, *"abc", machine_of={"a": slow, "b": KEEPS, "c": KEEPS})
        await swarm.until(lambda: swarm["a"].facts.step > 2 * H)
        swarm.isolate("a")
        parted, lag = swarm["a"].facts.step, 2 * LOST_LAG_ROUNDS * H
        await swarm.until(lambda: swarm["b"].facts.step > swarm["a"].facts.step + lag)
        swarm.internet.heal()
        await swarm["a"].ended.wait()
        failure = swarm["a"].failure
        assert isinstance(failure, JoinAgain)
        said = re.search(r"up to (\d+) steps, trained apart from it, are given up", str(failure))
        assert said is not None, str(failure)
        silence_steps = 10 * SILENCE_S  # until the others are missed, at the swarm's ten a second
        apart = swarm["a"].facts.step - parted
        assert apart - silence_steps - 2 * H <= int(said[1]) <= apart


@simulated()
async def test_the_last_checkpoint_is_written_as_soon_as_there_is_room(tmp_path, monkeypatch):
    async with open_swarm(1, toy_spec(12), tmp_path) as swarm:
        await start(swarm, "a", machine_of={"a": KEEPS})
        peer = swarm["a"]
        await swarm.until(lambda: peer.facts.step > 10 * H)

        def refuse(*_: object) -> None:
            raise NoRoom("no room")

        with monkeypatch.context() as full:
            full.setattr(CheckpointStore, "begin", refuse)
            await swarm.finished()
            await trio.sleep(2 * RETRY_S)
        assert max(kept(tmp_path / "a").values()) < 12 * H
        await trio.sleep(2 * RETRY_S)
        assert max(kept(tmp_path / "a").values()) == 12 * H
        await kill(swarm, "a")
        again = await back(swarm, "a")
        await swarm.finished()
        assert again.facts.run_over
        assert not again.events(EventName.ROUND_CLOSED)


@simulated()
async def test_a_peer_that_leaves_joins_nothing_again(tmp_path):
    async with open_swarm(1, toy_spec(10 * ROUNDS), tmp_path) as swarm:
        await train(swarm, "a", "b")
        peer = swarm["a"]
        rounds = rounds_of(peer)
        assert rounds is not None
        line = rounds._checkpoints._line  # type: ignore[attr-defined]

        async def find_lost() -> None:
            raise JoinAgain("far behind")

        peer.peer.request_stop()
        line.nursery.start_soon(find_lost)
        await peer.ended.wait()
        assert peer.failure is None
        assert peer.events(EventName.LEAVING)


async def test_a_trainer_that_dies_over_its_part_blocks_no_later_checkpoint(
    tmp_path, autojump_clock
):
    store, facts = CheckpointStore(tmp_path, 3), Facts("me", 1, nominal_step=10.0)
    log = EventLog(lambda _: None, peer="me", wall_time_s=lambda: 0.0, stream=None)
    held: Any = SimpleNamespace(
        group=SimpleNamespace(run_id="run", part="model"),
        shape=SimpleNamespace(layout_digest="layout"),
    )
    vector = np.ones(9, np.float32)
    averaging: Any = SimpleNamespace(slow_P=vector, momentum_P=vector, round=1)
    way: Any = SimpleNamespace(wait_idle=trio.lowlevel.checkpoint)
    services: Any = SimpleNamespace(
        checkpoints=store,
        facts=facts,
        events=log,
        work=SimulatedWork(0.1),
        directory=SimpleNamespace(swarm_time_s=lambda: 0.0),
        version="0",
    )
    checkpointing = Checkpointing(CheckpointPlan(1.0), held, services)
    checkpointing.on_trainer_started(SilentLine())  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(checkpointing.run, averaging)
        await trio.sleep(2.0)
        with trio.CancelScope() as life:
            async with trio.open_nursery() as rounds:
                rounds.start_soon(checkpointing.between_rounds, way)
                await trio.sleep(2.0)
                checkpointing.on_trainer_died()
                life.cancel()
        with trio.fail_after(60.0):
            await checkpointing.write_last(way, trio.current_time())
        nursery.cancel_scope.cancel()
    assert list(kept_in(tmp_path).values()) == [10]


class SilentLine:
    """To a trainer that takes what it is asked, and answers nothing."""

    async def send(self, _: object) -> None:
        await trio.lowlevel.checkpoint()


class Told:
    """What a peer that is back hears of others, laid here by hand."""

    def __init__(self, *remembered: str) -> None:
        self.roster, self.facts = Roster(10.0), Facts("me", 1, state=PeerState.RETURNING)
        self.refusals: dict[str, Refused] = {}
        self.lines: list[bytes] = []
        log = EventLog(self.lines.append, peer="me", wall_time_s=lambda: 0.0, stream=None)
        services: Any = SimpleNamespace(roster=self.roster, facts=self.facts, events=log)
        dialler: Any = SimpleNamespace(refusals=self.refusals, failures={})
        self.neighbours = RememberedPeers(services, dialler, alone=False)
        self.neighbours.remember(remembered)

    def refuse(self, peer_id: str, reason: RefusalReason) -> None:
        self.refusals[peer_id] = Refused(reason, f"{reason} by {peer_id}")


async def watched_for(told: Told, seconds: float) -> Refused | None:
    with trio.move_on_after(seconds):
        try:
            await told.neighbours.watch()
        except Refused as refused:
            return refused
    return None


async def test_one_that_refuses_is_not_all_while_others_may_still_answer(autojump_clock):
    told = Told("a", "b")
    told.refuse("a", RefusalReason.NOT_ADMITTED)
    assert await watched_for(told, UNREACHED_S - 2) is None
    assert await watched_for(told, 5) is told.refusals["a"]


async def test_where_all_refuse_nobody_is_waited_for(autojump_clock):
    told = Told("a", "b")
    told.refuse("a", RefusalReason.NOT_ADMITTED)
    told.refuse("b", RefusalReason.VERSION)
    assert await watched_for(told, LISTEN_S + 2) is told.refusals["b"]


async def test_a_refusal_counts_no_more_when_somebody_has_taken_us_in(autojump_clock):
    told = Told("a", "b")
    told.refuse("a", RefusalReason.VERSION)
    told.roster.heard(trio.current_time(), "b", 1)
    assert await watched_for(told, 5) is None
    assert await watched_for(told, 2 * UNREACHED_S) is None, "b was silent for long, and is known"


async def test_a_neighbour_that_is_full_is_no_reason_to_lead_or_to_end(autojump_clock):
    told = Told("a")
    told.refuse("a", RefusalReason.TOO_MANY)
    assert told.neighbours.unreached()
    assert told.neighbours.refused() is None
    assert await watched_for(told, 2 * UNREACHED_S) is None
    assert not any(b"RefusedByPeer" in line for line in told.lines)
