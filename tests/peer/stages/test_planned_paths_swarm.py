"""Data peers that plan their paths over links that they have measured, beside those that draw."""

from statistics import median

import pytest
import trio
from stage_worlds import StageWorld

from peer.network.simulated_link import LinkModel
from protocol.routing.proposals import REPLAN_EVERY_S

NEAR = LinkModel(latency_s=0.005, bandwidth_bytes_per_s=1e7)
FAR = LinkModel(latency_s=0.2, bandwidth_bytes_per_s=1e6)


def two_regions(one, other):
    """The first peers of all stages are near each other, and so are the second ones."""
    return NEAR if one[1] == other[1] else FAR


async def run(routing, link_of=two_regions, iterations=40):
    """A world of two regions that has trained."""
    world = StageWorld((2, 2, 2), iterations, 4, routing, link_of)
    async with world.running():
        await world.wait_done()
        await trio.sleep(REPLAN_EVERY_S)
    return world


def iteration_s(world):
    return median(peer.facts.pipeline.iteration_s for peer in world.of_stage(0))


@pytest.mark.slow
async def test_planned_paths_stay_near_and_beat_drawn_ones(autojump_clock):
    planned, drawn = await run("planned"), await run("random", iterations=10)
    assert iteration_s(planned) < 0.7 * iteration_s(drawn)
    one, other = (peer.facts.pipeline for peer in planned.of_stage(0))
    assert one.plan is not None
    assert (one.plan, one.snapshot) == (other.plan, other.snapshot)
