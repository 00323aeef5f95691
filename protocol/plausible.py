"""Whether values of another peer can be those of an honest one, by what was seen recently.

Idea. What honest peers send differs from what we have by about as much today as it did in the last
exchanges, whoever sent it. A vector that is far further away is a lie, a fault, or of another time,
and is not taken. What is let through moves us no further than a few times the usual way. A liar
within the bounds has the pull of one peer, and one beyond them has none.

Rules
  1. The last KEPT_AVERAGES distances that were let through are kept. An occasion counts once: a
     distance that replaces another stands in its place. In their middle each sender has one voice.
     The bound is the middle times a factor: as many times as their scatter explains (BOUND.spreads
     median absolute deviations of their logarithms), within BOUND; its largest holds as long as
     fewer than MANY are there. So neither a calm time nor a wild one, nor a liar that makes some of
     them large, makes it too narrow or too wide.
  2. Before FIRST distances are there, the bound is the scale that the caller gives, which is wide:
     a peer that was elsewhere must be able to come back.
  3. Beyond some middles (within CLIP, by the scatter) a vector counts less, so that it pulls no
     more than one at that distance would; and it is remembered as if it were there, so that liars
     do not shift what is usual. Before FIRST distances the caller's expectation stands in the place
     of the middle, and CLIP.largest holds. The caller may say what is the least that counts as
     usual, by what it knows itself, so that nobody makes others implausible by bringing us what we
     have.
  4. A peer that finds values of ODD_ONES peers implausible in a row, or ODD_TIMES of any, is itself
     the one that is elsewhere (it was parted, or began anew): it forgets what it saw, and rule 2
     holds. One sender that was implausible ODD_ONES times, whatever others brought meanwhile, is
     let through the next time, within the scale: parts of a swarm come together again by such
     steps. They are clipped, and their sender has rested three times before each (matchmaking.py),
     ever longer: so a liar has two or three of them in an hour.
  5. A distance that is no number, or infinite, is never plausible.
  6. Replicas move apart with the steps that they train between two averages. After k times as many
     steps as usual, a pair's together, the bound is k times as wide (BOUND.largest at most). The
     clip moves k times as far only where our own steps are that many: of theirs we have their word
     alone. Our own steps are counted from the last time that this sender moved us, or that two
     others did, whichever is later. So one peer that is everybody's partner does not shut the
     others out. What is much nearer than usual (half as far) moves nobody.

The numbers were chosen by what lies cost in learning (bench/hostile.py): distances of honest peers
lie within a fifth of their middle, and what is let through is what a liar can use.

Values are clipped where they are (gossip: the weight of the partner in the mean; fragments: that of
a contribution); here are numbers only.
"""

import math
import sys
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from itertools import accumulate
from statistics import median_low
from typing import Final, NamedTuple

from protocol.limits import MAX_LINKS

KEPT_AVERAGES: Final = 16
"""Averages of which the distance, or the gain, is remembered."""
FIRST: Final = 4
MANY: Final = 8


class Factor(NamedTuple):
    """A factor of the middle: by `spreads` deviations of the scatter, within two bounds."""

    spreads: float
    least: float
    largest: float


BOUND: Final = Factor(6.0, least=4.0, largest=8.0)
"""How many times as far as usual a plausible value may be: by their scatter, and again by steps."""
CLIP: Final = Factor(2.0, least=1.25, largest=1.5)
"""The clip holds for contributions to fragments too, of which all are there at once."""
CLIP_OF_TWO: Final = 4.0
"""The clip of two contributions to a fragment: neither is the middle, and a fast
peer's is honestly longer."""
ODD_ONES: Final = 3
ODD_TIMES: Final = 8
NO_LENGTH: Final = 1e15
"""What stands for the length of a contribution that is as long or longer: it counts nothing. (The
squares of such values may be beyond fp32 on one machine, and not on another.)"""
LENGTH_TOLERANCE: Final = 1e-3
"""Sums of squares depend a little on their order, and so on the machine: so far, by ratio."""
_NORMAL: Final = 1.4826
"""A median absolute deviation of normal values, times this, is their standard deviation."""
_ROUNDING: Final = 1e-9
"""The error of sums of weights."""


class _Distance(NamedTuple):
    peer_id: str
    distance: float
    steps: float


