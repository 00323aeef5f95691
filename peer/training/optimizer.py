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
between its many small operations, so there matrices of one shape go together. All else is as
torch's.

Moments may be kept in bf16 (`optimizer.moments`), rounded to the nearest after each step in fp32.
A moment that a step moves by less than half of bf16's distance, at most 1/256, stands still, so the
run spec bounds the betas there.

The size of Muon's step is the run spec's `adjust_lr`, by its names in torch: `original` makes it
the rate times sqrt(max(1, rows / columns)), `match_rms_adamw` as long as AdamW's usual step, 0.2
per weight in the mean square (arXiv 2502.16982): then AdamW's rate and weight decay fit.
"""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch.optim.adamw import adamw

from protocol.run.layout import Layout
from protocol.run.sections import MuonSection, OptimizerSection

from .device import Precision
from .model import FlatModel, FlatPart, block_matrices
from .ranks.group import ALONE, RankOrder, Ranks, parts_of
from .ranks.spans import shared_part, spans_of

CLIP_EPSILON: Final = 1e-6
"""Keeps the clip factor finite for a zero gradient; without a bound, `clip_norm` is infinite."""
NEWTON_SCHULZ: Final = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's iteration, as torch has them; there are five."""
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOST_TOGETHER: Final = 1 << 24
"""Values of matrices that Muon works on together on a GPU: the memory of one of 4096 x 4096."""

Tensors = list[torch.Tensor]
Parameters = list[torch.nn.Parameter]


class _Mover(ABC):
    """Moves weights by their gradients; torch's own classes import its compiler, for seconds.

    Attributes:
        moments: names in torch of what is remembered of a parameter.
        state: that, by parameter.
    """

    moments: ClassVar[tuple[str, ...]]

    def __init__(self, parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> None:
        self.state = dict[torch.nn.Parameter, dict[str, torch.Tensor]]()
        self._parameters, self._dtype = parameters, dtype

    def begin(self, num_steps: int = 0) -> None:
        """Make moments, of zeros, that have seen so many steps: all, or none where memory ends."""
        self.state.clear()
        self.state.update([(each, self._fresh(each, num_steps)) for each in self._parameters])

    def _fresh(self, parameter: torch.nn.Parameter, num_steps: int) -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(parameter, dtype=self._dtype) for name in self.moments}

    @abstractmethod
    def step(self, rate: float) -> None: ...


