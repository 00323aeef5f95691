"""Trainers that fail, machines that differ, peers that come, go and sleep."""

import math
from functools import partial
from typing import Any

import pytest
import trio
from swarm_worlds import (
    STEP_S,
    assert_trains_on,
    final_outcomes,
    jumps,
    outcomes,
    simulated,
    skips,
    start,
    tally,
    toy_spec,
    training_outcomes,
)

from peer.facts import PeerState
from peer.observe.event_names import EventName
from peer.process.rejoin import JoinAgain
from peer.rounds.loop import MAX_FAILURES_IN_A_ROW, TrainingImpossible
from peer.rounds.validation import MAX_VALIDATION_SHARE
from peer.state.kept_files import Acquaintances
from peer.training.ports import CannotTrain
from protocol.schedule.rounds import VARIED
from protocol.wire.versions import CONTENT
from simulation.machine import Machine
from simulation.network import LinkModel
from simulation.swarm import GRACE_S, SwarmOptions, open_swarm
from simulation.trainer import SimulatedSpeed, SimulatedTrainer

ROUNDS = 5


def failing(**at_steps: Any) -> Machine:
    return Machine(SimulatedSpeed(**at_steps))


# --- trainers that fail ---------------------------------------------------------------------------
DIES, NON_FINITE, OUT_OF_MEMORY = (
    ("die_at_steps", "died"),
    ("non_finite_at_steps", "non_finite"),
    ("out_of_memory_at_steps", "out_of_memory"),
)


@pytest.mark.parametrize(
    ("field", "reason", "step"),
    [  # each way at each end of a run, and at each step of a round in one of them
        *[(*DIES, step) for step in (1, 51, 75, 100)],
        *[(*way, step) for way in (NON_FINITE, OUT_OF_MEMORY) for step in (1, 100)],
        *[
            pytest.param(*way, step, marks=pytest.mark.long)
            for way in (NON_FINITE, OUT_OF_MEMORY)
            for step in (51, 75)
        ],
    ],
)
def test_a_failed_trainer_is_restarted_within_a_round(tmp_path, field, reason, step):
    @simulated()
    async def fail() -> None:
        async with open_swarm(1, toy_spec(ROUNDS, 50), tmp_path) as swarm:
            machine = failing(**{field: frozenset({step})})
            await start(swarm, "a", "b", machine_of={"b": machine})
            await swarm.finished()
            a, b = swarm["a"], swarm["b"]
            assert b.facts.restarts == {reason: 1}
            assert len(b.events(EventName.TRAINER_DIED)) == 1
            for peer in (a, b):
                assert peer.failure is None
                assert peer.facts.state is PeerState.FINISHED
                assert len(skips(peer, after=0)) <= 2, outcomes(peer)
            (died, started) = (
                b.events(EventName.TRAINER_DIED)[0],
                b.events(EventName.TRAINER_STARTED)[1],
            )
            assert started["monotonic_s"] - died["monotonic_s"] <= 5.0 + 1.0  # a round and a start
            batch = toy_spec().training.batch_size
            expected = batch // 2 if reason == "out_of_memory" else batch
            assert started["micro_batch"] == expected
            told = {problem.name: problem.words for problem in b.report.status().problems}
            said = f"out of memory 1 times; it takes {expected} sequences at a time now, {batch}"
            assert (said in told.get("memory-lowered", "")) == (reason == "out_of_memory")
            assert ("loss-not-finite" in told) == (reason == "non_finite")

    fail()


def test_a_trainer_that_never_had_enough_memory_is_told_so(monkeypatch, tmp_path):
    """It has tried one sequence: less is kept from then on, and then less of the weights."""
    caps, made = list[int | None](), SimulatedTrainer.__init__

    def too_small_at_first(self, machine, slow, cap):
        made(self, machine, slow, cap)
        caps.append(cap)
        if len(caps) <= 2:
            self._ready_s = math.inf  # it never is
            self._fail("out_of_memory", "no room")

    monkeypatch.setattr(SimulatedTrainer, "__init__", too_small_at_first)

    @simulated()
    async def fail() -> None:
        async with open_swarm(1, toy_spec(1, 50), tmp_path) as swarm:
            await start(swarm, "a")
            await swarm.finished()
            assert caps == [None, 0, 0]
            assert swarm["a"].facts.restarts == {"out_of_memory": 2}

    fail()


