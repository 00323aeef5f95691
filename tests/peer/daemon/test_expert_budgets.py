"""What an expert is trained with is its budget, whoever trains it (decision 0056)."""

from pathlib import Path
from typing import Any, Final

import pytest
from swarm_worlds import simulated, start
from test_expert_swarm import experts_spec

from peer.observe.event_names import EventName
from peer.simulation.machine import Machine
from peer.simulation.swarm import SimulatedSwarm, open_swarm
from peer.training.simulated import SimulatedSpeed
from protocol.run.run_spec import RunSpec

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
