"""Rounds as long as each peer's line wants them (`sync.inner_steps = "auto"`), in swarms."""

from collections.abc import Iterable
from typing import Any

import pytest
from swarm_worlds import (
    STEP_S,
    assert_trains_on,
    exchanges,
    final_outcomes,
    jumps,
    partners,
    set_lines,
    simulated,
    start,
    toy_spec,
    training_outcomes,
)

from peer.averaging.gossip import lane
from peer.observe.event_names import EventName
from protocol.gossip.round_length import (
    FEWEST,
    FIRST_INNER_STEPS,
    LEAST_INNER_STEPS,
)
from protocol.outcomes import SkipReason
from protocol.run.run_spec import AUTO_ROUND_STEPS, RunSpec
from simulation.machine import Machine
from simulation.network import LinkModel
from simulation.swarm import SimulatedPeer, SimulatedSwarm, SwarmOptions, open_swarm
from simulation.trainer import SimulatedSpeed, ToyProblem

pytestmark = pytest.mark.slow

OPTIONS = SwarmOptions(padded_parameters=16 * 1024)
CODE_BYTES = 16.6e3


def auto_spec(steps: int, **sync: Any) -> RunSpec:
    spec = toy_spec(1, AUTO_ROUND_STEPS, **sync)
    auto = spec.sync.model_copy(update={"inner_steps": "auto"})
    training = spec.training.model_copy(update={"total_steps": steps})
    return spec.model_copy(update={"sync": auto, "training": training})


def line(vector_s: float) -> LinkModel:
    """One that carries a vector in so many seconds, if it carries nothing else."""
    return LinkModel(0.02, bandwidth_bytes_per_s=CODE_BYTES / vector_s)


THIN, THINNER = line(2.0), line(4.0)


def set_lines_of(swarm: SimulatedSwarm, name: str, model: LinkModel) -> None:
    own = swarm[name].peer_id
    for other in {peer.peer_id for peer in swarm.peers.values()} - {own}:
        swarm.internet.link(own, other).model = swarm.internet.link(other, own).model = model


def chosen(peer: SimulatedPeer) -> int:
    assert peer.facts.chosen_inner_steps is not None
    return peer.facts.chosen_inner_steps


def changes(peer: SimulatedPeer, since_s: float = 0.0) -> list[int]:
    """Each H that it chose, after a time."""
    changed = peer.events(EventName.ROUND_LENGTH_CHANGED)
    return [event["inner_steps"] for event in changed if event["monotonic_s"] >= since_s]


def busy(peer: SimulatedPeer, since_s: float) -> float:
    """Part of its training after a time for which it was in an exchange."""
    opened = [event["monotonic_s"] for event in peer.events(EventName.ROUND_OPENED)]
    in_exchange = 0.0
    for event in peer.events(EventName.ROUND_AVERAGED):
        end_s = min(opened[-1], event["monotonic_s"])
        in_exchange += max(0.0, end_s - max(since_s, event["monotonic_s"] - event["seconds"]))
    return in_exchange / (opened[-1] - since_s)


def now_s(peers: Iterable[SimulatedPeer]) -> float:
    return max(peer.events()[-1]["monotonic_s"] for peer in peers)


async def until_step(swarm: SimulatedSwarm, step: int) -> float:
    """Wait until all are there; the time."""
    peers = swarm.peers.values()
    await swarm.until(lambda: all(peer.facts.step >= step for peer in peers))
    return now_s(peers)