@simulated()
async def test_failure_after_failure_ends_the_peer_and_nobody_else(tmp_path):
    async with open_swarm(1, toy_spec(20), tmp_path) as swarm:
        machine = failing(die_at_steps=frozenset(range(30, 60)))
        await start(swarm, "a", "b", machine_of={"b": machine})
        await swarm.until(swarm["b"].ended.is_set)
        failure = swarm["b"].failure
        assert isinstance(failure, TrainingImpossible)
        assert "trainer-dies" in [problem.name for problem in swarm["b"].report.status().problems]
        assert "signal 9" in str(failure)
        assert swarm["b"].facts.restarts == {"died": MAX_FAILURES_IN_A_ROW + 1}
        assert len(swarm["b"].network.streams) == 0
        await swarm.finished("a")
        (finished,) = swarm["a"].events(EventName.RUN_FINISHED)
        assert finished["step"] == 20 * 20
        assert_trains_on(swarm["a"])


@simulated()
async def test_who_cannot_train_ends_before_anybody_counts_on_it(tmp_path):
    unusable = Machine(unusable="device 'cuda' is not here")
    async with open_swarm(1, toy_spec(20), tmp_path) as swarm:
        founder = swarm.found("a", unusable)
        await founder.ended.wait()
        assert isinstance(founder.failure, CannotTrain)
        assert str(founder.failure) == "the trainer cannot start: device 'cuda' is not here"
        assert not founder.ready.is_set()
        assert founder.facts.restarts == {}
    async with open_swarm(1, toy_spec(20), tmp_path) as swarm:
        await start(swarm, "a")
        joiner = swarm.join("b", unusable)
        await joiner.ended.wait()
        assert isinstance(joiner.failure, CannotTrain)
        assert not joiner.ready.is_set()
        assert joiner.events(EventName.RUN_RECEIVED)
        assert not joiner.events(EventName.STATE_RECEIVED)


@simulated()
async def test_memory_that_runs_out_again_and_again_halves_the_micro_batch(tmp_path):
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        machine = failing(out_of_memory_at_steps=frozenset({30, 32, 34, 36}))
        await start(swarm, "a", "b", machine_of={"b": machine})
        await swarm.finished()
        started = swarm["b"].events(EventName.TRAINER_STARTED)
        took = [event["micro_batch"] for event in started]
        assert took == [8, 4, 2, 1, 8], "of which less is kept, as not even one has fitted"


# --- machines that differ -------------------------------------------------------------------------
@pytest.mark.slow
@simulated()
async def test_slow_peers_get_small_quotas_and_partners(tmp_path):
    async with open_swarm(1, toy_spec(8, 40), tmp_path) as swarm:
        speeds = {"c": 0.2, "d": 0.4}
        machines = {name: Machine(SimulatedSpeed(step_s=s)) for name, s in speeds.items()}
        names = ["a", "b", "c", "d", "e", "f"]
        await start(swarm, *names, machine_of=machines)
        await swarm.finished()
        steady = {  # rounds in which all speeds are known, and the end is far
            name: [
                event
                for event in swarm[name].events(EventName.ROUND_OPENED)
                if 120 <= event["step"] < 260
            ]
            for name in names
        }
        for name in names:
            speed = speeds.get(name, STEP_S) / STEP_S
            owed = 40 / speed
            quotas = [event["quota"] for event in steady[name]]
            least, largest = (1 - VARIED) * owed / 1.5 - 1, (1 + VARIED) * owed * 1.2
            assert all(least <= quota <= largest for quota in quotas), (name, quotas)
            # Nominal steps of an own step: what is drawn longer or shorter is not in it.
            begin, end = steady[name][0]["step"], steady[name][-1]["step"]
            # A slow one catches up yet what its first round was short of.
            most = 1.1 * speed if speed == 1 else 1.5 * speed
            assert 0.9 * speed <= (end - begin) / sum(quotas[:-1]) <= most, name
        for name in names:
            rounds = [swarm[name].timings[event["round"]].train_s for event in steady[name]]
            assert all(2.0 <= seconds <= 6.0 for seconds in rounds), (name, rounds)
            # The first round of `d` is short, so it trains one more after the others have ended.
            missed = [each for each in outcomes(swarm[name], after=1) if each != "averaged"]
            assert missed == (["no_partner"] if name == "d" else []), name
            assert_trains_on(swarm[name], speeds.get(name, STEP_S))
            # Nobody falls behind, but for what the first quota did, before speeds were known.
            assert set(jumps(swarm[name])) <= {1}, name


