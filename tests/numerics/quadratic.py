"""NoLoCo on a noisy quadratic, driven through the real outer step and codec.

Each replica minimises 0.5 (theta - c)^T diag(lambda) (theta - c) with plain SGD, c ~ N(optimum, I)
drawn anew at every inner step; then random pairs take the outer step. Small enough that the
stationary spread of the replicas is known.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from peer.averaging.noloco.outer_step import NolocoFactors, outer_step
from peer.codec import get_codec

DIMENSIONS = 64
PADDED = 128


@dataclass(frozen=True, slots=True)
class Outcome:
    """Means over the second half of the run.

    Attributes:
        replica_std: std across replicas, mean over dimensions.
        bias: mean distance of the replicas' mean from the optimum, per dimension (last round).
        diverged_at: round in which a weight passed 1e6; None if none did.
        std_by_round: replica_std of each round.
    """

    replica_std: float
    bias: float
    diverged_at: int | None
    std_by_round: list[float] = field(repr=False)
    mean_bias: float = 0.0


def run_quadratic(
    *,
    replicas: int = 16,
    inner_steps: int = 50,
    alpha: float = 0.5,
    beta: float = 0.7,
    gamma: float = 0.7,
    rate: float | Callable[[int], float] = 0.05,
    rounds: int = 400,
    codec_name: str = "fp32",
    optimum_std: float = 0.0,
    seed: int = 0,
) -> Outcome:
    rng = np.random.default_rng(seed)
    curvature = np.linspace(0.2, 2, DIMENSIONS)
    optimum = rng.normal(size=DIMENSIONS) * optimum_std if optimum_std else np.zeros(DIMENSIONS)
    phi = torch.zeros(replicas, PADDED)
    phi[:, :DIMENSIONS] = torch.from_numpy(rng.normal(size=DIMENSIONS))
    delta = torch.zeros_like(phi)
    codec = get_codec(codec_name)
    theta_codes = torch.empty(replicas, codec.code_bytes(PADDED), dtype=torch.uint8)
    phi_codes = torch.empty_like(theta_codes)
    std_by_round: list[float] = []
    biases: list[float] = []
    for t in range(rounds):
        step = rate(t) if callable(rate) else rate
        theta = phi[:, :DIMENSIONS].double().numpy().copy()
        for _ in range(inner_steps):
            target = optimum + rng.normal(size=theta.shape)
            theta -= step * curvature * (theta - target)
        padded = torch.zeros_like(phi)
        padded[:, :DIMENSIONS] = torch.from_numpy(theta)
        for i in range(replicas):
            codec.encode(padded[i], theta_codes[i])
            if gamma != beta:
                codec.encode(phi[i], phi_codes[i])
        for group in _groups(rng.permutation(replicas).tolist()):
            for own in group:
                members = [own, *(other for other in group if other != own)]
                outer_step(
                    phi[own], delta[own], [theta_codes[k] for k in members],
                    codec, NolocoFactors(alpha, beta, gamma), [phi_codes[k] for k in members],
                )  # fmt: skip
        weights = phi[:, :DIMENSIONS].double().numpy()
        if not np.isfinite(weights).all() or np.abs(weights).max() > 1e6:
            return Outcome(math.inf, math.inf, t, std_by_round)
        std_by_round.append(float(weights.std(0).mean()))
        biases.append(float(np.abs(weights.mean(0) - optimum).mean()))
    half = slice(rounds // 2 + 1, None)
    return Outcome(
        float(np.mean(std_by_round[half])),
        biases[-1],
        None,
        std_by_round,
        float(np.mean(biases[half])),
    )


def _groups(order: list[int]) -> list[tuple[int, ...]]:
    """Pairs, and one alone if the number is odd."""
    half = len(order) // 2
    pairs = zip(order[:half], order[half : 2 * half], strict=True)
    return [*pairs, *((last,) for last in order[2 * half :])]
