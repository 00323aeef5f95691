"""Where all average, peers that are many rounds apart come together again, in bounded time."""

import pytest
from streaming_worlds import OPTIONS, fragment_spec, returned
from swarm_worlds import simulated, start

from simulation.swarm import SimulatedPeer, SimulatedSwarm, open_swarm

pytestmark = pytest.mark.slow

LEAD = 10
"""Rounds by which one is ahead."""
SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))]


def ends(peer: SimulatedPeer, since: int) -> set[tuple[int, int, int, str]]:
    """Fragment, cycle, contributors, and where that led, of its sends since then."""
    return {
        (end["fragment"], end["round"], end["contributors"], end["digest"])
        for end in returned(peer, since)
    }


def are_together(swarm: SimulatedSwarm, names: str, since: int) -> bool:
    """Whether some send was averaged by all of them, and led all of them to the same state."""
    same = set.intersection(*(ends(swarm[name], since) for name in names))
    return any(contributors == len(names) for _, _, contributors, _ in same)


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_one_that_is_many_rounds_ahead_of_three_averages_with_them_again(tmp_path, seed):
    """It trained alone, as many rounds ahead, and they without it, to the end of the run."""

    @simulated(seed)
    async def run():
        async with open_swarm(seed, fragment_spec(100), tmp_path, OPTIONS) as swarm:
            await start(swarm, *"abcd")
            first, others = swarm["a"], [swarm[name] for name in "bcd"]
            await swarm.until(lambda: min(peer.facts.round for peer in others) >= 2)
            for peer in others:
                peer.gate.close()
            await swarm.until(lambda: first.facts.round >= others[0].facts.round + LEAD)
            for peer in others:
                peer.gate.open()
            since, stood = first.facts.round, others[0].facts.round
            await swarm.until(
                lambda: are_together(swarm, "abcd", since) or others[0].facts.round > 60
            )
            took = others[0].facts.round - stood
            print(seed, since, stood, took)
            assert are_together(swarm, "abcd", since)
            assert took <= 3 * LEAD

    run()