@simulated()
async def test_a_slow_peer_validates_less_often_and_keeps_up(tmp_path):
    rounds, validation_s = 30, 3.0  # of rounds of 2 s
    slow = Machine(SimulatedSpeed(step_s=0.8, validation_s=validation_s))
    async with open_swarm(1, toy_spec(rounds), tmp_path) as swarm:
        await start(swarm, "a", "b", "c", machine_of={"c": slow})
        await swarm.finished()
        ended_s = trio.current_time()
        validated = swarm["c"].events(EventName.VALIDATED)
        # Besides, the first one and the last one, which is always made.
        assert 2 < len(validated) <= 2 + MAX_VALIDATION_SHARE * ended_s / validation_s
        assert len(swarm["a"].events(EventName.VALIDATED)) > rounds
        counted = tally(swarm["c"], after=1)
        assert counted["averaged"] >= 0.5 * counted.total(), counted


@pytest.mark.slow
@simulated()
async def test_a_peer_whose_steps_take_rounds_of_the_others_goes_on_with_them(tmp_path):
    """Its first round, begun before it had heard of their speeds, took it eight steps, not two."""
    slow = Machine(SimulatedSpeed(step_s=300 * STEP_S))
    async with open_swarm(1, toy_spec(100, 64), tmp_path) as swarm:
        await start(swarm, "a", "b", "c", machine_of={"c": slow})
        c = swarm["c"]
        closed = partial(c.events, EventName.ROUND_CLOSED)
        await swarm.until(lambda: len(closed()) >= 3 or c.ended.is_set())
        assert c.failure is None
        opened = c.events(EventName.ROUND_OPENED)
        assert min(event["quota"] for event in opened) > 2
        assert max(event["steps"] for event in closed()) <= 2
        assert jumps(c) == [event["round"] for event in opened[1:]]


@simulated()
async def test_a_machine_that_slept_goes_on_where_the_others_are(tmp_path):
    async with open_swarm(1, toy_spec(12), tmp_path) as swarm:
        await start(swarm, "a", "b", "c")
        await swarm.until(lambda: swarm["b"].facts.step >= 45)
        swarm.freeze("b")
        await swarm.until(lambda: swarm["c"].facts.step >= 145)
        swarm.thaw("b")
        await swarm.finished()
        b = swarm["b"]
        closed = {event["round"]: event for event in b.events(EventName.ROUND_CLOSED)}
        opened = b.events(EventName.ROUND_OPENED)
        assert [event["round"] for event in opened] == list(range(len(opened)))  # none is given up
        (jumped,) = jumps(b)
        assert closed[jumped - 1]["step"] < 100
        assert opened[jumped]["step"] >= 140
        assert {"averaged"} == set(outcomes(b)[jumped:-2])
        assert final_outcomes(b)[-1] == "averaged"
        for name in "ac":
            assert_trains_on(swarm[name])
            assert len(skips(swarm[name])) <= 4, outcomes(swarm[name])  # while b was asleep


@simulated()
async def test_who_comes_too_late_for_the_final_averaging_joins_again(tmp_path):
    async with open_swarm(1, toy_spec(8), tmp_path) as swarm:
        await start(swarm, "a", "b", "c")
        await swarm.until(lambda: swarm["c"].facts.round >= 6)
        swarm.freeze("c")
        await swarm.finished("a", "b")
        swarm.thaw("c")
        await swarm.finished()
        c = swarm["c"]
        assert isinstance(c.failure, JoinAgain), c.failure
        remembered = Acquaintances(tmp_path / "c" / "neighbours.json").read()
        assert {*remembered} == {swarm[name].peer_id for name in "ab"}
        assert all(swarm[name].failure is None for name in "ab")


@simulated()
async def test_alone_nobody_is_too_late(tmp_path):
    async with open_swarm(1, toy_spec(2), tmp_path) as swarm:
        await start(swarm, "a")
        await swarm.finished()
        assert swarm["a"].failure is None
        assert swarm["a"].facts.state is PeerState.FINISHED


