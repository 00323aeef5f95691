"""A model whose weights do not fit a card: each rank has those of its own span alone (ZeRO-3).

Theory (arXiv 1910.02054). Each rank's optimizer moves its span, as in ranks/group.py. But weights
and gradients outside of it are there for a moment only, those of a layer at a time:

    layer, forward       gather its weights; compute; keep its input
    layer, backward      gather its weights; compute again, and the gradients; add these to the
                         gradients of the spans that they belong to
    rest                 embedding, norm and head: gathered after a step, and kept until the next

All layers share one memory, for the weights and for the gradients: whoever computes has filled it.
So of P parameters on n ranks a rank has P/n with gradient and moments, the rest, and a layer. A
layer's span is the flat vector's, so most layers come from one rank, whose broadcast takes a ring
as long as it takes to gather pieces of all. Nothing is fetched in advance yet.

All ranks compute a layer together, so all make the same number of passes (`Stepper`).

The whole vector is in the main memory of rank 0, where averages and checkpoints find it: all ranks
map it, and each copies its span from there when something else has moved it (`take_moved`), and to
there when it is asked for after a step. So other peers see what they see of one card.

Not torch's `fully_shard`: its shards are rows of each parameter, and Muon needs whole matrices, our
codes whole blocks and our files one vector (decision 0069).
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils import swap_tensors

from protocol.run.layout import LayoutEntry

from .model import FlatModel, trained_parameters
from .ranks.group import RankOrder, Ranks, parts_of
from .ranks.spans import shared_part
from .recomputed import layer_of


@contextmanager
def weights_nowhere() -> Iterator[None]:
    """Modules that are made inside have weights of no memory, but buffers as always."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, given: nn.Parameter | None) -> None:
        if given is not None and not given.is_meta:
            given = nn.Parameter(given.to("meta"), given.requires_grad)
        register(module, name, given)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class _GatheredSpan:
    """Neighbours in the flat vector, and the memory where a rank has all of them for a moment."""

    place: slice
    weights: torch.Tensor
    gradient: torch.Tensor


