"""Rounds without a clock: lines that are too thin, machines that differ, peers out of reach."""

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import trio
from swarm_worlds import (
    assert_trains_on,
    exchanges,
    jumps,
    partners,
    set_lines,
    simulated,
    start,
    toy_spec,
    training_outcomes,
)

from peer.daemon.links import SILENCE_S
from peer.observe.event_names import EventName
from protocol.errors import StreamLost
from protocol.gossip.matchmaking import PROPOSAL_ANSWER_S
from protocol.schedule.rounds import LARGEST_CHANGE
from protocol.wire.versions import GOSSIP
from simulation.machine import Machine
from simulation.network import LinkModel, SimulatedNetwork
from simulation.swarm import SimulatedPeer, SimulatedSwarm, SwarmOptions, open_swarm
from simulation.trainer import SimulatedSpeed

pytestmark = pytest.mark.slow

INNER_STEPS = 20  # of 0.1 s: a round takes 2 s
VECTOR = 64 * 1024  # int8 codes of one peer, about as many bytes


OPTIONS = SwarmOptions(padded_parameters=VECTOR)
THIN = LinkModel(0.02, bandwidth_bytes_per_s=16e3)
"""An exchange takes four seconds, and a little more."""


def quotas(peer: SimulatedPeer) -> list[int]:
    opened = peer.events(EventName.ROUND_OPENED)
    return [event["quota"] for event in opened if event["quota"]]


