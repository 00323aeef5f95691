"""Each family of decoders: counted to the last parameter, trained, averaged, exported, loaded."""

import json
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from training_worlds import VOCABULARY, World, build_world, order, run, tiny_spec
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from peer.state.export import export_hugging_face
from peer.training.messages import RoundClosed
from peer.training.model import (
    FlatModel,
    block_matrices,
    config_of,
    empty_module,
    initial_module,
    model_config,
    model_shapes,
)
from protocol.run.families import FAMILIES, MIXTURES, config_fault, decoder_of
from protocol.run.needs import flops_per_token, parameters_of, state_bytes_of
from protocol.run.run_spec import FrozenSection, RunSpec

CPU = torch.device("cpu")
CODE = "fp32"
BIASES = ("attention_bias", "mlp_bias")
UNSAID = {
    *("chunk_size_feed_forward", "id2label", "is_encoder_decoder", "label2id", "problem_type"),
    *("output_attentions", "output_hidden_states", "return_dict", "_name_or_path"),
    "_sliding_window_pattern",
}
"""Keys of transformers' own that change nothing in a decoder."""


def spec_of(family: str, *, muon: bool = False, **sizes: Any) -> RunSpec:
    model = tiny_spec().model.model_dump() | {"family": family} | sizes
    tree = tiny_spec(codec=CODE, inner_steps=10, overlap=False).model_dump() | {"model": model}
    if muon:
        tree["optimizer"] = {"name": "muon", "warmup_steps": 2}
    return RunSpec.model_validate(tree)


SIZES: tuple[dict[str, Any], ...] = (
    {},
    {"num_heads": 4, "num_kv_heads": 2, "hidden_size": 32, "num_layers": 3},
    {"tie_embeddings": False, "intermediate_size": 40},
)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", SIZES)
def test_parameters_are_counted_to_the_last_one(family: str, sizes: dict[str, Any]) -> None:
    spec = spec_of(family, **sizes)
    tree = dict(config_of(spec, VOCABULARY))
    biases: list[dict[str, Any]] = [{key: True} for key in BIASES if key in tree]
    for more in ({}, {"head_dim": 12}, *biases):
        text = json.dumps(tree | more)
        assert config_fault(text) is None
        frozen = FrozenSection(
            config=text, layout_digest="0" * 32, parameters=1, padded_parameters=128
        )
        with_it = spec.model_copy(update={"frozen": frozen})
        shapes = model_shapes(with_it, VOCABULARY)
        assert decoder_of(text).parameters == sum(map(np.prod, shapes.values())), more
        assert parameters_of(with_it) == decoder_of(text).parameters


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_muon_takes_the_matrices_that_are_counted(family: str) -> None:
    spec = spec_of(family, muon=True)
    model = FlatModel(empty_module(spec, 256), CPU)
    matrices = [model.leaf(*part) for part in block_matrices(model.layout)]
    assert all(matrix.dim() == 2 and matrix.is_contiguous() for matrix in matrices)
    parameters = parameters_of(spec)
    saved = 4 * 4 * parameters - state_bytes_of(spec, parameters)
    assert saved == 4 * sum(matrix.numel() for matrix in matrices)
    groups = model.groups(without_block_matrices=True)
    rest = [model.leaf(*part) for parts, _ in groups for part in parts]
    assert sum(leaf.numel() for leaf in (*matrices, *rest)) == model.layout.padded_parameters


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_two_replicas_learn_meet_and_are_loaded_by_transformers(
    family: str, tmp_path: Path
) -> None:
    spec = spec_of(family, muon=family in MIXTURES)
    worlds = [build_world(spec), build_world(spec)]
    before = loss_of(worlds[0])
    for number, world in enumerate(worlds):
        closed = run(world, order(0, 10, position=80 * number)).of(RoundClosed)
        assert [event.steps for event in closed] == [10]
    sent = [world.decoded() for world in worlds]
    assert not np.array_equal(sent[0], sent[1]), "they have seen other data"
    for number, world in enumerate(worlds):
        world.slow[:] = np.mean(sent, axis=0)
        run(world, order(1, 10, position=80 * number + 40))
    assert loss_of(worlds[0]) < before
    export_hugging_face(worlds[0].theta.copy(), spec, worlds[0].model.layout, tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(loaded).__name__ == FAMILIES[family].architecture
    tokens = torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ours = worlds[0].model._module(input_ids=tokens).logits
        theirs = loaded(input_ids=tokens).logits
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)


def loss_of(world: World) -> float:
    stepper: Any = world.stepper
    return float(stepper.loss_of(world.corpus.validation_blocks(4)))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_that_shapes_a_model_is_unknown_here(family: str) -> None:
    keys = AutoConfig.for_model(family).to_dict().keys()
    assert keys - FAMILIES[family].model_fields.keys() <= UNSAID


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXTURES)
def test_operations_are_those_of_the_active_parameters(family: str) -> None:
    few, many = (spec_of(family, experts=experts) for experts in (4, 8))
    assert parameters_of(many) > 1.3 * parameters_of(few)
    router = 6 * 2 * 4 * 16  # two layers, four more experts
    assert flops_per_token(many) - flops_per_token(few) == router
    one = spec_of(family, experts=8, experts_per_token=1)
    assert flops_per_token(many) - flops_per_token(one) == 6 * 2 * 3 * 16 * 24


