"""What machines would do together, against figures worked out by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from offers_worlds import WORKLOAD, offers_at, question

from bench.pipeline.checker import violations
from protocol.errors import InvalidRunSpec
from protocol.pipeline.pipelines import replicas_of, skipping_pipeline, state_fits
from protocol.pipeline.problem import Matrix, PathRules
from protocol.pipeline.question import (
    CannotPlan,
    PlanQuestion,
    numbers_of_data_peers,
    too_small_of,
    workload_of,
)
from protocol.pipeline.tables import MachineOffer
from protocol.pipeline.what_if import most_evaluations, what_if
from protocol.run.run_spec import FrozenSection, ModelSection, RunSpec
from protocol.run.sections import OptimizerSection

EQUAL = tuple(MachineOffer(f"p{i}", "LA", 100_000, 2, 0.36) for i in range(4))


def uniform(
    offers: Sequence[MachineOffer], latency_us: int, bytes_per_s: int
) -> tuple[Matrix, Matrix]:
    number = len(offers)
    return ((latency_us,) * number,) * number, ((bytes_per_s,) * number,) * number


def test_parameters_are_counted_as_the_model_has_them():
    spec = RunSpec()
    assert workload_of(spec).parameters == 885_888  # what the trainer says of the demo's model
    small = '{"vocab_size":1,"hidden_size":1,"intermediate_size":1,"num_hidden_layers":1}'
    frozen = FrozenSection(
        config=small, layout_digest="0" * 32, parameters=700, padded_parameters=1024
    )
    assert workload_of(spec.model_copy(update={"frozen": frozen})).parameters == 700


def test_a_microbatch_is_what_the_spec_or_the_asker_says():
    workload = workload_of(RunSpec(), 2)
    assert (workload.sequences, workload.batch_microbatches, workload.tokens) == (2, 4, 256)
    assert workload.boundary_bytes("bf16") == 256 * 128 * 2
    assert workload.boundary_bytes("int8") == 256 * 128


def test_a_checkpoints_sizes_are_asked_for():
    with pytest.raises(InvalidRunSpec, match="write the checkpoint's sizes"):
        workload_of(RunSpec(model=ModelSection(init_from="some/model")))


def test_replicas_on_good_lines_train_without_pause():
    lines = uniform(EQUAL, 1000, 10**9)
    asked = PlanQuestion(EQUAL, *lines, WORKLOAD, 2, 2, microbatches=24)
    for estimate in replicas_of(asked).values():
        assert estimate.tokens_per_s == pytest.approx(4 * 100 / 0.3)  # 3 forwards of 0.1 s
        assert estimate.iteration_s == pytest.approx(24 * 0.3 / 4)
        assert set(estimate.utilisation.values()) == {1.0}
        # 1.44 a hour for 4.8 million tokens.
        assert estimate.cost_per_billion_tokens == pytest.approx(1.44 / 4.8e6 * 1e9)


def test_replicas_on_thin_lines_wait_for_the_exchange():
    lines = uniform(EQUAL, 0, 10_000)  # a vector takes 100 s, training a round 12 s
    found = replicas_of(PlanQuestion(EQUAL, *lines, WORKLOAD, 2, 2, microbatches=24))
    alone, among_all = found["noloco"], found["diloco"]
    assert alone.tokens_per_s == pytest.approx(4 * 4000 / 100)
    assert alone.utilisation["p0"] == pytest.approx(0.12)
    assert alone.bytes_per_hour["p0"] == pytest.approx(36e6)
    assert among_all.tokens_per_s == pytest.approx(4 * 4000 / 50)  # half a vector on each line


def test_fit_needs_the_memory_of_every_machine():
    big, small = (replace(EQUAL[0], memory_bytes=size) for size in (16 * 10**6, 15 * 10**6))
    for offers, fits in (([big], True), ([big, small], False), ([big, EQUAL[0]], None)):
        assert state_fits(offers, too_small_of(offers, 16 * 10**6)) is fits


def test_cards_of_a_machine_share_moments_and_batch_and_wait_for_each_other():
    """1M parameters in AdamW: 8 bytes on each card, 8 shared out; four microbatches a step."""
    million = replace(WORKLOAD, parameters=10**6, state_bytes=16 * 10**6, batch_microbatches=4)
    alone = replace(EQUAL[0], memory_bytes=10 * 10**6)
    told = []
    for gpus in (1, 3, 4):
        box = replace(alone, gpus=gpus, gpu_bytes_per_s=10**9)
        asked = PlanQuestion((box,), *uniform([box], 1000, 10**9), million, 2, 2)
        told.append((million.step_us(box), asked.too_small_for_the_whole == ()))
    # Three forwards of 0.1 s for each microbatch, of two sequences; of three cards the fullest has
    # three of the eight sequences; 8 MB x (n - 1) / n exchanged.
    assert told == [(1_200_000, False), (455_333, False), (306_000, True)]
    assert [million.state_bytes_on(n) for n in (1, 4)] == [16 * 10**6, 10 * 10**6]


def test_cards_that_cannot_hold_all_weights_share_them_out_and_wait_more():
    """0.8 MB on each card, 16 MB shared out; layers twice, and 12 bytes a parameter exchanged."""
    million = replace(WORKLOAD, parameters=10**6, state_bytes=16 * 10**6, batch_microbatches=4)
    shared = replace(million, resident=10**5)
    box = replace(EQUAL[0], memory_bytes=5 * 10**6, gpus=4, gpu_bytes_per_s=10**9)
    told = []
    for work in (million, shared):
        asked = PlanQuestion((box,), *uniform([box], 1000, 10**9), work, 2, 2)
        told.append(asked.too_small_for_the_whole == ())
    assert told == [False, True]
    assert shared.sharded_bytes_on(4) == 4_800_000
    assert shared.step_us(box) == 409_000
    large = replace(box, memory_bytes=10 * 10**6)
    assert shared.step_us(large) == million.step_us(large) == 306_000


def test_muon_keeps_one_moment_of_the_blocks_matrices_where_adamw_keeps_two():
    spec = RunSpec()
    assert workload_of(spec).state_bytes == 16 * 885_888
    muon = spec.model_copy(update={"optimizer": OptimizerSection(name="muon")})
    block = 4 * 128 * 128 + 3 * 128 * spec.model.intermediate_size
    assert workload_of(muon).state_bytes == 16 * 885_888 - 4 * spec.model.num_layers * block


@pytest.mark.slow
def test_all_ways_are_told_for_the_same_microbatches():
    asked, spent = question(workload=replace(WORKLOAD, hidden_size=60_000)), list[int]()
    answer = what_if(asked, spent.append)
    assert 0.4 < sum(spent) / most_evaluations(asked) < 1.1, "what shows how far it is"
    told = answer.to_json()
    assert set(told["iteration_s"]) == {"noloco", "diloco", "full", "skippipe"}
    assert told["iteration_s"]["skippipe"] < told["iteration_s"]["full"]
    assert told["lower_bound_s"] <= told["iteration_s"]["skippipe"]
    for pipeline in (answer.full, answer.skippipe):
        assert violations(pipeline.problem, pipeline.planned.plan) == []
        assert pipeline.problem.microbatches == answer.skippipe.problem.microbatches
    assert all(0 <= share <= 1 for share in told["utilisation"]["full"].values())
    assert told == what_if(asked).to_json()
    assert set(told["arrangement"].values()) == {0, 1, 2}
    assert "is home last" in told["bottleneck"]
    helped = {each["change"]: each["iteration"] for each in told["help"]}
    assert helped["boundaries in int8, half the bytes of bf16"] < -0.03
    for way in ("full", "skippipe"):
        assert told["ways_of_working"][way]["arrival"] == told["iteration_s"][way]
    assert told["unskipped"] is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"stages": 9}, "9 stages of 8 layers; choose 2 to 8"),
        ({"stages": 1}, "1 stages of 8 layers"),
        ({"stages": 7}, "6 machines cannot hold 7 stages"),
        ({"visited": 1}, "--visited must be 2 to 3"),
        ({"visited": 4}, "--visited must be 2 to 3"),
        ({"rules": PathRules(max_jump=0)}, "no orders to visit 2 of 3 stages"),
        ({"microbatches": 0}, "--microbatches must be 1 to"),
        ({"microbatches": 5000}, "--microbatches must be 1 to"),
        ({"full_every": -1}, "--full-every must be 0 (never) or more; got -1"),
        ({"workload": replace(WORKLOAD, num_layers=1)}, "a model of 1 layer cannot be cut"),
        ({"offers": offers_at("LA")}, "1 machine cannot hold 3 stages; add machines"),
        (
            {"offers": tuple(replace(o, memory_bytes=10**6) for o in offers_at(*["LA"] * 6))},
            "no machine can hold a stage, stage 0 or another: its training state takes 0.0 GB",
        ),
    ],
)
def test_what_cannot_be_planned_is_told(changes, sentence):
    with pytest.raises(CannotPlan) as caught:
        what_if(question(**changes))
    assert sentence in str(caught.value)


@pytest.mark.slow
def test_an_iteration_that_skips_nothing_counts_in_the_mean():
    never = skipping_pipeline(question(workload=replace(WORKLOAD, hidden_size=40_000)))
    asked = question(workload=replace(WORKLOAD, hidden_size=40_000), full_every=3)
    answer = what_if(asked)
    usual, whole = answer.skippipe.iterations
    assert (usual.times, whole.times) == (2, 1)
    assert usual.planned == never.planned
    assert whole.planned.plan.stages == usual.planned.plan.stages
    assert whole.problem.visited == asked.stages
    assert violations(whole.problem, whole.planned.plan) == []
    quotas = [[len(p) for p in each.planned.plan.paths] for each in (usual, whole)]
    assert sum(quotas[0]) == sum(quotas[1])
    mean_s = (2 * usual.planned.makespan_us + whole.planned.makespan_us) / 3e6
    told = answer.to_json()
    assert told["iteration_s"]["skippipe"] == pytest.approx(mean_s)
    assert told["iteration_s"]["skippipe"] > never.estimate.iteration_s
    tokens = usual.problem.microbatches * WORKLOAD.tokens
    assert told["tokens_per_s"]["skippipe"] == pytest.approx(tokens / mean_s)
    assert told["ways_of_working"]["skippipe"]["arrival"] == pytest.approx(mean_s)
    assert told["unskipped"]["every"] == 3
    assert {len(path) for paths in told["unskipped"]["paths"].values() for path in paths} == {2}
    assert all(0 <= share <= 1 for share in told["utilisation"]["skippipe"].values())


@pytest.mark.slow
def test_skipping_in_no_iteration_is_the_full_pipeline():
    answer = what_if(question(full_every=1))
    assert answer.full is answer.skippipe
    assert answer.skippipe.problem.visited == 3


@pytest.mark.parametrize(
    ("machines", "visited", "numbers"), [(8, 3, [2, 3, 4]), (9, 3, [3, 2, 4]), (3, 3, [1])]
)
def test_data_peers_with_relays_of_their_own_are_tried_first(machines, visited, numbers):
    asked = question(offers_at(*["LA"] * machines))
    assert list(numbers_of_data_peers(asked, visited)) == numbers


def test_paths_that_cannot_reach_every_stage_are_told():
    rules = PathRules(max_jump=4)  # the last of five relay stages is too far
    far = question(stages=6, visited=2, microbatches=10, rules=rules)
    with pytest.raises(CannotPlan, match="raise pipeline.max_jump, or give the machines more"):
        what_if(far)


def test_machines_too_small_for_a_stage_are_named():
    needed = question().stage_state_bytes
    assert needed == 20_000_000 // 3  # and a gradient of one microbatch
    offers = [
        replace(o, memory_bytes=size)
        for o, size in zip(offers_at("LA", "LA", "LA"), (needed, needed - 1, None), strict=True)
    ]
    assert [offer.name for offer in question(tuple(offers)).too_small] == ["LA-1"]
