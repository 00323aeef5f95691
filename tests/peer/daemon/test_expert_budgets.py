"""What an expert is trained with is its budget, whoever trains it (decision 0056)."""

from pathlib import Path
from typing import Any, Final

import pytest
from swarm_worlds import simulated, start
from test_expert_swarm import experts_spec

from peer.daemon.control_requests import amend
from peer.observe.event_names import EventName
from peer.state.kept_files import AdmissionFile
from protocol.errors import InvalidRunSpec, LocoError
from protocol.run.amendments import LEARNING_RATE, is_amendment
from protocol.run.run_spec import RunSpec
from simulation.machine import Machine
from simulation.swarm import SimulatedSwarm, open_swarm
from simulation.trainer import SimulatedSpeed

pytestmark = pytest.mark.slow

STEPS: Final = 20
ROUNDS: Final = 10
WITHIN: Final = 0.05
LONE: Final = ("a", "general", 1.0)
THREE: Final = (("b", "code", 1.0), ("c", "code", 0.5), ("d", "code", 2.0))


def tokens_of(swarm: SimulatedSwarm, expert: str) -> int:
    """Of all rounds that peers of this expert have closed, those that have died among them."""
    peers = [peer for peer in swarm.peers.values() if peer.machine.expert == expert]
    closed = [event for peer in peers for event in peer.events(EventName.ROUND_CLOSED)]
    return sum(event["tokens"] for event in closed)


def budget_of(spec: RunSpec, number: int) -> int:
    own = spec.of_expert(number)
    return own.training.total_steps * own.tokens_per_step


def machines(*rows: tuple[str, str, float]) -> dict[str, Machine]:
    return {
        name: Machine(expert=expert, speed=SimulatedSpeed(step_s)) for name, expert, step_s in rows
    }


@pytest.mark.long
@pytest.mark.parametrize(
    "sync",
    [
        {},
        {"method": "diloco"},
    ],
    ids=["in pairs", "diloco"],
)
def test_one_peer_and_three_of_unequal_speed_end_at_their_budgets(
    tmp_path: Path, sync: dict[str, Any]
) -> None:
    spec = experts_spec(ROUNDS, code_rounds=ROUNDS, **sync)

    @simulated()
    async def run() -> None:
        async with open_swarm(1, spec, tmp_path) as swarm:
            placed = machines(LONE, *THREE)
            await start(swarm, *placed, machine_of=placed)
            await swarm.finished()
            for number, expert in enumerate(("general", "code")):
                trained, budget = tokens_of(swarm, expert), budget_of(spec, number)
                # The three begin at the same moment, each with a round that it owes alone.
                round_ = spec.sync.round_steps * spec.tokens_per_step
                assert -WITHIN * budget <= trained - budget <= WITHIN * budget + round_, expert
            assert swarm["b"].status().outcomes.averaged >= 3

    run()


@pytest.mark.long
@pytest.mark.parametrize("sync", [{}, {"method": "diloco"}], ids=["in pairs", "diloco"])
@pytest.mark.parametrize("rounds", [14, 7], ids=["longer", "shorter"])
def test_an_expert_that_is_amended_ends_at_its_new_budget_and_no_other_does(
    tmp_path: Path, sync: dict[str, Any], rounds: int
) -> None:
    spec = experts_spec(ROUNDS, code_rounds=ROUNDS, **sync)
    key = "experts.code.training.total_steps"

    @simulated()
    async def run() -> None:
        async with open_swarm(1, spec, tmp_path) as swarm:
            placed = machines(LONE, *THREE[:2])
            await start(swarm, *placed, machine_of=placed)
            await swarm.until(lambda: swarm["b"].facts.step >= 2 * STEPS)
            wanted = {"values": {key: rounds * STEPS}, "at_round": None, "dry_run": False}
            told = await amend(swarm["a"].parts, wanted)
            assert told["changes"] == [[key, ROUNDS * STEPS, rounds * STEPS]]
            assert told["end"] == rounds
            late = swarm.join("d", machines(("d", "code", 1.0))["d"])
            await swarm.finished()
            assert {swarm[name].facts.step for name in "bcd"} == {rounds * STEPS}
            assert swarm["a"].facts.step == ROUNDS * STEPS
            for peer in (swarm["a"], late):
                status = peer.status()
                assert [each.total_steps for each in status.experts] == [
                    ROUNDS * STEPS,
                    rounds * STEPS,
                ]
                (shown,) = status.amendments
                assert shown["changes"] == {key: rounds * STEPS}
            kept = AdmissionFile(tmp_path / "c" / "admission").read().statements
            assert sum(map(is_amendment, kept)) == 1
            budget = rounds * STEPS * spec.of_expert(1).tokens_per_step
            round_ = spec.sync.round_steps * spec.tokens_per_step
            assert abs(tokens_of(swarm, "code") - budget) <= WITHIN * budget + round_

    run()


@simulated()
async def test_what_an_expert_cannot_be_amended_to_is_refused(tmp_path: Path) -> None:
    spec = experts_spec(ROUNDS, code_rounds=ROUNDS)
    keys = {name: f"experts.{name}.training.total_steps" for name in ("general", "code")}

    async def refused(**steps: int) -> str:
        values = {keys.get(name, name): value for name, value in steps.items()}
        with pytest.raises((LocoError, InvalidRunSpec)) as told:
            await amend(swarm["a"].parts, {"values": values, "at_round": None, "dry_run": True})
        return str(told.value)

    async with open_swarm(1, spec, tmp_path) as swarm:
        placed = machines(LONE, THREE[2])
        await start(swarm, *placed, machine_of=placed)
        await swarm.finished("a")
        assert "nothing else" in await refused(general=40 * STEPS, code=40 * STEPS)
        assert "or over" in await refused(general=40 * STEPS)
        assert swarm["d"].facts.step < ROUNDS * STEPS
        assert "at the earliest" in await refused(code=STEPS)


@simulated()
async def test_what_all_experts_share_is_amended_within_the_rounds_of_the_founders_own(
    tmp_path: Path,
) -> None:
    """However many rounds the run's own `training.total_steps` would make."""
    spec = experts_spec(ROUNDS, code_rounds=2 * ROUNDS)
    wanted = {"values": {LEARNING_RATE: 1e-4}, "at_round": ROUNDS + 2, "dry_run": True}
    async with open_swarm(1, spec, tmp_path) as swarm:
        await start(swarm, "a", machine_of=machines(("a", "code", 1.0)))
        await swarm.until(lambda: swarm["a"].facts.step >= STEPS)
        told = await amend(swarm["a"].parts, wanted)
        assert (told["round"], told["end"]) == (ROUNDS + 2, 2 * ROUNDS)
