"""The outer step of NoLoCo: gossip averaging of slow weights in pairs.

Idea. Each peer i holds slow weights phi_i and an outer momentum delta_i. After a round of inner
training it has fast weights theta_i; with Delta_i = theta_i - phi_i the step over a group of n
peers (a random pair: n = 2) is

    delta_i <- alpha delta_i + (beta / n) sum_j Delta_j - gamma (phi_i - (1 / n) sum_j phi_j)
    phi_i   <- phi_i + delta_i

alpha is the outer momentum, beta the outer learning rate, gamma the pull to the group's mean,
without which the peers would drift apart: no step here ever sees all of them. (NoLoCo, arXiv
2506.10911, eq. 1 to 3. Its eq. 2 is printed with -beta; the derivation needs +beta, and with -beta
the weights run away from the optimum.) Rewritten with means over the group:

    delta_i <- alpha delta_i + beta (mean theta - phi_i) + (gamma - beta) (mean phi - phi_i)

so with gamma = beta, the default, only theta travels.

Rules:

- theta is what the *codes* say, for our own as for the partner's: both peers of a pair compute the
  same mean, bit for bit. (0.5 a + 0.5 b commutes, and halving is exact.)
- A peer without partner takes the step with n = 1; the gamma term vanishes.
- A group of all peers is DiLoCo with heavy-ball momentum: phi stays equal everywhere.
- Stability for n = 2: gamma < sqrt(2 + alpha^2).
- With alpha = 0 nothing is remembered: delta is neither read nor written. It stays zero, so it is
  neither sent nor kept (peer/content/fetching.py, peer/state/checkpoints.py). In the final
  averaging it becomes zero with any alpha.

The step runs in place, tile by tile: one pass over memory, no vector of scratch. Separately rounded
fp32 operations only (no fused multiply-add), so a step can be reproduced on another machine; long
int8 vectors go through a compiled loop that does the same (`fused_step`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from peer.codec import BLOCK, TILE, Codec
from peer.codec.compiled import in_chunks

# --- the step through the codec's compiled loop, where it has one that fits (`int8_step`) ---------

WAY: Final = "noloco"
"""The name under which a codec's row has loops for this step (protocol/run/ways.py)."""
MAX_MEMBERS: Final = 2
"""The loops know one of us alone, and a pair."""


def fused_step(
    phi_P: torch.Tensor,
    delta_P: torch.Tensor,
    theta_codes: Sequence[torch.Tensor],
    codec: Codec,
    alpha: float,
    beta: float,
) -> tuple[float, float] | None:
    """Step phi and delta in place, with gamma = beta; lengths and types are checked.

    Returns:
        The sums of squares of delta and of our values less the mean; None, and nothing done, where
        no compiled loop fits: another code, a short vector, a larger group, numba missing.
    """
    if len(theta_codes) > MAX_MEMBERS:
        return None
    fused = codec.fused_loops(WAY, theta_codes, (phi_P, delta_P))
    if fused is None:
        return None
    arrays = (
        *fused.codes[0],
        *fused.codes[-1],
        phi_P.detach().numpy(),
        delta_P.detach().numpy(),
        (np.float32(1 / len(theta_codes)), np.float32(alpha), np.float32(beta)),
    )
    sums = in_chunks(
        lambda first, last: fused.kernels.step_blocks(*arrays, first, last), phi_P.numel() // BLOCK
    )
    return sum(delta for delta, _ in sums), sum(distance for _, distance in sums)


# --- outer step -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OuterStepMeasures:
    """What a step found, per padded parameter.

    Attributes:
        delta_rms: root mean square of the move of phi.
        replica_distance: root mean square of our theta less the mean of the others' (the
            partner's); None alone.
    """

    delta_rms: float
    replica_distance: float | None


@dataclass(frozen=True, slots=True)
class NolocoFactors:
    """alpha: outer momentum; beta: outer learning rate; gamma: pull to the group's mean."""

    alpha: float
    beta: float
    gamma: float

    @property
    def pulls(self) -> bool:
        """Whether gamma differs from beta: then phi travels too."""
        return self.gamma != self.beta

    @property
    def remembers(self) -> bool:
        """Whether there is outer momentum."""
        return self.alpha != 0


PLAIN_AVERAGE: Final = NolocoFactors(alpha=0.0, beta=1.0, gamma=1.0)
"""In the final averaging: nothing is trained any more, so momentum leads nowhere."""


