"""The trainer of now, as the exchange of fragments sees it.

- Which sends of *this* trainer are in flight: a new trainer is not told of an old one's.
- When the outer copy may be written: not while the trainer reads all of it (load, validation), and
  a fragment that is not in flight only after the trainer has yielded it. A Yield that crosses a
  send on its way is void; the fragment's keeper goes on from that send.
"""

import trio

from peer.rounds.validation import Validation
from peer.rounds.way import TrainerLine
from peer.training.messages import Amend, FragmentSent, Merge, Yield
from protocol.diloco.fragment_events import Changes, HoldOutcome


class CurrentTrainer:
    """See the top of the file. Implements `FragmentTrainer` (surroundings.py)."""

    def __init__(self, validation: Validation) -> None:
        self._validation = validation
        self._line: TrainerLine | None = None
        self._loaded = trio.Event()
        self._in_flight: dict[int, int] = {}
        self._holding: dict[int, trio.Event] = {}
        self._yielded: set[int] = set()
        self._all_back = trio.Event()
        self._all_back.set()

    @property
    def line(self) -> TrainerLine:
        """The line to the trainer; there must be one."""
        assert self._line is not None
        return self._line

    async def wait_all_back(self) -> None:
        """Wait until no send is under way."""
        await self._all_back.wait()

    # --- its life ---------------------------------------------------------------------------------
    def began(self, line: TrainerLine) -> None:
        """A trainer has started, and loads the outer copy."""
        self._line = line
        self._loaded = trio.Event()

    def loaded(self) -> None:
        """The trainer has taken what it loaded."""
        self._loaded.set()

    def sent(self, event: FragmentSent) -> None:
        """The trainer has sent a fragment."""
        self._in_flight[event.fragment] = event.cycle
        if self._all_back.is_set():
            self._all_back = trio.Event()
        self._stop_holding(event.fragment)

    def yielded(self, fragment: int) -> None:
        """The trainer does not read this fragment until `amend`."""
        self._yielded.add(fragment)
        self._stop_holding(fragment)

    def died(self) -> None:
        """Nothing is in flight any more: a new trainer is not told of an old one's sends."""
        self._line = None
        self._loaded.set()
        self._in_flight.clear()
        self._yielded.clear()
        self._all_back.set()
        for fragment in list(self._holding):
            self._stop_holding(fragment)

    def _stop_holding(self, fragment: int) -> None:
        if (answered := self._holding.pop(fragment, None)) is not None:
            answered.set()

    # --- what the exchange asks of it -------------------------------------------------------------
    async def may_write(self) -> None:
        """Wait until the trainer does not read the whole outer copy."""
        while not self.can_write:
            await self._validation.wait_idle()
            await self._loaded.wait()

    @property
    def can_write(self) -> bool:
        """Whether it does not."""
        return self._validation.is_idle and self._loaded.is_set()

    async def merge(self, fragment: int, cycle: int, changes: Changes) -> None:
        """The send is over; tell the trainer that made it."""
        if self._in_flight.get(fragment) == cycle and self._line is not None:
            del self._in_flight[fragment]
            stepped, moved = tuple(sorted(changes.stepped)), tuple(sorted(changes.moved))
            await self._line.send(Merge(fragment, cycle, stepped, moved))
        if not self._in_flight:
            self._all_back.set()

    async def hold(self, fragment: int) -> HoldOutcome:
        """Make the trainer read nothing of the fragment until `amend`."""
        if self._line is None:
            return HoldOutcome.FREE
        if fragment in self._in_flight:
            return HoldOutcome.VOID
        answered = self._holding[fragment] = trio.Event()
        await self._line.send(Yield(fragment))
        await answered.wait()
        if fragment in self._yielded:
            return HoldOutcome.YIELDED
        return HoldOutcome.VOID if fragment in self._in_flight else HoldOutcome.FREE

    async def amend(self, fragment: int, changes: Changes) -> None:
        """Tell the trainer that yielded what has changed."""
        if fragment in self._yielded and self._line is not None:
            self._yielded.discard(fragment)
            await self._line.send(
                Amend(
                    fragment,
                    merged=tuple(sorted(changes.stepped)),
                    redone=tuple(sorted(changes.redone)),
                    moved=tuple(sorted(changes.moved)),
                )
            )
