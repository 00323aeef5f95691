"""How swarms of fragments begin: who joins in the middle of a cycle holds nobody up, nor itself.

At the start nobody has seen yet how long things take, so every wait that nothing ends lasts for the
longest patience: half a minute or a whole one, in which nobody trains.
"""

import pytest
from swarm_worlds import STEP_S, simulated, start
from test_fragment_swarm import (
    LONGEST_ROUND_S,
    assert_equal,
    fragment_spec,
    longest_round_s,
    returned,
)

from peer.network.simulated_link import LinkModel
from peer.simulation.swarm import SwarmOptions, open_swarm

pytestmark = pytest.mark.slow


@simulated()
async def test_an_owner_that_heals_and_gives_up_early_holds_nobody_up(tmp_path):
    """The founder, alone until then, knows no waits: it soon gives up what it collects."""
    options = SwarmOptions(padded_parameters=6 * 16384, link=LinkModel(latency_s=STEP_S / 2))
    async with open_swarm(1, fragment_spec(4, overlap_steps=2), tmp_path, options) as swarm:
        await start(swarm, *"abc")
        await swarm.finished()
        assert_equal(*(swarm[name] for name in "abc"))
        assert sum(event["missing"] for event in returned(swarm["a"])) > 0
        assert max(longest_round_s(swarm[name]) for name in "abc") <= LONGEST_ROUND_S


@pytest.mark.parametrize("latency_s", [0.05, 0.1])
def test_nobody_waits_for_what_was_done_before_others_joined(tmp_path, latency_s):
    """More members than chunks: some have nothing to say to each other, and yet must know."""

    @simulated()
    async def run():
        link = LinkModel(latency_s=latency_s, jitter_s=latency_s / 4)
        options = SwarmOptions(padded_parameters=6 * 16384, link=link)
        async with open_swarm(1, fragment_spec(5), tmp_path, options) as swarm:
            await start(swarm, "a")
            await swarm.until(lambda: swarm["a"].facts.round == 1)
            for name in "bcd":
                swarm.join(name)
            await swarm.until(lambda: all(swarm[name].ready.is_set() for name in "bcd"))
            await swarm.finished()
            assert_equal(*(swarm[name] for name in "abcd"))
            assert max(longest_round_s(swarm[name]) for name in "abcd") <= LONGEST_ROUND_S

    run()
