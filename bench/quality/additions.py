"""What an arm may add to pairs, as others found to help (tried.py says which arms have it)."""

from dataclasses import dataclass
from typing import Final

from peer.averaging.gossip.outer_step import NolocoFactors
from protocol.fragment.fragments import Span, cut_fragments
from protocol.run.layout import Layout

RISE: Final = 0.1
"""What outer momentum rises by in each round, up to `MOST`."""
MOST: Final = 0.5
LATE_SHARE: Final = 0.5
"""Share of the run after which it is late."""


@dataclass(frozen=True, slots=True)
class Additions:
    """What is added; nothing, unless it is said.

    Attributes:
        momentum_after: rounds after which outer momentum rises; 0 has that of the arm always.
        restart_every: rounds after which outer momentum begins anew; 0 never.
        moments_every: rounds after which the first moments of inner optimizers are averaged, too;
            0 never.
        late_batches: batches of an inner step late in the run; it stands for as many steps.
        waits_for_blocks: blocks whose averages do not come late, the first of the model, with all
            that belongs to no block; 0 waits for nothing.
    """

    momentum_after: int = 0
    restart_every: int = 0
    moments_every: int = 0
    late_batches: int = 1
    waits_for_blocks: int = 0

    def factors_at(self, round_: int, usual: NolocoFactors) -> NolocoFactors:
        """The factors of the outer step of a round, where the arm's are `usual`."""
        if not self.momentum_after:
            return usual
        alpha = min(MOST, RISE * max(0, round_ - self.momentum_after))
        return NolocoFactors(alpha, 1 - alpha, 1 - alpha)

    def restarts(self, round_: int) -> bool:
        """Whether outer momentum begins anew with this round."""
        return bool(self.restart_every) and round_ % self.restart_every == 0

    def averages_moments(self, round_: int) -> bool:
        """Whether first moments are averaged in this round."""
        return bool(self.moments_every) and (round_ + 1) % self.moments_every == 0

    def batches_at(self, share: float) -> int:
        """Batches of an inner step, when this share of the run is over."""
        return self.late_batches if share >= LATE_SHARE else 1

    def waited_for(self, layout: Layout) -> list[Span]:
        """The parts of the vector whose averages do not come late."""
        if not self.waits_for_blocks:
            return []
        first = cut_fragments(layout, "sequential", 1)[: 1 + self.waits_for_blocks]
        return [span for fragment in first for span in fragment.spans]


NOTHING_ADDED: Final = Additions()