@simulated()
async def test_on_a_fast_line_rounds_are_as_short_as_they_may_be(tmp_path):
    machine = Machine(SimulatedSpeed(step_s=1.0))
    async with open_swarm(1, auto_spec(192), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a", "b", "c", machine_of=dict.fromkeys("abc", machine))
        await swarm.finished()
        for peer in swarm.peers.values():
            assert changes(peer) == [LEAST_INNER_STEPS]
            assert chosen(peer) == LEAST_INNER_STEPS
            assert peer.status().chosen_inner_steps == LEAST_INNER_STEPS
            averaged = training_outcomes(peer).count("averaged")
            assert averaged >= 8 * 192 / 50  # what the default H would have made of it
            assert_trains_on(peer, 1.0)
            assert jumps(peer) == []
            # Validation goes by rounds that are as long for all; and at either end of the run.
            assert len(peer.events(EventName.VALIDATED)) <= 192 / AUTO_ROUND_STEPS + 3
            assert set(final_outcomes(peer)) == {"averaged"}


@simulated()
async def test_on_thin_lines_rounds_are_as_long_as_keeps_them_busy(tmp_path):
    async with open_swarm(1, auto_spec(1900), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a", "b")
        set_lines(swarm, THINNER)
        settled_s = await until_step(swarm, 900)
        await swarm.finished()
        for peer in swarm.peers.values():
            exchange_s = [e["seconds"] for e in peer.events(EventName.ROUND_AVERAGED)][-3]
            fitting = exchange_s / STEP_S
            assert changes(peer, settled_s) == []
            assert fitting < chosen(peer) < 1.6 * fitting
            assert 0.6 <= busy(peer, settled_s) <= 1.0
            assert_trains_on(peer)
            assert len(peer.events(EventName.VALIDATED)) >= 1900 / AUTO_ROUND_STEPS / 2


@pytest.mark.long
@simulated()
async def test_peers_with_unequal_lines_meet_and_a_slow_one_sets_nobodys_rounds(tmp_path):
    """The slow one may as well be one that pretends to be."""
    options = SwarmOptions(padded_parameters=16 * 1024, link=line(0.25))
    async with open_swarm(1, auto_spec(1200), tmp_path, options) as swarm:
        await start(swarm, "a", "b", "c", "d")
        set_lines_of(swarm, "d", THINNER)
        settled_s = await until_step(swarm, 850)
        await swarm.finished()
        others = {swarm[name].peer_id for name in "abc"}
        for name in "abc":
            peer = swarm[name]
            assert changes(peer, settled_s) == []
            assert chosen(peer) < 3 * FIRST_INNER_STEPS
            assert set(partners(peer).values()) == others - {peer.peer_id} | {swarm["d"].peer_id}
        assert chosen(swarm["d"]) > 60
        assert set(partners(swarm["d"]).values()) == others
        assert busy(swarm["d"], settled_s) >= 0.6
        assert all(set(final_outcomes(peer)) == {"averaged"} for peer in swarm.peers.values())
        assert len(list(exchanges(*swarm.peers.values()))) > 0


@simulated()
@pytest.mark.long
async def test_replicas_that_forget_nothing_believe_each_other_over_unequal_lines(tmp_path):
    """Rounds of ten steps and of a hundred: so unlike are the distances of their replicas."""
    options = SwarmOptions(
        padded_parameters=16 * 1024, link=line(0.25), problem=ToyProblem(rate=0.001)
    )
    async with open_swarm(1, auto_spec(800), tmp_path, options) as swarm:
        await start(swarm, "a", "b", "c", "d")
        set_lines_of(swarm, "d", THINNER)
        await swarm.finished()
        for peer in swarm.peers.values():
            assert peer.facts.skipped[SkipReason.IMPLAUSIBLE] == 0
            assert not peer.events(EventName.PEER_IGNORED)


@pytest.mark.long
@simulated(2)
async def test_the_end_waits_for_a_peer_that_is_in_a_long_exchange(tmp_path):
    async with open_swarm(2, auto_spec(640), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a", "b", "c", "d")
        set_lines_of(swarm, "d", line(12.0))
        await swarm.finished()
        ends = [p.events(EventName.FINAL_AVERAGING)[0] for p in swarm.peers.values()]
        assert [end["peers"] for end in ends] == [4] * 4
        assert all(set(final_outcomes(peer)) == {"averaged"} for peer in swarm.peers.values())


@simulated()
@pytest.mark.long
async def test_a_line_that_becomes_slower_and_faster_is_followed(tmp_path):
    async with open_swarm(1, auto_spec(2600), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a", "b")
        await until_step(swarm, 200)
        set_lines(swarm, THIN)
        slower_s = await until_step(swarm, 1500)
        thin = {name: chosen(peer) for name, peer in swarm.peers.items()}
        set_lines(swarm, OPTIONS.link)
        await swarm.finished()
        for name, peer in swarm.peers.items():
            assert thin[name] > 4 * LEAST_INNER_STEPS
            assert chosen(peer) < thin[name] / 3
            lengths = changes(peer)
            turn = lengths.index(max(lengths))
            assert sorted(lengths[turn:], reverse=True) == lengths[turn:]
            assert len(changes(peer, slower_s)) <= 7  # from 40 to 2


@simulated()
async def test_exchanges_that_are_given_up_count_with_the_time_that_they_took(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(lane, "MIN_EXCHANGE_S", 3.0)
    monkeypatch.setattr(lane, "MAX_EXCHANGE_ROUNDS", 0.1)
    async with open_swarm(1, auto_spec(640), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a", "b")
        set_lines(swarm, THINNER)
        await swarm.until(lambda: all(p.facts.step >= 576 for p in swarm.peers.values()))
        for peer in swarm.peers.values():
            assert peer.facts.skipped[SkipReason.DEADLINE] >= FEWEST
            assert peer.facts.averaged <= 1
            assert chosen(peer) >= 3.0 / STEP_S


@simulated()
async def test_a_peer_alone_takes_the_rounds_of_the_run(tmp_path):
    async with open_swarm(1, auto_spec(320), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a")
        await swarm.finished()
        opened = [e["quota"] for e in swarm["a"].events(EventName.ROUND_OPENED) if e["quota"]]
        assert sum(opened) == 320
        assert min(opened) >= AUTO_ROUND_STEPS / 2


@pytest.mark.long
@simulated()
async def test_a_founder_ends_its_round_alone_when_the_first_joiner_comes(tmp_path):
    async with open_swarm(1, auto_spec(192), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a")
        for steps, name in ((20, "b"), (40, "c")):
            await until_step(swarm, steps)
            swarm.join(name)
            await swarm.until(swarm[name].ready.is_set)
        await swarm.finished()
        quotas = [opened["quota"] for opened in swarm["a"].events(EventName.ROUND_OPENED)[:3]]
        first, second = (end["steps"] for end in swarm["a"].events(EventName.ROUND_CLOSED)[:2])
        assert 20 <= first < quotas[0]  # the joiner comes
        assert second < quotas[1]  # and trains
        assert quotas[2] < 2 * FIRST_INNER_STEPS  # what they had not trained is no credit
        for name in "bc":
            (received,) = swarm[name].events(EventName.STATE_RECEIVED)
            assert received["round"] >= 0
        for peer in swarm.peers.values():
            assert peer.facts.skipped[SkipReason.IMPLAUSIBLE] == 0


@simulated()
async def test_where_the_run_names_h_nobody_chooses(tmp_path):
    async with open_swarm(1, toy_spec(30, 4), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a", "b")
        await swarm.finished()
        for peer in swarm.peers.values():
            assert changes(peer) == []
            assert peer.status().chosen_inner_steps is None
