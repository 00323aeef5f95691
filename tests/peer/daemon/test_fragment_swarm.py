"""Streaming DiLoCo in whole swarms: everybody holds the same outer copy, whatever happens.

Each fragment is large enough to be averaged in several chunks, with several owners.
"""

import itertools
import math
from statistics import median

import numpy as np
import pytest
from streaming_worlds import (
    LONGEST_ROUND_S,
    OPTIONS,
    assert_equal,
    contributors,
    fragment_spec,
    longest_round_s,
    returned,
    spoil,
)
from swarm_worlds import STEP_S, simulated, start, toy_spec

from peer.codec import get_codec
from peer.facts import PeerState
from peer.observe.event_names import EventName
from peer.options.config import ConfigError
from protocol.wire.versions import FRAGMENT
from simulation import trainer as trainers_module
from simulation.machine import Machine
from simulation.network import LinkModel
from simulation.swarm import SwarmOptions, open_swarm
from simulation.trainer import SimulatedTrainer

pytestmark = pytest.mark.slow

LOSS_OF_THE_START = 5.0


@simulated()
async def test_two_peers_end_with_the_same_bytes(tmp_path):
    async with open_swarm(1, fragment_spec(), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a", "b")
        await swarm.finished()
        a, b = swarm["a"], swarm["b"]
        assert_equal(a, b)
        for peer in (a, b):
            assert contributors(peer, after=1).keys() == {2}
            assert {event["missing"] for event in returned(peer, after=1)} == {0}
            assert peer.status().state is PeerState.FINISHED
        assert a.status().train_loss < a.events(EventName.ROUND_CLOSED)[0]["loss"]


@simulated()
async def test_a_peer_alone_trains(tmp_path):
    async with open_swarm(1, fragment_spec(), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a")
        await swarm.finished()
        assert contributors(swarm["a"]).keys() == {1}
        assert swarm["a"].facts.skipped == {"no_partner": len(returned(swarm["a"]))}


@pytest.mark.long
@simulated()
async def test_five_peers_end_with_the_same_bytes(tmp_path):
    names = "abcde"
    async with open_swarm(1, fragment_spec(), tmp_path, OPTIONS) as swarm:
        await start(swarm, *names)
        await swarm.finished()
        peers = [swarm[name] for name in names]
        assert_equal(*peers)
        for peer in peers:
            assert contributors(peer, after=2).keys() == {5}


FAR_LINK = LinkModel(latency_s=2 * STEP_S)
"""A fragment's trip takes four steps at least: codes to the owners, results to all."""


SETTLED = 9
"""Rounds after which the chunks of newcomers stand where all others' do."""


@pytest.mark.long
@simulated()
async def test_peers_with_different_overlap_end_with_the_same_bytes(tmp_path):
    own = {"a": None, "b": 8, "c": 3}
    machines = {name: Machine(overlap_steps=tau) for name, tau in own.items()}
    options = SwarmOptions(padded_parameters=6 * 16384, link=FAR_LINK)
    async with open_swarm(1, fragment_spec(12, overlap_steps=5), tmp_path, options) as swarm:
        await start(swarm, *own, machine_of=machines)
        await swarm.finished()
        assert_equal(*(swarm[name] for name in own))
        for name in own:
            assert contributors(swarm[name], after=SETTLED).keys() == {3}
        # All end a round together; who may train on for longer has sent its part sooner.
        trips_s = {n: [e["seconds"] for e in returned(swarm[n], after=SETTLED)] for n in own}
        assert median(trips_s["b"]) > median(trips_s["a"]) > median(trips_s["c"])


@pytest.mark.parametrize("spec", [toy_spec(), fragment_spec()], ids=["pairs", "fragments"])
def test_a_joiner_whose_overlap_does_not_fit_the_run_is_told_so(tmp_path, spec):
    @simulated()
    async def run():
        async with open_swarm(1, spec, tmp_path, OPTIONS) as swarm:
            await start(swarm, "a")
            swarm.join("b", Machine(overlap_steps=spec.sync.inner_steps))
            await swarm["b"].ended.wait()
            assert isinstance(swarm["b"].failure, ConfigError)
            assert swarm["a"].failure is None

    run()


@simulated()
async def test_a_late_joiner_heals_and_contributes(tmp_path):
    async with open_swarm(1, fragment_spec(12), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a", "b")
        await swarm.until(lambda: swarm["a"].facts.round == 4)
        swarm.join("c", through=["b"])
        await swarm.finished()
        a, b, c = (swarm[name] for name in "abc")
        assert_equal(a, b, c)
        assert contributors(a, after=9).keys() == {3}


@simulated()
async def test_a_killed_peer_costs_the_others_nothing_but_its_part(tmp_path):
    async with open_swarm(1, fragment_spec(12), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a", "b", "c")
        await swarm.until(lambda: swarm["a"].facts.round == 4)
        swarm.kill("c")
        await swarm.finished("a", "b")
        assert_equal(swarm["a"], swarm["b"])
        assert contributors(swarm["a"], after=8).keys() == {2}


@simulated()
@pytest.mark.long
async def test_after_a_partition_all_are_equal_again(tmp_path):
    async with open_swarm(1, fragment_spec(20), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a", "b", "c")
        await swarm.until(lambda: swarm["a"].facts.round == 4)
        swarm.isolate("c")
        await swarm.until(lambda: swarm["a"].facts.round == 10)
        swarm.internet.heal()
        await swarm.finished()
        assert_equal(*(swarm[name] for name in "abc"))
        assert contributors(swarm["a"], after=17).keys() == {3}


@simulated()
async def test_two_peers_that_were_apart_are_equal_again(tmp_path):
    async with open_swarm(1, fragment_spec(20), tmp_path, OPTIONS) as swarm:
        await start(swarm, "a", "b")
        await swarm.until(lambda: swarm["a"].facts.round == 4)
        swarm.isolate("b")
        await swarm.until(lambda: swarm["a"].facts.round == 10)
        swarm.internet.heal()
        await swarm.finished()
        assert_equal(swarm["a"], swarm["b"])


@pytest.mark.parametrize(
    ("sync", "diloco"),
    [
        ({"codec": "fp32"}, {"fragments": "whole", "overlap_steps": 0, "merge": 0.0}),
        ({"codec": "bf16"}, {"fragments": "sequential", "overlap_steps": 5}),
        ({"codec": "int4"}, {"late": "skip"}),
    ],
    ids=["plain", "sequential", "int4"],
)
def test_every_way_of_streaming_ends_with_the_same_bytes(tmp_path, sync, diloco):
    @simulated()
    async def run():
        spec = toy_spec(4, method="diloco", diloco={"blocks_per_fragment": 2} | diloco, **sync)
        async with open_swarm(1, spec, tmp_path, OPTIONS) as swarm:
            await start(swarm, "a", "b", "c")
            await swarm.finished()
            assert_equal(*(swarm[name] for name in "abc"))
            assert contributors(swarm["a"], after=2).keys() == {3}
            assert (swarm["a"].status().train_loss or math.inf) < LOSS_OF_THE_START

    run()


@pytest.mark.long
@simulated()
async def test_bytes_follow_the_formula(tmp_path):
    """2 (M - 1) / M vectors per round and peer; framing, signatures and audits add at most 15%.

    Chunks are as small as they can be, so that an audit opens an eighth of one.
    """
    names, parameters, rounds = "abcd", 6 * 65536, 3
    options = SwarmOptions(padded_parameters=parameters)
    async with open_swarm(1, fragment_spec(10), tmp_path, options) as swarm:
        await start(swarm, *names)

        def in_mid_round(round_: int) -> bool:
            """All are between the third send of a round and the last one."""
            facts = [swarm[name].facts for name in names]
            return all(f.round == round_ and 0.5 < f.fraction < 0.75 for f in facts)

        def sent_bytes() -> int:
            carried = [swarm[name].network.statistics().sent_bytes for name in names]
            return sum(sent[FRAGMENT] for sent in carried)

        await swarm.until(lambda: in_mid_round(5))
        before = sent_bytes()
        await swarm.until(lambda: in_mid_round(5 + rounds))
        vectors = (sent_bytes() - before) / get_codec("int8").code_bytes(parameters)
        each = 2 * (len(names) - 1) / len(names)
        assert each <= vectors / rounds / len(names) <= 1.15 * each


def test_a_run_ends_with_the_mean_of_all_weights(tmp_path, monkeypatch):
    """With merge 1 nothing is taken over meanwhile, so the fast weights stay as they were sent."""
    trainers = []

    class Watched(SimulatedTrainer):
        def __init__(self, *given):
            super().__init__(*given)
            trainers.append(self)

    monkeypatch.setattr(trainers_module, "SimulatedTrainer", Watched)

    @simulated()
    async def run():
        spec = toy_spec(4, method="diloco", codec="fp32", diloco={"merge": 1.0})
        async with open_swarm(1, spec, tmp_path, OPTIONS) as swarm:
            await start(swarm, *"abc")
            await swarm.finished()
            assert_equal(*(swarm[name] for name in "abc"))
            mean = np.mean([trainer.model.theta for trainer in trainers], axis=0)
            np.testing.assert_allclose(swarm["a"].slow_weights(), mean, rtol=0, atol=1e-5)
            apart = trainers[0].model.theta - trainers[1].model.theta
            assert np.abs(apart).max() > 0.1

    run()


# --- whoever fails, the others' average is exact for what arrived ---------------------------------
@pytest.mark.long
@simulated()
async def test_of_five_peers_two_die_and_three_go_on_within_the_deadline(tmp_path):
    async with open_swarm(2, fragment_spec(12), tmp_path, OPTIONS) as swarm:
        await start(swarm, *"abcde")
        await swarm.until(lambda: swarm["a"].facts.round == 4)
        swarm.kill("d")
        swarm.kill("e")
        await swarm.finished(*"abc")
        assert_equal(*(swarm[name] for name in "abc"))
        assert contributors(swarm["a"], after=8).keys() == {3}
        assert longest_round_s(swarm["a"]) <= LONGEST_ROUND_S


@pytest.mark.long
@simulated()
async def test_a_peer_that_stalls_costs_the_others_one_deadline(tmp_path):
    """Long: test_fragment_faults.py bounds what the same stall costs as a whole."""
    async with open_swarm(1, fragment_spec(16), tmp_path, OPTIONS) as swarm:
        await start(swarm, *"abc")
        await swarm.until(lambda: swarm["a"].facts.round == 4)
        swarm.freeze("c")
        await swarm.until(lambda: swarm["a"].facts.round == 8)
        swarm.thaw("c")
        await swarm.finished()
        assert_equal(*(swarm[name] for name in "abc"))
        assert longest_round_s(swarm["a"]) <= LONGEST_ROUND_S


@pytest.mark.long
@simulated()
async def test_the_number_of_contributors_is_exact_around_a_join_and_a_leave(tmp_path):
    """With a seed for which the leaver owns nothing at that moment: what it owns is lost once."""
    async with open_swarm(4, fragment_spec(16), tmp_path, OPTIONS) as swarm:
        await start(swarm, *"ab")
        await swarm.until(lambda: swarm["a"].facts.round == 4)
        swarm.join("c", through=["a"])
        await swarm.until(lambda: swarm["a"].facts.round == 9)
        swarm["c"].peer.request_stop()
        await swarm.finished("a", "b")
        seen = [event["contributors"] for event in returned(swarm["a"], after=1)]
        steps = [seen[0], *(now for before, now in itertools.pairwise(seen) if now != before)]
        assert steps == [2, 3, 2]


@pytest.mark.long
@simulated()
async def test_a_replica_that_crashed_comes_back_with_the_same_bytes(tmp_path):
    async with open_swarm(1, fragment_spec(16), tmp_path, OPTIONS) as swarm:
        await start(swarm, *"abc")
        await swarm.until(lambda: swarm["a"].facts.round == 4)
        swarm.kill("c")
        await swarm.until(lambda: swarm["a"].facts.round == 6)
        swarm.join("c", through=["b"])
        await swarm.finished()
        assert_equal(*(swarm[name] for name in "abc"))
        assert contributors(swarm["a"], after=13).keys() == {3}


@simulated()
async def test_a_join_delays_by_one_gap_between_fragments_at_most_and_once(tmp_path):
    """Fetching delays nobody; the first fragment in which the newcomer has a part may wait for it,
    since it came in between two fragments."""
    async with open_swarm(1, fragment_spec(10), tmp_path, OPTIONS) as swarm:
        await start(swarm, *"ab")
        await swarm.until(lambda: swarm["a"].facts.round == 3)
        swarm.join("c", through=["b"])
        await swarm.finished()
        rounds = {e["round"]: e["seconds"] for e in swarm["a"].events(EventName.ROUND_CLOSED)}
        met = min(e["round"] for e in returned(swarm["a"]) if e["contributors"] == 3)
        gap_s = rounds[2] / 4  # a round has four fragments
        assert met > 3
        assert rounds[met] <= rounds[2] + 1.2 * gap_s
        others = [rounds[r] for r in range(3, 10) if r != met]
        assert max(others) <= 1.05 * rounds[2]


@simulated()
async def test_who_joins_after_the_end_has_the_same_bytes_and_moves_nobody(tmp_path):
    async with open_swarm(1, fragment_spec(4), tmp_path, OPTIONS) as swarm:
        await start(swarm, *"ab")
        await swarm.finished()
        before = swarm["a"].slow_weights()
        swarm.join("c", through=["a"])
        await swarm.finished()
        assert swarm["c"].failure is None
        assert swarm["c"].facts.state is PeerState.FINISHED
        assert_equal(*(swarm[name] for name in "abc"))
        np.testing.assert_array_equal(swarm["a"].slow_weights(), before)


# --- who differs finds out, and heals -------------------------------------------------------------
@pytest.mark.parametrize(
    "victim", ["a", *(pytest.param(name, marks=pytest.mark.long) for name in "bc")]
)
def test_of_three_the_one_with_a_spoilt_chunk_heals_and_the_majority_does_not_move(
    tmp_path, victim
):
    @simulated()
    async def run():
        async with open_swarm(1, fragment_spec(12), tmp_path, OPTIONS) as swarm:
            await start(swarm, *"abc")
            await swarm.until(lambda: swarm["a"].facts.round == 5)
            before = {name: swarm[name].facts.healed for name in "abc"}
            spoil(swarm[victim])
            await swarm.finished()
            assert_equal(*(swarm[name] for name in "abc"))
            healed = {name: swarm[name].facts.healed - before[name] for name in "abc"}
            assert healed.pop(victim) >= 1  # again, when it was written in between
            assert set(healed.values()) == {0}

    run()


@pytest.mark.parametrize("victim", ["b", pytest.param("a", marks=pytest.mark.long)])
def test_two_peers_that_differ_agree_again(tmp_path, victim):
    @simulated()
    async def run():
        async with open_swarm(1, fragment_spec(12), tmp_path, OPTIONS) as swarm:
            await start(swarm, *"ab")
            await swarm.until(lambda: swarm["a"].facts.round == 5)
            spoil(swarm[victim])
            await swarm.finished()
            assert_equal(swarm["a"], swarm["b"])

    run()
