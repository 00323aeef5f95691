"""Rounds without a round master.

The idea. A round is H inner steps of the group's median peer, and nobody starts or ends it for
others. Each peer derives how many inner steps *it* owes to a round from speeds that all peers tell
each other, so peers of unequal speed train all the while and are equally far in the run.

Rules
  1. A peer owes H * speed_i / median speed steps to a round: the median peer does H. It does them
     whole: the largest number that keeps the sum of what it did within the sum of what it owed, and
     at least one. So a slow peer, whose rounds have few steps, is on time on the whole. Speeds are
     what others say. So the median counts within LARGEST_RATIO times what we measure of ourselves,
     and a round ends early once twice the steps are done that it would have by what is said now.
  2. The *nominal* step counts trained steps: each own step is H / owed nominal ones, its stride
     (with fragments H / its quota). Learning rate, schedule, data and the end of the run follow it.
     It goes on rising when a round lasts beyond its quota. It is no local counter, so a peer that
     was away resumes at the swarm's place in the schedule. (Its learning rate warms up to it,
     peer/training/schedule.py.)
  3. With fragments, a peer that is behind the others owes less, at most by half, so that it catches
     up. One that is more than a round ahead owes more, at most twice as much: peers further apart
     do not wait for each other, and would never meet again where fewer than half are ahead. In
     gossip, where one that is ahead would not have to wait, each owes so many steps that its
     *nominal pace* is higher by a third of its lag in rounds, or lower by a third of its lead, at
     most by half. (The pace, as much either way: a change of the steps owed would speed peers up
     more than it slows them down, and the schedule would run ahead of the training.) A peer that is
     too far behind for that goes on where the others are, and keeps its weights; a newcomer begins
     where they are.
  4. Where the others are is the middle of what they say; of two middle ones, and so of two others,
     it is the lower (`middle`). One peer among several moves nothing, whatever it says. The quotas
     of rule 3 take the mean of two middle ones, for what it can change is bounded.
  5. A peer that is more than LOST_LAG_ROUNDS behind is lost: its weights belong to another time and
     must not be averaged into this one. It takes the swarm's state anew, as a joiner does. (A
     founder that is started again, with fresh weights, is such a peer.) Nobody takes over a state
     with which it would be lost at once.
  6. The peers of an expert owe H steps to a round *together*, H * speed_i / the sum of the speeds,
     so that it costs as much whoever trains it (decision 0056); the sum is also how fast its
     nominal step rises. Speeds are what others say, so each counts LARGEST_RATIO times the lower
     middle one, or ours, at most. Where a peer owes less than a step, rounds become longer in
     gossip: one step each. With fragments a round has at least one step of each peer, so more than
     H peers train more than the budget.

How rounds follow each other differs by the way of averaging: with fragments all peers train the
same round, by number (`next_round`); gossip has no such number (below).

In gossip each peer has rounds of its own, and only the nominal step is shared. A round ends when
its quota is done *and* the exchange before it has ended, so on a thin line rounds grow longer, and
training never stops. The nominal step counts training beyond the quota, so the schedule loses
nothing; but there are fewer averages per nominal step. So it is a debt, and later quotas are
smaller until it is paid: as long as exchanges are shorter than rounds on the average, there is one
average per H nominal steps on the average.

Peers of one speed that never vary would close their rounds at the same distance from each other for
ever: the same few would be free together, and a peer that closes just after another would make it
wait each time. So lengths are drawn anew for each round, and who is near whom changes.

Rules of own rounds
  1. A round's length is H nominal steps, and up to VARIED more or less: drawn by a hash of the peer
     and the round, so that it can be told afterwards. Lengths are H on the average. A peer may have
     an H of its own (`length`; protocol/gossip/round_length.py): quotas, debts and the last round
     go by that, and what peers agree on by the run's nominal round.
  2. A round's quota is its length less the debt, in what the peer owes; at least half
     of what it owes, in whole steps. The part of a step that is left over is a credit: a debt below
     zero. Only that is credited where a round is closed early, or trains nothing.
  3. The debt is what the rounds so far have trained more than their lengths, but no more than
     JUMP_ROUNDS rounds: on a line that is too thin for one average a round there is nothing to
     make up for.
  4. A peer that closes a round more than JUMP_ROUNDS rounds behind the middle of the others jumps:
     its nominal step becomes theirs, for the snapshot and for the next round. No round is given up,
     but one in which a peer falls so far behind ends early. A peer of few steps a round, which owes
     more than it can do (LARGEST_RATIO), or has begun its round alone, would be lost in it.
  5. The training is over at the run's last nominal step, which is asked for anew at each step:
     amendments move it. The last round ends there; one that would be shorter than a quarter of a
     round is put to the round before.

Source: docs/decisions/0016-gossip-without-a-clock.md.

How fast a run comes forward (`RunPace`). The swarm comes to the end of the run at the pace of its
median peer, not at ours. So the time left is told by how the nominal step has moved here over the
last WINDOW_S, with quotas, pauses of the trainer and waits in it. A step that falls, or leaps
further than anybody trains, is another beginning: a state was taken, or the run went on elsewhere.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import Final

import blake3

from protocol.limits import EPSILON

# --- rounds ---------------------------------------------------------------------------------------
EQUAL_SPEED_BAND: Final = 0.1
"""Speeds within this share of the median count as it: noise must not change quotas."""

MAX_LAG_ROUNDS: Final = 1
"""With fragments, a peer this many rounds behind catches up by itself; further behind, it jumps."""

LOST_LAG_ROUNDS: Final = 20
"""A peer further behind than this many rounds of nominal steps takes the swarm's state anew."""

