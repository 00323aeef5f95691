"""The parts of bench.pipeline_learning that decide what its figures mean."""

import math
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from existing import existing
from small_texts import small_texts
from transformers import LlamaForCausalLM

from bench import pipeline_learning
from bench.quality.world import World
from bench.stage_quality import findings
from bench.stage_quality.arms import (
    ARMS,
    DECIDING_ARMS,
    FULL,
    MAIN_ARMS,
    QUICK_ARMS,
    SKIP,
    SMALL,
    StageArm,
)
from bench.stage_quality.clocks import iteration_s, steps_of
from bench.stage_quality.pipeline import Pipeline
from bench.stage_quality.routes import Columns, Routes
from bench.stage_quality.run import StageResult, train_stages
from bench.stage_quality.settings import COLUMNS, MICROBATCHES, SMOKE, STAGES, VISITED
from peer.training.model import FlatModel, model_config
from peer.training.optimizer import inner_optimizer
from peer.training.step import Stepper
from protocol.pipeline.problem import PathRules, stage_orders

CPU = torch.device("cpu")


def routes_of(name: str, iterations: int = 3) -> list[list[tuple[int, ...]]]:
    routes = Routes(ARMS[name], 0)
    return [routes.of_iteration(number, MICROBATCHES) for number in range(iterations)]


# --- the arms -------------------------------------------------------------------------------------


def test_the_study_has_at_most_twelve_arms_beside_clipping_rates_and_columns():
    beside = [ARMS[name] for name in ARMS if name not in MAIN_ARMS]
    assert len(MAIN_ARMS) <= 12
    for arm in beside:
        assert arm.global_clip or arm.rate_of != 1 or arm.columns == COLUMNS or arm.late
    assert {*QUICK_ARMS, *DECIDING_ARMS} <= set(ARMS)


@pytest.mark.parametrize("arm", ARMS.values(), ids=lambda arm: arm.name)
def test_an_arm_changes_one_factor(arm):
    reference = asdict(StageArm(SKIP))
    changed = {name for name, value in asdict(arm).items() if value != reference[name]} - {"name"}
    if arm.columns > 1:
        assert changed <= {"visited", "columns", "mixing", "gossip"}
    else:
        ways_to_be_late = arm.name.startswith("late-") + ("foretold-" in arm.name)
        assert len(changed - {"clock_of"}) == (arm.name != SKIP) + ways_to_be_late


@pytest.mark.long
@pytest.mark.slow
def test_equal_time_is_the_planners():
    full, skip, same = ARMS[FULL], ARMS[SKIP], ARMS["full-same-clock"]
    full_s, skip_s = existing(iteration_s(full)), existing(iteration_s(skip))
    assert 1.8 < full_s / skip_s < 2.4  # docs/results.md: 56.5 and 27.4 s
    assert steps_of(same, 400) == round(400 * skip_s / full_s)
    assert (steps_of(full, 400), steps_of(skip, 400)) == (400, 400)
    mended_s = existing(iteration_s(ARMS["full-every-10"]))
    assert mended_s == pytest.approx(0.9 * skip_s + 0.1 * full_s)
    assert iteration_s(ARMS["cc1"]) is None


