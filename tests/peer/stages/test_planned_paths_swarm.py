"""Data peers that plan their paths over links that they have measured, beside those that draw."""

import json
from statistics import median

import pytest
import trio
from stage_worlds import StageWorld

from bench.pipeline_world.given_paths import GivenPaths
from peer.network.identity import Identity
from protocol.microbatch.core import MicrobatchEvent
from protocol.routing.snapshots import REPLAN_EVERY_S
from simulation.network import LinkModel
from simulation.virtual_time import run_in_virtual_time

NEAR = LinkModel(latency_s=0.005, bandwidth_bytes_per_s=1e7)
FAR = LinkModel(latency_s=0.2, bandwidth_bytes_per_s=1e6)
SEED = 1
"""Of the scheduler: a tie that falls the other way makes another plan."""


def two_regions(one, other):
    """The first peers of all stages are near each other, and so are the second ones."""
    return NEAR if one[1] == other[1] else FAR


def run(routing, iterations, link_of=two_regions):
    """A world of two regions that has trained."""

    async def trained():
        world = StageWorld((2, 2, 2), iterations, 4, routing, link_of)
        async with world.running():
            await world.wait_done()
            await trio.sleep(REPLAN_EVERY_S)
        return world

    return run_in_virtual_time(SEED, trained)


def iteration_s(world):
    return median(peer.facts.pipeline.iteration_s for peer in world.of_stage(0))


@pytest.mark.long
@pytest.mark.slow
def test_planned_paths_stay_near_and_beat_drawn_ones():
    planned, drawn = run("planned", iterations=48), run("random", iterations=8)
    assert iteration_s(planned) < 0.6 * iteration_s(drawn)
    one, other = (peer.facts.pipeline for peer in planned.of_stage(0))
    assert one.planned_s == pytest.approx(iteration_s(planned), rel=0.03)
    assert (one.plan, one.snapshot) == (other.plan, other.snapshot)


@pytest.mark.long
@pytest.mark.slow
async def test_a_link_that_worsens_is_left_and_noise_changes_nothing(autojump_clock):
    world = StageWorld((1, 2, 2), 300, 2, link_of=two_regions)
    async with world.running():
        (origin,), (near, far) = world.of_stage(0), world.of_stage(1)
        shown = origin.facts.pipeline
        await trio.sleep(1.5 * REPLAN_EVERY_S)
        before = shown.plan
        assert all(near.peer_id[-8:] in path for path in shown.paths)
        for part in (1.25, 0.8):
            world.change(origin, near, latency_s=part * NEAR.latency_s)
            await trio.sleep(REPLAN_EVERY_S)
        assert shown.plan == before
        world.change(origin, near, latency_s=1.0)
        await trio.sleep(4 * REPLAN_EVERY_S)
        assert all(far.peer_id[-8:] in path for path in shown.paths)


@pytest.mark.slow
async def test_paths_that_are_given_take_the_place_of_plans(autojump_clock):
    (origin_id,), away = ids_of((0, 0)), ids_of((1, 1), (2, 1))
    given = GivenPaths(json.dumps({origin_id: [away]}))
    world = StageWorld((1, 2, 2), 12, 2, link_of=two_regions, plan=given)
    async with world.running():
        await world.wait_done()
    (origin,) = world.of_stage(0)
    assert origin.facts.pipeline.plan == given.digest
    assert origin.facts.pipeline.paths == (f"1:{away[0][-8:]} 2:{away[1][-8:]}",)
    near, far = (world.of_stage(1)[place].exchange._core.counts for place in (0, 1))
    assert far[MicrobatchEvent.DONE] > 2 * near[MicrobatchEvent.DONE]


def ids_of(*places):
    return [Identity(bytes([10 * stage + i]) * 32).peer_id for stage, i in places]
