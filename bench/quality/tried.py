"""Arms that try what others found to help, on pairs that average plainly with Muon inside.

    momentum-late     no outer momentum for ten rounds; then it rises by a tenth each round, up to
                      a half, and the gain falls so that a steady move counts once (2511.17849)
    momentum-restart  outer momentum of a half that begins anew every third round (2605.28585)
    moments           every fourth round pairs average the first moments of their inner optimizers,
                      too, in int8 (MT-DAO, 2510.05361; DES-LOC, 2505.22549)
    batches           in the second half of the run two batches make one step, at a rate higher by
                      the root of two: half of the noise of a step
    first-waits       averages are late, but those of embedding, head, norms and the first half of
                      the blocks are waited for (Factored Gossip DiLoCo, 2606.22768: the first two)

Names end with H and Muon's rate, as those of the plain arms that they stand beside. In `batches` a
step with two batches stands where two were: tokens and averages are as many as before.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from peer.averaging.gossip.outer_state import OuterRule
from peer.averaging.noloco.outer_step import NolocoFactors
from protocol.fragment.fragments import Span, cut_fragments
from protocol.run.layout import Layout

from .arms import Arm

LATE_ROUNDS: Final = 10
RISE: Final = 0.1
MOST: Final = 0.5
RESTART_ROUNDS: Final = 3
MOMENTS_ROUNDS: Final = 4
LATE_SHARE: Final = 0.5
WAITED_BLOCKS: Final = 2


@dataclass(frozen=True, slots=True)
class TriedArm(Arm):
    """Pairs with something added.

    Attributes:
        momentum_after: rounds after which outer momentum rises; 0 has that of `alpha` always.
        restart_every: rounds after which outer momentum begins anew; 0 never.
        moments_every: rounds after which first moments are averaged; 0 never.
        late_batches: batches of a step in the second half.
        waits_for_blocks: blocks whose averages do not come late, the first of the model, with all
            that belongs to no block; 0 waits for nothing.
    """

    momentum_after: int = 0
    restart_every: int = 0
    moments_every: int = 0
    late_batches: int = 1
    waits_for_blocks: int = 0

    def rule_at(self, round_: int) -> OuterRule:
        if not self.momentum_after:
            return self.rule
        alpha = min(MOST, RISE * max(0, round_ - self.momentum_after))
        return NolocoFactors(alpha, 1 - alpha, 1 - alpha)

    def restarts(self, round_: int) -> bool:
        return bool(self.restart_every) and round_ % self.restart_every == 0

    def averages_moments(self, round_: int) -> bool:
        return bool(self.moments_every) and (round_ + 1) % self.moments_every == 0

    def batches_at(self, share: float) -> int:
        return self.late_batches if share >= LATE_SHARE else 1

    def waited_for(self, layout: Layout) -> list[Span]:
        if not self.waits_for_blocks:
            return []
        first = cut_fragments(layout, "sequential", 1)[: 1 + self.waits_for_blocks]
        return [span for fragment in first for span in fragment.spans]


def _plain(inner_steps: int, muon: float) -> TriedArm:
    return TriedArm(
        f"h{inner_steps}-muon-{muon:g}",
        alpha=0.0,
        beta=1.0,
        code="int8",
        rounds_of=inner_steps / 8,
        muon=muon,
    )


def _tried() -> Iterator[TriedArm]:
    for late in (0.25, 0.7):
        plain = _plain(16, 8.0)
        name = f"first-waits-{plain.name}-late-{late:g}"
        yield replace(plain, name=name, delay=late, waits_for_blocks=WAITED_BLOCKS)
    for inner_steps in (2, 8):
        for muon in (2.0, 4.0, 8.0, 16.0):
            plain = _plain(inner_steps, muon)
            yield replace(plain, name=f"momentum-late-{plain.name}", momentum_after=LATE_ROUNDS)
            yield replace(
                plain,
                name=f"momentum-restart-{plain.name}",
                alpha=MOST,
                beta=1 - MOST,
                restart_every=RESTART_ROUNDS,
            )
            yield replace(plain, name=f"moments-{plain.name}", moments_every=MOMENTS_ROUNDS)
            yield replace(plain, name=f"batches-{plain.name}", late_batches=2)


TRIED_ARMS: Final = {arm.name: arm for arm in _tried()}