@pytest.mark.slow
def test_the_auxiliary_loss_moves_routers_and_is_not_told() -> None:
    def model_of(balance: float) -> FlatModel:
        return FlatModel(initial_module(spec_of("mixtral", balance=balance), VOCABULARY), CPU)

    tokens = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    without, with_it = model_of(0.0), model_of(0.5)
    with torch.no_grad():
        measured = with_it.loss(tokens)
    losses = [model.loss(tokens) for model in (without, with_it)]
    assert losses[0] == losses[1] == measured
    for loss in losses:
        loss.backward()
    module: Any = with_it._module
    theirs = module(input_ids=tokens[:, :-1], output_router_logits=True)
    assert theirs.aux_loss > 0
    (own,) = torch.autograd.grad(theirs.aux_loss, [module.model.layers[1].mlp.gate.weight])
    entry = next(e for e in with_it.layout.entries if "layers.1.mlp.gate" in e.name)
    part = slice(entry.offset, entry.offset + entry.size)
    difference = with_it.gradient_P[part] - without.gradient_P[part]
    torch.testing.assert_close(difference, 0.5 * own.flatten(), rtol=1e-3, atol=1e-7)


@pytest.mark.slow
def test_each_matrix_of_each_expert_is_muons_alone() -> None:
    spec = spec_of("mixtral", muon=True, experts=3)
    model = FlatModel(initial_module(spec, VOCABULARY), CPU)
    named = dict(model._module.named_parameters())
    first = "model.layers.0.mlp"
    assert named[f"{first}.experts.gate_up_proj"].shape == (3, 48, 16)
    matrices = [model.leaf(*part) for part in block_matrices(model.layout)]
    starts = {matrix.data_ptr(): matrix for matrix in matrices}
    for expert in range(3):
        gate, up = named[f"{first}.experts.gate_up_proj"][expert].chunk(2)
        for part in (gate, up, named[f"{first}.experts.down_proj"][expert]):
            assert torch.equal(starts[part.data_ptr()], part)
    assert named[f"{first}.gate.weight"].data_ptr() not in starts, "the router is AdamW's"


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_compute_in_the_precision_of_all_else(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    product, seen = torch.nn.functional.grouped_mm, set[torch.dtype]()

    def noted(given: torch.Tensor, weights: torch.Tensor, **others: Any) -> torch.Tensor:
        seen.update((given.dtype, weights.dtype))
        return product(given, weights, **others)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", noted)
    gradients = []
    for precision in (torch.float32, torch.bfloat16):
        model = FlatModel(initial_module(spec_of(family), VOCABULARY), CPU)
        seen.clear()
        with torch.autocast("cpu", dtype=precision, enabled=precision is torch.bfloat16):
            model.loss(tokens).backward()
        assert seen == {precision}
        gradients.append(model.gradient_P)
    exact, rounded = gradients
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=0) > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_that_are_computed_again_give_the_same_gradient(family: str, precision: str) -> None:
    """And a graph keeps a third, with six layers."""
    tokens = torch.randint(0, VOCABULARY, (2, 33), generator=torch.Generator().manual_seed(1))
    told, kept = [], []
    for again in (False, True):
        module = initial_module(spec_of(family, context_length=32, num_layers=6), VOCABULARY)
        model = FlatModel(module, CPU)
        assert not again or (model.recompute() and not model.recompute())
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            with GraphSize() as graph:
                loss = model.loss(tokens)
            loss.backward()
        told.append((loss.detach(), model.gradient_P))
        kept.append(graph.values)
    torch.testing.assert_close(*told, rtol=1e-6, atol=1e-7)
    assert kept[1] < 0.35 * kept[0]


class GraphSize:
    """How many values a graph keeps for its backward pass."""

    def __enter__(self) -> Self:
        storages = dict[int, int]()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.grad_fn is not None:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        self._storages = storages
        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    @property
    def values(self) -> int:
        return sum(self._storages.values())


# --- other versions -------------------------------------------------------------------------------


def with_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.training.model.version", lambda name: "4.57.6")


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - set(MIXTURES)))
def test_transformers_4_is_told_of_rotations_by_its_own_keys(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_4(monkeypatch)
    given: dict[str, Any] = {}
    read = CONFIG_MAPPING[family].from_dict

    def noted(tree: dict[str, Any], **others: Any) -> Any:
        given.update(tree)
        return read(tree, **others)

    monkeypatch.setattr(CONFIG_MAPPING[family], "from_dict", noted)
    config = model_config(spec_of(family, rope_theta=500.0), VOCABULARY)
    assert given["rope_theta"] == 500.0
    assert "rope_parameters" not in given
    rope = config.rope_parameters  # this transformers takes both
    wide = rope.get("full_attention", rope)
    assert wide["rope_theta"] == 500.0
    assert wide.get("partial_rotary_factor") == (0.5 if family == "phi" else None)
    if family == "gemma3_text":
        assert rope["sliding_attention"]["rope_theta"] == 10_000.0


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_is_refused_where_experts_lie_otherwise(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_4(monkeypatch)
    with pytest.raises(ValueError, match=f"^{family} needs transformers 5: 4.57.6, which is inst"):
        initial_module(spec_of(family), VOCABULARY)


@pytest.mark.slow
def test_experts_are_multiplied_where_torch_cannot_do_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    found = []
    make = partial(initial_module, spec_of("mixtral"), VOCABULARY)
    for is_old in (False, True):
        if is_old:
            monkeypatch.delattr(torch.nn.functional, "grouped_mm", raising=False)
            monkeypatch.delattr(torch, "_grouped_mm", raising=False)
        model = FlatModel(make(), CPU)
        model.loss(tokens).backward()
        found.append(model.gradient_P)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)
