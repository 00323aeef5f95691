"""The iteration that a relay is in: its number, whether it is over, and what belongs to it.

The rules stand in relay.py (1, 3 and 5) and below. One more is for a new relay, whose first number
is one peer's word. Until it has stepped it goes back to the middle of those that train, where that
is lower: else it would refuse what they send, and wait for them.

Announcements (data peers tell a relay, and relays a data peer). A data peer announces an iteration
once. That may be before the relay hears that it trains, by a beat a second later, and while the
link between them breaks and comes again. So what was announced stands, whoever trains: forgotten,
each would wait for the other. A peer that does not train is not waited for, and moves nobody.

Numbers of iterations are claims. So the middle of what several say counts, and nobody goes further
in one step than MAX_LEAP: a lie costs the others one leap to follow, and the numbers, at whose end
nobody could go on (MAX_ITERATION), last for 2^33 of them. Of two the lower counts, so the word of
one that is behind must not count for itself: it would be told to stay there.

Waiting. A relay steps when all data peers have come to a later iteration, so one that says it
trains and announces nothing would hold up all others. They show how long iterations last that all
come through, and that this one is over for them. So a silent one is left out soon, and for longer
each time.

  1. An iteration that half of the data peers have finished, at least, is waited for SEVERAL
     times as long as is usual, within FLOOR_S and the relay's patience. Any other, and the first
     few, are waited for as long as the patience lasts.
  2. A data peer that was waited for in vain is left out of 1 iteration to come, then of 2, 4, up to
     MOST_LEFT_OUT; it begins anew once it was waited for and came. Where all are left out, all are
     waited for.
  3. Being left out costs a data peer its microbatches of iterations that it comes too late for,
     and nothing else: what it brings in time counts.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median_low
from typing import Final

from protocol.limits import MAX_REMEMBERED
from protocol.membership.book import BackOff
from protocol.schedule.deadline import ObservedDeadline
from protocol.wire.stage_messages import Direction, Hop

MAX_LEAP: Final = 1 << 20
"""Iterations: more than a run has in years, so a newcomer is there after one or two."""


def next_iteration(current: int, others: int) -> int:
    """The iteration after the current one, where others are said to be in `others`."""
    return max(current + 1, min(others, current + MAX_LEAP))


class Announced:
    """The iterations that data peers have announced to a relay.

    Attributes:
        present: the peers that train.
        newest_of: the newest iteration of each peer that has told of any.
    """

    def __init__(self) -> None:
        self.present: tuple[str, ...] = ()
        self.newest_of: dict[str, int] = {}

    def add(self, teller: str, iteration: int) -> None:
        self.newest_of[teller] = max(iteration, self.newest_of.get(teller, 0))

    def update_present(self, present: Iterable[str]) -> None:
        self.present = tuple(present)
        absent = [teller for teller in self.newest_of if teller not in self.present]
        for teller in absent[:-MAX_REMEMBERED]:
            del self.newest_of[teller]

    @property
    def least(self) -> int:
        """Where the last is of those that train; 0 where none has told of any."""
        return min(self._of(self.present), default=0)

    def middle_of(self, tellers: Collection[str]) -> int:
        """Where the middle of these is, of two the lower: one far ahead takes nobody along."""
        return median_low(self._of(tellers) or [0])

    def _of(self, tellers: Collection[str]) -> list[int]:
        return [self.newest_of[each] for each in tellers if each in self.newest_of]


SEVERAL: Final = 4
"""Times the usual that is at least waited for, doubled by the deadline."""
FLOOR_S: Final = 20.0
MOST_LEFT_OUT: Final = 64


class Awaited:
    """For how long a relay waits for the data peers of an iteration; at most `patience_s`."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        floor_s = min(FLOOR_S, patience_s)
        self._usual = ObservedDeadline(floor_s=floor_s, ceiling_s=patience_s)
        self._left_out = BackOff(1, MOST_LEFT_OUT)
        """Its time is counted in iterations."""

    def is_over(
        self, iteration: int, announced: Mapping[str, int], present: Sequence[str], lasted_s: float
    ) -> bool:
        """Whether nobody is waited for any longer; to be asked until it is so, and not after.

        Args:
            announced: the newest iteration of each data peer that has announced any.
            present: the data peers that train, at least one.
            lasted_s: since the iteration began here.
        """
        through = {each for each in present if announced.get(each, 0) > iteration}
        awaited = {each for each in present if self._left_out.is_due(each, iteration)}
        missing = (awaited or set(present)) - through
        if not missing:
            self._usual.observe(SEVERAL * lasted_s)
            for each in awaited:
                self._left_out.answered(each)
            return True
        half = 2 * len(through) >= len(present)
        if lasted_s < (self._usual.current_s if half else self._patience_s):
            return False
        for each in missing:
            self._left_out.failed(each, iteration + 1)  # the next one is the first without it
        return True


class CurrentIteration(Announced):
    """The iteration that a relay is in, and whether all of it has come.

    Attributes:
        number: None before the first announcement.
        is_finishing: whether it is over, and the trainer has not stepped yet.
    """

    def __init__(self, patience_s: float) -> None:
        super().__init__()
        self._awaited = Awaited(patience_s)
        self._began_s = 0.0
        self._ended = self._has_stepped = False
        self.number: int | None = None
        self.is_finishing = False

    def announced(self, origin: str, iteration: int, now_s: float) -> None:
        self.add(origin, iteration)
        if self.number is None:
            self.number, self._began_s = next_iteration(0, iteration), now_s
        self._go_back()

    def peers_changed(self, origins: Iterable[str], *, ended: bool) -> None:
        """Take over which data peers train; `ended`: all data peers are at the end of the run."""
        self.update_present(origins)
        self._ended = ended
        self._go_back()

    def _go_back(self) -> None:
        middle = self.middle_of(self.present)
        if self.number is not None and middle and not self._has_stepped and not self.is_finishing:
            self.number = min(self.number, middle)

    def newest_for(self, origin: str) -> int:
        others = [each for each in self.present if each != origin]
        return max(self.number or 0, self.middle_of(others))

    def ends(self, now_s: float) -> bool:
        if self.number is None or self.is_finishing:
            return False
        if self.present:
            lasted_s = now_s - self._began_s
            self.is_finishing = self._awaited.is_over(
                self.number, self.newest_of, self.present, lasted_s
            )
        else:
            self._began_s, self.is_finishing = now_s, self._ended
        return self.is_finishing

    def stepped(self, now_s: float) -> None:
        assert self.number is not None, "a step belongs to an iteration"
        self.number = next_iteration(self.number, self.least)
        self._began_s, self.is_finishing, self._has_stepped = now_s, False, True

    def is_of(self, hop: Hop) -> bool:
        """Whether a forward is of this iteration, and it is not over. A score is of any."""
        is_due = hop.microbatch.iteration == self.number and not self.is_finishing
        return is_due or hop.direction is Direction.SCORE

    def is_after(self, hop: Hop) -> bool:
        is_past = self.number is not None and hop.microbatch.iteration < self.number
        return is_past and hop.direction is not Direction.SCORE
