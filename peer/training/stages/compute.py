"""A stage's work on microbatches: forwards that wait for gradients, and gradients that add up.

A forward keeps its graph until the gradient of its output comes back. The weights must be the same
at both moments, so a stage steps when no microbatch waits.

Theory. A backward has two independent halves: the gradient of the input, which goes on to the stage
before, and that of the weights, which stays here. Others wait for the first only. Nearly all of a
Llama's weights are in linear layers; each puts its second half, one product of matrices, into a
queue, which is worked off when the input's gradient is on its way (`add_weights`). Nothing is
computed twice, but the gradients of all layers' outputs are held until then. The few weights of
norms and embeddings add at once, as autograd does.

Source: Zero Bubble Pipeline Parallelism (Qi et al., ICLR 2024) splits the backward like this.

Shapes: b sequences of a microbatch, T tokens, D width of the model; N rows (sequences times
tokens), I and O width of a layer's input and output.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from peer.training.device import Precision, autocast

from .module import StageModule


class DeferredProducts(list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]):
    """Products to be computed later: of gradients [N, O] and inputs [N, I], for weights [O, I]."""

    @torch.no_grad()
    def add(self) -> None:
        """Compute all, and add them to the weights' gradients."""
        for gradient_NO, given_NI, weight_OI in self:
            assert weight_OI.grad is not None, "gradients are views of the flat one"
            if given_NI.dtype == weight_OI.dtype:
                weight_OI.grad.addmm_(gradient_NO.t(), given_NI)
            else:
                weight_OI.grad += gradient_NO.t() @ given_NI
        self.clear()


class _DeferredProduct(torch.autograd.Function):
    """given @ weight.T, in the precision of the autocast that is on."""

    @staticmethod
    def forward(
        context: Any, given: torch.Tensor, weight_OI: torch.Tensor, deferred: DeferredProducts
    ) -> torch.Tensor:
        kind, before = given.device.type, given.dtype
        if torch.is_autocast_enabled(kind):
            given = given.to(torch.get_autocast_dtype(kind))
        context.save_for_backward(given)
        # The parameter itself: what is saved beside it is a copy, where layers are checkpointed.
        context.weight_OI, context.deferred, context.before = weight_OI, deferred, before
        with torch.autocast(kind, enabled=False):
            return nn.functional.linear(given, weight_OI.to(given.dtype))

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        (given,), weight_OI = context.saved_tensors, context.weight_OI
        gradient_NO = gradient.detach().reshape(-1, weight_OI.shape[0])
        given_NI = given.detach().reshape(-1, weight_OI.shape[1])
        context.deferred.append((gradient_NO, given_NI, weight_OI))
        return (gradient @ weight_OI.to(gradient.dtype)).to(context.before), None, None


class _DeferredLinear(nn.Linear):
    """A linear layer without bias that puts its weight's gradient off."""

    deferred: DeferredProducts

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _apply(input, self.weight, self.deferred)


_apply = cast(Callable[..., torch.Tensor], _DeferredProduct.apply)


def defer_weights(module: nn.Module) -> DeferredProducts:
    """Have a module's linear layers put their weights' gradients off. Returns where they go."""
    deferred = DeferredProducts()
    for layer in module.modules():
        has_bias = len(list(layer.parameters(recurse=False))) > 1
        if isinstance(layer, nn.Linear) and not has_bias:
            layer.__class__ = _DeferredLinear
            assert isinstance(layer, _DeferredLinear)
            layer.deferred = deferred
    return deferred


@dataclass(slots=True)
class _Held:
    """A microbatch whose gradient has not come.

    Attributes:
        given_bTD: the input, a leaf; None where tokens are embedded.
        targets_bT: at the data peer.
        is_finished: whether the head has added its gradient.
    """

    given_bTD: torch.Tensor | None
    produced_bTD: torch.Tensor
    targets_bT: torch.Tensor | None = None
    is_finished: bool = False


