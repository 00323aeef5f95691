"""Plans from snapshots: better than draws on unequal links, and still where relays are missing."""

import json
from dataclasses import replace
from statistics import mean

import pytest
from routing_worlds import RUN_ID, MeasuredWorld

from bench.pipeline.checker import violations
from bench.pipeline_world.given_paths import GivenPaths
from protocol.pipeline.simulator import Order, Plan, Simulator, jobs_of
from protocol.routing.routers import PlannedRouter, RandomRouter, plan_of
from protocol.routing.snapshots import LinkSnapshot
from protocol.wire.stage_messages import Path

pytestmark = pytest.mark.slow

STAGES = [0, 0, 0, 1, 1, 2, 2, 3, 3]
REGIONS = [0, 1, 2, 0, 1, 1, 2, 2, 0]


def rtt_us(a, b):
    """Near within a region, far between them."""
    return 4_000 if REGIONS[a] == REGIONS[b] else 160_000


def world(rtt_us=rtt_us):
    return MeasuredWorld(STAGES, rtt_us)


def problem_of(measured):
    return measured.snapshot().problem(measured.terms(), 3)


def as_plan(measured, paths):
    """Paths by peer id as the planner has them."""
    number = {peer.peer_id: n for n, peer in enumerate(measured.peers)}
    own: list[list[tuple[int, ...]]] = [[] for _ in measured.peers]
    for origin, each in paths.items():
        own[number[origin]] = [tuple(number[relay] for relay in path.relays) for path in each]
    return Plan(tuple(STAGES), tuple(map(tuple, own)))


def planned(measured, visited=3):
    found = plan_of(measured.snapshot(), measured.terms(visited), visited)
    assert found is not None
    return found


def iteration_us(measured, paths):
    problem = problem_of(measured)
    jobs = jobs_of(problem, as_plan(measured, paths))
    return Simulator(problem, Order.BACKWARD_FIRST).run(jobs).makespan_us


def drawn(measured, seed=1):
    terms = measured.terms()
    return {
        origin: RandomRouter(origin, seed, terms.visited, terms.rules).paths(
            1, terms.microbatches, measured.relays()
        )
        for origin in measured.origins()
    }


def test_a_plan_is_legal_and_the_same_for_all_that_hold_the_snapshot():
    measured = world()
    snapshot, terms = measured.snapshot(), measured.terms()
    found = planned(measured)
    assert found == plan_of(LinkSnapshot.read(snapshot.data, RUN_ID), terms, terms.visited)
    assert sorted(found.paths) == sorted(measured.origins())
    assert {len(paths) for paths in found.paths.values()} == {8}
    assert violations(problem_of(measured), as_plan(measured, found.paths)) == []
    assert {path.plan for paths in found.paths.values() for path in paths} == {found.digest}
    assert iteration_us(measured, found.paths) == found.iteration_us


def test_planned_paths_beat_drawn_ones_on_unequal_links():
    measured = world()
    found = planned(measured)
    draws = [iteration_us(measured, drawn(measured, seed)) for seed in range(8)]
    assert found.iteration_us < 0.8 * min(each for each in draws if each is not None)
    assert found.iteration_us < 0.7 * mean(each for each in draws if each is not None)


def test_a_link_that_worsens_changes_the_plan_and_its_loss_is_avoided():
    before = planned(world())
    used = {
        tuple(sorted((origin, path.relays[0])))
        for origin, paths in before.paths.items()
        for path in paths
    }
    peers = [peer.peer_id for peer in world().peers]
    bad = min(used)

    def worse(a, b):
        return 2_000_000 if tuple(sorted((peers[a], peers[b]))) == bad else rtt_us(a, b)

    measured = world(worse)
    after = planned(measured)
    assert after.digest != before.digest
    assert after.iteration_us < 0.7 * iteration_us(measured, before.paths)


def test_no_plan_while_a_stage_has_nobody():
    measured = world()
    assert plan_of(measured.snapshot(), replace(measured.terms(), stages=5), 3) is None


def test_shares_that_do_not_come_out_even_are_planned_with_some_slack():
    stages = [0, 0, 0, 0, *[1 + i % 5 for i in range(12)]]
    measured = MeasuredWorld(stages, lambda a, b: 20_000 + 10_000 * ((3 * a + 5 * b) % 7))
    assert planned(measured, 4).iteration_us > 0


# --- the router -----------------------------------------------------------------------------------
@pytest.fixture
def routed():
    measured = world()
    origin = measured.origins()[0]
    terms = measured.terms()
    router = PlannedRouter(origin, 1, terms.visited, terms.rules, full_every=5)
    return measured, router


def test_paths_are_drawn_until_there_is_a_plan(routed):
    measured, router = routed
    assert {path.plan for path in router.paths(1, 8, measured.relays())} == {None}
    router.plan = planned(measured)
    assert tuple(router.paths(2, 8, measured.relays())) == router.plan.paths[measured.origins()[0]]
    assert len(router.paths(2, 11, measured.relays())) == 11


def test_iterations_that_skip_nothing_have_a_plan_of_their_own(routed):
    measured, router = routed
    router.plan = planned(measured)
    assert {path.plan for path in router.paths(5, 8, measured.relays())} == {None}
    router.full = planned(measured, 4)
    paths = router.paths(5, 8, measured.relays())
    assert {path.plan for path in paths} == {router.full.digest}
    assert {len(path.relays) for path in paths} == {3}


def test_relays_that_are_missing_are_replaced_by_their_stage_alone(routed):
    measured, router = routed
    router.plan = planned(measured)
    before = router.paths(1, 8, measured.relays())
    gone = before[0].relays[0]
    left = tuple(tuple(peer for peer in stage if peer != gone) for stage in measured.relays())
    after = router.paths(1, 8, left)
    assert [path.stages for path in after] == [path.stages for path in before]
    for one, other in zip(before, after, strict=True):
        same = [a == b for a, b in zip(one.relays, other.relays, strict=True)]
        assert same == [relay != gone for relay in one.relays]


def test_a_stage_that_has_nobody_is_left_out(routed):
    measured, router = routed
    router.plan = planned(measured)
    left = ((), *measured.relays()[1:])
    paths = router.paths(1, 8, left)
    assert len(paths) == 8
    assert not any(1 in path.stages for path in paths)


def test_what_sets_out_again_goes_another_way(routed):
    measured, router = routed
    router.plan = planned(measured)
    before = router.paths(1, 8, measured.relays())[0]
    gone = before.relays[0]
    left = tuple(tuple(peer for peer in stage if peer != gone) for stage in measured.relays())
    after = router.another(before, 3, left)
    assert isinstance(after, Path)
    assert gone not in after.relays
    assert router.whole(1, left).stages == (1, 2, 3)


def test_given_paths_are_the_plan_once_all_their_peers_are_there():
    measured = MeasuredWorld([0, 1, 1], lambda a, b: 1_000)
    origin, *relays = [peer.peer_id for peer in measured.peers]
    snapshot, terms = measured.snapshot(), measured.terms()
    planned = GivenPaths(json.dumps({origin: [[relay] for relay in relays]}))(snapshot, terms, 2)
    assert planned is not None
    assert planned.paths.keys() == {origin}
    paths = planned.paths[origin]
    assert [(path.relays, path.stages) for path in paths] == [((r,), (1,)) for r in relays]
    for missing in ({origin: [["new"]]}, {"new": [relays[:1]]}):
        assert GivenPaths(json.dumps(missing))(snapshot, terms, 2) is None
