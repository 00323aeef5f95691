"""What goes when, and what all hold afterwards: Streaming DiLoCo's promises in whole swarms."""

import itertools
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio
from fragment_tap import watch
from streaming_worlds import OPTIONS, assert_equal, contributors, fragment_spec, returned
from swarm_worlds import STEP_S, simulated, start

from peer.training.sync import FragmentSync
from protocol.trainer_messages import FragmentMerged, FragmentSent
from protocol.wire.fields import Message
from protocol.wire.fragment_messages import Contribution, FragmentSettled, Result
from simulation.machine import Machine
from simulation.network import LinkModel
from simulation.swarm import SimulatedSwarm, identity_of, open_swarm
from simulation.trainer import SimulatedSpeed, ToyNoise, ToyProblem, optimum

pytestmark = pytest.mark.slow

SEED = 1
EVEN = 2
"""A seed whose fragments take as long before a join as while it lasts, by their owners."""
FRAGMENTS = range(4)
H = 20


# --- plain DiLoCo ---------------------------------------------------------------------------------
def plain_diloco(start_P: npt.NDArray[Any], names: str, rounds: int) -> npt.NDArray[Any]:
    """DiLoCo as its paper has it, straight down, and the mean of all at the end."""
    problem, rate, momentum = ToyProblem(), np.float32(0.4), np.float32(0.9)
    best_P = optimum(SEED, start_P.size)
    noises = {name: ToyNoise(SEED, identity_of(SEED, name).peer_id) for name in names}
    phi, v = start_P.copy(), np.zeros_like(start_P)
    for round_ in range(rounds):
        thetas = []
        for name in sorted(names, key=lambda each: identity_of(SEED, each).peer_id):
            theta = phi.copy()
            for _step in range(H):
                noise = noises[name].of_step(theta.size)
                gradient = theta - best_P + np.float32(problem.sigma) * noise
                theta -= np.float32(problem.rate) * gradient
            thetas.append(theta)
        mean = np.mean([phi - theta for theta in thetas], axis=0, dtype=np.float32)
        v = momentum * v + mean
        last = round_ == rounds - 1
        phi = phi - (mean if last else rate * (mean + momentum * v))
    return phi


@pytest.mark.parametrize("names", ["a", "ab"])
def test_whole_at_once_and_in_fp32_a_swarm_is_plain_diloco(tmp_path, monkeypatch, names):
    """The trainer of the first starts so late that both begin the first round together."""

    @simulated(SEED)
    async def run():
        spec = fragment_spec(4, "fp32", fragments="whole", overlap_steps=0, merge=0.0)
        async with open_swarm(SEED, spec, tmp_path, OPTIONS) as swarm:
            tap = watch(swarm, monkeypatch)
            late = {"a": Machine(SimulatedSpeed(start_s=1.65))} if names == "ab" else {}
            await start(swarm, *names, machine_of=late)
            await swarm.finished()
            assert all(contributors(swarm[name]).keys() == {len(names)} for name in names)
            first = tap.sent(0, 1)["a"].phi
            expected = plain_diloco(np.concatenate(first), names, 4)
            for name in names:
                np.testing.assert_allclose(
                    swarm[name].slow_weights(), expected, atol=1e-6, rtol=1e-6
                )

    run()


# --- the schedule ---------------------------------------------------------------------------------
@pytest.mark.parametrize("tau", [1, pytest.param(4, marks=pytest.mark.long)])
def test_each_fragment_is_sent_once_in_h_steps_and_merged_tau_steps_later(
    tmp_path, monkeypatch, tau
):
    @simulated(SEED)
    async def run():
        async with open_swarm(
            SEED, fragment_spec(8, overlap_steps=tau), tmp_path, OPTIONS
        ) as swarm:
            tap = watch(swarm, monkeypatch)
            await start(swarm, *"abc")
            await swarm.finished()
            contributed = Counter(
                (post.sender, post.receiver, post.message.fragment, post.message.cycle)
                for post in tap.messages(Contribution)
            )
            assert set(contributed.values()) == {1}
            for name in "abc":
                events = [(at_s, event) for who, at_s, event in tap.told if who == name]
                for fragment in FRAGMENTS:
                    sent = flights(events, FragmentSent, fragment)
                    merged = flights(events, FragmentMerged, fragment)
                    assert list(sent) == list(range(min(sent), 9))
                    for cycle in range(3, 8):
                        assert sent[cycle][1].steps == H
                        flight_s = merged[cycle][0] - sent[cycle][0] - merged[cycle][1].waited_s
                        assert flight_s == pytest.approx(tau * STEP_S)

    run()


