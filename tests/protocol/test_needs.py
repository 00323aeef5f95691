"""What a run takes of a peer, by the run spec alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from peer.cli.new import PRESETS, preset_spec
from protocol.run import needs as needs_module
from protocol.run.families import config_of_sizes
from protocol.run.needs import USUAL_VOCABULARY, Needs, disk_needs, parameters_of
from protocol.run.run_spec import FrozenSection, RunSpec, parse_toml

GB = 1e9
KEEP = 3


def needs_of(spec: RunSpec) -> Needs:
    return needs_module.needs_of(spec, KEEP)


def changed(**sections: dict[str, object]) -> RunSpec:
    tree = preset_spec("125m", "noloco", "adamw").model_dump()
    for name, values in sections.items():
        tree[name] |= values
    return RunSpec.model_validate(tree)


@pytest.mark.parametrize("preset", PRESETS)
def test_memory_holds_what_training_cannot_do_without(preset):
    spec = preset_spec(preset, optimizer="adamw")
    needs, parameters = needs_of(spec), parameters_of(spec)
    assert needs.parameters == parameters
    assert needs.gpu_memory > 16 * parameters, "weights, gradient and two moments"
    assert needs.host_memory > 4 * parameters, "slow weights"
    assert needs.cpu_memory > 20 * parameters, "both"
    assert needs.disk == disk_needs(parameters, KEEP).total_bytes
    steps = spec.total_rounds * spec.sync.round_steps
    assert needs.tokens_per_peer == steps * spec.tokens_per_step


def test_muon_takes_less_than_adamw_and_outer_momentum_more_of_the_host():
    adamw, muon = needs_of(changed()), needs_of(preset_spec("125m"))
    assert adamw.gpu_memory - muon.gpu_memory == 4 * 84_934_656, "a moment of the blocks' matrices"
    momentum = needs_of(changed(sync={"alpha": 0.5}))
    assert momentum.host_memory - adamw.host_memory == 4 * adamw.parameters
    assert momentum.gpu_memory == adamw.gpu_memory


def test_coarse_moments_take_half_and_layers_computed_again_a_part():
    for name, of_matrices in (("adamw", 0), ("muon", 2 * 84_934_656)):
        fine = needs_of(changed(optimizer={"name": name}))
        coarse = needs_of(changed(optimizer={"name": name, "moments": "bf16"}))
        assert fine.gpu_memory - coarse.gpu_memory == 4 * fine.parameters - of_matrices
        assert fine.disk == coarse.disk, "a bound, as files hold fp32"
    whole, again = (
        needs_module.needs_of(changed(), KEEP, recomputes=each) for each in (False, True)
    )
    assert again.sequence < whole.sequence / 2
    assert whole.gpu_memory - again.gpu_memory == whole.gpu_sequence - again.gpu_sequence


def test_a_micro_batch_that_is_set_takes_its_sequences_and_auto_begins_with_one():
    auto, eight = needs_of(changed()), needs_of(changed(training={"micro_batch": 8}))
    assert (auto.sequences, auto.most_sequences) == (1, 64)
    assert (eight.sequences, eight.most_sequences) == (8, 8)
    assert eight.gpu_memory - auto.gpu_memory == 7 * auto.gpu_sequence


ROWS = Path(__file__).parents[2] / "bench/results/gpu_h100.jsonl"
MEASURED = [row for row in map(json.loads, ROWS.read_text().splitlines()) if "peak_gb" in row]


def spec_of_row(row: dict[str, Any]) -> RunSpec:
    tree = preset_spec(row["preset"], optimizer=row["optimizer"]).model_dump()
    tree["training"] |= {"micro_batch": row["sequences"], "batch_size": row["batch"]}
    tree["training"]["compile"] = row.get("compile", False)
    tree["optimizer"]["moments"] = row.get("moments", "fp32")
    tree["data"]["mask_documents"] = row.get("documents", False)
    if "lora" in row:
        config = config_of_sizes(preset_spec(row["preset"]).model, USUAL_VOCABULARY)
        size = -(-row["adapter_parameters"] // 128) * 128
        tree["frozen"] = {"config": json.dumps(config), "parameters": size}
        tree["frozen"] |= {"padded_parameters": size, "layout_digest": "0" * 32}
        tree["model"]["init_from"], tree["adapter"] = "x", {}
    return RunSpec.model_validate(tree)


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['preset']}-{row['sequences']}")
def test_memory_of_a_gpu_is_what_one_took(row):
    """Peaks of torch's allocator on an H100 in bf16; ours has a copy for averages, too."""
    spec, recomputes = spec_of_row(row), row.get("recompute", False)
    needs = needs_module.needs_of(spec, KEEP, recomputes=recomputes)
    told = needs.gpu_memory - needs_module.CUDA_CONTEXT_BYTES
    if "lora" in row:  # there the base was fp32, with a copy in bf16
        told += 4 * parameters_of(spec)
    assert row["peak_gb"] * GB < told < 1.15 * row["peak_gb"] * GB


def test_fp32_takes_more_of_a_gpu():
    half, fp32 = (changed(training={"precision": each}) for each in ("auto", "fp32"))
    assert needs_of(fp32).gpu_memory > needs_of(half).gpu_memory + 0.4 * GB


def test_of_several_cards_each_computes_in_the_precision_of_one():
    """But for the copy while weights are averaged, which is told of all weights."""
    spec, fp32 = (changed(training={"precision": each}) for each in ("auto", "fp32"))
    for each in (spec, fp32):
        one = needs_module.needs_of(each, KEEP, recomputes=True)
        told = needs_module.CUDA_CONTEXT_BYTES + needs_module.card_memory(each, 1, sharded=False)
        assert told == one.gpu_memory