# --- paths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [SKIP, "cc3"])
def test_every_iteration_uses_all_relay_stages_alike(name):
    for routes in routes_of(name):
        assert {route[0] for route in routes} == {0}
        assert len({frozenset(route) for route in routes}) == MICROBATCHES
        visits = Counter(stage for route in routes for stage in route[1:])
        assert visits == dict.fromkeys(range(1, STAGES), MICROBATCHES * (VISITED - 1) // 5)


def test_only_the_arm_that_moves_stages_does():
    legal = set(stage_orders(STAGES, VISITED, PathRules()))
    orders = {
        name: {route[1:] for routes in routes_of(name, 12) for route in routes}
        for name in (SKIP, "cc3")
    }
    assert orders[SKIP] == legal
    assert orders["cc3"] - legal


def test_unequal_use_is_two_to_one():
    (routes,) = routes_of("cc2", 1)
    assert all(len(route) == VISITED for route in routes)
    visits = Counter(stage for route in routes for stage in route)
    assert [visits[stage] for stage in range(STAGES)] == [10, 8, 8, 6, 4, 4]


def test_stage_0_is_skipped_as_often_as_any_other():
    visits = Counter(s for routes in routes_of("cc1", 3) for route in routes for s in route)
    assert visits == dict.fromkeys(range(STAGES), 3 * MICROBATCHES * VISITED // STAGES)


def test_every_tenth_iteration_skips_nothing():
    lengths = [{len(route) for route in routes} for routes in routes_of("full-every-10", 11)]
    assert lengths == [{STAGES}, *[{VISITED}] * 9, {STAGES}]


def test_random_routes_use_all_replicas_alike():
    columns = Columns(ARMS["random-gossip"], 0)
    taken = [
        [columns.replica(0, number, stage, origin) for origin in range(COLUMNS)]
        for number in range(5)
        for stage in range(1, STAGES)
    ]
    assert all(sorted(each) == list(range(COLUMNS)) for each in taken)
    assert len(set(map(tuple, taken))) > 5
    straight = Columns(ARMS["columns-gossip"], 0)
    assert [straight.replica(3, 1, 2, origin) for origin in range(3)] == [0, 1, 2]


# --- training -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("texts")
    setting = replace(SMOKE, source=small_texts(folder, 60))
    return World.open(setting, 0, folder / "cache")


@pytest.mark.slow
@pytest.mark.parametrize("global_clip", [True, pytest.param(False, marks=pytest.mark.long)])
def test_at_full_depth_it_is_the_whole_model(world, global_clip):
    """Clipped by the norm of all; where stages clip by their own, it is another model."""
    arm = StageArm("whole", visited=STAGES, codec="fp32", global_clip=global_clip)
    pipeline = Pipeline(world, arm, SMOKE.batch_size)
    module = LlamaForCausalLM(model_config(world.spec, world.vocabulary)).float()
    named = {n: p.detach() for (s,) in pipeline.stages for n, p in s.module.named_parameters()}
    module.load_state_dict(named, strict=False)
    model = FlatModel(module, CPU)
    optimizer = inner_optimizer(model, world.spec.optimizer, "fp32")
    stepper = Stepper(model, optimizer, "fp32", SMOKE.batch_size)
    feed, losses = world.feed(), list[tuple[float, float]]()
    for _ in range(5):
        blocks_1BT = feed.next_blocks()
        theirs = float(stepper.step(blocks_1BT[0], 5e-3).loss)
        losses.append((pipeline.step(blocks_1BT, 5e-3), theirs))
    assert all(ours == pytest.approx(theirs, abs=1e-5) for ours, theirs in losses) == global_clip
    blocks = world.corpus.validation_blocks(2)
    relays = range(1, STAGES)
    same = pipeline.loss_of(blocks, relays) == pytest.approx(stepper.loss_of(blocks), abs=1e-4)
    assert same == global_clip


@pytest.mark.long
@pytest.mark.slow
def test_late_gradients_are_those_of_the_weights_one_update_ago(world):
    losses = {}
    for name in (SKIP, "late"):
        pipeline = Pipeline(world, replace(ARMS[name], visited=STAGES), SMOKE.batch_size)
        blocks_1BT = world.feed().next_blocks()
        losses[name] = [pipeline.step(blocks_1BT, 5e-3) for _ in range(4)]
    now, late = losses[SKIP], losses["late"]
    assert late[:2] == [now[0], now[0]]  # the first weights, twice
    assert late[2] == now[1]  # one update later
    assert late[3] < late[2] < late[1]


@pytest.mark.slow
def test_foretold_weights_are_one_update_further_than_late_ones(world):
    """Were every update the same, gradients would be those of the present weights."""
    pipeline = Pipeline(world, replace(ARMS["late-foretold"], visited=STAGES), SMOKE.batch_size)
    stage = pipeline.stages[1][0]
    theta_P, seen = stage.model.theta_P, list[float]()
    first = theta_P[0].item()
    for _ in range(4):
        stage.begin_step()
        seen.append(round(theta_P[0].item() - first, 4))
        stage.end_gradients()
        theta_P.add_(0.5)
    assert seen == [0.0, 0.0, 1.0, 1.5]


@pytest.mark.slow
def test_stages_left_out_are_left_out(world):
    """cc1 too: the layers of stage 0 are trained, and embedding and head always are."""
    result = train_stages(world, ARMS["cc1"])
    assert [len(losses) for losses in result.left_out.values()] == [1, 5, 10, 10, 5]
    assert len(result.norms) == STAGES
    assert all(norm > 0 for norm in result.norms)
    assert (result.steps, result.tokens) == (6, 6 * 20 * 16)


@pytest.mark.long
@pytest.mark.slow
def test_gossip_brings_replicas_together(world):
    apart, together = (
        train_stages(world, ARMS[name]).deviations for name in ("random-apart", "random-gossip")
    )
    assert apart[0] == together[0]  # taken before the first average
    assert together[-1][1] < apart[-1][1]


@pytest.mark.slow
def test_boundaries_cost_what_their_codes_round_away(world):
    losses = {
        codec: Pipeline(world, StageArm("x", codec=codec), SMOKE.batch_size).step(
            world.feed().next_blocks(), 1e-3
        )
        for codec in ("fp32", "bf16", "int8")
    }
    off = {codec: abs(loss - losses["fp32"]) for codec, loss in losses.items()}
    assert 0 < off["int8"] < 1e-3


# --- what is said ---------------------------------------------------------------------------------


def result_of(name: str, seed: int, loss: float, **more) -> StageResult:
    return StageResult(asdict(ARMS[name]), {}, seed, 1, loss, **more)


def test_goals_compare_equal_seeds():
    runs = {
        SKIP: {0: result_of(SKIP, 0, 2.0), 1: result_of(SKIP, 1, 2.2)},
        FULL: {0: result_of(FULL, 0, 1.9), 1: result_of(FULL, 1, 2.2), 2: result_of(FULL, 2, 9.0)},
        SMALL: {1: result_of(SMALL, 1, 2.3)},
    }
    harmless, opponent = findings.goals(runs)
    assert harmless.measured == pytest.approx(0.05)
    assert opponent.measured == pytest.approx(-0.1)
    assert (harmless.met, opponent.met) == (False, True)


def test_ratios_are_of_perplexities_to_the_same_model_with_all_stages():
    left_out = {"6": [1.0], "5": [1.0 + math.log(1.2), 1.0 + math.log(1.4)]}
    result = result_of(SKIP, 0, 1.5, left_out=left_out)
    assert findings.perplexity_ratio(result, 5) == pytest.approx(1.3)
    assert findings.perplexity_ratio(result, 3) is None


@pytest.mark.slow
def test_the_smallest_study_runs_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    picture, results = tmp_path / "picture.png", tmp_path / "results.jsonl"
    given = ["--smoke", "--arms", "skip,small", "--results", str(results)]
    for more in (["--cache", str(tmp_path)], ["--made-only", "--picture", str(picture)]):
        monkeypatch.setattr(sys, "argv", ["pipeline_learning", *given, *more])
        pipeline_learning.main()
    first, again = capsys.readouterr().out.split("skip, seed 0:")[1].split("small, seed 0:")
    assert "goal" not in first
    assert again.count("loss of skip less that of small") == 2
    assert picture.stat().st_size > 0
    assert len(results.read_text().splitlines()) == 2