class StageCompute:
    """Runs microbatches, named by numbers, through a stage, and adds up their gradients."""

    def __init__(self, module: StageModule, device: torch.device, precision: Precision) -> None:
        self._deferred = defer_weights(module)
        self._module = module
        self._device = device
        self._precision = precision
        self._held: dict[int, _Held] = {}

    @property
    def num_layers(self) -> int:
        return len(self._module.model.layers)

    def holds(self, microbatch: int) -> bool:
        return microbatch in self._held

    def forget(self, microbatch: int) -> None:
        self._held.pop(microbatch, None)

    def embed(self, microbatch: int, tokens_bT: torch.Tensor) -> torch.Tensor:
        """Begin a path with [b, T+1] tokens. Returns [b, T, D]."""
        with autocast(self._device, self._precision):
            produced_bTD = self._module.embed(tokens_bT[:, :-1])
        self._held[microbatch] = _Held(None, produced_bTD, tokens_bT[:, 1:])
        return produced_bTD.detach()

    def produced(self, microbatch: int) -> torch.Tensor:
        return self._held[microbatch].produced_bTD.detach()

    def forward(self, microbatch: int, given_bTD: torch.Tensor) -> torch.Tensor:
        given_bTD.requires_grad_()
        with autocast(self._device, self._precision):
            produced_bTD = self._module.through(given_bTD)
        self._held[microbatch] = _Held(given_bTD, produced_bTD)
        return produced_bTD.detach()

    def finish(self, microbatch: int, given_bTD: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Head and loss, and their backward, at the data peer; `add_weights` has to follow.

        The head's gradient is added once. Returns the loss, nats per token, and its gradient.
        """
        held = self._held[microbatch]
        targets_bT = held.targets_bT
        assert targets_bT is not None
        given_bTD.requires_grad_()
        with autocast(self._device, self._precision):
            loss = self._module.loss(given_bTD, targets_bT)
        if held.is_finished:
            (gradient_bTD,) = torch.autograd.grad(loss, given_bTD)
            self._deferred.clear()
            return float(loss.detach()), gradient_bTD
        torch.autograd.backward(loss)
        held.is_finished = True
        assert given_bTD.grad is not None
        return float(loss.detach()), given_bTD.grad

    def is_finished(self, microbatch: int) -> bool:
        """Whether the head has added this microbatch's gradient."""
        return self._held[microbatch].is_finished

    def backward(
        self, microbatch: int, gradient_bTD: torch.Tensor, *, adds: bool = True
    ) -> torch.Tensor | None:
        """Add this microbatch's gradient, or only pass it on; `add_weights` has to follow.

        Returns the gradient for the stage before, if there is one.
        """
        held = self._held.pop(microbatch)
        if not adds and held.given_bTD is not None:
            (passed_bTD,) = torch.autograd.grad(held.produced_bTD, held.given_bTD, gradient_bTD)
            self._deferred.clear()
            return passed_bTD
        torch.autograd.backward(held.produced_bTD, gradient_bTD)
        return None if held.given_bTD is None else held.given_bTD.grad

    def add_weights(self) -> None:
        """Compute and add the weights' gradients that a backward has put off."""
        self._deferred.add()

    def score_embed(self, tokens_bT: torch.Tensor) -> torch.Tensor:
        """[b, T+1] tokens to [b, T, D]."""
        with torch.no_grad(), autocast(self._device, self._precision):
            return self._module.embed(tokens_bT[:, :-1])

    def score_through(self, given_bTD: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), autocast(self._device, self._precision):
            return self._module.through(given_bTD)

    def score_loss(self, given_bTD: torch.Tensor, tokens_bT: torch.Tensor) -> float:
        """The loss of [b, T+1] tokens, nats per token."""
        with torch.no_grad(), autocast(self._device, self._precision):
            return float(self._module.loss(given_bTD, tokens_bT[:, 1:]))
