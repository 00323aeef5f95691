"""How many inner steps a peer puts between two averages, where the run leaves that open.

The idea. At equal bytes, more averages in coarser codes learn better than fewer in finer ones, so a
line that is idle is learning that is lost. With `sync.inner_steps = "auto"` a peer chooses its H so
that its line is nearly always in an exchange. Nothing that peers agree on depends on that: a
*nominal round* has AUTO_ROUND_STEPS steps (run_spec.py) for everybody, and the end of the run,
amendments, quotas, the middle of the others and the bounds of partners' distance count in nominal
steps and rounds. H is the length of a peer's *own* rounds, whose numbers say nothing to others;
gossip pairs peers that are free, whatever lies behind them.

A round lasts until the exchange before it has ended, so with the smallest H the line would be busy
too. But peers would then always be free at the moment at which their exchange ends, with the same
partner and nobody else, and without the slack that is needed to meet others (`Patience`); and a
trainer stands still for a moment at each average.

The rules
  1. Each average has a wish: the H with which its exchange would have filled LINE_SHARE of the
     round, or, if that is more, with which it would have kept the trainer from training for
     PAUSE_SHARE of it (rule 6). The search for a partner does not count: it grows with H.
  2. Wishes of one partner, among the last KEPT_WISHES, are averaged without the outer quarters. The
     fastest partners show what our own line can do, so they count: the lowest of these means, with
     all that are at most NEAR times it, together in proportion to their averages. (NEAR is how far
     noise of a quarter in either direction takes two that are equal.) The slower partners are
     waited for all the same, since a round lasts as long as its exchange.
  3. H changes when that is more than BAND away from it, and at least FEWEST wishes are there: to
     what is wished, in whole steps, rounded up. So estimates that are off by a tenth in either
     direction move nothing. Where partners are of two kinds, the share of either must not decide
     anew each time: to come down, ENOUGH_SHARE of the averages must be with the fastest; to go up,
     none of the last NEWEST, and those before them are forgotten.
  4. H is LEAST_INNER_STEPS at least, and at most MOST_INNER_STEPS: beyond, replicas drift too far,
     and rounds that are too short for their line grow by themselves.
  5. Exchanges that were given up since they took too long count with the time that they took.
     Others that failed say nothing.
  6. The trainer is kept from training while it takes a snapshot and merges an average, and by what
     works for averages beside it, if no processor is idle that could do that. What is taken beside
     it all the time, for whatever and whoever, is known from between two averages, and left out: it
     would be no less with a larger H.

A partner that is slow, or pretends to be, moves nothing, unless there are no others. One that
pretends to be faster than our line (it cannot send faster, only confirm what it has not got) makes
H too small, which costs slack, but leaves no line idle.

Invariants: H is within its bounds; where wishes are off by BAND at most, H is off by no more, but
for whole steps; the same averages give the same H.

Pure: times come in with each average.
Source: docs/decisions/0036-inner-steps-by-the-line.md.
"""

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from protocol.limits import EPSILON

LINE_SHARE: Final = 0.8
"""Part of a round that its exchange should take."""
PAUSE_SHARE: Final = 0.05
"""Part of a round for which an average may keep the trainer from training."""
BAND: Final = 0.25
"""H stays while what is wished is within so much of it."""
KEPT_WISHES: Final = 24
"""Averages that count."""
NEWEST: Final = 16
"""The last of them, by which H goes up: a line that was fast must not count for long."""
NEAR: Final = (1 + BAND) / (1 - BAND)
"""Partners of which one is at most this many times as slow as the other count together."""
ENOUGH_SHARE: Final = 0.25
"""Part of the averages that those with the fastest partners must be, for a lower H."""
FEWEST: Final = 8
"""Averages before H changes for the first time."""
FIRST_INNER_STEPS: Final = 8
"""H before it is known what fits: small, so that this is known soon."""
LEAST_INNER_STEPS: Final = 2
"""The least that was measured (docs/results/optimizers.md)."""
MOST_INNER_STEPS: Final = 512
"""An exchange may last no longer (eight nominal rounds)."""


