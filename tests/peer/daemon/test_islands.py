"""Islands that share one bootstrap peer become one swarm, without the directory."""

from itertools import permutations

import pytest
import trio
from swarm_worlds import simulated, start, toy_spec

from simulation.swarm import SimulatedSwarm, SwarmOptions, identity_of, open_swarm

SEED = 1
ISLANDS = (("a0", "a1"), ("b0", "b1"))
MERGED_S = 90.0
NO_DIRECTORY = SwarmOptions(shared_directory=False)


def ids(*names: str) -> list[str]:
    return [identity_of(SEED, name).peer_id for name in names]


def sees(swarm: SimulatedSwarm, name: str, other: str) -> bool:
    peer = swarm[name]
    if not hasattr(peer, "roster"):
        return False  # it is not there yet
    return ids(other)[0] in {m.peer_id for m in peer.roster.alive(trio.current_time())}


@pytest.mark.long
@pytest.mark.slow
@simulated()
async def test_islands_that_share_a_bootstrap_peer_merge(tmp_path):
    async with open_swarm(SEED, toy_spec(2000), tmp_path, options=NO_DIRECTORY) as swarm:
        await start(swarm, "shared")
        swarm.internet.partition(ids(*ISLANDS[0]), ids(*ISLANDS[1]))
        for island in ISLANDS:
            for name in island:
                swarm.join(name, through=("shared",))
        near = [pair for island in ISLANDS for pair in permutations(island, 2)]
        far = [(one, other) for one in ISLANDS[0] for other in ISLANDS[1]]
        await swarm.until(lambda: all(sees(swarm, *pair) for pair in near))
        await trio.sleep(MERGED_S)
        assert not any(sees(swarm, *pair) for pair in far)
        swarm.internet.heal()
        with trio.fail_after(MERGED_S):
            await swarm.until(lambda: all(sees(swarm, *pair) for pair in far))