class Plausibility:
    def __init__(self) -> None:
        self._seen: deque[_Distance] = deque(maxlen=KEPT_AVERAGES)
        self._odd: deque[str] = deque(maxlen=ODD_TIMES)
        self._refused: dict[str, int] = {}
        self._steps = 0
        self._moved_at: dict[str, int] = {}
        self._moved_before = 0

    @property
    def has_seen_enough(self) -> bool:
        """Whether the bound is that of what was seen (rule 1)."""
        return len(self._seen) >= FIRST

    def trained(self, steps: int) -> None:
        """We have made this many further steps (rule 6)."""
        self._steps += steps

    def bound(self, scale: float, steps: float = 0, least: float = 0.0) -> float:
        """The largest distance that is plausible after a pair's steps (rules 1, 2, 3 and 6)."""
        if not self.has_seen_enough:
            return scale
        factor = self._factor(BOUND) if len(self._seen) >= MANY else BOUND.largest
        return self._reach(steps) * factor * max(least, self._middle)

    def is_usual(self, distance: float) -> bool:
        """Whether nothing that the caller expects matters to what counts at this distance."""
        return self.has_seen_enough and distance <= self._usual(0.0)

    @property
    def _middle(self) -> float:
        return self._middle_of([seen.distance for seen in self._seen])

    def _middle_of(self, values: Sequence[float]) -> float:
        return middle_of([seen.peer_id for seen in self._seen], values)

    def _reach(self, steps: float) -> float:
        """How many times as far as usual replicas may have moved in these steps (rule 6)."""
        return min(BOUND.largest, max(1.0, steps / max(1, self._usual_steps)))

    @property
    def _usual_steps(self) -> float:
        return self._middle_of([seen.steps for seen in self._seen])

    def _factor(self, within: Factor) -> float:
        """The factor of the middle that the scatter explains."""
        logarithms = [math.log(seen.distance) for seen in self._seen]
        middle = self._middle_of(logarithms)
        spread = _NORMAL * self._middle_of([abs(each - middle) for each in logarithms])
        explained = math.exp(min(10.0, within.spreads * spread))
        return min(within.largest, max(within.least, explained))

    def _usual(self, least: float) -> float:
        """The distance from which on a vector counts less, after the usual steps (rule 3)."""
        return self._factor(CLIP) * max(least, self._middle)

    def _since(self, peer_id: str) -> int:
        """Our own steps since that peer or two others moved us (rule 6)."""
        two = sorted(self._moved_at.values())[-2:]
        return self._steps - max(self._moved_at.get(peer_id, 0), *two[:1], 0)

    def share(
        self,
        peer_id: str,
        distance: float,
        scale: float,
        *,
        expected: float = math.inf,
        least: float = 0.0,
        their_steps: int = 0,
        instead: bool = False,
        remember: bool = True,
        replaces_ours: bool = False,
    ) -> float | None:
        """How much a vector counts: 1 as any other, less if it is clipped; None for not at all.

        Args:
            distance: how far it is from what we have.
            scale: the bound while too little was seen.
            expected: what counts as usual while too little was seen; nothing is clipped without.
            least: the least that counts as usual.
            their_steps: trained since their last average, as they say.
            instead: whether it comes in the place of the one before.
            remember: whether it is an occasion like those to come; where peers draw together for
                good, distances shrink and say nothing of what is usual.
            replaces_ours: it takes the place of ours: it pulls as far as one that counts half.
        """
        own_steps = self._since(peer_id)
        self._moved_before = self._moved_at.get(peer_id, 0)
        steps: float = own_steps + their_steps
        bound = self.bound(scale, steps, least)
        if self._refused.get(peer_id, 0) >= ODD_ONES:
            bound = max(bound, scale)
        if not math.isfinite(distance) or distance > bound:
            self._note_refused(peer_id)
            return None
        usual = most = self._usual(least) if self.has_seen_enough else CLIP.largest * expected
        if self.has_seen_enough:
            most *= self._reach(own_steps)
        if replaces_ours:
            most = min(most, bound) / 2
        if instead and self._seen:
            self._seen.pop()
        self._refused.pop(peer_id, None)
        if not self.has_seen_enough or distance >= self._middle / 2:
            self._odd.clear()
            keep_newest(self._moved_at, peer_id, self._steps)
        else:
            steps = min(steps, self._usual_steps)
        if remember:
            # Not 0: a logarithm is taken.
            kept = max(sys.float_info.min, min(distance, usual))
            self._seen.append(_Distance(peer_id, kept, steps))
        return 1.0 if distance <= most else most / distance

    def not_taken(self, peer_id: str) -> None:
        """The vector let through last, of that peer, has not moved us after all (rule 6)."""
        if peer_id in self._moved_at:
            self._moved_at[peer_id] = self._moved_before

    def _note_refused(self, peer_id: str) -> None:
        keep_newest(self._refused, peer_id, self._refused.get(peer_id, 0) + 1)
        self._odd.append(peer_id)  # rule 4
        if len(set(self._odd)) >= ODD_ONES or len(self._odd) == ODD_TIMES:
            self._odd.clear()
            self._seen.clear()


def middle_of(senders: Sequence[str], values: Sequence[float]) -> float:
    """The middle of one value of each occasion, the lower of two; senders weigh equally."""
    occasions = Counter(senders)
    weights = [1 / occasions[sender] for sender in senders]
    ordered = sorted(zip(values, weights, strict=True))
    sums = list(accumulate(weight for _, weight in ordered))
    return ordered[bisect_left(sums, sums[-1] / 2 - _ROUNDING)][0]


def keep_newest(kept: dict[str, int], peer_id: str, number: int) -> None:
    """Keep the number of a peer, as the newest of as many peers as may be linked with us."""
    kept.pop(peer_id, None)
    kept[peer_id] = number
    if len(kept) > MAX_LINKS:
        del kept[next(iter(kept))]


def told_length(length: float) -> float:
    """A length as a contribution tells it."""
    return min(length, NO_LENGTH) if math.isfinite(length) else NO_LENGTH


def is_length(told: float, found: float) -> bool:
    return math.isclose(told, told_length(found), rel_tol=LENGTH_TOLERANCE)


def contribution_shares(told: Sequence[float]) -> list[float]:
    """How much each contribution to a chunk counts, by the lengths that they tell.

    Whole machines agree on this to the bit: the lengths are given, and there are few operations.
    """
    lengths = [length if length < NO_LENGTH else math.inf for length in told]
    return clipped_shares(lengths, CLIP.largest if len(lengths) > 2 else CLIP_OF_TWO)


def clipped_shares(lengths: Sequence[float], factor: float = CLIP.largest) -> list[float]:
    """How much each of several vectors counts in their mean, by their lengths.

    None pulls further than `factor` times the middle one (of two middle ones the shorter) would;
    one whose length is no number counts nothing.
    """
    finite = [length for length in lengths if math.isfinite(length)]
    most = factor * median_low(finite) if finite else 0.0
    return [
        (1.0 if length <= most else most / length) if math.isfinite(length) else 0.0
        for length in lengths
    ]
