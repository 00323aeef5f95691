"""Which data peers an iteration of a relay is waited for, and for how long.

Theory. A relay steps when all data peers have come to a later iteration. One that says it trains
and announces nothing would hold up all others. They show what is usual: how long iterations last
that all come through, and that this one is over for them. So a silent one is left out soon, and for
longer each time.

  1. An iteration that half of the data peers are through with, at least, is waited for SEVERAL
     times as long as is usual, within FLOOR_S and the relay's patience. Any other, and the first
     few, are waited for as long as the patience lasts.
  2. A data peer that was waited for in vain is left out of 1 iteration to come, then of 2, 4, up to
     MOST_LEFT_OUT; it begins anew once it was waited for and came. Where all are left out, all are
     waited for.
  3. Being left out costs a data peer its microbatches of iterations that it comes too late for,
     and nothing else: what it brings in time counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from protocol.schedule.deadline import ObservedDeadline

SEVERAL: Final = 4
"""Times the usual that is at least waited for, doubled by the deadline."""
FLOOR_S: Final = 20.0
MOST_LEFT_OUT: Final = 64
"""Iterations."""


@dataclass(frozen=True, slots=True)
class _LeftOut:
    until: int
    iterations: int


class Awaited:
    """See the top of the file.

    Args:
        patience_s: longest time for an iteration.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        floor_s = min(FLOOR_S, patience_s)
        self._usual = ObservedDeadline(floor_s=floor_s, ceiling_s=patience_s)
        self._left_out: dict[str, _LeftOut] = {}

    def is_over(
        self, iteration: int, announced: Mapping[str, int], present: Sequence[str], lasted_s: float
    ) -> bool:
        """Whether nobody is waited for any more; to be asked until it is so, and then no more.

        Args:
            announced: the newest iteration of each data peer that has announced any.
            present: the data peers that train, at least one.
            lasted_s: since the iteration began here.
        """
        self._left_out = {each: out for each, out in self._left_out.items() if each in present}
        through = {each for each in present if announced.get(each, 0) > iteration}
        awaited = {each for each in present if not self._is_left_out(each, iteration)}
        missing = (awaited or set(present)) - through
        if not missing:
            self._usual.observe(SEVERAL * lasted_s)
            for each in awaited:
                self._left_out.pop(each, None)
            return True
        half = 2 * len(through) >= len(present)
        if lasted_s < (self._usual.current_s if half else self._patience_s):
            return False
        for each in missing:
            before = self._left_out.get(each)
            more = 1 if before is None else min(MOST_LEFT_OUT, 2 * before.iterations)
            self._left_out[each] = _LeftOut(iteration + more, more)
        return True

    def _is_left_out(self, data_peer: str, iteration: int) -> bool:
        out = self._left_out.get(data_peer)
        return out is not None and iteration <= out.until
