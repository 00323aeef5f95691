"""The loss of a large vocabulary without whole logits.

The idea. Logits, their copy in fp32 and their gradient are three times V values for each token: at
128k tokens of vocabulary more than all else that a step keeps. Each token's loss is its own, so a
few tokens go through the head at a time, and what their logits give to the gradients is taken at
once, before the next ones come. Nothing is computed twice; beside the gradient of the head's weight
two more matrices of its size are there. A head that does not learn, as beside adapters, has none.

torch's own (`linear_cross_entropy`, from 2.13 on) does not do: in bf16 it sums the loss in bf16,
9.81 where it was 9.33 (decision 0064).

Sums are in another order than over whole logits, so small vocabularies keep those.

Shapes: N tokens, D width of the model, V vocabulary.
"""

from typing import Any

import torch
from torch.nn import functional

from protocol.run.needs import MOST_LOGITS, WHOLE_LOGITS_VOCABULARY


def takes_few_logits(vocabulary: int) -> bool:
    return vocabulary > WHOLE_LOGITS_VOCABULARY


def head_loss(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, count: torch.Tensor
) -> torch.Tensor:
    """Cross-entropy of the targets over `count`, as `cross_entropy` of whole logits has its sum."""
    loss: torch.Tensor = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, targets_N, count, torch.is_grad_enabled()
    )
    return loss


def log_probs(
    out_NV: torch.Tensor, weight_VD: torch.Tensor | None, targets_N: torch.Tensor
) -> torch.Tensor:
    """Log-probability of each target, fp32 [N]; 0 where there is no target.

    Args:
        out_NV: logits; where there is a weight, hidden values [N, D].
    """
    at_once = max(1, MOST_LOGITS // (out_NV.shape[1] if weight_VD is None else len(weight_VD)))
    parts = list[torch.Tensor]()
    for few, targets in zip(out_NV.split(at_once), targets_N.split(at_once), strict=True):
        logits = few if weight_VD is None else functional.linear(few, weight_VD)
        parts.append(-functional.cross_entropy(logits.float(), targets, reduction="none"))
    return torch.cat(parts)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        count: torch.Tensor,
        learns: bool,
    ) -> torch.Tensor:
        head_learns = learns and weight_VD.requires_grad  # beside adapters it does not
        weight = weight_VD.detach().requires_grad_(head_learns)
        total = torch.zeros((), device=hidden_ND.device)
        grads_ND = list[torch.Tensor]()
        grad_VD = torch.zeros_like(weight) if head_learns else None
        at_once = max(1, MOST_LOGITS // len(weight))
        for few, targets in zip(hidden_ND.split(at_once), targets_N.split(at_once), strict=True):
            hidden = few.detach().requires_grad_(learns)
            with torch.set_grad_enabled(learns):
                logits = functional.linear(hidden, weight).float()
                loss = functional.cross_entropy(logits, targets, reduction="sum")
            del logits  # of the next ones there would be two
            total += loss.detach()
            if learns:
                wanted = (hidden,) if grad_VD is None else (hidden, weight)
                to_hidden, *to_weight = torch.autograd.grad(loss, wanted)
                grads_ND.append(to_hidden)
                if grad_VD is not None:
                    grad_VD += to_weight.pop()
        if learns:
            ctx.save_for_backward(torch.cat(grads_ND), grad_VD, count)
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        hidden_ND, weight_VD, count = ctx.saved_tensors
        factor = grad / count
        to_weight = None if weight_VD is None else weight_VD * factor
        return hidden_ND * factor.to(hidden_ND.dtype), to_weight, None, None, None