LARGEST_CHANGE: Final = 0.5
"""Largest change of what is owed, of the pace (up or down, or all would drift), and of a quota by
debts."""

TOGETHER_ROUNDS: Final = 3.0
"""In gossip, a peer comes back to the others within about this many rounds. In one alone it would
overshoot where an exchange, and so a round, lasts for several."""

LARGEST_RATIO: Final = 16.0
"""Times that the others are taken to be faster or slower than we are, at most (rule 1)."""


def owed_steps(
    inner_steps: int, own_speed: float, member_speeds: Sequence[float], *, together: bool = False
) -> float:
    """Inner steps that a peer owes to a round (rule 1). Speeds are inner steps per second.

    Args:
        inner_steps: H.
        member_speeds: of the members of the group, ours among them or not.
        together: H are the steps of all (rule 6); ours must be among the speeds then.
    """
    speeds = [speed for speed in member_speeds if speed > 0]
    if not speeds or own_speed <= 0:
        return inner_steps
    if together:
        return inner_steps * own_speed / speed_of_all(own_speed, speeds)
    ratio = min(LARGEST_RATIO, max(1 / LARGEST_RATIO, own_speed / median(speeds)))
    if abs(ratio - 1) <= EQUAL_SPEED_BAND:
        return inner_steps
    return inner_steps * ratio


def speed_of_all(own_speed: float, member_speeds: Sequence[float]) -> float:
    """Steps per second of all members together, ours among them (rule 6)."""
    most = LARGEST_RATIO * max(own_speed, median_low([own_speed, *member_speeds]))
    return sum(min(most, speed) for speed in member_speeds)


def is_overdone(
    fraction: float, owed_then: float, owed_now: float, *, together: bool = False
) -> bool:
    """Whether a round of which so much is done should end: we owe far less by now (rule 1).

    Of steps that are all members' together, what is beyond our part is trained twice (rule 6).
    """
    share = 1 - EQUAL_SPEED_BAND if together else LARGEST_CHANGE
    return min(1.0, fraction) * share * owed_then >= owed_now


def whole_steps(inner_steps: int, own_speed: float, member_speeds: Sequence[float]) -> int:
    """The steps that a peer owes, whole ones: the nearest number, and at least one."""
    return max(1, round(owed_steps(inner_steps, own_speed, member_speeds)))


def place(step: float, age_s: float, steps_per_s: float, inner_steps: int) -> float:
    """The nominal step of a peer that told us its step so long ago: at most a round beyond that.

    Args:
        steps_per_s: nominal ones; quotas see to it that all peers do as many.
        inner_steps: H.
    """
    return step + min(float(inner_steps), max(0.0, age_s) * steps_per_s)


def catch_up(owed: float, own_step: float, places: Sequence[float], inner_steps: int) -> float:
    """The steps that a peer owes that is at `own_step` when the others are at `places` (rule 3)."""
    lag_rounds = _lag_rounds(own_step, places, inner_steps)
    if lag_rounds < -MAX_LAG_ROUNDS:
        return owed * min(1 / LARGEST_CHANGE, -lag_rounds)
    return owed * min(1.0, max(1 - LARGEST_CHANGE, 1 - lag_rounds))


def keep_together(owed: float, own_step: float, places: Sequence[float], inner_steps: int) -> float:
    """The steps owed where nobody waits: a peer that is ahead owes more (rule 3)."""
    pace = 1 + _lag_rounds(own_step, places, inner_steps) / TOGETHER_ROUNDS
    return owed / min(1 + LARGEST_CHANGE, max(1 - LARGEST_CHANGE, pace))


def _lag_rounds(own_step: float, places: Sequence[float], inner_steps: int) -> float:
    return (median(places) - own_step) / inner_steps if places else 0.0


class Quotas:
    def __init__(self) -> None:
        self._rest = 0.0

    def next(self, owed: float) -> int:
        """The steps of one more round. What is left over goes to the next; no debt is kept."""
        steps = max(1, math.floor(self._rest + owed + EPSILON))
        self._rest = max(0.0, self._rest + owed - steps)
        return steps


def middle(heard: Sequence[float], nobody: float) -> float:
    """The middle of steps, or rounds, that others say they are at (rule 4); `nobody` for none."""
    return median_low(heard) if heard else nobody