def flights(
    events: list[tuple[float, Any]], kind: type[FragmentSent | FragmentMerged], fragment: int
) -> dict[int, tuple[float, Any]]:
    """By cycle, when this befell a fragment, and the event."""
    found = [each for each in events if isinstance(each[1], kind) and each[1].fragment == fragment]
    by_cycle = {each[1].cycle: each for each in found}
    assert len(by_cycle) == len(found)
    return by_cycle


@pytest.mark.long
@simulated(SEED)
async def test_with_merge_0_all_replicas_are_equal_on_a_fragment_that_came_back(
    tmp_path, monkeypatch
):
    merged = defaultdict(list)
    take_over = FragmentSync._land

    def noted(sync, lane, merge):
        take_over(sync, lane, merge)
        fragment = sync._values.fragments[merge.fragment]
        theta_P = sync._values.model.theta_P
        values = b"".join(theta_P[a:b].numpy().tobytes() for a, b in fragment.spans)
        merged[merge.cycle, merge.fragment].append(values)

    monkeypatch.setattr(FragmentSync, "_land", noted)
    spec = fragment_spec(6, merge=0.0, overlap_steps=2)
    async with open_swarm(SEED, spec, tmp_path, OPTIONS) as swarm:
        await start(swarm, *"abc")
        await swarm.finished()
    complete = {cycle: each for (cycle, _), each in merged.items() if cycle >= 2}
    assert list(map(len, complete.values())) == [3] * len(complete)
    assert all(len(set(each)) == 1 for each in complete.values())


# --- one outer copy -------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_outer_copies_are_identical_again_before_each_next_send(tmp_path, monkeypatch, codec):
    """Also where every fifth result is lost on its way; that happens, and is counted."""

    @simulated(SEED)
    async def run():
        async with open_swarm(SEED, fragment_spec(10, codec), tmp_path, OPTIONS) as swarm:
            tap = watch(swarm, monkeypatch)
            lost = Counter[str]()
            settled = set[tuple[str, int, int]]()

            def lose(sender: str, receiver: str, message: Message) -> bool:
                if isinstance(message, FragmentSettled):
                    settled.add((sender, message.fragment, message.cycle))
                elif (
                    isinstance(message, Result)
                    and 2 < message.cycle < 9
                    and (receiver, message.fragment, message.cycle) not in settled
                ):
                    lost["asked"] += 1
                    if lost["asked"] % 5 == 0:
                        lost[receiver] += 1
                        return True
                return False

            await start(swarm, *"abc")
            tap.loses = lose
            await swarm.finished()
            for fragment in FRAGMENTS:
                for cycle in range(3, 11):
                    sent = tap.sent(fragment, cycle)
                    assert sent["a"].stamps == sent["b"].stamps == sent["c"].stamps
            assert_equal(*(swarm[name] for name in "abc"))
            missing = {n: sum(e["missing"] for e in returned(swarm[n], after=2)) for n in "abc"}
            assert all(missing.values())

    run()


# --- joining --------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("into_flight_s", [0.0, 0.15, 0.3])
def test_a_join_request_during_an_exchange_neither_aborts_nor_delays_it(
    tmp_path, monkeypatch, into_flight_s
):
    """A fragment is on its way for half a second; the newcomer asks both for all that it needs."""

    @simulated(EVEN)
    async def run():
        spec = fragment_spec(12, overlap_steps=15)
        async with open_swarm(EVEN, spec, tmp_path, OPTIONS) as swarm:
            tap = watch(swarm, monkeypatch)
            await start(swarm, *"ab")
            await swarm.until(lambda: swarm["a"].facts.round == 3)
            for ends in itertools.permutations(swarm[name].peer_id for name in "ab"):
                link = LinkModel(0.1, bandwidth_bytes_per_s=100e3)
                swarm.internet.link(*ends).model = link
            await swarm.until(lambda: len(tap.sent(1, 6)) == 2)
            await trio.sleep(into_flight_s)
            swarm.join("c", through=["a", "b"])
            await swarm.until(lambda: ends_of(swarm, "c") != [])
            joined_in = swarm["a"].facts.round
            await swarm.finished()
            for name in "ab":
                before = [e for e in ends_of(swarm, name) if 3 < e["round"] < 6]
                while_joining = [e for e in ends_of(swarm, name) if 6 <= e["round"] < joined_in]
                assert len(while_joining) >= len(FRAGMENTS)
                assert {(e["contributors"], e["missing"]) for e in while_joining} == {(2, 0)}
                longest_s = max(e["seconds"] for e in before)
                assert max(e["seconds"] for e in while_joining) <= 1.05 * longest_s

    run()


def ends_of(swarm: SimulatedSwarm, name: str) -> list[dict[str, Any]]:
    return returned(swarm[name]) if swarm[name].lines else []
