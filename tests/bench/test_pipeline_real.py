"""The pipeline of nine peers with stated compute: its world, its plans, and how it is timed."""

import json

import pytest

from bench.pipeline.checker import violations
from bench.pipeline_real import WORLDS, Found, goals_of, row_of
from bench.pipeline_world.swarm import named_paths, used_machines
from bench.pipeline_world.timeline import ends_of_iterations, iteration_times, read_pieces
from bench.pipeline_world.ways import NAMES, Way, predicted_us, ways_of
from bench.pipeline_world.world import MICROBATCHES, PLACES, STAGE_SIZES, World
from protocol.pipeline.simulator import Plan
from protocol.run.run_spec import parse_toml

SMALL = Plan((0, 1, 0, 1), (((1,), (3,)), (), ((3,), (3,)), ()))


@pytest.mark.parametrize("world", WORLDS.values(), ids=list(WORLDS))
def test_links_and_problem_say_the_same(world: World) -> None:
    problem, table = world.problem(), world.links()
    assert len(problem.peers) == table.num_hosts == len(PLACES) == sum(STAGE_SIZES)
    for (a, b), link in table.links.items():
        assert problem.latency_us[a][b] == pytest.approx(1e6 * link.delay_s)
        assert problem.bytes_per_s[a][b] == pytest.approx(0.955 * link.bits_per_s / 8, rel=1e-5)


def test_coarser_boundaries_have_fewer_bytes() -> None:
    sizes = [WORLDS[name].problem().work.boundary_bytes for name in ("bf16", "int8")]
    assert sizes[0] == 2 << 20
    assert [size / sizes[0] for size in sizes] == pytest.approx([1, 0.508], abs=1e-3)


def test_the_run_spec_has_a_batch_for_each_share() -> None:
    spec = parse_toml(WORLDS["int8"].run_toml(3, 8))
    assert (spec.pipeline.stages, spec.pipeline.visited, spec.pipeline.codec) == (4, 3, "int8")
    assert spec.training.batch_size == 8 * spec.microbatch_sequences


@pytest.mark.slow
def test_every_way_finds_a_legal_plan() -> None:
    ways = ways_of(WORLDS["regions"].problem())
    assert [way.name for way in ways] == list(NAMES)
    for way in ways:
        assert not violations(way.problem, way.plan)
        assert sum(map(len, way.plan.paths)) == MICROBATCHES
        assert way.share * sum(map(bool, way.plan.paths)) == MICROBATCHES
        assert way.predicted_us == predicted_us(way.problem, way.plan)


def test_machines_without_work_are_not_started() -> None:
    idle = Plan((0, 1, 0, 1), (((1,), (1,)), (), (), ()))
    assert used_machines(idle) == [0, 1]
    assert used_machines(SMALL) == [0, 2, 1, 3]


def test_paths_are_told_by_peer_id() -> None:
    ids = {0: "a", 1: "b", 2: "c", 3: "d"}
    assert named_paths(SMALL, ids) == {"a": [["b"], ["d"]], "c": [["d"], ["d"]]}


def test_iterations_end_with_the_last_data_peer(tmp_path) -> None:
    log = tmp_path / "trainer0.jsonl"
    pieces = [("backward", end_s) for end_s in (1, 2, 5, 6, 9, 10)] + [("forward", 3.0)]
    lines = [json.dumps({"kind": k, "number": 0, "start_s": 0, "end_s": e}) for k, e in pieces]
    log.write_text("\n".join(lines) + '\n{"kind": "back')
    ends = ends_of_iterations(read_pieces(log), share=2)
    assert ends == [2, 6, 10]
    assert iteration_times([ends, [2.5, 5.5, 11]]) == [3.5, 5]
    # one that was alone at first
    assert iteration_times([[0.5, *ends], [2.5, 5.5, 11]]) == [3.5, 5]
    assert read_pieces(tmp_path / "none") == []


def found(name: str, seconds: float) -> Found:
    way = Way(name, WORLDS["regions"].problem(), SMALL, 10_000_000)
    return Found(WORLDS["regions"], way, [seconds, seconds, 99.0], 0, 1.0, 0.1)


def test_goals_compare_with_the_full_pipeline_and_the_best() -> None:
    both = [found("full", 20.0), found("SkipPipe", 9.0), found("ours", 10.0)]
    row = row_of(both[2], both[0].median_s)
    assert (row["of full"], row["of predicted"]) == (0.5, 1.0)
    met = {goal.what.partition(": ")[2] or goal.what: goal.met for goal in goals_of(both)}
    assert met["ours of full"]
    assert not met["ours over the best other way"]
    assert [goal.met for goal in goals_of(both)[:3]] == [False, True, True]
