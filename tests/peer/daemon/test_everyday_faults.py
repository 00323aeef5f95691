"""What goes wrong on any day of a run of weeks costs what it must, and no more.

In simulated swarms, for both ways of averaging where they differ: a machine that stops, one that is
alive and stuck, lines that are long, unsteady and lossy, a beat that does not arrive.
"""

import math

import pytest
import trio
from swarm_worlds import outcomes, simulated, start, toy_spec

from peer.daemon.links import SILENCE_S
from peer.observe.event_names import EventName
from simulation.machine import Machine
from simulation.network import LinkModel
from simulation.swarm import SimulatedPeer, SimulatedSwarm, SwarmOptions, open_swarm
from simulation.trainer import SimulatedSpeed, ToyProblem

pytestmark = pytest.mark.slow

INNER_STEPS, STEP_S = 20, 0.1
ROUND_S = INNER_STEPS * STEP_S
LONG = 10_000
MARGIN_S = 2.0
WAYS = pytest.mark.parametrize("method", ["noloco", pytest.param("diloco", marks=pytest.mark.long)])


def rounds_closed(peer: SimulatedPeer, since_s: float = 0.0) -> int:
    closed = peer.events(EventName.ROUND_CLOSED)
    return sum(event["monotonic_s"] >= since_s for event in closed)


async def both_average(swarm: SimulatedSwarm, *names: str, times: int = 2) -> None:
    """Until each of these has averaged so often from now on."""
    wanted = {name: swarm[name].facts.averaged + times for name in names}
    await swarm.until(lambda: all(swarm[n].facts.averaged >= wanted[n] for n in names))


@pytest.mark.long
@simulated()
async def test_of_sixteen_peers_fifteen_find_a_partner_each_round(tmp_path):
    rounds, names = 5, [f"p{number}" for number in range(16)]
    machines = {
        name: Machine(SimulatedSpeed(scatter=0.25, scatter_seed=number))
        for number, name in enumerate(names)
    }
    async with open_swarm(1, toy_spec(rounds + 1, INNER_STEPS), tmp_path) as swarm:
        await start(swarm, *names, machine_of=machines)
        averaged = {name: swarm[name].facts.averaged for name in names}
        began_s = trio.current_time()
        await swarm.finished()
        assert trio.current_time() - began_s < (rounds + 6) * ROUND_S
        ends = [outcomes(swarm[name])[averaged[name] :][:rounds] for name in names]
        for round_ in range(rounds):
            found = sum(round_ < len(of) and of[round_] == "averaged" for of in ends)
            assert found >= 15, (round_, ends)


@WAYS
@simulated()
async def test_a_killed_peer_is_told_once_and_costs_its_own_work_alone(tmp_path, method):
    async with open_swarm(1, toy_spec(LONG, INNER_STEPS, method=method), tmp_path) as swarm:
        await start(swarm, *"abc")
        await both_average(swarm, *"abc")
        closed = {name: rounds_closed(swarm[name]) for name in "ab"}
        swarm.kill("c")
        killed_s, gone = trio.current_time(), swarm["c"].peer_id
        await trio.sleep(SILENCE_S + MARGIN_S)
        for name in "ab":
            lost = [e for e in swarm[name].events(EventName.PEER_LOST) if e["remote"] == gone]
            assert len(lost) == 1
            assert lost[0]["monotonic_s"] - killed_s <= SILENCE_S + MARGIN_S
            fair = (SILENCE_S + MARGIN_S) / ROUND_S
            assert rounds_closed(swarm[name]) - closed[name] >= fair - 2
        await both_average(swarm, *"ab")


@WAYS
@simulated()
async def test_a_pause_and_long_unsteady_lossy_lines_end_nobody_and_loss_falls(tmp_path, method):
    link = LinkModel(latency_s=1.0, jitter_s=1.0, loss=0.02)
    line = SwarmOptions(link=link, problem=ToyProblem(rate=0.003))
    spec = toy_spec(LONG, 200, method=method)
    async with open_swarm(1, spec, tmp_path, line) as swarm:
        await start(swarm, *"abc")
        await swarm.until(lambda: all(swarm[name].facts.train_loss for name in "abc"))
        first = {name: swarm[name].facts.train_loss or math.inf for name in "abc"}
        swarm.freeze("c")
        await trio.sleep(60)
        swarm.thaw("c")
        await both_average(swarm, *"abc")
        for name, before in first.items():
            peer = swarm[name]
            assert not peer.ended.is_set()
            assert peer.events(EventName.TRAINER_DIED) == []
            assert (peer.facts.train_loss or math.inf) < before


@WAYS
@simulated()
async def test_a_peer_alive_and_stuck_is_not_waited_for_and_is_taken_back(tmp_path, method):
    inner_steps = 60  # so that it is not lost meanwhile
    async with open_swarm(1, toy_spec(LONG, inner_steps, method=method), tmp_path) as swarm:
        await start(swarm, *"abc")
        await both_average(swarm, *"abc", times=8)
        swarm["c"].gate.close()  # its daemon beats on
        before = {name: (swarm[name].facts.step, swarm[name].facts.averaged) for name in "ab"}
        await trio.sleep(70)
        rounds = 70 / (inner_steps * STEP_S)
        for name, (step, averaged) in before.items():
            lost = swarm[name].events(EventName.PEER_LOST)
            assert [event for event in lost if event["remote"] == swarm["c"].peer_id] == []
            assert swarm[name].facts.step - step >= 0.8 * rounds * inner_steps
            assert swarm[name].facts.averaged - averaged >= 0.8 * rounds
        swarm["c"].gate.open()
        await both_average(swarm, *"abc")


@simulated()
async def test_one_beat_that_is_late_loses_nobody_and_silence_does(tmp_path):
    async with open_swarm(1, toy_spec(LONG, INNER_STEPS), tmp_path) as swarm:
        await start(swarm, *"abc")
        await both_average(swarm, *"abc")
        c = swarm["c"]
        swarm.isolate("c")
        await trio.sleep(SILENCE_S / 2)
        swarm.internet.heal()
        await both_average(swarm, *"abc")
        assert swarm["a"].events(EventName.PEER_LOST) == []

        swarm.isolate("c")
        await trio.sleep(SILENCE_S + MARGIN_S)
        for name in "ab":
            now_s = trio.current_time()
            assert c.peer_id not in {m.peer_id for m in swarm[name].view.members_training(now_s)}
        swarm.internet.heal()
        await both_average(swarm, *"abc")


@simulated()
async def test_a_peer_started_again_in_its_home_is_back_within_a_round(tmp_path):
    inner_steps = 60
    keeps = Machine(checkpoint_every_s=5.0)
    async with open_swarm(1, toy_spec(LONG, inner_steps), tmp_path) as swarm:
        await start(swarm, *"abc", machine_of=dict.fromkeys("abc", keeps))
        await both_average(swarm, *"abc")
        await swarm.until(lambda: bool(swarm["c"].events(EventName.CHECKPOINT_WRITTEN)))
        swarm.kill("c")
        await swarm["c"].ended.wait()
        again, since_s = swarm.resume("c"), trio.current_time()
        await swarm.until(again.ready.is_set)
        await swarm.until(lambda: bool(again.events(EventName.ROUND_OPENED)))
        assert trio.current_time() - since_s < inner_steps * STEP_S
        await both_average(swarm, *"abc")
