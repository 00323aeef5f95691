"""Simulated swarms of runs with experts of equal size."""

from typing import Any, Final

from swarm_worlds import toy_spec

from peer.process.rejoin import JoinAgain
from protocol.run.run_spec import RunSpec, validated
from simulation.machine import Machine
from simulation.swarm import SimulatedPeer, SimulatedSwarm

STEPS: Final = 20
ANY: Final = Machine(checkpoint_every_s=5.0)


def run_of(rounds: dict[str, int], branch_round: int = 0, **sync: Any) -> RunSpec:
    """The first is the generalist; all are of one size, so that rounds are their budgets."""
    names = list(rounds)
    tree = toy_spec(rounds[names[0]], STEPS, **sync).model_dump()
    others = [
        {"name": each, "source": "text:x", "training": {"total_steps": rounds[each] * STEPS}}
        for each in names[1:]
    ]
    experts = [{"name": names[0]}, *others]
    return validated({**tree, "experts": experts, "ensemble": {"branch_round": branch_round}})


def expert_of(peer: SimulatedPeer) -> str | None:
    return peer.facts.expert


async def begin(
    swarm: SimulatedSwarm, *names: str, machine: Machine = ANY, through: str = "a"
) -> None:
    for name in names:
        swarm.join(name, machine, through=[through])
    await swarm.until(lambda: all(swarm[name].ready.is_set() for name in names))


async def go_over(swarm: SimulatedSwarm, name: str) -> SimulatedPeer:
    """What a daemon does by itself, when it is to join again."""
    await swarm.until(swarm[name].ended.is_set)
    assert isinstance(swarm[name].failure, JoinAgain)
    back = swarm.resume(name)
    await swarm.until(back.ready.is_set)
    return back
