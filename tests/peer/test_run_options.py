"""A peer's options against its run: what fits, and what is refused."""

import json
from typing import Any

import pytest

from peer.options.config import ConfigError, check_options, load_config
from protocol.errors import InvalidRunSpec
from protocol.run.families import config_of_sizes
from protocol.run.run_spec import (
    FrozenSection,
    ModelSection,
    RunSpec,
    SyncSection,
    TrainingSection,
)
from protocol.run.sections import PipelineSection

PAIRS = RunSpec()
FRAGMENTS = RunSpec(sync=SyncSection(method="diloco", inner_steps=10))


def config(home, **given):
    return load_config({"home": home, **given}, {})


@pytest.mark.parametrize("steps", [0, 3, 9])
def test_a_peer_may_have_its_own_overlap(tmp_path, steps):
    chosen = config(tmp_path, **{"overlap-steps": steps})
    check_options(chosen, FRAGMENTS)
    assert chosen.overlap_steps == steps
    assert f"overlap-steps = {steps} (command line)" in chosen.describe()


@pytest.mark.parametrize("spec", [PAIRS, FRAGMENTS])
def test_without_it_the_runs_holds(tmp_path, spec):
    assert config(tmp_path).overlap_steps is None
    check_options(config(tmp_path), spec)


def test_a_run_without_fragments_has_no_use_for_it(tmp_path):
    (tmp_path / "peer.toml").write_text("overlap_steps = 0")
    with pytest.raises(ConfigError, match=r"overlap-steps = 0 \(file\): this run waits for no fr"):
        check_options(config(tmp_path), PAIRS)


def test_a_fragment_must_be_back_before_it_is_sent_again(tmp_path):
    with pytest.raises(ConfigError, match=r"must be below the run's inner_steps \(10\)"):
        check_options(config(tmp_path, **{"overlap-steps": 10}), FRAGMENTS)


HEADS: dict[str, Any] = {"hidden_size": 48, "num_heads": 4}
LONG_ROPE = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}


def frozen(**more):
    text = json.dumps(config_of_sizes(ModelSection(**HEADS), 256) | more)
    section = FrozenSection(
        config=text, layout_digest="0" * 32, parameters=1, padded_parameters=128
    )
    return RunSpec(model=ModelSection(init_from="some/model"), frozen=section)


@pytest.mark.parametrize(
    ("spec", "gpus", "why"),
    [
        (RunSpec(model=ModelSection(**HEADS)), None, "give --gpus all, or a number above 1"),
        (RunSpec(model=ModelSection(**HEADS)), "3", "4 heads of attention cannot be divided by 3"),
        (RunSpec(model=ModelSection(**HEADS, family="olmoe")), "2", "a mixture of experts"),
        (frozen(), "0,1,2", "4 heads of attention cannot be divided by 3"),
        (frozen(**LONG_ROPE), "2", "rotary positions depend on how long a sequence is"),
    ],
)
def test_what_gpus_cannot_divide_is_refused(tmp_path, spec, gpus, why):
    given = config(tmp_path, **{"split-context": True}, **({"gpus": gpus} if gpus else {}))
    with pytest.raises(ConfigError, match=why) as refused:
        check_options(given, spec)
    assert str(refused.value).startswith("split-context = true (command line): ")


@pytest.mark.parametrize("spec", [frozen(), RunSpec(model=ModelSection(init_from="some/model"))])
def test_gpus_that_divide_sequences_may_be_more_than_these(tmp_path, spec):
    """And of a checkpoint that is not read yet the trainer says what it is."""
    given = config(tmp_path, **{"split-context": True}, gpus="4")
    alone = spec.model_copy(update={"training": TrainingSection(batch_size=2)})
    check_options(given, alone)
    with pytest.raises(ConfigError, match="a step has 2 sequences"):
        check_options(config(tmp_path, gpus="4"), alone)


def test_a_pipeline_averages_in_pairs(tmp_path):
    stages = PipelineSection(stages=2)
    check_options(config(tmp_path), RunSpec(pipeline=stages))
    with pytest.raises(InvalidRunSpec) as refused:
        check_options(config(tmp_path), FRAGMENTS.model_copy(update={"pipeline": stages}))
    assert str(refused.value) == (
        "the run has pipeline.stages = 2 and sync.method = 'diloco': stages average by noloco so"
        " far"
    )
    checkpoint = ModelSection(init_from="some/model")
    with pytest.raises(InvalidRunSpec, match="leave init_from out"):
        check_options(config(tmp_path), RunSpec(pipeline=stages, model=checkpoint))


def test_all_microbatches_of_stages_are_equally_long(tmp_path):
    training = TrainingSection(batch_size=9, micro_batch=2)
    spec = RunSpec(pipeline=PipelineSection(stages=2), training=training)
    with pytest.raises(InvalidRunSpec, match=r"batch_size = 9: .* multiple of .*micro_batch \(2\)"):
        check_options(config(tmp_path), spec)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_machine_may_say_which_stage_it_holds(tmp_path, stage):
    chosen = config(tmp_path, stage=stage)
    check_options(chosen, RunSpec(pipeline=PipelineSection(stages=2)))
    assert chosen.stage == stage


def test_a_stage_must_be_one_of_the_runs(tmp_path):
    with pytest.raises(ConfigError, match=r"stage = 2 \(command line\): must be from 0 to 1"):
        check_options(config(tmp_path, stage=2), RunSpec(pipeline=PipelineSection(stages=2)))
    with pytest.raises(ConfigError, match="this run has no stages"):
        check_options(config(tmp_path, stage=0), PAIRS)


def experts(*, branch_round: int | None = 0, begin: str = "fresh") -> RunSpec:
    code = {"name": "code", "source": "text:code/*.txt", "begin": begin}
    named = [{"name": "general"}, code]
    return RunSpec.model_validate({"experts": named, "ensemble": {"branch_round": branch_round}})


def test_what_experts_cannot_do_so_far_is_refused_by_name(tmp_path):
    check_options(config(tmp_path), experts())
    check_options(config(tmp_path, expert="code"), experts())
    check_options(config(tmp_path), experts(branch_round=None))


def test_an_expert_is_one_of_the_runs(tmp_path):
    with pytest.raises(InvalidRunSpec, match="no expert 'cod', .* did you mean 'code'"):
        check_options(config(tmp_path, expert="cod"), experts())
    with pytest.raises(InvalidRunSpec, match="--expert code: the run has no experts"):
        check_options(config(tmp_path, expert="code"), PAIRS)
