"""Rounds without a round master.

The idea. A round is H inner steps of the group's median peer, and nobody starts or ends it for
others. Each peer derives how many inner steps *it* owes to a round from speeds that all peers tell
each other, so that peers of unequal speed are equally far in the run, each having trained all the
while.

Rules
  1. A peer owes H * speed_i / median speed steps to a round: the median peer does H. It does them
     whole: the largest number that keeps the sum of what it did within the sum of what it owed, and
     at least one. So a slow peer, whose rounds have few steps, is on time on the whole.
  2. The *nominal* step counts trained steps: each own step is H / owed nominal ones, its stride.
     Learning rate, schedule, data and the end of the run follow it. It goes on rising when a round
     lasts beyond its quota. No local counter is consulted, so a peer that was away resumes at the
     swarm's place in the schedule. (Its learning rate comes to the schedule's over a warm-up of its
     own, peer/training/schedule.py.)
  3. With fragments, a peer that is behind the others owes less, at most by half, so that it catches
     up. In gossip, where one that is ahead would not have to wait, each owes so many steps that its
     *nominal pace* is higher by a third of its lag in rounds, or lower by a third of its lead, at
     most by half. (As much either way: a change of what is owed by equal parts would speed peers up
     more than it slows them down, and the schedule would run ahead of the training.) A peer that is
     too far behind for that goes on where the others are, and keeps its weights; a newcomer begins
     where they are.
  4. Where the others are is the middle of what they say; of two middle ones, and so of two others,
     it is the lower (`middle`). One peer among several moves nothing, whatever it says,
     nor does one that was isolated and comes back far ahead.
  5. A peer that is more than LOST_LAG_ROUNDS behind is lost: its weights belong to another time and
     must not be averaged into this one. It takes the swarm's state anew, as a joiner does. (A
     founder that is started again, with fresh weights, is such a peer.) Nobody takes over a state
     with which it would be lost at once.

How rounds follow each other differs by the way of averaging: with fragments all peers train the
same round, by number (`next_round`); gossip has no such number (own_rounds.py).
"""

import math
from collections.abc import Sequence
from statistics import median, median_low
from typing import Final

EQUAL_SPEED_BAND: Final = 0.1
"""Speeds within this share of the median count as it: noise must not change quotas."""

MAX_LAG_ROUNDS: Final = 1
"""With fragments, a peer this many rounds behind catches up by itself; further behind, it jumps."""

LOST_LAG_ROUNDS: Final = 20
"""A peer further behind than so many rounds of nominal steps takes the swarm's state anew."""

_EPSILON: Final = 1e-9
"""A third of a step, three times, is one."""

LARGEST_CATCH_UP: Final = 0.5
"""Largest part of what is owed that is left out to catch up."""

TOGETHER_ROUNDS: Final = 3.0
"""In gossip, a peer comes back to the others within about so many rounds. In one alone it would
overshoot where an exchange, and so a round, lasts for several."""

LARGEST_CHANGE_OF_PACE: Final = 0.5
"""Largest change of the pace, up or down: as much either way, or all would drift."""

LARGEST_RATIO: Final = 1000.0
"""Times that a peer is taken to be faster than the others, at most: speeds are what others say."""

LARGEST_RATIO_OF_TWO: Final = 16.0
"""Times that the only other peer is taken to be faster or slower than we are, at most."""


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
    ratio = min(LARGEST_RATIO, own_speed / median(speeds))
    if abs(ratio - 1) <= EQUAL_SPEED_BAND:
        return inner_steps
    return inner_steps * ratio


def believed_speeds(own_speed: float, heard: Sequence[float]) -> list[float]:
    """Speeds of the group by which a peer reckons what it owes, its own among them.

    Of three and more the median is moved by no single one. One other peer alone moves it as it
    likes, so its speed counts within LARGEST_RATIO_OF_TWO of ours.
    """
    if len(heard) == 1 and own_speed > 0:
        least, most = own_speed / LARGEST_RATIO_OF_TWO, own_speed * LARGEST_RATIO_OF_TWO
        heard = [min(most, max(least, speed)) for speed in heard if speed > 0]
    return [*heard, own_speed]


def whole_steps(inner_steps: int, own_speed: float, member_speeds: Sequence[float]) -> int:
    """The same in whole steps, by itself: the nearest number of them, and at least one."""
    return max(1, round(owed_steps(inner_steps, own_speed, member_speeds)))


def place(step: float, age_s: float, steps_per_s: float, inner_steps: int) -> float:
    """The nominal step of a peer by now: at most a round beyond the one that it spoke of.

    Args:
        step: where it was when it told us.
        age_s: how long ago that was.
        steps_per_s: nominal steps; quotas see to it that all peers do as many.
        inner_steps: H.
    """
    return step + min(float(inner_steps), max(0.0, age_s) * steps_per_s)


def catch_up(owed: float, own_step: float, places: Sequence[float], inner_steps: int) -> float:
    """The steps that a peer owes that is at `own_step` when the others are at `places` (rule 3)."""
    lag_rounds = _lag_rounds(own_step, places, inner_steps)
    return owed * min(1.0, max(1 - LARGEST_CATCH_UP, 1 - lag_rounds))


def keep_together(owed: float, own_step: float, places: Sequence[float], inner_steps: int) -> float:
    """The same where nobody waits: a peer that is ahead owes more (rule 3)."""
    pace = 1 + _lag_rounds(own_step, places, inner_steps) / TOGETHER_ROUNDS
    return owed / min(1 + LARGEST_CHANGE_OF_PACE, max(1 - LARGEST_CHANGE_OF_PACE, pace))


def _lag_rounds(own_step: float, places: Sequence[float], inner_steps: int) -> float:
    return (median(places) - own_step) / inner_steps if places else 0.0


class Quotas:
    """Whole steps out of what is owed, round after round (rule 1)."""

    def __init__(self) -> None:
        self._rest = 0.0

    def next(self, owed: float) -> int:
        """The steps of one more round. What is left over goes to the next; no debt is kept."""
        steps = max(1, math.floor(self._rest + owed + _EPSILON))
        self._rest = max(0.0, self._rest + owed - steps)
        return steps


def middle(heard: Sequence[float], nobody: float) -> float:
    """The middle of steps, or rounds, that others say they are at (rule 4); `nobody` for none."""
    return median_low(heard) if heard else nobody


def next_round(finished_round: int, heard_rounds: Sequence[int]) -> int:
    """The round to train after `finished_round`, where all train the same one (rule 3).

    Args:
        finished_round: the round just closed.
        heard_rounds: rounds that other peers say they are training.
    """
    following = finished_round + 1
    theirs = int(middle(heard_rounds, following))
    return theirs if theirs - following > MAX_LAG_ROUNDS else following


def is_left_behind(training_round: int, heard_rounds: Sequence[int]) -> bool:
    """Whether the round in training should be given up for a newer one (rule 3)."""
    return middle(heard_rounds, training_round) - training_round > MAX_LAG_ROUNDS


def lost_lag(inner_steps: int) -> int:
    """Nominal steps behind which a peer is lost (rule 5)."""
    return LOST_LAG_ROUNDS * inner_steps


def is_lost(own_step: float, heard_steps: Sequence[float], inner_steps: int) -> bool:
    """Whether our weights are too old to be averaged with those of the others (rule 5)."""
    return middle(heard_steps, own_step) - own_step > lost_lag(inner_steps)


def oldest_useful(heard_steps: Sequence[float], inner_steps: int) -> int:
    """The oldest nominal step that a newcomer can begin at without being lost (rule 5)."""
    return max(0, int(middle(heard_steps, 0)) - lost_lag(inner_steps))
