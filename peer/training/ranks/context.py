"""Ranks that divide each sequence between them, for sequences too long for one of them.

Theory (DeepSpeed-Ulysses, arXiv 2309.14509). All but attention treats each token by itself, so each
of n ranks has T/n tokens of every sequence, and an n-th of all that a step keeps. Attention treats
each head by itself: before it the ranks swap their queries, keys and values so that each has all
tokens of H/n heads, and after it they swap back. It is the attention of one process, with its masks
of windows and documents, and not an approximation.

A sequence that n does not divide is lengthened by tokens that nothing follows from: they stand
behind all others, and attention looks back.

Shapes: B sequences, T tokens, t tokens of a rank, H heads, d width of a head.
"""

from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from .group import Ranks

ATTENTION: Final = "loco_split_context"
"""Its name in transformers."""
NO_TARGET: Final = -100
"""Which `cross_entropy` leaves out."""
_HEADS, _TOKENS = 1, 2


class SplitContext:
    """The division of the sequences that a model is given, in the order in which it is."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._documents_BT: torch.Tensor | None = None
        self._seen = dict[int | None, torch.Tensor]()

    def divide(self, module: nn.Module) -> None:
        """Have a module of transformers attend so."""
        from transformers import AttentionInterface

        # Here, for it imports torch's compiler, which takes seconds; so does transformers.
        AttentionInterface.register(ATTENTION, torch.compiler.disable(self._attend))
        config: Any = module.config
        config._attn_implementation = ATTENTION

    def own(
        self, inputs: dict[str, torch.Tensor], targets_BT: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Our part of what a model is given, with its true positions, and of the targets."""
        self._seen.clear()
        self._documents_BT = None
        if "position_ids" in inputs:
            self._documents_BT = (self._long(inputs["position_ids"]) == 0).cumsum(dim=1)
        else:
            places_T = torch.arange(targets_BT.shape[1], device=targets_BT.device)
            inputs = {**inputs, "position_ids": places_T.expand_as(targets_BT)}
        given = {name: self._part(self._long(whole)) for name, whole in inputs.items()}
        return given, self._part(self._long(targets_BT, NO_TARGET))

    def whole(self, own_Bt: torch.Tensor, length: int) -> torch.Tensor:
        """All values of sequences of this length, of which each rank has its own."""
        whole_BT = self._long(own_Bt.new_zeros(len(own_Bt), length))
        self._part(whole_BT).copy_(own_Bt)
        return self._ranks.sum(whole_BT)[:, :length]

    def _long(self, tokens_BT: torch.Tensor, filler: int = 0) -> torch.Tensor:
        return functional.pad(tokens_BT, (0, -tokens_BT.shape[1] % self._ranks.count), value=filler)

    def _part(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return tokens_BT.chunk(self._ranks.count, dim=1)[self._ranks.rank]

    def _attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: None,  # which transformers makes for attention that it knows
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """[B, H, t, d] each, keys and values of fewer heads, to [B, t, H, d]."""
        if k.shape[_HEADS] % self._ranks.count:
            each = q.shape[_HEADS] // k.shape[_HEADS]
            k, v = (few.repeat_interleave(each, dim=_HEADS) for few in (k, v))
        q, k, v = (_swapped(own, self._ranks, _HEADS, _TOKENS) for own in (q, k, v))
        seen = self._seen_within(sliding_window, q.shape[_TOKENS], q.device)
        mixed = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=seen,
            is_causal=seen is None,
            scale=scaling,
            enable_gqa=k.shape[_HEADS] < q.shape[_HEADS],
        )
        back = _swapped(mixed, self._ranks, _TOKENS, _HEADS)
        return back.transpose(_HEADS, _TOKENS).contiguous(), None

    def _seen_within(
        self, window: int | None, length: int, device: torch.device
    ) -> torch.Tensor | None:
        """The tokens that each token sees, [B or 1, 1, T, T]; None is all before it, and itself."""
        if self._documents_BT is None and (window is None or window >= length):
            return None
        if window not in self._seen:
            seen = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril_()
            if window is not None:
                seen = seen.triu(1 - window)
            if (documents_BT := self._documents_BT) is not None:
                same = documents_BT[:, :, None] == documents_BT[:, None, :]
                seen = seen & same[:, None]
            self._seen[window] = seen
        return self._seen[window]


class _Swap(torch.autograd.Function):
    """The gradient goes back the way that the values came."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, ranks: Ranks, cut: int, join: int) -> torch.Tensor:
        ctx.back = ranks, join, cut
        return ranks.swap(own, cut, join)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ranks, cut, join = ctx.back
        return ranks.swap(grads[0], cut, join), None, None, None


def _swapped(own: torch.Tensor, ranks: Ranks, cut: int, join: int) -> torch.Tensor:
    swapped: torch.Tensor = _Swap.apply(own, ranks, cut, join)  # type: ignore[no-untyped-call]
    return swapped
