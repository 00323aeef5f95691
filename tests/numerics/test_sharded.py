"""A model of which each rank has a part alone: steps are those of a flat one, memory is less.

The ranks' exchange is tested with processes (tests/peer/training/test_ranks.py).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_families import spec_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import TensorWeakRef
from training_worlds import CPU, VOCABULARY, tiny_corpus, tiny_spec

from peer.training.device import Precision, autocast
from peer.training.model import FlatModel, empty_module, initial_module, layout_of
from peer.training.optimizer import inner_optimizer, rank_spans
from peer.training.ranks.group import ALONE, Ranks
from peer.training.sharded import ShardedModel, weights_nowhere
from peer.training.shared import code_memory
from peer.training.step import Stepper
from protocol.run.families import FAMILIES
from protocol.run.needs import card_memory, state_bytes_of
from protocol.run.run_spec import RunSpec

DENSE = sorted(name for name, family in FAMILIES.items() if not family.is_mixture)


def sharded(spec: RunSpec, ranks: Ranks, end: int | None = None) -> ShardedModel:
    with weights_nowhere():
        module = empty_module(spec, VOCABULARY)
    spans = rank_spans(layout_of(module), spec.optimizer, ranks.count, by_size=True)
    return ShardedModel(module, CPU, ranks, spans, code_memory(), document_end=end)


def trained(spec: RunSpec, model: FlatModel, precision: Precision) -> Iterator[torch.Tensor]:
    """Losses, norms and weights of some steps in micro-batches of 3 and 1 sequences."""
    optimizer, corpus = inner_optimizer(model, spec.optimizer, precision), tiny_corpus(spec)
    stepper = Stepper(model, optimizer, precision, micro_batch=3)
    model.take_moved(ALONE)
    for first in range(0, 12, 4):
        result = stepper.step(corpus.blocks(np.arange(first, first + 4)), 1e-2)
        yield torch.tensor(result.settled())
    yield torch.tensor(stepper.loss_of(corpus.blocks(np.arange(20, 24))))
    yield model.theta_P.clone()


@pytest.mark.slow
@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize(("precision", "end"), [("fp32", None), ("bf16", 3)])
def test_a_step_is_that_of_a_flat_model_bit_for_bit(
    family: str, precision: Precision, end: int | None
) -> None:
    spec = spec_of(family, muon=True)
    flat = FlatModel(initial_module(spec, VOCABULARY), CPU, document_end=end)
    parts = sharded(spec, ALONE, end)
    assert parts.layout == flat.layout
    parts.theta_P.copy_(flat.theta_P)
    parts.moved = True
    before = flat.theta_P.clone()
    for expected, found in zip(
        trained(spec, flat, precision), trained(spec, parts, precision), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert torch.dist(flat.theta_P, before) > 0.1


class Copies(TorchDispatchMode):
    """bf16 copies of weights of this shape that are still there."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._shape, self._made = shape, list[TensorWeakRef]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16:
            self._made += [TensorWeakRef(out)] * (out.shape == self._shape)
        return out

    @property
    def count(self) -> int:
        return sum(each() is not None for each in self._made)


def test_no_bf16_copy_of_a_layer_outlives_it() -> None:
    """Autocast keeps those of a flat model until a forward pass is over."""
    spec, found = tiny_spec(), []
    tokens = torch.from_numpy(tiny_corpus(spec).blocks(np.arange(4)))
    for model in FlatModel(initial_module(spec, VOCABULARY), CPU), sharded(spec, ALONE):
        with autocast(CPU, "bf16"), Copies((24, 16)) as copies:
            loss = model.loss(tokens)
            found.append(copies.count)
        loss.backward()
    flat, parts = found
    assert flat >= 4  # of two matrices in each of two layers
    assert parts == 0


def bytes_of(spec: RunSpec, model: FlatModel, ranks: Ranks) -> int:
    """Of weights, gradients and moments, after a step."""
    optimizer = inner_optimizer(model, spec.optimizer, "fp32", ranks)
    Stepper(model, optimizer, "fp32", 1, ranks).step(tiny_corpus(spec).blocks(np.arange(4)), 0.0)
    moments = [own for _, _, own in optimizer._moments() if own is not None]
    moved = [leaf.own for part in optimizer._parts for leaf in part.leaves if leaf.own is not None]
    weights = [*moved, *model._module.parameters()]
    gradients = [each.grad for each in weights if each.grad is not None]
    memories = [each.untyped_storage() for each in (*moments, *weights, *gradients)]
    return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_rank_has_its_part_and_a_layer(name: str) -> None:
    tree = tiny_spec().model_dump()
    tree["model"] |= {"num_layers": 8, "hidden_size": 64, "intermediate_size": 128}
    spec = RunSpec.model_validate(tree | {"optimizer": {"name": name}})
    ranks = Ranks(1, 4)
    with ranks.apart():
        model = sharded(spec, ranks)
        taken = bytes_of(spec, model, ranks)
    parameters = model.layout.padded_parameters
    assert not model.gradient_P.numel(), "its part of the gradient is all that it has"
    layer = sum(e.padded_size for e in model.layout.entries if ".layers.0." in e.name)
    state = state_bytes_of(spec, parameters) / 4
    assert taken == pytest.approx(state + 8 * (parameters - 7 * layer), rel=0.05)
    flat = bytes_of(spec, FlatModel(initial_module(spec, VOCABULARY), CPU), ALONE)
    assert flat == pytest.approx(state_bytes_of(spec, parameters), rel=0.05)


def test_parts_fit_where_the_whole_does_not() -> None:
    """Eight layers of a wide model on four cards."""
    tree = tiny_spec().model_dump()
    tree["model"] |= {"num_layers": 8, "hidden_size": 64, "intermediate_size": 128}
    spec = RunSpec.model_validate(tree)
    flat, parts = (card_memory(spec, 4, sharded=each) for each in (False, True))
    assert parts < 0.5 * flat
    assert card_memory(spec, 8, sharded=True) < parts
