"""How swarms of fragments begin: who joins in the middle of a cycle holds nobody up, nor itself.

At the start nobody has seen yet how long things take, so every wait that nothing ends lasts for the
longest patience: half a minute or a whole one, in which nobody trains.
"""

import pytest
from streaming_worlds import LONGEST_ROUND_S, assert_equal, fragment_spec, longest_round_s
from swarm_worlds import simulated, start

from simulation.network import LinkModel
from simulation.swarm import SwarmOptions, open_swarm

pytestmark = pytest.mark.slow


LINES = [(1, 0.05, 0, 2), (1, 0.05, 1, 1), (1, 0.1, 1, 1), (3, 0.1, 0, 3)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("seed", "latency_s", "alone_rounds", "overlap_steps", "joiners"),
    [(*line, joiners) for line in LINES for joiners in ("bc", "bcd")],
)
def test_nobody_waits_long_when_others_join(
    tmp_path, seed, latency_s, alone_rounds, overlap_steps, joiners
):
    """With three joiners there are more members than chunks: not all have to send to all."""

    @simulated(seed)
    async def run():
        link = LinkModel(latency_s=latency_s, jitter_s=latency_s / 4)
        options = SwarmOptions(padded_parameters=6 * 16384, link=link)
        spec = fragment_spec(5 + alone_rounds, overlap_steps=overlap_steps)
        async with open_swarm(seed, spec, tmp_path, options) as swarm:
            await start(swarm, "a")
            await swarm.until(lambda: swarm["a"].facts.round == alone_rounds)
            for name in joiners:
                swarm.join(name)
            await swarm.until(lambda: all(swarm[name].ready.is_set() for name in joiners))
            await swarm.finished()
            peers = [swarm[name] for name in ("a", *joiners)]
            assert_equal(*peers)
            assert max(map(longest_round_s, peers)) <= LONGEST_ROUND_S

    run()
