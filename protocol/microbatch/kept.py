"""Gradients that have been sent and stay in their outbound slots until they are passed on."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from .core import Command, Send
from .trainer_messages import Release
from .trip import Microbatch, Trip

KEPT_PER_SLOT: Final = 2
"""Gradients kept for each microbatch that a machine has room for."""
KEPT: Final = 8
"""Gradients kept at once, where nobody says otherwise."""


@dataclass(slots=True)
class _Kept:
    slot: int
    loss: float | None
    trip: Trip | None = None


class KeptGradients:
    """See the top of the file.

    Args:
        limit: kept at once; the oldest makes room.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: dict[Microbatch, _Kept] = {}

    def __iter__(self) -> Iterator[Microbatch]:
        return iter(self._kept)

    def attempt_of(self, microbatch: Microbatch) -> int:
        """The attempt in which it was sent; 0 where it is not kept."""
        kept = self._kept.get(microbatch)
        return 0 if kept is None or kept.trip is None else kept.trip.attempt

    def __contains__(self, microbatch: Microbatch) -> bool:
        return microbatch in self._kept

    def keep(self, microbatch: Microbatch, slot: int, loss: float | None) -> list[Command]:
        """Keep a gradient."""
        commands = self.drop(microbatch)
        if len(self._kept) >= self._limit:
            commands += self.drop(next(iter(self._kept)))
        self._kept[microbatch] = _Kept(slot, loss)
        return commands

    def send(self, trip: Trip) -> list[Command]:
        """Send a gradient, if it is kept."""
        kept = self._kept.get(trip.microbatch)
        if kept is None:
            return []
        kept.trip = trip
        return [Send(trip, kept.slot, kept.loss, keeps=True)]

    def passed(self, microbatch: Microbatch, taker: str) -> list[Command]:
        """The one that took it says that its own has been taken."""
        kept = self._kept.get(microbatch)
        if kept is None or kept.trip is None or kept.trip.receiver != taker:
            return []
        return self.drop(microbatch)

    def drop(self, microbatch: Microbatch) -> list[Command]:
        """Keep it no longer; nothing happens where it is not kept."""
        kept = self._kept.pop(microbatch, None)
        return [] if kept is None else [Release(kept.slot)]

    def drop_all(self) -> list[Command]:
        """Keep nothing."""
        return [command for microbatch in list(self._kept) for command in self.drop(microbatch)]

    def clear(self, limit: int) -> None:
        """The memory is gone, and all that lay in it; there is new one for so many."""
        self._kept.clear()
        self._limit = limit
