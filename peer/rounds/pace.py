"""How many steps of a round are ours, by what is heard (protocol/schedule/rounds.py)."""

from collections.abc import Callable, Sequence
from statistics import median

import trio

from peer.facts import Facts
from protocol.limits import EPSILON
from protocol.membership.view import Member
from protocol.schedule.rounds import is_overdone, owed_steps, place


class Pace:
    """The steps that one peer owes to a round; `inner_steps` are those of a nominal one."""

    def __init__(self, inner_steps: int, facts: Facts) -> None:
        self._inner_steps = inner_steps
        self._facts = facts
        self._owed_by_speed = float(inner_steps)
        self._together = facts.expert is not None  # an expert's steps are those of all its peers

    def owed(
        self,
        step: float,
        others: Sequence[Member],
        adjusted: Callable[..., float],
        own_length: float = 0.0,
    ) -> float:
        """Our steps of a nominal round that begins now, at this nominal step; not whole.

        Args:
            others: those that train; those count whose work goes on.
            adjusted: `catch_up` or `keep_together`.
            own_length: nominal steps of our own rounds; the pace cannot change within one.
        """
        now_s = trio.current_time()
        others = _going_on(others, now_s)
        owed = self._owed_by_speed = self._by_speed(others)
        if self._together:
            # They tell of whole steps, each several nominal ones. Without half of one more each
            # would take all others to be behind, and all would train more than their part.
            speed = self._facts.steps_per_s * self._inner_steps / owed
            halves = [0.5 / max(m.progress.steps_per_s, EPSILON) for m in others]
        else:
            speed, halves = median(self._speeds(others)), [0.0 for _ in others]
        places = [
            place(m.progress.step, now_s - m.told_s + half_s, speed, self._inner_steps)
            for m, half_s in zip(others, halves, strict=True)
        ]
        return adjusted(owed, step, places, max(self._inner_steps, own_length))

    def is_overdone(self, others: Sequence[Member]) -> bool:
        """Whether the round for which `owed` was asked is far too long by what is said now."""
        owed_now = self._by_speed(_going_on(others, trio.current_time()))
        done, owed_then = self._facts.fraction, self._owed_by_speed
        return is_overdone(done, owed_then, owed_now, together=self._together)

    def nominal_step_s(self, others: Sequence[Member]) -> float:
        """How long a nominal step takes us; 0 while our speed is not known."""
        own_speed = self._facts.steps_per_s
        owed = self._by_speed(_going_on(others, trio.current_time()))
        return owed / (self._inner_steps * own_speed) if own_speed > 0 else 0.0

    def _by_speed(self, others: Sequence[Member]) -> float:
        own_speed, speeds = self._facts.steps_per_s, self._speeds(others)
        return owed_steps(self._inner_steps, own_speed, speeds, together=self._together)

    def _speeds(self, others: Sequence[Member]) -> list[float]:
        return [*(member.progress.steps_per_s for member in others), self._facts.steps_per_s]


def _going_on(others: Sequence[Member], now_s: float) -> list[Member]:
    return [member for member in others if member.goes_on(now_s)]
