"""GASLoC's outer step: gossip with Nesterov's look-ahead on the peer's own iterate.

Idea. NoLoCo's momentum is the past step of phi, so an old pull towards a former partner is replayed
in later rounds. GASLoC puts the momentum on what the peer itself has come to. With g_i the progress
of a round, theta_i - phi_i, and W the mean over the pair:

    y_i   = phi_i + eta g_i
    phi_i <- (W y)_i + gamma (y_i - y_i of the round before)

(arXiv 2606.11081, Cagnasso, Belilovsky and Oyallon, with a perfect mix of two peers; on the
complete graph it is DiLoCo.) With eta = 1, the only value here, y is theta, so theta's codes are
all that travels, and with gamma = 0 the step is the plain average of the pair.

Rules:

- y is what the *codes* say, for our own as for the partner's.
- The buffer holds the own y of the round before. A founder has none before its first step, which
  goes without momentum; a joiner takes over that of the peer whose phi it takes.
- A peer alone takes the step with its own y in place of the mean.
- In the final averaging phi becomes the mean: gamma = 0.

The step runs in place, tile by tile, in separately rounded fp32 operations.
"""

from dataclasses import dataclass

import torch

from peer.averaging.gossip.group_mean import group_mean
from peer.averaging.gossip.outer_state import Exchanged, OuterStepMeasures
from peer.codec import TILE, Codec


@dataclass(frozen=True, slots=True)
class LookAhead:
    """The rule; `momentum` is gamma. Implements `peer.averaging.gossip.outer_state.OuterRule`."""

    momentum: float

    @property
    def pulls(self) -> bool:
        """Never: only theta travels."""
        return False

    @property
    def remembers(self) -> bool:
        """Always: the buffer is written, even where the next step takes nothing of it."""
        return True

    def step(
        self, phi_P: torch.Tensor, delta_P: torch.Tensor, codec: Codec, exchanged: Exchanged
    ) -> OuterStepMeasures:
        """Take the outer step; `delta_P` is the buffer, the own y of the round before."""
        gamma = 0.0 if exchanged.plain or exchanged.is_first else self.momentum
        scratch = torch.empty(3, TILE, dtype=torch.float32, device=phi_P.device)
        moved = apart = 0.0
        for start in range(0, phi_P.numel(), TILE):
            phi, before = phi_P[start : start + TILE], delta_P[start : start + TILE]
            mean, own, spare = scratch[:, : phi.numel()]
            group_mean(exchanged.theta, codec, start, mean, own, spare, exchanged.shares)
            apart += _squares(torch.sub(own, mean, out=spare))
            moved += _squares(torch.sub(mean, phi, out=spare))
            torch.sub(own, before, out=spare)
            phi.copy_(mean)
            phi.add_(spare, alpha=gamma)
            before.copy_(own)
        shares = exchanged.shares
        own_share = shares[0] if shares else 1 / len(exchanged.theta)
        return OuterStepMeasures.of_squares(moved, apart, phi_P.numel(), own_share)


def _squares(values: torch.Tensor) -> float:
    return float(torch.dot(values, values))
