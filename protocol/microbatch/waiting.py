"""The offers to a relay that wait for their answer: for a slot, or for their iteration."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from .trip import Trip

MAX_WAITING: Final = 256
"""Offers without an answer at once."""


@dataclass(frozen=True, slots=True)
class Offer:
    """An offer without an answer."""

    ticket: int
    trip: Trip


class Waiting:
    """See the top of the file. Iterating goes over them, the oldest first, mended ones before."""

    def __init__(self) -> None:
        self._offers: list[Offer] = []

    def __len__(self) -> int:
        return len(self._offers)

    def __iter__(self) -> Iterator[Offer]:
        return iter(sorted(self._offers, key=lambda offer: not offer.trip.attempt))

    @property
    def is_full(self) -> bool:
        """Whether a further one has to be sent away."""
        return len(self) >= MAX_WAITING

    def add(self, offer: Offer) -> None:
        """A further one waits."""
        self._offers.append(offer)

    def remove(self, offer: Offer) -> None:
        """One is answered."""
        self._offers.remove(offer)

    def withdraw(self, ticket: int) -> None:
        """One is no longer there; nothing happens where it was answered."""
        self._offers = [offer for offer in self._offers if offer.ticket != ticket]

    def take(self, which: Callable[[Trip], bool]) -> list[Offer]:
        """Those with such trips, which wait no longer."""
        taken = [offer for offer in self._offers if which(offer.trip)]
        self._offers = [offer for offer in self._offers if not which(offer.trip)]
        return taken
