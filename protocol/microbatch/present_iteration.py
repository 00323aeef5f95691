"""The iteration that a relay is in: its number, whether it is over, and what belongs to it.

The rules stand in relay.py (1, 3 and 5), announced.py and awaited.py. One more is for a relay that
is new: the first number that it hears is one peer's word. Until it has stepped it goes back to the
middle of those that train, where that is lower: it would refuse what they send, and wait for them.
"""

from collections.abc import Iterable

from .announced import Announced, next_iteration
from .awaited import Awaited
from .trip import Leg, Trip


class PresentIteration:
    """See the top of the file.

    Args:
        patience_s: longest time for an iteration.

    Attributes:
        number: None before the first announcement.
        is_finishing: whether it is over, and the trainer has not stepped yet.
    """

    def __init__(self, patience_s: float) -> None:
        self._awaited = Awaited(patience_s)
        self._announced = Announced()
        self._began_s = 0.0
        self._ended = self._has_stepped = False
        self.number: int | None = None
        self.is_finishing = False

    def announced(self, origin: str, iteration: int, now_s: float) -> None:
        """A data peer has come to an iteration."""
        self._announced.add(origin, iteration)
        if self.number is None:
            self.number, self._began_s = next_iteration(0, iteration), now_s
        self._go_back()

    def look(self, origins: Iterable[str], *, ended: bool) -> None:
        """These data peers train.

        Args:
            ended: whether there are data peers, and all have come to the end of the run.
        """
        self._announced.look(origins)
        self._ended = ended
        self._go_back()

    def _go_back(self) -> None:
        middle = self._announced.middle_of(self.origins)
        if self.number is not None and middle and not self._has_stepped and not self.is_finishing:
            self.number = min(self.number, middle)

    @property
    def origins(self) -> tuple[str, ...]:
        """The data peers that train."""
        return self._announced.present

    def newest_for(self, origin: str) -> int:
        """Where the data peers beside this one are, and no earlier than where we are."""
        others = [each for each in self.origins if each != origin]
        return max(self.number or 0, self._announced.middle_of(others))

    def ends(self, now_s: float) -> bool:
        """Whether nothing more of it is waited for, since this moment."""
        if self.number is None or self.is_finishing:
            return False
        if not self._announced.present:
            self._began_s = now_s
        self.is_finishing = self._is_over(self.number, now_s - self._began_s)
        return self.is_finishing

    def _is_over(self, number: int, lasted_s: float) -> bool:
        announced = self._announced
        if not announced.present:
            return self._ended
        return self._awaited.is_over(number, announced.newest_of, announced.present, lasted_s)

    def stepped(self, now_s: float) -> None:
        """The trainer has stepped: the next one begins."""
        assert self.number is not None, "a step belongs to an iteration"
        self.number = next_iteration(self.number, self._announced.least)
        self._began_s, self.is_finishing, self._has_stepped = now_s, False, True

    def is_of(self, trip: Trip) -> bool:
        """Whether a forward is of this iteration, and it is not over. A score is of any."""
        is_due = trip.microbatch.iteration == self.number and not self.is_finishing
        return is_due or trip.leg is Leg.SCORE

    def is_after(self, trip: Trip) -> bool:
        """Whether a trip is of an iteration before."""
        is_past = self.number is not None and trip.microbatch.iteration < self.number
        return is_past and trip.leg is not Leg.SCORE