class AdamW(_Mover):
    """torch's AdamW, fused.

    Args:
        groups: parameters, each with the decay of their weights.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        groups: Sequence[tuple[list[Any], float]],
        betas: tuple[float, float],
        dtype: torch.dtype,
    ) -> None:
        super().__init__([each for parameters, _ in groups for each in parameters], dtype)
        self._groups, self._betas = groups, betas

    def _fresh(self, parameter: torch.nn.Parameter, num_steps: int) -> dict[str, torch.Tensor]:
        step = torch.full((), float(num_steps), device=parameter.device)
        return {**super()._fresh(parameter, num_steps), "step": step}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for parameters, decay in self._groups:
            states = [self.state[parameter] for parameter in parameters]
            gradients = [parameter.grad for parameter in parameters]
            means, squares, steps = (
                [state[name] for state in states] for name in (*self.moments, "step")
            )
            all_at_once = parameters, gradients, means, squares, steps
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
                    lr=rate,
                    weight_decay=decay,
                    eps=1e-8,
                    maximize=False,
                )


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


class Muon(_Mover):
    """Muon with Nesterov's momentum, over matrices.

    Args:
        dtype: of the momentum; the iteration is in `precision`.
        most_together: values of matrices of one shape that go through the iteration together.
    """

    moments = ("momentum_buffer",)

    def __init__(
        self,
        matrices: Parameters,
        section: MuonSection,
        decay: float,
        dtype: torch.dtype,
        precision: Precision,
        most_together: int,
    ) -> None:
        super().__init__(matrices, dtype)
        self._section, self._decay = section, decay
        self.precision, self._most_together = precision, most_together

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for matrices in self._batches():
            self._step(matrices, rate)

    def _batches(self) -> Iterator[Parameters]:
        of_shape = defaultdict[torch.Size, Parameters](list)
        for matrix in self._parameters:
            of_shape[matrix.shape].append(matrix)
        for shape, alike in of_shape.items():
            size = max(1, self._most_together // shape.numel())
            yield from (alike[at : at + size] for at in range(0, len(alike), size))

    def _step(self, parameters: list[Any], rate: float) -> None:
        momentum = self._section.momentum
        gradients = [parameter.grad for parameter in parameters]
        kept = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        buffers = [buffer.float() for buffer in kept]  # themselves, where they are fp32
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        torch._foreach_lerp_(gradients, buffers, momentum)  # zeroed after the step anyway
        for buffer, exact in zip(kept, buffers, strict=True):
            buffer.copy_(exact)  # nothing, where they are the same
        first, dtype = gradients[0], DTYPES[self.precision]
        matrices = torch.empty(len(gradients), *first.shape, dtype=dtype, device=first.device)
        torch._foreach_copy_(matrices.unbind(), gradients)
        made = orthogonalised(matrices if len(gradients) > 1 else matrices[0])
        torch._foreach_copy_(gradients, made.view_as(matrices).unbind())
        torch._foreach_mul_(parameters, 1 - rate * self._decay)
        factor = scale(first.shape, self._section.adjust_lr)
        torch._foreach_add_(parameters, gradients, alpha=-rate * factor)


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """A matrix, or several, with all singular values made about 1, in its own precision."""
    a, b, c = NEWTON_SCHULZ
    add_product = torch.addmm if matrices.dim() == 2 else torch.baddbmm
    tall = matrices.size(-2) > matrices.size(-1)
    short = matrices.mT if tall else matrices
    short = short / short.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = short @ short.mT
        short = add_product(short, add_product(gram, gram, gram, beta=b, alpha=c), short, beta=a)
    return short.mT if tall else short


def scale(shape: torch.Size, adjust_lr: str) -> float:
    """The factor of the rate, by its name in torch."""
    rows, columns = shape
    if adjust_lr == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


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
        leaves: in the order in which their moments are kept.
        rate_ratio: its learning rate over AdamW's.
    """

    optimizer: AdamW | Muon
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
        for part in self._parts:
            part.optimizer.begin(num_steps)
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

    def _moments(self) -> Iterator[tuple[str, OptimizerLeaf, torch.Tensor | None]]:
        """Each moment by name, with what we have of it as a flat view."""
        for part in self._parts:
            for index, leaf in enumerate(part.leaves):
                for name in part.optimizer.moments:
                    state = {} if leaf.own is None else part.optimizer.state[leaf.own]
                    yield f"{name}.{index}", leaf, state[name].view(-1) if state else None

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
            if not part.optimizer.state:
                part.optimizer.begin()
            part.optimizer.step(learning_rate * part.rate_ratio)
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
    parts = [OptimizerPart(AdamW(decaying, section.betas, dtype), all_leaves)]
    if with_muon:
        muon = section.muon or MuonSection()
        leaves = tuple(_leaf(model, each, own) for each in matrices)
        together = MOST_TOGETHER if model.device.type == "cuda" else 0
        made = Muon(_own(leaves), muon, section.weight_decay, dtype, precision, together)
        ratio = (muon.learning_rate or section.learning_rate) / section.learning_rate
        parts.append(OptimizerPart(made, leaves, ratio))
    return FlatOptimizer(model, section, parts, ranks, spans)


def _leaf(model: FlatModel, whole: FlatPart, span: slice) -> OptimizerLeaf:
    part = shared_part(whole.place, span)
    if part == whole.place:
        return OptimizerLeaf(part, model.leaf(*whole))
    return OptimizerLeaf(whole.place, model.leaf(part) if part.start < part.stop else None)


def _own(leaves: Sequence[OptimizerLeaf]) -> list[torch.nn.Parameter]:
    return [leaf.own for leaf in leaves if leaf.own is not None]
