"""NoLoCo on a noisy quadratic, driven through the real outer step and codec.

Each replica minimises 0.5 (theta - c)^T diag(lambda) (theta - c) with plain SGD, c ~ N(optimum, I)
drawn anew at every inner step; then random pairs take the outer step. Small enough that the
stationary spread of the replicas is known.

The step and the codec know no places beyond a block of values, so one call takes the step of many
replicas, whose vectors stand one behind the other.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from peer.averaging.gossip.outer_step import NolocoFactors, outer_step
from peer.codec import Codec, get_codec

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
    factors, codec = NolocoFactors(alpha, beta, gamma), get_codec(codec_name)
    std_by_round: list[float] = []
    biases: list[float] = []
    for t in range(rounds):
        step = rate(t) if callable(rate) else rate
        theta = phi[:, :DIMENSIONS].double().numpy().copy()
        for target in optimum + rng.normal(size=(inner_steps, *theta.shape)):
            theta -= step * curvature * (theta - target)
        padded = torch.zeros_like(phi)
        padded[:, :DIMENSIONS] = torch.from_numpy(theta)
        for sides in _groups(rng.permutation(replicas).tolist()):
            _step(phi, delta, padded, sides, codec, factors)
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


def _groups(order: list[int]) -> list[tuple[list[int], ...]]:
    """All pairs, as their first and their second members; and one alone if the number is odd."""
    half = len(order) // 2
    alone = order[2 * half :]
    return [(order[:half], order[half : 2 * half]), *([(alone,)] if alone else [])]


def _step(
    phi: torch.Tensor,
    delta: torch.Tensor,
    theta: torch.Tensor,
    sides: tuple[list[int], ...],
    codec: Codec,
    factors: NolocoFactors,
) -> None:
    """Take the outer step of groups, given by the first member of each, the second of each."""
    theta_codes = [_codes(theta[side], codec) for side in sides]
    phi_codes = [_codes(phi[side], codec) for side in sides] if factors.pulls else []
    for own, side in enumerate(sides):
        new_phi, new_delta = phi[side].flatten(), delta[side].flatten()
        members = [own, *(other for other in range(len(sides)) if other != own)]
        outer_step(
            new_phi, new_delta, [theta_codes[k] for k in members],
            codec, factors, [phi_codes[k] for k in members] if phi_codes else (),
        )  # fmt: skip
        phi[side], delta[side] = new_phi.view(-1, PADDED), new_delta.view(-1, PADDED)


def _codes(rows: torch.Tensor, codec: Codec) -> torch.Tensor:
    """The codes of some replicas' vectors."""
    codes = torch.empty(codec.code_bytes(rows.numel()), dtype=torch.uint8)
    codec.encode(rows.flatten(), codes)
    return codes
