"""The toy model of the simulated trainer, and the machine it pretends to run on.

The model is a point theta that takes noisy gradient steps towards an optimum c:

    theta <- theta - rate * (theta - c + sigma * noise)
    loss   = floor + mean((theta - c)^2) / 2

c follows from the run's seed, so all peers look for the same; the noise from the peer's, so they
differ, and averaging them helps, as with a real model.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import torch

from protocol.run.layout import ALIGNMENT, Layout

from .ports import Float32Vector

LOSS_FLOOR: Final = 1.0
SHORTEST_STEP: Final = 0.3
"""No scattered step takes less than this share of its mean."""
MAX_LAYERS: Final = 6
"""With fragments of three layers, as they are by default, three fragments."""


@dataclass(frozen=True, slots=True)
class SimulatedSpeed:
    """How fast a machine is, and when it fails.

    Attributes:
        step_s: virtual duration of an inner step, the mean of all.
        scatter: standard deviation of that duration, as a share.
        stretch_steps: so many steps in a row take equally long, so that rounds scatter, too.
        scatter_seed: of this machine's scatter.
        start_s: virtual time from start to `Ready`.
        validation_s: for how long a validation holds up training.
        die_at_steps: counts of this machine's steps at which its trainer is killed.
        non_finite_at_steps: those at which its loss is NaN.
        out_of_memory_at_steps: those at which its memory runs out.
    """

    step_s: float = 0.1
    scatter: float = 0.0
    stretch_steps: int = 1
    scatter_seed: int = 0
    start_s: float = 1.0
    validation_s: float = 0.0
    die_at_steps: frozenset[int] = frozenset()
    non_finite_at_steps: frozenset[int] = frozenset()
    out_of_memory_at_steps: frozenset[int] = frozenset()

    def duration_s(self, step: int) -> float:
        """Virtual duration of the machine's step of this number, from 0."""
        if not self.scatter:
            return self.step_s
        drawn = np.random.default_rng([self.scatter_seed, step // self.stretch_steps])
        scattered = 1 + self.scatter * float(drawn.standard_normal())
        return self.step_s * max(SHORTEST_STEP, scattered)


@dataclass(frozen=True, slots=True)
class ToyProblem:
    """The quadratic that all peers of a simulated run minimise.

    Attributes:
        rate: step size at the schedule's full learning rate.
        sigma: standard deviation of the gradient noise per value.
        num_blocks: training blocks of the pretended corpus.
        piece_blocks: of them in one piece.
    """

    rate: float = 0.1
    sigma: float = 1.0
    num_blocks: int = 1 << 16
    piece_blocks: int = 1 << 8


def simulated_layout(padded_parameters: int) -> Layout:
    """The layout of a toy model: like a transformer's, an embedding and some blocks.

    As many equal parts as there are code blocks for, no more than `MAX_LAYERS` and one.
    """
    blocks = padded_parameters // ALIGNMENT
    parts = min(blocks, MAX_LAYERS + 1)
    cuts = [part * blocks // parts * ALIGNMENT for part in range(parts + 1)]
    names = ["embed", *(f"layers.{layer}.weight" for layer in range(parts - 1))]
    sizes = (stop - start for start, stop in pairwise(cuts))
    return Layout.from_shapes({name: (size,) for name, size in zip(names, sizes, strict=True)})


class ToyWeights:
    """theta as a model's flat vector. Implements `peer.training.weights.FastWeights`.

    Attributes:
        theta: its values.
    """

    def __init__(self, start: Float32Vector) -> None:
        self.theta = start.copy()
        self.theta_P = torch.from_numpy(self.theta)
        self.gradient_P = torch.zeros_like(self.theta_P)
        self.device = torch.device("cpu")
        self.layout = simulated_layout(start.size)


def optimum(seed: int, size: int) -> Float32Vector:
    """c: the point that all peers of a run look for."""
    return np.random.default_rng([seed, 0]).standard_normal(size, dtype=np.float32)


def loss_of(theta: Float32Vector, optimum_: Float32Vector) -> float:
    """Loss at `theta`."""
    return loss_at(theta - optimum_)


def loss_at(to_optimum: Float32Vector) -> float:
    """Loss so far from the optimum."""
    return LOSS_FLOOR + float(np.mean(np.square(to_optimum))) / 2