def test_a_peer_with_a_stage_takes_its_share_of_the_model():
    whole, half = needs_of(preset_spec("1b")), needs_of(preset_spec("1b", stages=2))
    assert half.parameters == whole.parameters
    relay = needs_module.needs_of(preset_spec("1b", stages=2), KEEP, stage=1)
    assert half == needs_module.needs_of(preset_spec("1b", stages=2), KEEP, stage=0), "the larger"
    ends, tokens = 50_257 * 2048 + 2048, 2048
    assert half.average + relay.average == pytest.approx(whole.average, rel=0.01)
    assert half.average - relay.average == pytest.approx(ends, rel=0.02), "a byte for each"
    more = 4 * 6 * ends + 12 * tokens * 2048
    assert half.gpu_memory - relay.gpu_memory == more, "state, a step's sum, a copy; a norm's"
    assert half.step_boundaries == 2 * 64 * 2048 * 2048 * 2, "bf16, there and back"
    assert whole.step_boundaries == 0


def test_bytes_an_hour_are_what_is_wanted_and_no_more_than_the_line_carries():
    fixed = needs_of(changed(sync={"inner_steps": 50}))
    assert fixed.bytes_per_hour(1.0, 1e9) == pytest.approx(72 * fixed.average)
    assert fixed.bytes_per_hour(1.0, 1e6) == pytest.approx(3.6 * GB)
    auto = needs_of(preset_spec("125m"))
    assert auto.bytes_per_hour(1.0, 1e6) == pytest.approx(0.8 * 3.6 * GB)
    assert auto.bytes_per_hour(1.0, 1e9) == pytest.approx(1800 * auto.average), "H is 2 at least"


LARGE = '{"hidden_size":8192,"num_hidden_layers":20}'
SMALL = '{"vocab_size":1,"hidden_size":1,"intermediate_size":1,"num_hidden_layers":1}'
COUNT = 11_303_649_280
"""Parameters of LARGE."""


@pytest.mark.parametrize(
    ("config", "parameters", "padded"),
    [(LARGE, 1, 128), (SMALL, COUNT, 128), (SMALL, 1, COUNT)],
)
def test_of_numbers_that_do_not_fit_each_other_the_largest_is_what_a_run_can_take(
    config, parameters, padded
):
    frozen = FrozenSection(
        config=config, layout_digest="0" * 32, parameters=parameters, padded_parameters=padded
    )
    sizes = {"hidden_size": 65536, "intermediate_size": 1 << 20, "num_layers": 1024}
    tree = {"model": sizes, "optimizer": {"name": "muon"}, "frozen": frozen.model_dump()}
    needs = needs_of(RunSpec.model_validate(tree))
    assert needs.disk > 20 * COUNT
    for on_gpu in (False, True):
        assert needs.model_memory(on_gpu=on_gpu) > 6 * COUNT
    assert needs.average >= COUNT


def test_the_tokens_of_a_batch_count_too():
    large = needs_of(changed(training={"batch_size": 1 << 20}))
    assert large.model_memory(on_gpu=False) > 8 << 30
    assert large.model_memory(on_gpu=True) > 8 << 30
    assert needs_of(RunSpec()).model_memory(on_gpu=False) < 64 << 20


def test_codes_in_differences_are_counted_too():
    assert needs_of(parse_toml('sync.codec = "int8-diff"')).average > 0


def frozen_run(config: str, **sections: object) -> RunSpec:
    frozen = FrozenSection(
        config=config, layout_digest="0" * 32, parameters=128, padded_parameters=128
    )
    return RunSpec.model_validate({"frozen": frozen.model_dump(), **sections})


def test_adapters_take_the_disk_of_adapters_and_the_memory_of_their_base():
    adapted = frozen_run(LARGE, model={"init_from": "x"}, adapter={})
    assert needs_module.least_parameters_of(adapted) == 128
    base = 4 * COUNT
    assert needs_of(adapted).disk < 1 << 30
    for on_gpu in (False, True):
        assert base < needs_of(adapted).model_memory(on_gpu=on_gpu) < 2 * base
    assert base / 2 < needs_of(adapted).gpu_memory < base, "in bf16"


def test_a_head_of_many_tokens_has_gradients_for_logits_in_stages_too():
    sizes = '"hidden_size":64,"intermediate_size":64,"num_hidden_layers":20}'
    many = '{"vocab_size":131072,' + sizes
    whole = needs_of(frozen_run(many))
    adapted = needs_of(frozen_run(many, model={"init_from": "x"}, adapter={}))
    head, parameters = 4 * 131_072 * 64, parameters_of(frozen_run(many))
    trained = 4 * 5 * (parameters - 128)  # four values of each, and one while they are averaged
    assert whole.gpu_memory - adapted.gpu_memory == trained - 2 * parameters + 2 * head
    stages = {"pipeline": {"stages": 2}, "sync": {"inner_steps": 5}}
    long = {"model": {"context_length": 4096}}
    logits = 12 * 4096 * 131_072
    assert needs_of(frozen_run(many, **stages, **long)).sequence < logits / 2
    assert needs_of(frozen_run(many, **long)).sequence < logits / 2
    data, relay = (
        needs_module.needs_of(frozen_run(many, **stages), KEEP, stage=stage).gpu_memory
        for stage in (0, 1)
    )
    few = 12 * 128 * 131_072
    assert data - relay == pytest.approx(24 * 2 * 131_072 * 64 + 2 * head + few, rel=0.05)
