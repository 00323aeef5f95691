"""Layers that keep their input alone, and are computed again for their gradient.

What a layer keeps for its backward pass is some twenty times its input. To compute it again takes a
third more work. Layers are found by the names that all decoders here give them, in whole models of
any family, beside adapters, and in stages.

Source: gradient checkpointing (arXiv 1604.06174), by torch.utils.checkpoint.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from protocol.fragment.fragments import BLOCK_OF


class _Recomputed(nn.Module):
    def forward(self, *given: Any, **named: Any) -> Any:
        forward = super().forward
        if not torch.is_grad_enabled():
            return forward(*given, **named)
        # Nothing is drawn in a layer: there is no dropout.
        kept: Any = {"use_reentrant": False, "preserve_rng_state": False}
        return checkpoint(forward, *given, **kept, **named)


def layer_of(name: str) -> str | None:
    """The name of the layer that has this parameter; None where it is in none."""
    found = BLOCK_OF.search(f"{name}.")
    return found and name[: found.end() - 1]


def recompute_layers(module: nn.Module) -> bool:
    """Returns whether there were any that are not computed again already."""
    layers = [
        layer
        for name, layer in module.named_modules()
        if layer_of(name) == name and not isinstance(layer, _Recomputed)
    ]
    for layer in layers:
        layer.__class__ = type(type(layer).__name__, (_Recomputed, type(layer)), {})
    return bool(layers)
