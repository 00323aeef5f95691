"""The snapshot that a pipeline is planned from, and the table of regions."""

import json
from dataclasses import replace

import pytest
from pipeline_settings import small_problem

from bench.planner_settings import PLACES, SKIPPIPE, published_plan, published_problem
from protocol.errors import LocalProtocolError
from protocol.pipeline.tables import REGION_LINES, REGIONS, SAME_PLACE, line_between


def test_the_digest_names_the_snapshot():
    assert small_problem().digest() == small_problem().digest()
    assert small_problem().digest() == "244c4092db12a2649603758acf29a237"


@pytest.mark.parametrize(
    "change",
    [
        {"microbatches": 2},
        {"visited": 2},
        {"queued_links": True},
        {"rules": replace(small_problem().rules, max_jump=1)},
        {"work": replace(small_problem().work, hop_us=1)},
        {"peers": (replace(small_problem().peers[0], slots=1), *small_problem().peers[1:])},
        {"latency_us": ((0, 1, 1), (1, 0, 1), (1, 2, 0))},
    ],
)
def test_every_change_gives_the_snapshot_another_name(change):
    assert replace(small_problem(), **change).digest() != small_problem().digest()


def test_canonical_bytes_are_json_of_integers():
    tree = json.loads(small_problem().to_bytes(), parse_float=pytest.fail)
    assert tree["stage_sizes"] == [1, 1, 1]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"stage_sizes": (1, 2, 1)}, "add up"),
        ({"stage_sizes": (3,)}, "two stages"),
        ({"stage_sizes": (0, 2, 1)}, "every stage needs"),
        ({"visited": 4}, "visits two stages to all"),
        ({"visited": 1}, "visits two stages to all"),
        ({"microbatches": 0}, "has a microbatch"),
        ({"peers": small_problem().peers[:1] * 3}, "names must differ"),
        ({"latency_us": ((0,),)}, "latency_us"),
        ({"bytes_per_s": ((0,) * 3,) * 3}, "bytes_per_s"),
    ],
)
def test_what_is_no_problem_is_refused(change, sentence):
    with pytest.raises(LocalProtocolError, match=sentence):
        replace(small_problem(), **change)


def test_shares_of_relay_stages_are_equal():
    assert published_problem().stage_cap == 18


def test_the_table_has_every_pair_of_its_regions():
    assert len(REGIONS) == 12
    assert len(REGION_LINES) == 66
    assert all(line_between(a, b) for a in REGIONS for b in REGIONS)
    assert line_between("LA", "LA") == SAME_PLACE
    assert line_between("LA", "Mars") is None


@pytest.mark.parametrize(
    ("source", "destination", "published_s"),
    [("Belgium", "Canada", 1.961562), ("London", "Oregon", 1.885274), ("Iowa", "Iowa", 0.366625)],
)
def test_delays_of_the_published_schedule_follow_from_the_table(source, destination, published_s):
    problem = published_problem()
    a = PLACES.index(source)
    b = PLACES.index(destination, a + 1)
    assert problem.travel_us(a, b) / 1e6 == pytest.approx(published_s, rel=1e-4)


def test_a_plan_is_named_by_its_paths_and_its_snapshot():
    plan, problem = published_plan(SKIPPIPE), published_problem()
    tree = plan.to_json(problem)
    assert tree["arrangement"]["Japan-4"] == 0
    assert tree["paths"]["Japan-4"] == [["Oregon-7", "Canada-13", "Oregon-19"]] * 6
    assert set(tree["paths"]) == {"Belgium-0", "Iowa-3", "Japan-4", "London-10", "Australia-11"}
    other = replace(plan, paths=(*plan.paths[:-1], ((1,),)))
    digests = {plan.digest(problem), plan.digest(replace(problem, microbatches=31))}
    assert len({*digests, replace(other, stages=(*plan.stages[:-1], 0)).digest(problem)}) == 3
