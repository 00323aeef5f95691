"""How long peers of unequal speed wait for each other: a model of the close of rounds.

In round r peer i begins at b_i and does its quota, q_i whole steps, each of which takes 1 / speed_i
times a log-normal factor of mean 1. Pairs are those that the matchmaker makes when all are known
to all (pairing.py). With c for the close, x for the length of an exchange, a pair's outer step is
at

    settled = max(c_i, c_j) + x

blocking    b_i(r + 1) = settled: a peer waits for its partner until max(c_i, c_j), then for x
overlap     b_i(r + 1) = c_i: nobody waits. A round that is due before the one before it is settled
            trains on past its quota; what a slow partner costs is the age of the vectors
early       whoever trains while its partner has closed closes too, after the step in progress, if
            half of its quota is done: a rule that the matchmaker had once (docs/log.md)

Not in the model, but in the daemon (bench/simulated_pace.py): catching up
(protocol/schedule/rounds.py, rule 3), partners of second choice, matches that fail, the time that
finding a partner takes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from bench.latency_model import log_normal_sigma

from .pairing import groups_of_round

Vector = npt.NDArray[np.float64]
JITTER: Final = 0.05
"""Standard deviation of a step's time over its mean."""
EXCHANGE: Final = 0.02
"""Length of an exchange, in rounds of the median peer."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules by which rounds are closed."""

    overlap: bool = False
    early: bool = False


BLOCKING: Final = Rules()


@dataclass(frozen=True, slots=True)
class Pace:
    """Peers, and what they owe to a round.

    Attributes:
        speeds: in steps per step of the median peer.
        quotas: steps of a round.
        inner_steps: H.
        exchange: length of an exchange, in H steps of the median peer.
    """

    speeds: Sequence[float]
    quotas: Sequence[int]
    inner_steps: int
    exchange: float = EXCHANGE
    jitter: float = JITTER


@dataclass(frozen=True, slots=True)
class Waits:
    """The waits of each peer; the first two as shares of the whole time.

    Attributes:
        for_partner: in which it neither trained nor exchanged.
        for_exchange: in which it exchanged and did not train.
        steps: done, over what its quotas say.
        age: from the close of a round to its outer step, in steps of the median peer, mean.
    """

    for_partner: Vector
    for_exchange: Vector
    steps: Vector
    age: Vector


def waits(pace: Pace, rounds: int, seed: int, rules: Rules = BLOCKING) -> Waits:
    """Let the peers go through their rounds."""
    model = _Model(pace, rules, np.random.default_rng(seed))
    for round_ in range(rounds):
        for group in groups_of_round("pairs", f"waiting-{seed}", round_, len(pace.speeds)):
            model.close(group)
    return model.found(rounds)


class _Model:
    def __init__(self, pace: Pace, rules: Rules, rng: np.random.Generator) -> None:
        self._pace, self._rules, self._rng = pace, rules, rng
        count = len(pace.speeds)
        self._begins, self._settled = np.zeros(count), np.zeros(count)
        self._for_partner, self._for_exchange = np.zeros(count), np.zeros(count)
        self._steps, self._ages = np.zeros(count), np.zeros(count)

    def close(self, group: Sequence[int]) -> None:
        """The next round of a group: of one alone, or a pair."""
        step_ends = [self._step_ends(peer) for peer in group]
        last_steps = [self._due(peer, ends) for peer, ends in zip(group, step_ends, strict=True)]
        if self._rules.early:
            last_steps = list(self._closed_early(group, step_ends, last_steps))
        closes = [float(ends[last]) for ends, last in zip(step_ends, last_steps, strict=True)]
        exchange = self._pace.exchange * self._pace.inner_steps if len(group) > 1 else 0.0
        settled = max(closes) + exchange
        for peer, last, closed in zip(group, last_steps, closes, strict=True):
            self._steps[peer] += last + 1
            self._ages[peer] += settled - closed
            self._settled[peer] = settled
            if self._rules.overlap:
                self._begins[peer] = closed
            else:
                self._for_partner[peer] += max(closes) - closed
                self._for_exchange[peer] += exchange
                self._begins[peer] = settled

    def found(self, rounds: int) -> Waits:
        whole = self._begins
        return Waits(
            for_partner=self._for_partner / whole,
            for_exchange=self._for_exchange / whole,
            steps=self._steps / (np.array(self._pace.quotas) * rounds),
            age=self._ages / rounds,
        )

    def _step_ends(self, peer: int) -> Vector:
        """Ends of the steps of the round; some more than the quota, for a peer that trains on."""
        pace, begins = self._pace, float(self._begins[peer])
        sigma = log_normal_sigma(pace.jitter)
        unsettled = max(0.0, self._settled[peer] - begins) * pace.speeds[peer]
        count = pace.quotas[peer] + int(2 * unsettled) + 2
        factors = self._rng.lognormal(-sigma * sigma / 2, sigma, count)
        ends: Vector = begins + np.cumsum(factors) / pace.speeds[peer]
        return ends

    def _due(self, peer: int, ends: Vector) -> int:
        """The step that closes the round: the quota's last, or the first after the settlement."""
        return self._first_from(self._pace.quotas[peer] - 1, ends, self._settled[peer])

    def _closed_early(
        self, group: Sequence[int], step_ends: Sequence[Vector], last_steps: Sequence[int]
    ) -> Iterator[int]:
        first = min(float(ends[last]) for ends, last in zip(step_ends, last_steps, strict=True))
        for peer, ends, last in zip(group, step_ends, last_steps, strict=True):
            half = -(-self._pace.quotas[peer] // 2)
            yield min(last, self._first_from(half - 1, ends, max(first, self._settled[peer])))

    @staticmethod
    def _first_from(step: int, ends: Vector, not_before: float) -> int:
        """The first step, from this one on, that ends at that time or later."""
        return step + int(np.argmax(ends[step:] >= not_before))
