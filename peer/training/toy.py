"""The toy model of the simulated trainer, and the machine it pretends to run on.

The model is a point theta that takes noisy gradient steps towards an optimum c:

    theta <- theta - rate * (theta - c + sigma * noise)        loss = floor + mean((theta - c)^2) /
    2

c follows from the run's seed, so all peers look for the same; the noise from the peer's, so they
differ, and averaging them helps, as with a real model.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from protocol.layout import Layout

from .ports import Float32Vector

LOSS_FLOOR: Final = 1.0


@dataclass(frozen=True, slots=True)
class SimulatedSpeed:
    """How fast a machine is, and when it fails.

    Attributes:
        step_s: virtual duration of an inner step.
        start_s: virtual time from start to `Ready`.
        validation_s: for how long a validation holds up training.
        die_at_steps: counts of this machine's steps at which its trainer is killed.
        non_finite_at_steps: those at which its loss is NaN.
        out_of_memory_at_steps: those at which its memory runs out.
    """

    step_s: float = 0.1
    start_s: float = 1.0
    validation_s: float = 0.0
    die_at_steps: frozenset[int] = frozenset()
    non_finite_at_steps: frozenset[int] = frozenset()
    out_of_memory_at_steps: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ToyProblem:
    """The quadratic that all peers of a simulated run minimise.

    Attributes:
        rate: step size at the schedule's full learning rate.
        sigma: standard deviation of the gradient noise per value.
        num_blocks: training blocks of the pretended corpus.
    """

    rate: float = 0.1
    sigma: float = 1.0
    num_blocks: int = 1 << 16


def simulated_layout(padded_parameters: int) -> Layout:
    """The layout of a toy model."""
    return Layout.from_shapes({"theta": (padded_parameters,)})


def optimum(seed: int, size: int) -> Float32Vector:
    """c: the point that all peers of a run look for."""
    return np.random.default_rng([seed, 0]).standard_normal(size, dtype=np.float32)


def loss_of(theta: Float32Vector, optimum_: Float32Vector) -> float:
    """Loss at `theta`."""
    return LOSS_FLOOR + float(np.mean(np.square(theta - optimum_))) / 2
