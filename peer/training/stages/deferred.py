"""Linear layers whose weights' gradient is computed later, so that the input's leaves at once.

Theory. A backward has two halves that need nothing of each other: what goes on to the stage before
(the gradient of the input) and what stays here (that of the weights). Others wait for the first
only. In a Llama nearly all weights are in linear layers; each puts its second half, one product of
matrices, into a queue, which is worked off when the input's gradient is on its way. Nothing is
computed twice. What it costs is memory: until then the gradients of all layers' outputs are held.

Norms and embeddings add at once, as autograd does; their weights are few.

Source: Zero Bubble Pipeline Parallelism (Qi et al., ICLR 2024) splits the backward like this.

Shapes: N rows (sequences times tokens), I and O width of a layer's input and output.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn


class PutOff:
    """The products that are still to be computed."""

    def __init__(self) -> None:
        self._products: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def put(
        self, gradient_NO: torch.Tensor, given_NI: torch.Tensor, weight_OI: torch.Tensor
    ) -> None:
        """A layer's gradient is due."""
        self._products.append((gradient_NO, given_NI, weight_OI))

    @torch.no_grad()
    def add(self) -> None:
        """Compute all, and add them to the weights' gradients."""
        for gradient_NO, given_NI, weight_OI in self._products:
            assert weight_OI.grad is not None, "gradients are views of the flat one"
            if given_NI.dtype == weight_OI.dtype:
                weight_OI.grad.addmm_(gradient_NO.t(), given_NI)
            else:
                weight_OI.grad += gradient_NO.t() @ given_NI
        self._products.clear()

    def drop(self) -> None:
        """They are not wanted."""
        self._products.clear()


class _DeferredProduct(torch.autograd.Function):
    """given @ weight.T, in the precision of the autocast that is on."""

    @staticmethod
    def forward(
        context: Any, given: torch.Tensor, weight_OI: torch.Tensor, put_off: PutOff
    ) -> torch.Tensor:
        kind, before = given.device.type, given.dtype
        if torch.is_autocast_enabled(kind):
            given = given.to(torch.get_autocast_dtype(kind))
        context.save_for_backward(given)
        # The parameter itself: what is saved beside it is a copy, where layers are checkpointed.
        context.weight_OI, context.put_off, context.before = weight_OI, put_off, before
        with torch.autocast(kind, enabled=False):
            return nn.functional.linear(given, weight_OI.to(given.dtype))

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        (given,), weight_OI = context.saved_tensors, context.weight_OI
        context.put_off.put(
            gradient.detach().reshape(-1, weight_OI.shape[0]),
            given.detach().reshape(-1, weight_OI.shape[1]),
            weight_OI,
        )
        return (gradient @ weight_OI.to(gradient.dtype)).to(context.before), None, None


class _DeferredLinear(nn.Linear):
    """A linear layer without bias that puts its weight's gradient off."""

    put_off: PutOff

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., I] to [..., O]."""
        return _apply(input, self.weight, self.put_off)


_apply = cast(Callable[..., torch.Tensor], _DeferredProduct.apply)


def put_off_weights(module: nn.Module) -> PutOff:
    """Have a module's linear layers put their weights' gradients off. Returns where they go."""
    put_off = PutOff()
    for layer in module.modules():
        has_bias = len(list(layer.parameters(recurse=False))) > 1
        if isinstance(layer, nn.Linear) and not has_bias:
            layer.__class__ = _DeferredLinear
            assert isinstance(layer, _DeferredLinear)
            layer.put_off = put_off
    return put_off