class ShardedModel(FlatModel):
    """A flat model of which each rank has a span; made of a module without memory.

    Args:
        memory_fd: of the whole vector, which all ranks map.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        ranks: Ranks,
        spans: Sequence[slice],
        memory_fd: int,
        *,
        document_end: int | None = None,
    ) -> None:
        self.spans, self._ranks, self._memory_fd = spans, ranks, memory_fd
        self._own = spans[ranks.rank]
        self._is_behind = False
        super().__init__(module, device, document_end=document_end)
        self.recomputes = True
        self.notes.append(
            "each GPU has a part of the weights alone: layers are computed again in the backward"
            " pass, and not compiled"
        )

    def _place(self) -> None:
        padded, size = self.layout.padded_parameters, self._own.stop - self._own.start
        os.ftruncate(self._memory_fd, 4 * padded)
        memory = mmap.mmap(self._memory_fd, 4 * padded)
        self._whole_P = torch.frombuffer(memory, dtype=torch.float32)
        # Scratch of rank 0. Takes memory only where it is used: zeros of torch's are written.
        scratch = padded if self._ranks.rank == 0 else 0
        self.gradient_P = torch.from_numpy(np.zeros(scratch, np.float32))
        self._theta = torch.zeros(size, device=self.device)
        self._gradient = torch.zeros_like(self._theta)
        grouped = [
            (layer, list(entries))
            for layer, entries in groupby(self.layout.entries, lambda entry: layer_of(entry.name))
        ]
        largest = max((_size(entries) for layer, entries in grouped if layer), default=0)
        weights = torch.zeros(largest, device=self.device)
        gradient = torch.zeros_like(weights)
        self._rest = list[_GatheredSpan]()
        for layer, entries in grouped:
            if layer is None:
                own = torch.zeros(_size(entries), device=self.device)
                self._rest.append(self._placed(entries, own, torch.zeros_like(own)))
            else:
                piece = self._placed(entries, weights[: _size(entries)], gradient[: _size(entries)])
                _make_gathered(self._module.get_submodule(layer), self, piece)
        self._module.to(self.device)

    def _placed(
        self, entries: Sequence[LayoutEntry], weights: torch.Tensor, gradient: torch.Tensor
    ) -> _GatheredSpan:
        parameters, start = trained_parameters(self._module), entries[0].offset
        for entry in entries:
            part = slice(entry.offset - start, entry.offset - start + entry.size)
            parameter = nn.Parameter(weights[part].view(entry.shape))
            parameter.grad = gradient[part].view(entry.shape)
            swap_tensors(parameters[entry.name], parameter)
        return _GatheredSpan(slice(start, start + len(weights)), weights, gradient)

    def recompute(self) -> bool:
        return False  # it does that anyway

    # --- what passes between the ranks -----------------------------------------------------------
    def gather(self, piece: _GatheredSpan) -> None:
        mine = shared_part(piece.place, self._own)
        piece.weights[_within(mine, piece.place)] = self._theta[_within(mine, self._own)]
        self._ranks.share(piece.weights, parts_of(piece.place, self.spans))

    def add_gradient(self, piece: _GatheredSpan) -> None:
        """To that of the ranks' spans; then it is zero here."""
        self._ranks.reduce(piece.gradient, parts_of(piece.place, self.spans))
        mine = shared_part(piece.place, self._own)
        self._gradient[_within(mine, self._own)] += piece.gradient[_within(mine, piece.place)]
        piece.gradient.zero_()

    def _gather_rest(self) -> None:
        for piece in self._rest:
            self.gather(piece)

    # --- as of a flat model ----------------------------------------------------------------------
    @property
    def theta_P(self) -> torch.Tensor:  # type: ignore[override]  # noqa: N802
        """The whole vector, of rank 0."""
        if self._is_behind:
            self._ranks.tell(RankOrder.GIVE_WEIGHTS)
            self.give_weights()
        return self._whole_P

    def give_weights(self) -> None:
        self._whole_P[self._own] = self._theta
        self._ranks.wait()
        self._is_behind = False

    def take_moved(self, ranks: Ranks) -> None:
        if self.moved:
            self._theta.copy_(self._whole_P[self._own])
            ranks.wait()  # before rank 0 writes there again
            self._gather_rest()
            self.moved = False

    def leaf(self, part: slice, shape: tuple[int, ...] = (-1,)) -> nn.Parameter:
        own = _within(part, self._own)
        leaf = nn.Parameter(self._theta[own].view(shape))
        leaf.grad = self._gradient[own].view(shape)
        return leaf

    def reduce(self, ranks: Ranks, spans: Sequence[slice]) -> torch.Tensor:
        for piece in self._rest:
            self.add_gradient(piece)
        return self._gradient

    def share(self, ranks: Ranks, spans: Sequence[slice]) -> None:
        self._is_behind = True
        self._gather_rest()
        self._gradient.zero_()


def _size(entries: Sequence[LayoutEntry]) -> int:
    return sum(entry.padded_size for entry in entries)


def _within(part: slice, whole: slice) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)


# --- a layer -----------------------------------------------------------------------------------


def _make_gathered(layer: nn.Module, model: ShardedModel, piece: _GatheredSpan) -> None:
    kind = type(layer)
    own = {"model": model, "piece": piece}
    layer.__class__ = type(kind.__name__, (_Gathered, kind), own)


class _Gathered(nn.Module):
    model: ShardedModel
    piece: _GatheredSpan

    def forward(self, hidden_BTD: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        def compute(hidden_BTD: torch.Tensor) -> torch.Tensor:
            self.model.gather(self.piece)
            return cast(torch.Tensor, forward(hidden_BTD, *given, **named))

        forward = super().forward
        out: torch.Tensor = _LayerPass.apply(  # type: ignore[no-untyped-call]
            hidden_BTD, compute, lambda: self.model.add_gradient(self.piece)
        )
        return out


class _LayerPass(torch.autograd.Function):
    """A layer that keeps its input alone; its weights' gradients are where they belong."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, compute: Any, add_gradient: Any) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        ctx.compute, ctx.add_gradient = compute, add_gradient
        kind = hidden.device.type
        ctx.autocast = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
            "cache_enabled": False,  # it would keep a bf16 copy of each layer
        }
        with torch.autocast(**ctx.autocast):
            out: torch.Tensor = compute(hidden)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        again = hidden.detach().requires_grad_()
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            out = ctx.compute(again)
        torch.autograd.backward(out, grads[0])
        ctx.add_gradient()
        return again.grad, None, None
