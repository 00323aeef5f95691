"""How the daemon keeps peers of unequal speed busy: its own code, in a simulated swarm.

Real round loop, matchmaking and exchange, toy models, virtual time (peer/simulation). Steps take
exactly as long as the speed says; links have latency and jitter. A peer is *busy* while its trainer
makes steps. The first rounds, in which peers join, and the last ones, in which they come together,
are left out.

What peers know of each other's progress is as old as a beat, one second; so a round has to be
longer than a few.
"""

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from peer.observe.event_names import EventName
from peer.simulation.machine import Machine
from peer.simulation.peer import SimulatedPeer
from peer.simulation.swarm import SimulatedSwarm, open_swarm
from peer.simulation.virtual_time import run_in_virtual_time
from peer.training.toy import SimulatedSpeed
from protocol.run.run_spec import RunSpec

STEP_S: Final = 2.0
"""Length of a step of a peer of speed 1."""
JOINING_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True)
class Kept:
    """The record of one peer.

    Attributes:
        busy: share of its time in which it trained.
        averaged: share of its rounds that ended with a partner.
        steps: inner steps of a round, mean.
    """

    busy: float
    averaged: float
    steps: float


def keep_pace(
    speeds: Sequence[float], inner_steps: int, rounds: int, seed: int, *, overlap: bool
) -> list[Kept]:
    """Let peers of these speeds train together, and look at each."""
    spec = RunSpec.model_validate(
        {
            "seed": seed,
            "training": {"total_steps": rounds * inner_steps},
            "optimizer": {"warmup_steps": 0, "schedule": "constant"},
            "sync": {"inner_steps": inner_steps, "overlap": overlap},
        }
    )
    return run_in_virtual_time(seed, lambda: _keep_pace(spec, speeds))


async def _keep_pace(spec: RunSpec, speeds: Sequence[float]) -> list[Kept]:
    with tempfile.TemporaryDirectory(prefix="loco") as folder:
        async with open_swarm(spec.seed, spec, Path(folder)) as swarm:
            for number, speed in enumerate(speeds):
                await _start(swarm, f"p{number}", Machine(SimulatedSpeed(step_s=STEP_S / speed)))
            await swarm.finished()
            peers = list(swarm.peers.values())
            return [_kept(peer, spec) for peer in peers]


async def _start(swarm: SimulatedSwarm, name: str, machine: Machine) -> None:
    if swarm.peers:
        swarm.join(name, machine)
    else:
        await swarm.until(swarm.found(name, machine).known.is_set)


def _kept(peer: SimulatedPeer, spec: RunSpec) -> Kept:
    def counts(round_: int) -> bool:
        return JOINING_ROUNDS <= round_ < spec.total_rounds

    closed = [e for e in peer.events(EventName.ROUND_CLOSED) if counts(e["round"])]
    ends = peer.events(EventName.ROUND_AVERAGED, EventName.ROUND_SKIPPED)
    outcomes = Counter(e["event"] for e in ends if counts(e["round"]))
    busy_s = sum(e["steps"] for e in closed[1:]) * peer.machine.speed.step_s
    return Kept(
        busy=busy_s / (closed[-1]["time"] - closed[0]["time"]),
        averaged=outcomes[EventName.ROUND_AVERAGED] / outcomes.total(),
        steps=sum(e["steps"] for e in closed) / len(closed),
    )
