"""Rounds of gossip: each peer has its own, and only the nominal step is shared.

The idea. A round ends when its quota is done *and* the exchange before it has ended, so on a thin
line rounds grow longer, and training never stops. What was trained beyond the quota is no loss for
the schedule (the nominal step counts it), but it is one for averaging: there are fewer averages per
nominal step. So it is a debt, and later quotas are smaller until it is paid: as long as exchanges
are shorter than rounds on the average, there is one average per H nominal steps on the average,
whatever single rounds do.

Peers of one speed that never vary would close their rounds at the same distance from each other for
ever: the same few would be free together, and a peer that closes just after another would make it
wait each time. So lengths are drawn anew for each round, and who is near whom changes.

The rules
  1. A round's length is H nominal steps, and up to VARIED more or less: drawn by a hash of the peer
     and the round, so that it can be told afterwards. Lengths are H on the average. A peer may have
     an H of its own (`length`; protocol/gossip/round_length.py): quotas, debts and the last round
     go by that, and what peers agree on by the run's nominal round.
  2. A round's quota is its length less the debt, in what the peer owes (rounds.py); at least half
     of what it owes, in whole steps. The part of a step that is left over is a credit: a debt below
     zero. A round that is closed early leaves no other, nor does one that trains nothing.
  3. The debt is what the rounds so far have trained more than their lengths, but no more than
     MAX_DEBT_ROUNDS rounds: on a line that is too thin for one average a round there is nothing to
     make up for.
  4. A peer that closes a round more than JUMP_ROUNDS rounds behind the middle of the others jumps:
     its nominal step becomes theirs, for the snapshot and for the next round. No round is given up.
  5. The training is over at the run's last nominal step, which is asked for anew at each step:
     amendments move it. The last round ends there; one that would be shorter than a quarter of a
     round is put to the round before.

Source: docs/decisions/0016-gossip-without-a-clock.md.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import blake3

from .rounds import middle

JUMP_ROUNDS: Final = 2.0
MAX_DEBT_ROUNDS: Final = 2.0
LEAST_QUOTA_SHARE: Final = 0.5
VARIED: Final = 0.25
"""The length of a round is within so much of H."""
SHORTEST_LAST_ROUND: Final = 0.25
_EPSILON: Final = 1e-6


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """One round to train.

    Attributes:
        quota: own steps after which it may close; 0 trains nothing.
        start_step: the nominal step at which it begins.
        stride: nominal steps of one own step.
    """

    round: int
    quota: int
    start_step: float
    stride: float


class OwnRounds:
    """The rounds of one peer.

    Args:
        peer_id: whose they are.
        inner_steps: of a nominal round.
        total_steps_at: nominal steps of the whole run, as is in force at a nominal step.
        round: number of the first round.
        step: the nominal step at which it begins.
        debt: from rounds before.
        varied: lengths of rounds are within so much of H.

    Attributes:
        round, step: of the next round.
        debt: rule 3.
        length: H; that of the run, unless we have one of our own.
    """

    def __init__(
        self,
        peer_id: str,
        inner_steps: int,
        total_steps_at: Callable[[float], int],
        round: int,
        step: float,
        *,
        debt: float = 0.0,
        varied: float = VARIED,
    ) -> None:
        self._peer_id = peer_id
        self._varied = varied
        self._inner_steps = self.length = inner_steps
        self._total_steps_at = total_steps_at
        self.debt = debt
        self.round = round
        self.step = step
        self._stride = float(inner_steps)

    @property
    def is_over(self) -> bool:
        """Whether the training is over (rule 5)."""
        return self.step >= self._total_steps_at(self.step) - _EPSILON

    @property
    def nominal_round(self) -> int:
        """The nominal round in which the next one begins."""
        return int(self.step // self._inner_steps)

    @property
    def next_length(self) -> float:
        """Nominal steps of the next round, debts taken off (rule 2), unless the run ends in it."""
        return max(LEAST_QUOTA_SHARE * self.length, self._length() - self.debt)

    def plan(self, owed: float) -> RoundPlan:
        """The next round; of no steps when the training is over.

        Args:
            owed: own steps that we owe to a round.
        """
        self._stride = stride = self._inner_steps / owed
        total_steps = self._total_steps_at(self.step)
        if self.is_over:
            return RoundPlan(self.round, 0, float(total_steps), stride)
        wanted = self.next_length
        left = total_steps - self.step
        if left - wanted < SHORTEST_LAST_ROUND * self.length:
            quota = max(1, math.ceil(left / stride - _EPSILON))
        else:
            quota = max(1, math.floor(wanted / stride + _EPSILON))
        return RoundPlan(self.round, quota, self.step, stride)

    def closed(self, step: float, heard_steps: Sequence[float]) -> None:
        """The round is closed at this nominal step; `step` is then the snapshot's.

        Args:
            heard_steps: where the others are.
        """
        debt = 0.0 if self.is_over else self.debt + step - self.step - self._length()
        self.debt = min(max(-self._stride, debt), MAX_DEBT_ROUNDS * self.length)
        self.round += 1
        self.step = min(step, float(self._total_steps_at(step)))
        if middle(heard_steps, step) - step > JUMP_ROUNDS * max(self._inner_steps, self.length):
            self.enter(heard_steps)

    def _length(self) -> float:
        """Nominal steps of the next round, before debts (rule 1)."""
        digest = blake3.blake3(f"{self._peer_id}/{self.round}".encode()).digest(length=4)
        drawn = int.from_bytes(digest, "big") / 2**32  # in [0, 1)
        return self.length * (1 + self._varied * (2 * drawn - 1))

    def enter(self, heard_steps: Sequence[float]) -> None:
        """Go on where the others are, if they are ahead."""
        theirs = middle(heard_steps, self.step)
        ahead = min(theirs, self._total_steps_at(theirs))
        if ahead > self.step:
            self.step, self.debt = float(ahead), 0.0
