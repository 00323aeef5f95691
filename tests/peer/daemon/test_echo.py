"""A member that returns to each peer its own vector: honest peers average on, and after it too."""

from itertools import permutations
from typing import Final

import pytest
from echo_worlds import Echo
from swarm_worlds import distance, round_of, simulated, start, tally, toy_spec

from peer.observe.event_names import EventName
from simulation.machine import Machine
from simulation.swarm import SwarmOptions, identity_of, open_swarm
from simulation.trainer import SimulatedSpeed, ToyProblem

pytestmark = pytest.mark.slow

SEED: Final = 1
MACHINES: Final = {
    name: Machine(SimulatedSpeed(step_s=step_s))
    for name, step_s in {"a": 0.1, "b": 0.113, "c": 0.09}.items()
}
"""Of different speeds: when one is free, often the echo alone is."""
FORGETS_NOTHING: Final = SwarmOptions(problem=ToyProblem(rate=0.001))


@pytest.mark.long
def test_an_echo_does_not_part_honest_peers(tmp_path, monkeypatch):
    echo = Echo(monkeypatch, identity_of(SEED, "d").peer_id)

    @simulated(SEED)
    async def run():
        spec = toy_spec(1000, final_averaging=False)
        async with open_swarm(SEED, spec, tmp_path, FORGETS_NOTHING) as swarm:
            await start(swarm, *MACHINES, machine_of=MACHINES)
            honest = [swarm[name] for name in MACHINES]

            async def rounds(number: int) -> dict[str, int]:
                first = {peer.peer_id: round_of(peer) for peer in honest}
                due = {peer_id: round_ + number for peer_id, round_ in first.items()}
                await swarm.until(lambda: all(round_of(p) >= due[p.peer_id] for p in honest))
                return first

            await rounds(10)
            swarm.join("d")
            await rounds(12)
            assert echo.averages > 10
            swarm.kill("d")
            stopped = await rounds(10)
            averaged = {
                (peer.peer_id, event["partner"])
                for peer in honest
                for event in peer.events(EventName.ROUND_AVERAGED)
                if event["round"] >= stopped[peer.peer_id]
            }
            assert averaged >= set(permutations(stopped, 2))
            assert tally(*honest)["implausible"] <= 3
            apart = [distance(one, other) for one, other in permutations(honest, 2)]
            assert max(apart) < 0.1

    run()