# --- lines that are too thin ----------------------------------------------------------------------
@simulated()
async def test_training_goes_on_while_an_exchange_outlasts_the_quota(tmp_path):
    async with open_swarm(1, toy_spec(12, INNER_STEPS), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a", "b")
        set_lines(swarm, THIN)
        await swarm.finished()
        for peer in swarm.peers.values():
            assert_trains_on(peer)
            assert jumps(peer) == []
            closed = [e for e in peer.events(EventName.ROUND_CLOSED) if e["steps"]]
            held_up = [
                end for end, quota in zip(closed, quotas(peer), strict=True) if end["steps"] > quota
            ]
            assert len(held_up) >= len(closed) / 2
            # On a line that is always too thin each quota is as short as it may be.
            owed = INNER_STEPS * LARGEST_CHANGE
            assert all(quota <= 1.5 * owed for quota in quotas(peer)[2:-1]), quotas(peer)
            assert training_outcomes(peer)[:-1] == ["averaged"] * (len(closed) - 1)
            slowest = max(t.exchange_s for t in peer.timings)
            assert slowest > 1.5 * INNER_STEPS * 0.1
        assert len(list(exchanges(*swarm.peers.values()))) > 0


@simulated()
async def test_what_a_line_holds_up_for_a_while_is_made_up_for(tmp_path):
    rounds = 16
    async with open_swarm(1, toy_spec(rounds, INNER_STEPS), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a", "b")
        await swarm.until(lambda: swarm["a"].facts.step >= 3 * INNER_STEPS)
        set_lines(swarm, THIN)
        await swarm.until(lambda: swarm["a"].facts.step >= 7 * INNER_STEPS)
        set_lines(swarm, OPTIONS.link)
        await swarm.finished()
        for peer in swarm.peers.values():
            assert_trains_on(peer)
            assert min(quotas(peer)[4:-1]) <= 0.75 * INNER_STEPS
            averaged = training_outcomes(peer).count("averaged")
            assert abs(averaged - rounds) <= 2, (averaged, rounds)


# --- machines that differ -------------------------------------------------------------------------
@simulated()
async def test_a_peer_four_times_slower_averages_as_often_per_quota(tmp_path):
    rounds, slow_s = 12, 0.4
    async with open_swarm(1, toy_spec(rounds, 40), tmp_path) as swarm:
        slow = Machine(SimulatedSpeed(step_s=slow_s))
        await start(swarm, "a", "b", "c", "d", machine_of={"d": slow})
        await swarm.finished()
        d = swarm["d"]
        assert_trains_on(d, slow_s)
        for peer in swarm.peers.values():
            trained = training_outcomes(peer)
            assert trained.count("averaged") >= len(trained) - 1, (peer.name, trained)
        fast = [len(training_outcomes(swarm[name])) for name in "abc"]
        # Nobody knew its speed as it took its first quota of 16 s; that round ends early.
        assert jumps(d) == []
        begun = d.events(EventName.ROUND_OPENED)[1]["step"]
        per_round = (rounds * 40 - begun) / (len(training_outcomes(d)) - 1)
        assert per_round == pytest.approx(40, rel=0.15)
        assert max(fast) <= rounds + 1
        assert max(quotas(d)[1:]) <= 15


# --- partners change ------------------------------------------------------------------------------
@simulated()
@pytest.mark.long
async def test_pairs_at_steady_speeds_do_not_repeat(tmp_path):
    rounds, names = 40, [f"p{place}" for place in range(8)]
    async with open_swarm(1, toy_spec(rounds, INNER_STEPS), tmp_path) as swarm:
        await start(swarm, *names)
        await swarm.finished()
        peers = list(swarm.peers.values())
        pairs: Counter[frozenset[str]] = Counter()
        repeats = total = 0
        for peer in peers:
            met = list(partners(peer).values())[:-3]
            pairs.update(frozenset((peer.peer_id, other)) for other in met)
            repeats += sum(one == other for one, other in itertools.pairwise(met))
            total += len(met) - 1
            assert training_outcomes(peer)[1:-1].count("averaged") >= rounds - 4
            assert len(set(met)) >= 6  # nearly everybody
        assert repeats <= 0.05 * total  # of random ones it would be a seventh
        meetings = [count / 2 for count in pairs.values()]  # both sides count one
        even = sum(meetings) / 28
        chi_squared = sum((count - even) ** 2 / even for count in meetings)
        assert len(meetings) == 28
        assert chi_squared < 55.5, meetings  # 27 degrees of freedom, p = 0.001


def cut_line(swarm: SimulatedSwarm, one: str, other: str) -> None:
    for ends in itertools.permutations((swarm[one].peer_id, swarm[other].peer_id)):
        swarm.internet.link(*ends).cut()


@pytest.mark.parametrize(
    ("what", "most", "within_s"),
    [
        ("the line is cut", 5, SILENCE_S + PROPOSAL_ANSWER_S),
        pytest.param("gossip streams fail", 2, math.inf, marks=pytest.mark.long),
    ],
    ids=["line", "streams"],
)
def test_a_peer_out_of_reach_is_not_asked_again_soon_and_the_others_go_on(
    tmp_path, monkeypatch, what, most, within_s
):
    open_stream = SimulatedNetwork.open_stream

    @simulated()
    async def run() -> None:
        async with open_swarm(1, toy_spec(20, INNER_STEPS), tmp_path) as swarm:
            await start(swarm, "a", "b", "c", "d")
            await swarm.until(lambda: swarm["a"].facts.step >= INNER_STEPS)
            a, b = swarm["a"], swarm["b"]
            apart = {a.peer_id, b.peer_id}

            async def out_of_reach(network: SimulatedNetwork, peer_id: str, protocol: str) -> Any:
                if protocol == GOSSIP and {network.peer_id, peer_id} == apart:
                    raise StreamLost(f"{peer_id} cannot be reached")
                return await open_stream(network, peer_id, protocol)

            if what == "the line is cut":
                cut_line(swarm, "a", "b")
            else:
                monkeypatch.setattr(SimulatedNetwork, "open_stream", out_of_reach)
            cut_s = trio.current_time()
            await swarm.finished("c", "d")
            for one, other in ((a, b), (b, a)):
                asked_s = [
                    event["monotonic_s"] - cut_s
                    for event in one.events(EventName.PROPOSAL_SENT)
                    if event["remote"] == other.peer_id and event["monotonic_s"] > cut_s
                ]
                assert len(asked_s) <= most, asked_s
                assert max(asked_s, default=0.0) <= within_s, asked_s
            for peer in swarm.peers.values():
                assert_trains_on(peer)
                trained = training_outcomes(peer)
                least = 0.7 if peer.peer_id in apart else 0.9
                assert trained.count("averaged") >= least * len(trained), (peer.name, trained)

    run()
