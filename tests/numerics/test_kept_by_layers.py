"""Estimates of a step's memory count what a layer keeps for its backward pass."""

import pytest
import torch

from peer.training.device import Precision, autocast, choose_precision
from peer.training.model import FlatModel, initial_module
from protocol.run.needs import step_memory
from protocol.run.run_spec import RunSpec

CPU = torch.device("cpu")
SIZES = {"hidden_size": 128, "intermediate_size": 320, "num_heads": 4, "num_kv_heads": 2}
TOKENS, VOCABULARY = 256, 256
OTHERS = ("qwen3", "olmo2", "mixtral")
"""Families that keep more than Llama: of norms of heads, and of experts."""


def spec_of(family: str, precision: Precision, layers: int, tokens: int, *, compiled: bool = False):
    experts = {"experts": 4, "experts_per_token": 2} if family in ("mixtral", "qwen3_moe") else {}
    model = {**SIZES, **experts, "family": family, "num_layers": layers, "context_length": tokens}
    training = {"precision": precision, "compile": compiled}
    return RunSpec.model_validate({"model": model, "training": training})


def kept_of(spec: RunSpec, **options) -> int:
    """Bytes of the tensors that the graph of a sequence keeps, each memory once."""
    model = FlatModel(initial_module(spec, VOCABULARY), CPU)
    if options:
        torch._dynamo.reset()
        model._forward = torch.compile(model._module, **options)
    found, alive = dict[int, int](), list[torch.Tensor]()
    weights = {each.untyped_storage().data_ptr() for each in model._module.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    tokens_BT = torch.zeros((1, spec.model.context_length + 1), dtype=torch.int64)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, autocast(CPU, choose_precision(spec.training.precision, CPU)):
        model.loss(tokens_BT)
    return sum(found.values())


def of_a_layer(measure, family, precision, tokens=TOKENS, *, compiled: bool = False) -> int:
    """Of so many tokens; what does not grow with them (weights in bf16) falls out."""
    (one, two), (wide_one, wide_two) = (
        [
            measure(spec_of(family, precision, layers, length, compiled=compiled))
            for layers in (1, 2)
        ]
        for length in (tokens, 2 * tokens)
    )
    return wide_two - wide_one - (two - one)


def told(spec: RunSpec) -> int:
    return step_memory(spec, 1, on_gpu=True)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_layer_keeps_what_is_told(precision):
    kept = of_a_layer(kept_of, "llama", precision)
    assert kept == pytest.approx(of_a_layer(told, "llama", precision), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_a_layer_of_another_family_keeps_no_more_than_is_told(family):
    kept = of_a_layer(kept_of, family, "bf16")
    assert 0.9 < kept / of_a_layer(told, family, "bf16") < 1.01


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [128, 512])
def test_a_layer_keeps_a_mask_where_sequences_are_as_long_as_its_window(tokens):
    kept = of_a_layer(kept_of, "gemma3_text", "bf16", tokens)
    assert kept == pytest.approx(of_a_layer(told, "gemma3_text", "bf16", tokens), rel=0.01)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_layer_keeps_less():
    """As torch's compiler divides its graph; its code is not made."""
    kept = of_a_layer(
        lambda spec: kept_of(spec, backend="aot_eager_decomp_partition"), "llama", "bf16"
    )
    assert kept == pytest.approx(of_a_layer(told, "llama", "bf16", compiled=True), rel=0.02)