def wished(line_s: float, pause_s: float, nominal_step_s: float) -> float:
    """The H that an average asks for (rules 1 and 4).

    Args:
        line_s: from the agreement with the partner to the outer step.
        pause_s: for which the trainer was kept from training.
        nominal_step_s: how long a nominal step takes us, training alone.
    """
    round_s = max(line_s / LINE_SHARE, pause_s / PAUSE_SHARE)
    if not (nominal_step_s > 0 and math.isfinite(round_s)):
        return float(MOST_INNER_STEPS)
    return min(float(MOST_INNER_STEPS), max(1.0, round_s / nominal_step_s))


@dataclass(frozen=True, slots=True)
class ProcessorUse:
    """A moment, and the processors' seconds until then: for averages and more, and idle ones."""

    at_s: float
    taken_s: float
    idle_s: float


class AveragingCpu:
    """Processor time that averages take beside the trainer (rule 6).

    An average lasts from when a partner is found until it may be merged.
    """

    def __init__(self) -> None:
        self._begun = self._ended = ProcessorUse(math.nan, 0.0, 0.0)
        self._usual = 0.0

    def begin(self, now: ProcessorUse) -> None:
        """A partner is found."""
        seconds = now.at_s - self._ended.at_s
        if seconds > 0:
            # less than nothing: a process of ours has begun anew, which counts from 0
            self._usual = max(0.0, (now.taken_s - self._ended.taken_s) / seconds)
        self._begun = now

    def end(self, now: ProcessorUse) -> float:
        """The average may be merged. Returns the processor seconds that it took from other work."""
        begun, since = self._begun, self._begun if math.isnan(self._ended.at_s) else self._ended
        self._ended = now
        more_s = now.taken_s - begun.taken_s - self._usual * (now.at_s - begun.at_s)
        seconds = now.at_s - since.at_s
        idle = (now.idle_s - since.idle_s) / seconds if seconds > 0 else 1.0
        return max(0.0, more_s) * max(0.0, 1.0 - idle)


class RoundLength:
    def __init__(self) -> None:
        self.inner_steps = FIRST_INNER_STEPS
        self._wishes: deque[tuple[str, float]] = deque(maxlen=KEPT_WISHES)

    def averaged(self, partner_id: str, wish: float) -> bool:
        """Note that one more average is over. Returns whether H has changed."""
        self._wishes.append((partner_id, wish))
        if len(self._wishes) < FEWEST:
            return False
        before = self.inner_steps
        wishes = list(self._wishes)
        lower, higher = _fastest(wishes, ENOUGH_SHARE * len(wishes)), _fastest(wishes[-NEWEST:], 1)
        if lower < before * (1 - BAND):
            self.inner_steps = _whole(lower)
        elif higher > before * (1 + BAND):
            self.inner_steps = _whole(higher)
            self._wishes = deque(wishes[-NEWEST:], maxlen=KEPT_WISHES)
        return self.inner_steps != before


def _fastest(wishes: list[tuple[str, float]], enough: float) -> float:
    """The wish of the fastest partners that have enough averages together (rule 2)."""
    by_partner: dict[str, list[float]] = {}
    for partner_id, wish in wishes:
        by_partner.setdefault(partner_id, []).append(wish)
    usual = sorted((_without_outer(each), len(each)) for each in by_partner.values())
    for lowest, _ in usual:
        near = [each for each in usual if lowest <= each[0] <= NEAR * lowest]
        if sum(averages for _, averages in near) >= enough:
            return fmean([wish for wish, _ in near], [averages for _, averages in near])
    return usual[-1][0]


def _whole(wish: float) -> int:
    """The H for a wish (rules 3 and 4)."""
    return min(MOST_INNER_STEPS, max(LEAST_INNER_STEPS, math.ceil(wish - EPSILON)))


def _without_outer(wishes: list[float]) -> float:
    left_out = len(wishes) // 4
    return fmean(sorted(wishes)[left_out : len(wishes) - left_out])