# --- coming and going -----------------------------------------------------------------------------
@simulated()
async def test_a_joiner_trains_within_a_round_and_nobody_pauses(tmp_path):
    spec = toy_spec(10)
    async with open_swarm(1, spec, tmp_path) as swarm:
        await start(swarm, "a", "b")
        await swarm.until(lambda: swarm["a"].facts.round == 4)
        swarm.join("c", through=["b"])
        await swarm.finished()
        a, b, c = (swarm[name] for name in "abc")
        (received,) = c.events(EventName.STATE_RECEIVED)
        first = c.events(EventName.ROUND_OPENED)[0]
        assert received["round"] >= 3
        begun = [e for e in a.events(EventName.ROUND_OPENED) if e["step"] <= first["step"]]
        assert 0 <= first["monotonic_s"] - begun[-1]["monotonic_s"] <= 2.0 + 1.0  # at its place
        assert first["monotonic_s"] - received["monotonic_s"] <= 2.0
        assert "averaged" in training_outcomes(c)
        for peer in (a, b):
            assert_trains_on(peer)
            closed = [e for e in peer.events(EventName.ROUND_CLOSED) if e["steps"]]
            assert [event["round"] for event in closed] == list(range(10))
        # Its data begins where that of the others stands, not at the beginning.
        assert c.facts.position == pytest.approx(a.facts.position, rel=0.2)


@simulated()
async def test_who_leaves_goes_within_its_grace_and_costs_one_skip(tmp_path):
    async with open_swarm(1, toy_spec(8), tmp_path) as swarm:
        await start(swarm, "a", "b", "c")
        await swarm.until(lambda: swarm["b"].facts.round == 3)
        asked_s = trio.current_time()
        swarm["b"].peer.request_stop()
        await swarm["b"].ended.wait()
        assert trio.current_time() - asked_s <= GRACE_S
        assert swarm["b"].failure is None
        await swarm.finished("a", "c")
        for name in "ac":
            left = swarm[name].events(EventName.PEER_LEFT)
            assert [event["remote"] for event in left] == [swarm["b"].peer_id]
            broken = [reason for reason in skips(swarm[name]) if reason != "no_partner"]
            assert len(broken) <= 1
            # When one ends its training, the other may have a last round over.
            assert set(outcomes(swarm[name], after=4)) <= {"averaged", "no_partner"}
            assert skips(swarm[name], after=4).count("no_partner") <= 1
            assert final_outcomes(swarm[name]) == ["averaged"]


@simulated()
async def test_the_founder_dies_and_others_still_join(tmp_path):
    async with open_swarm(1, toy_spec(10), tmp_path) as swarm:
        await start(swarm, "a", "b")
        await swarm.until(lambda: swarm["b"].facts.round == 2)
        swarm.kill("a")
        swarm.join("c", through=["b"])
        await swarm.finished("b", "c")
        assert "averaged" in outcomes(swarm["c"])
        assert swarm["c"].facts.state is PeerState.FINISHED


@simulated()
async def test_a_killed_peer_comes_back_as_a_new_incarnation(tmp_path):
    async with open_swarm(1, toy_spec(12), tmp_path) as swarm:
        await start(swarm, "a", "b", "c")
        await swarm.until(lambda: swarm["b"].facts.round == 2)
        first = swarm["b"]
        swarm.kill("b")
        await first.ended.wait()
        again = swarm.join("b")
        await swarm.finished()
        assert (first.incarnation, again.incarnation) == (1, 2)
        assert "averaged" in outcomes(again)


@pytest.mark.slow
@simulated()
async def test_a_joiner_whose_source_dies_half_way_takes_another(tmp_path):
    options = SwarmOptions(
        padded_parameters=1 << 18, link=LinkModel(0.02, bandwidth_bytes_per_s=0.5e6)
    )
    spec = toy_spec(4, 5)
    async with open_swarm(1, spec, tmp_path, options) as swarm:
        slow = Machine(SimulatedSpeed(step_s=4.0))
        await start(swarm, "a", "b", machine_of={"a": slow, "b": slow})
        await swarm.until(lambda: swarm["b"].facts.round == 1)
        c = swarm.join("c", slow, through=["b"])

        def half_way(name: str) -> bool:
            return swarm[name].network.statistics().sent_bytes.get(CONTENT, 0) > 1 << 20

        await swarm.until(lambda: half_way("a") or half_way("b"))
        assert not c.ready.is_set()
        source, other = ("a", "b") if half_way("a") else ("b", "a")
        swarm.kill(source)
        await swarm.until(c.ready.is_set)
        (received,) = c.events(EventName.STATE_RECEIVED)
        assert swarm[other].peer_id in received["remotes"]
        await swarm.finished(other, "c")
        assert "averaged" in outcomes(c)
