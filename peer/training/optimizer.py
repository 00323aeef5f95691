"""The inner optimizer on the flat vector: AdamW, or Muon and AdamW; and the clipping of a gradient.

Theory. AdamW scales each weight's step by that weight's past gradients. Muon's step is the momentum
of a matrix with all singular values made about 1, by five Newton-Schulz iterations
(torch.optim.Muon; https://kellerjordan.github.io/posts/muon), in the precision of the forward pass.
It is made for matrices between layers, so the matrices of the blocks are Muon's, and embeddings,
head and norms are AdamW's.

Both work on views of the one vector, so nothing is copied, and clip by one norm for all. A step is
given AdamW's learning rate; Muon's stands in a fixed ratio to it, so that schedule, warm-up and
amendments move both.

torch.optim.Muon always iterates in bf16, which many CPUs emulate: a step of the demo's model took
ten times as long. In fp32 the same iterations are more exact and 17 times as fast there
(docs/results/optimizers.md). And it iterates matrix by matrix: on a GPU most of that time passes
between its many small operations, so there matrices of one shape go together. All else, state
included, is torch's: a checkpoint of one goes on in the other.

Moments may be kept in bf16 (`optimizer.moments`), rounded to the nearest after each step in fp32.
A moment that a step moves by less than half of bf16's distance, at most 1/256, stands still, so the
run spec bounds the betas there.

The size of Muon's step is the run spec's `adjust_lr`, by its names in torch: `original` makes it
the rate times sqrt(max(1, rows / columns)), `match_rms_adamw` as long as AdamW's usual step, 0.2
per weight in the mean square (arXiv 2502.16982): then AdamW's rate and weight decay fit.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.optim.adamw import adamw

from protocol.run.layout import Layout
from protocol.run.sections import MuonSection, OptimizerSection

from .device import Precision
from .model import FlatModel, FlatPart, block_matrices
from .ranks.group import ALONE, RankOrder, Ranks, parts_of
from .ranks.spans import shared_part, spans_of

ADAMW_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
MUON_MOMENTS: Final = ("momentum_buffer",)
CLIP_EPSILON: Final = 1e-6
"""Keeps the clip factor finite for a zero gradient; without a bound, `clip_norm` is infinite."""


DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOST_TOGETHER: Final = 1 << 24
"""Values of matrices that Muon works on together on a GPU: the memory of one of 4096 x 4096."""


class AdamW:
    """torch.optim.AdamW, fused; torch's own class imports its compiler, which takes seconds."""

    def __init__(
        self,
        decaying: list[tuple[list[torch.nn.Parameter], float]],
        betas: tuple[float, float],
        dtype: torch.dtype,
    ) -> None:
        self.param_groups: list[dict[str, Any]] = [
            {"params": parameters, "weight_decay": decay} for parameters, decay in decaying
        ]
        self.state: defaultdict[torch.Tensor, dict[str, torch.Tensor]] = defaultdict(dict)
        self._betas, self._dtype = betas, dtype

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            states = [self.state[parameter] for parameter in group["params"]]
            for parameter, state in zip(group["params"], states, strict=True):
                if not state:
                    state["step"] = torch.zeros((), device=parameter.device)
                    for name in ADAMW_MOMENTS:
                        state[name] = torch.zeros_like(parameter, dtype=self._dtype)
            gradients = [parameter.grad for parameter in group["params"]]
            means, squares = ([state[name] for state in states] for name in ADAMW_MOMENTS)
            steps = [state["step"] for state in states]
            all_at_once = group["params"], gradients, means, squares, steps
            moves = [all_at_once] if self._dtype == torch.float32 else _in_tiles(*all_at_once)
            for weights, slopes, means, squares, steps in moves:
                adamw(
                    weights,
                    slopes,
                    means,
                    squares,
                    [],
                    steps,
                    fused=True,
                    amsgrad=False,
                    beta1=self._betas[0],
                    beta2=self._betas[1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=1e-8,
                    maximize=False,
                )


Tensors = list[torch.Tensor]


def _in_tiles(*lists: Tensors) -> Iterator[tuple[Tensors, Tensors, Tensors, Tensors, Tensors]]:
    """Moments are fp32 for a tile of a vector at a time, and are kept when it has moved."""
    for parameter, gradient, mean, square, step in zip(*lists, strict=True):
        vectors = (parameter.detach(), gradient, mean, square)
        for tile in zip(*(each.view(-1).split(MOST_TOGETHER) for each in vectors), strict=True):
            exact = [each.float() for each in tile]  # themselves, where they are fp32
            weights, gradients, means, squares = ([each] for each in exact)
            yield weights, gradients, means, squares, [step.clone()]
            for kept, moved in zip(tile[2:], exact[2:], strict=True):
                kept.copy_(moved)
        step.add_(1)


@dataclass(frozen=True, slots=True)
class OptimizerLeaf:
    """A vector, or matrix, of an optimizer.

    Attributes:
        place: of all of it in the flat vector.
        own: the part that this rank moves; None where there is none.
    """

    place: slice
    own: torch.nn.Parameter | None


@dataclass(frozen=True, slots=True)
class OptimizerPart:
    """An optimizer over some of the weights.

    Attributes:
        moments: names in torch of what it remembers of a parameter.
        leaves: in the order of its groups.
        rate_ratio: its learning rate over AdamW's.
    """

    optimizer: AdamW | torch.optim.Optimizer
    moments: tuple[str, ...]
    leaves: tuple[OptimizerLeaf, ...]
    rate_ratio: float = 1.0


class FlatOptimizer:
    """An inner optimizer of parts that share one clipping norm; moments have seen `num_steps`.

    Args:
        spans: of the flat vector, that of each rank.
    """

    def __init__(
        self,
        model: FlatModel,
        section: OptimizerSection,
        parts: list[OptimizerPart],
        ranks: Ranks,
        spans: Sequence[slice],
    ) -> None:
        self._model = model
        self.clip_norm = section.clip_norm
        self._parts = parts
        self._ranks, self._spans = ranks, spans
        self._dtype = DTYPES[section.moments]
        self.num_steps = 0

    def reset(self) -> None:
        """Forget the moments: the weights were replaced."""
        self._ranks.tell(RankOrder.FORGET)
        for part in self._parts:
            part.optimizer.state.clear()
        self.num_steps = 0

    def moments(self) -> dict[str, torch.Tensor]:
        """The moments by name, as flat vectors; none before the first step.

        They are views; but of several ranks, copies in the main memory of rank 0.
        """
        if not self.num_steps:
            return {}
        self._ranks.tell(RankOrder.GIVE_MOMENTS)
        return {name: self._whole(leaf, own) for name, leaf, own in self._moments()}

    def take_over(self, num_steps: int, fill: Callable[[str, torch.Tensor], None]) -> None:
        """Go on from moments that were kept; `fill` writes the one of a name into a vector."""
        self._ranks.tell(RankOrder.TAKE_MOMENTS, num_steps)
        self._make_moments(num_steps)
        for name, leaf, own in self._moments():
            if self._ranks.count == 1:
                assert own is not None
                fill(name, own)
                continue
            whole = self._vector(leaf)
            if self._ranks.rank == 0:
                fill(name, whole)
            self._ranks.scatter(whole, own, parts_of(leaf.place, self._spans))
        self.num_steps = num_steps

    def _make_moments(self, num_steps: int) -> None:
        for part in self._parts:
            for own in _own(part.leaves):
                state = part.optimizer.state[own]
                if isinstance(part.optimizer, AdamW):
                    state["step"] = torch.tensor(float(num_steps), device=own.device)
                for name in part.moments:
                    state[name] = torch.empty(own.shape, dtype=self._dtype, device=own.device)

    def _moments(self) -> Iterator[tuple[str, OptimizerLeaf, torch.Tensor | None]]:
        """Each moment by name, with what we have of it as a flat view."""
        for part in self._parts:
            for index, leaf in enumerate(part.leaves):
                for name in part.moments:
                    state = {} if leaf.own is None else part.optimizer.state[leaf.own]
                    own = state[name].view(-1) if name in state else None
                    yield f"{name}.{index}", leaf, own

    def _whole(self, leaf: OptimizerLeaf, own: torch.Tensor | None) -> torch.Tensor:
        if self._ranks.count == 1:
            assert own is not None
            return own
        whole = self._vector(leaf)
        self._ranks.gather(whole, own, parts_of(leaf.place, self._spans))
        return whole

    def _vector(self, leaf: OptimizerLeaf) -> torch.Tensor:
        """Memory for a moment of rank 0; the others need none."""
        return torch.empty(leaf.place.stop - leaf.place.start if self._ranks.rank == 0 else 0)

    def step(self, learning_rate: float) -> torch.Tensor:
        """Clip, step, and zero the gradient. Returns its norm before clipping, a scalar."""
        model, ranks, spans = self._model, self._ranks, self._spans
        together = ranks.count > 1 or bool(model.spans)
        gradient_P = model.reduce(ranks, spans) if together else model.gradient_P
        norm: torch.Tensor = torch.linalg.vector_norm(gradient_P)
        if ranks.count > 1:
            norm = ranks.sum(norm.square()).sqrt()
        gradient_P.mul_((self.clip_norm / (norm + CLIP_EPSILON)).clamp_(max=1.0))
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["lr"] = learning_rate * part.rate_ratio
            part.optimizer.step()
        self.num_steps += 1
        if together:
            model.share(ranks, spans)
        else:
            model.gradient_P.zero_()
        return norm


def rank_spans(
    layout: Layout, section: OptimizerSection, count: int, *, by_size: bool = False
) -> tuple[slice, ...]:
    matrices = block_matrices(layout) if section.name == "muon" else []
    return spans_of(layout, count, {each.place.start for each in matrices}, by_size=by_size)


def inner_optimizer(
    model: FlatModel, section: OptimizerSection, precision: Precision, ranks: Ranks = ALONE
) -> FlatOptimizer:
    """The optimizer that the run spec names; AdamW decays matrices alone."""
    with_muon = section.name == "muon"
    matrices = block_matrices(model.layout) if with_muon else []
    spans = model.spans or rank_spans(model.layout, section, ranks.count)
    own = spans[ranks.rank]
    groups = [
        ([_leaf(model, each, own) for each in leaves], section.weight_decay if decays else 0.0)
        for leaves, decays in model.groups(without_block_matrices=with_muon)
    ]
    decaying = [(_own(leaves), decay) for leaves, decay in groups]
    all_leaves = tuple(leaf for leaves, _ in groups for leaf in leaves)
    dtype = DTYPES[section.moments]
    parts = [OptimizerPart(AdamW(decaying, section.betas, dtype), ADAMW_MOMENTS, all_leaves)]
    if with_muon:
        muon = section.muon or MuonSection()
        peak = section.learning_rate if muon.learning_rate is None else muon.learning_rate
        leaves = [_leaf(model, each, own) for each in matrices]
        made = Muon(
            _own(leaves),
            precision,
            dtype,
            MOST_TOGETHER if model.device.type == "cuda" else 0,
            lr=peak,
            weight_decay=section.weight_decay,
            momentum=muon.momentum,
            adjust_lr_fn=muon.adjust_lr,
        )
        ratio = peak / section.learning_rate
        parts.append(OptimizerPart(made, MUON_MOMENTS, tuple(leaves), rate_ratio=ratio))
    return FlatOptimizer(model, section, parts, ranks, spans)


def _leaf(model: FlatModel, whole: FlatPart, span: slice) -> OptimizerLeaf:
    part = shared_part(whole.place, span)
    if part == whole.place:
        return OptimizerLeaf(part, model.leaf(*whole))
    return OptimizerLeaf(whole.place, model.leaf(part) if part.start < part.stop else None)


def _own(leaves: Sequence[OptimizerLeaf]) -> list[torch.nn.Parameter]:
    return [leaf.own for leaf in leaves if leaf.own is not None]


class Muon(torch.optim.Muon):
    """torch.optim.Muon with Nesterov's momentum, whose iteration is in the precision given.

    Args:
        most_together: values of matrices of one shape that go through the iteration together.
    """

    def __init__(
        self,
        matrices: list[torch.nn.Parameter],
        precision: Precision,
        moments: torch.dtype,
        most_together: int,
        **settings: Any,
    ) -> None:
        super().__init__([{"params": matrices}], **settings)  # which may be none
        self.dtype = DTYPES[precision]
        self._moments, self._most_together = moments, most_together

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            for parameters in self._batches(group["params"]):
                self._step(parameters, group)

    def _batches(self, parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        of_shape = defaultdict[torch.Size, list[torch.Tensor]](list)
        for parameter in parameters:
            of_shape[parameter.shape].append(parameter)
        for shape, alike in of_shape.items():
            size = max(1, self._most_together // shape.numel())
            yield from (alike[at : at + size] for at in range(0, len(alike), size))

    def _step(self, parameters: list[Any], group: dict[str, Any]) -> None:
        gradients = [parameter.grad for parameter in parameters]
        kept = [self._buffer(parameter) for parameter in parameters]
        buffers = [buffer.float() for buffer in kept]  # themselves, where they are fp32
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        torch._foreach_lerp_(gradients, buffers, group["momentum"])  # zeroed after the step anyway
        for buffer, exact in zip(kept, buffers, strict=True):
            buffer.copy_(exact)  # nothing, where they are the same
        first = gradients[0]
        matrices = torch.empty(len(gradients), *first.shape, dtype=self.dtype, device=first.device)
        torch._foreach_copy_(matrices.unbind(), gradients)
        settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
        made = orthogonalised(matrices if len(gradients) > 1 else matrices[0], *settings)
        torch._foreach_copy_(gradients, made.view_as(matrices).unbind())
        rate = group["lr"]
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        factor = scale(parameters[0].shape, group["adjust_lr_fn"])
        torch._foreach_add_(parameters, gradients, alpha=-rate * factor)

    def _buffer(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=self._moments)
        buffer: torch.Tensor = state["momentum_buffer"]
        return buffer


def orthogonalised(
    matrices: torch.Tensor, coefficients: tuple[float, float, float], iterations: int, eps: float
) -> torch.Tensor:
    """A matrix, or several, with all singular values made about 1, in its own precision."""
    a, b, c = coefficients
    add_product = torch.addmm if matrices.dim() == 2 else torch.baddbmm
    tall = matrices.size(-2) > matrices.size(-1)
    short = matrices.mT if tall else matrices
    short = short / short.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(iterations):
        gram = short @ short.mT
        short = add_product(short, add_product(gram, gram, gram, beta=b, alpha=c), short, beta=a)
    return short.mT if tall else short


def scale(shape: torch.Size, adjust_lr: str) -> float:
    """The factor of the rate, by its name in torch."""
    rows, columns = shape
    if adjust_lr == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))