def outer_step(
    phi_P: torch.Tensor,
    delta_P: torch.Tensor,
    theta_codes: Sequence[torch.Tensor],
    codec: Codec,
    factors: NolocoFactors,
    phi_codes: Sequence[torch.Tensor] = (),
    shares: Sequence[float] | None = None,
) -> OuterStepMeasures:
    """Take the step of a group, ourselves first: one of us alone, a pair, or more.

    Args:
        phi_P: fp32 [P], overwritten.
        delta_P: fp32 [P], overwritten unless alpha is 0.
        theta_codes: codes of theta of each member, valid ones (`codec.validate`).
        codec: the code of all vectors.
        factors: alpha, beta and gamma.
        phi_codes: codes of phi of each member in the same order; needed by a group of more than one
            with gamma != beta, else ignored.
        shares: weight of each member in the means; equal ones when not given, or alone.

    Raises:
        ValueError: lengths do not fit, or the codes of phi are missing; nothing was written.
    """
    pulls = factors.pulls and len(theta_codes) > 1
    used_phi_codes = phi_codes if pulls else ()
    if pulls and len(phi_codes) != len(theta_codes):
        raise ValueError("gamma differs from beta: the codes of phi of every member are needed")
    _check(phi_P, delta_P, [*theta_codes, *used_phi_codes], codec)
    if len(theta_codes) == 1:
        shares = None
    sums = None
    if not pulls and shares is None:
        sums = fused_step(phi_P, delta_P, theta_codes, codec, factors.alpha, factors.beta)
    moves, to_mean = sums or _plain_step(
        phi_P, delta_P, theta_codes, used_phi_codes, codec, factors, shares
    )
    own_share, size = shares[0] if shares else 1 / len(theta_codes), max(1, phi_P.numel())
    distance = math.sqrt(to_mean / size) / (1 - own_share) if own_share < 1 else None
    return OuterStepMeasures(math.sqrt(moves / size), distance)


def _plain_step(
    phi_P: torch.Tensor,
    delta_P: torch.Tensor,
    theta_codes: Sequence[torch.Tensor],
    phi_codes: Sequence[torch.Tensor],
    codec: Codec,
    factors: NolocoFactors,
    shares: Sequence[float] | None,
) -> tuple[float, float]:
    """Step tile by tile, of any code, group and factors; returns the sums of `fused_step`."""
    alpha, pull = float(np.float32(factors.alpha)), factors.gamma - factors.beta
    scratch = torch.empty(4, TILE, dtype=torch.float32, device=theta_codes[0].device)
    delta_squares = distance_squares = 0.0
    for start in range(0, phi_P.numel(), TILE):
        phi, delta = phi_P[start : start + TILE], delta_P[start : start + TILE]
        mean, own, spare, move = scratch[:, : phi.numel()]
        group_mean(theta_codes, codec, start, mean, own, spare, shares)
        distance_squares += _squares(own.sub_(mean))
        if not alpha:
            delta = move.zero_()
        delta.mul_(alpha)
        delta.add_(mean.sub_(phi).mul_(factors.beta))
        if phi_codes:
            group_mean(phi_codes, codec, start, mean, own, spare, shares)
            delta.add_(mean.sub_(phi).mul_(pull))
        phi.add_(delta)
        delta_squares += _squares(delta)
    return delta_squares, distance_squares


def _squares(values: torch.Tensor) -> float:
    return float(torch.dot(values, values))


def _check(
    phi_P: torch.Tensor, delta_P: torch.Tensor, all_codes: Sequence[torch.Tensor], codec: Codec
) -> None:
    for vector in (phi_P, delta_P):
        if vector.dtype != torch.float32 or vector.dim() != 1 or not vector.is_contiguous():
            raise ValueError("phi and delta must be contiguous fp32 vectors")
    if phi_P.numel() != delta_P.numel():
        raise ValueError(f"phi has {phi_P.numel()} values, delta {delta_P.numel()}")
    expected = codec.code_bytes(phi_P.numel())
    for codes in all_codes:
        if codes.numel() != expected:
            raise ValueError(f"codes have {codes.numel()} bytes, expected {expected}")


def group_mean(
    group_codes: Sequence[torch.Tensor],
    codec: Codec,
    start: int,
    out_mean: torch.Tensor,
    out_own: torch.Tensor,
    scratch: torch.Tensor,
    shares: Sequence[float] | None = None,
) -> None:
    """Write the mean of the decoded values from `start` on, and the first member's own values.

    All three are fp32 [n]; values start .. start + n - 1 are read. The members weigh the same, or
    as `shares` says.
    """
    stop = start + out_mean.numel()
    weights = shares or [1.0 / len(group_codes)] * len(group_codes)
    codec.decode_range(group_codes[0], start, stop, out_own)
    torch.mul(out_own, weights[0], out=out_mean)
    for codes, weight in zip(group_codes[1:], weights[1:], strict=True):
        codec.decode_range(codes, start, stop, scratch)
        out_mean.add_(scratch.mul_(weight))
