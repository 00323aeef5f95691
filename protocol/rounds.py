"""Rounds without a round master.

The idea (design: "a round is H inner steps of the group's median peer"): nobody starts or ends a
round for others. Each peer derives how many inner steps *it* owes to a round from speeds that all
peers tell each other, so that peers of unequal speed reach the end of a round at about the same
time, each having trained all the while.

Rules
  1. A peer owes H * speed_i / median speed steps to a round: the median peer does H. It does them
     whole: the largest number that keeps the sum of what it did within the sum of what it owed, and
     at least one. So a slow peer, whose rounds have few steps, is on time on the whole.
  2. Learning rate, schedule, data and the end of the run are functions of the *nominal* step
     round * H + H * fraction, where fraction = steps done / quota. No local counter is consulted,
     so a peer that was away resumes with the swarm's learning rate (after a warm-up of its own,
     peer/training/schedule.py).
  3. A peer that is more than one round behind goes on with the newest round it has heard of. One
     that is behind by less shortens its quota, at most by half, so that it ends its round with the
     others; a newcomer enters the newest round.
  4. A peer that is more than LOST_LAG_ROUNDS behind is lost: its weights belong to another time and
     must not be averaged into this one. It takes the swarm's state anew, as a joiner does. (A
     founder that is started again, with fresh weights, is such a peer.) Nobody takes over a state
     with which it would be lost at once.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final

EQUAL_SPEED_BAND: Final = 0.1
"""Speeds within this share of the median count as it: noise must not change quotas."""

MAX_LAG_ROUNDS: Final = 1
"""A peer this many rounds behind catches up by itself; further behind, it jumps."""

LOST_LAG_ROUNDS: Final = 20
"""A peer further behind than this takes the swarm's state anew."""

_EPSILON: Final = 1e-9
"""A third of a step, three times, is one."""

LARGEST_CATCH_UP: Final = 0.5
"""Largest part of a quota that is left out to catch up."""


def owed_steps(inner_steps: int, own_speed: float, member_speeds: Sequence[float]) -> float:
    """Inner steps that a peer owes to a round (rule 1).

    Args:
        inner_steps: H.
        own_speed: our inner steps per second.
        member_speeds: those of the members of the group, ours among them or not.
    """
    speeds = [speed for speed in member_speeds if speed > 0]
    if not speeds or own_speed <= 0:
        return inner_steps
    ratio = own_speed / median(speeds)
    if abs(ratio - 1) <= EQUAL_SPEED_BAND:
        return inner_steps
    return inner_steps * ratio


def whole_steps(inner_steps: int, own_speed: float, member_speeds: Sequence[float]) -> int:
    """The same in whole steps, by itself: the nearest number of them, and at least one."""
    return max(1, round(owed_steps(inner_steps, own_speed, member_speeds)))


def place(round_: int, fraction: float, age_s: float, rounds_per_s: float) -> float:
    """Where a peer is by now, in rounds: not beyond the round it spoke of, where it may wait.

    Args:
        round_, fraction: where it was when it told us.
        age_s: how long ago that was.
        rounds_per_s: of the swarm; quotas see to it that it is that of every peer.
    """
    return round_ + min(1.0, fraction + max(0.0, age_s) * rounds_per_s)


def catch_up(owed: float, own_round: int, others: Sequence[float]) -> float:
    """The steps that a peer owes that opens `own_round` when the others are that far (rule 3).

    Args:
        owed: as `owed_steps` says.
        others: the `place` of each other peer in training.
    """
    lag = median(others) - own_round if others else 0.0
    return owed * min(1.0, max(1 - LARGEST_CATCH_UP, 1 - lag))


class Quotas:
    """Whole steps out of what is owed, round after round (rule 1)."""

    def __init__(self) -> None:
        self._rest = 0.0

    def __repr__(self) -> str:
        return f"<Quotas, {self._rest:.2f} steps over>"

    def next(self, owed: float) -> int:
        """The steps of one more round. What is left over goes to the next; no debt is kept."""
        steps = max(1, math.floor(self._rest + owed + _EPSILON))
        self._rest = max(0.0, self._rest + owed - steps)
        return steps


def nominal_step(round_: int, inner_steps: int, fraction: float) -> int:
    """The swarm's step count at this point of a round (rule 2); never beyond the round's end."""
    return round_ * inner_steps + int(inner_steps * min(1.0, max(0.0, fraction)))


def next_round(finished_round: int, heard_rounds: Iterable[int]) -> int:
    """The round to train after `finished_round` (rule 3).

    Args:
        finished_round: the round just closed.
        heard_rounds: rounds that other peers say they are training.
    """
    following = finished_round + 1
    newest = max(heard_rounds, default=following)
    return newest if newest - following > MAX_LAG_ROUNDS else following


def is_left_behind(training_round: int, heard_rounds: Iterable[int]) -> bool:
    """Whether the round in training should be given up for a newer one (rule 3)."""
    return max(heard_rounds, default=training_round) - training_round > MAX_LAG_ROUNDS


def is_lost(own_round: int, heard_rounds: Iterable[int]) -> bool:
    """Whether our weights are too old to be averaged with those of the others (rule 4)."""
    return max(heard_rounds, default=own_round) - own_round > LOST_LAG_ROUNDS


def oldest_useful(heard_rounds: Iterable[int]) -> int:
    """The oldest round that a newcomer can begin at without being lost (rule 4)."""
    return max(0, max(heard_rounds, default=0) - LOST_LAG_ROUNDS)