def next_round(finished_round: int, heard_rounds: Sequence[int]) -> int:
    """The round to train after `finished_round`, where all train the same one (rule 3)."""
    following = finished_round + 1
    theirs = int(middle(heard_rounds, following))
    return theirs if theirs - following > MAX_LAG_ROUNDS else following


def is_left_behind(training_round: int, heard_rounds: Sequence[int]) -> bool:
    """Whether the round in training should be given up for a newer one (rule 3)."""
    return middle(heard_rounds, training_round) - training_round > MAX_LAG_ROUNDS


def lost_lag(inner_steps: int) -> int:
    """Nominal steps beyond which a peer that is behind is lost (rule 5)."""
    return LOST_LAG_ROUNDS * inner_steps


def is_lost(own_step: float, heard_steps: Sequence[float], inner_steps: int) -> bool:
    """Whether our weights are too old to be averaged with those of the others (rule 5)."""
    return middle(heard_steps, own_step) - own_step > lost_lag(inner_steps)


def oldest_useful(heard_steps: Sequence[float], inner_steps: int) -> int:
    """The oldest nominal step that a newcomer can begin at without being lost (rule 5)."""
    return max(0, int(middle(heard_steps, 0)) - lost_lag(inner_steps))


# --- own rounds -----------------------------------------------------------------------------------
JUMP_ROUNDS: Final = 2.0
"""A peer that far behind the others jumps; and debts are no larger."""
VARIED: Final = 0.25
"""The length of a round is within so much of H; a last one is no shorter than so much of it."""


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
        inner_steps: of a nominal round.
        total_steps_at: nominal steps of the whole run, as is in force at a nominal step.

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
        return self.step >= self._total_steps_at(self.step) - EPSILON

    @property
    def nominal_round(self) -> int:
        return int(self.step // self._inner_steps)

    @property
    def next_length(self) -> float:
        """Nominal steps of the next round, debts taken off (rule 2), unless the run ends in it."""
        return max(LARGEST_CHANGE * self.length, self._length() - self.debt)

    def plan(self, owed: float) -> RoundPlan:
        """The next round, of no steps when the training is over; `owed` steps are ours in any."""
        self._stride = stride = self._inner_steps / owed
        total_steps = self._total_steps_at(self.step)
        if self.is_over:
            return RoundPlan(self.round, 0, float(total_steps), stride)
        wanted = self.next_length
        left = total_steps - self.step
        if left - wanted < VARIED * self.length:
            quota = max(1, math.ceil(left / stride - EPSILON))
        else:
            quota = max(1, math.floor(wanted / stride + EPSILON))
        return RoundPlan(self.round, quota, self.step, stride)

    def closed(self, step: float, heard_steps: Sequence[float]) -> None:
        """The round is closed at this nominal step; `step` is then the snapshot's."""
        debt = 0.0 if self.is_over else self.debt + step - self.step - self._length()
        self.debt = min(max(-self._stride, debt), JUMP_ROUNDS * self.length)
        self.round += 1
        self.step = min(step, float(self._total_steps_at(step)))
        if self.would_jump(step, heard_steps):
            self.enter(heard_steps)

    def would_jump(self, step: float, heard_steps: Sequence[float]) -> bool:
        """Whether a round that closes at this nominal step is followed by a jump (rule 4)."""
        lag = middle(heard_steps, step) - step
        return lag > JUMP_ROUNDS * max(self._inner_steps, self.length)

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


# --- pace -----------------------------------------------------------------------------------------
WINDOW_S: Final = 300.0
LEAST_S: Final = 5.0
"""Less than that says nothing yet."""
LARGEST_LEAP: Final = 10.0
"""Times what was trained in the whole window before."""
LEAST_LEAP_STEPS: Final = 100.0


class RunPace:
    """How fast a run comes forward: nominal steps per second, recently."""

    def __init__(self) -> None:
        self._seen = deque[tuple[float, float]]()

    def note(self, now_s: float, step: float) -> None:
        if self._seen and self._is_another_beginning(step):
            self._seen.clear()
        self._seen.append((now_s, step))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - WINDOW_S:
            self._seen.popleft()

    def rest(self) -> None:
        self._seen.clear()

    def steps_per_s(self) -> float | None:
        """Nominal steps per second; None before enough was seen."""
        if len(self._seen) < 2:
            return None
        (since_s, first), (now_s, last) = self._seen[0], self._seen[-1]
        if now_s - since_s < LEAST_S or last <= first:
            return None
        return (last - first) / (now_s - since_s)

    def left_s(self, total_steps: float) -> float | None:
        """Seconds to the end of the run at this pace; None where that is not known."""
        pace = self.steps_per_s()
        return None if pace is None else max(0.0, total_steps - self._seen[-1][1]) / pace

    def _is_another_beginning(self, step: float) -> bool:
        first, last = self._seen[0][1], self._seen[-1][1]
        return step < last or step - last > max(LEAST_LEAP_STEPS, LARGEST_LEAP * (last - first))
