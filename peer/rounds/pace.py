"""How many steps of a round are ours, by what is heard (protocol/schedule/rounds.py)."""

from collections.abc import Callable, Sequence
from statistics import median

import trio

from peer.facts import Facts
from protocol.membership.view import Member
from protocol.schedule.rounds import believed_speeds, owed_steps, place


class Pace:
    """What one peer owes to a round; `inner_steps` are those of a nominal one."""

    def __init__(self, inner_steps: int, facts: Facts) -> None:
        self._inner_steps = inner_steps
        self._facts = facts

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
        own_speed, now_s = self._facts.steps_per_s, trio.current_time()
        others = _going_on(others, now_s)
        speeds = self._speeds(others)
        places = [
            place(m.progress.step, now_s - m.told_s, median(speeds), self._inner_steps)
            for m in others
        ]
        owed = owed_steps(self._inner_steps, own_speed, speeds)
        return adjusted(owed, step, places, max(self._inner_steps, own_length))

    def nominal_step_s(self, others: Sequence[Member]) -> float:
        """How long a nominal step takes us; 0 while our speed is not known."""
        own_speed = self._facts.steps_per_s
        speeds = self._speeds(_going_on(others, trio.current_time()))
        owed = owed_steps(self._inner_steps, own_speed, speeds)
        return owed / (self._inner_steps * own_speed) if own_speed > 0 else 0.0

    def _speeds(self, others: Sequence[Member]) -> list[float]:
        return believed_speeds(self._facts.steps_per_s, [m.progress.steps_per_s for m in others])


def _going_on(others: Sequence[Member], now_s: float) -> list[Member]:
    return [member for member in others if member.goes_on(now_s)]
