"""How a microbatch goes on that has lost a relay on its way back: who does what once more.

Theory. A relay that waits for a microbatch's gradient still holds its forward, so it can send its
activations again; one that has sent a gradient keeps it until the receiver's own has been taken by
the next. So what a dead relay had in hand is nearly always still there on both sides of it: a
*stand-in*, another replica of its stage, gets the activations from one side, computes the forward
again, gets the gradient from the other side, adds, and goes on. The data peer knows the path, so it
decides:

  1. It *halts* the microbatch: every relay of the path that lives drops what belongs to earlier
     attempts, sends and takes nothing of the microbatch any more, and says where it *stands*.
  2. When all have answered it finds the place nearest to home whose gradient is *kept*; that place
     sends it again. All places before it which do not *wait* need the forward (again): a stand-in,
     or a relay that has added and whose kept gradient is gone. Where no gradient is kept anywhere,
     as when two neighbours died, that leads once more through the head.
     If a stage has nobody left, the microbatch stays halted until somebody comes, or until its
     data peer gives it up (data_peer.py, rule 5).
  3. Its relays *resume* with the new path. Activations go from the last place that waits through
     those that need them, and no further.

Only a relay that is gone, or one that says that it has not added and cannot be reached by its
neighbours, is replaced. Every other keeps its place in the path, and adds a microbatch once: what
comes again is computed without being added. So a stage counts a gradient twice only if its relay is
gone for the data peer, and lives on for its stage.

Source: SWARM (Ryabinin et al., 2023) does this from the trainer, which holds all activations; here
they stay where they were made. Gradients that have been sent stay in their outbound slots until
they are passed on.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from .core import Command, SendBoundary
from .trainer_messages import Release
from .trip import Microbatch, Trip

# --- gradients that are kept ----------------------------------------------------------------------
KEPT_PER_SLOT: Final = 2
"""Gradients kept for each microbatch that a machine has room for."""
KEPT: Final = 8
"""Gradients kept at once, where nobody says otherwise."""


@dataclass(slots=True)
class _KeptGradient:
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
        self._kept: dict[Microbatch, _KeptGradient] = {}

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
        self._kept[microbatch] = _KeptGradient(slot, loss)
        return commands

    def send(self, trip: Trip) -> list[Command]:
        """Send a gradient, if it is kept."""
        kept = self._kept.get(trip.microbatch)
        if kept is None:
            return []
        kept.trip = trip
        return [SendBoundary(trip, kept.slot, kept.loss, keeps=True)]

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


# --- who does what once more ----------------------------------------------------------------------
class Standing(StrEnum):
    """Where a relay stands with a microbatch."""

    NOTHING = "nothing"
    """It holds nothing of it, and has added nothing."""
    WAITS = "waits"
    """It has done the forward and waits for the gradient."""
    KEEPS = "keeps"
    """It keeps the gradient for the place before, or is computing it."""
    ADDED = "added"
    """It has added the gradient, and keeps none."""


REPLACEABLE: Final = (Standing.WAITS, Standing.NOTHING)
"""A relay that lives and stands so may be replaced: it has not added."""


@dataclass(slots=True)
class Mending:
    """The answers of the relays that were halted.

    Attributes:
        asked: relays that have not answered.
        silent: those of them that could not be asked, and are to be asked again.
    """

    asked: set[str]
    silent: set[str] = field(default_factory=set)
    standings: dict[str, Standing] = field(default_factory=dict)

    def found(self, relay: str, standing: Standing) -> None:
        """A relay has answered."""
        if relay in self.asked:
            self.asked.remove(relay)
            self.standings[relay] = standing

    def only(self, there: Collection[str]) -> None:
        """Others than these are gone."""
        self.asked.intersection_update(there)
        self.standings = {r: s for r, s in self.standings.items() if r in there}


@dataclass(frozen=True, slots=True)
class ResumeOrder:
    """What the peer at a place does.

    Attributes:
        until: the last place to which its activations go once more; 0 where they do not.
        returns: whether it sends the gradient that it keeps.
    """

    place: int
    until: int
    returns: bool


def first_kept(path: tuple[str, ...], standings: Mapping[str, Standing]) -> int:
    """The place nearest to home whose gradient is kept; n + 1 where no relay has it."""
    for place, relay in enumerate(path, 1):
        if standings.get(relay) is Standing.KEEPS:
            return place
    return len(path) + 1


def orders_of(
    path: tuple[str, ...], standings: Mapping[str, Standing], *, head_keeps: bool
) -> list[ResumeOrder]:
    """What every place does, from 0 to n + 1 (rules 2 and 3).

    Args:
        path: with stand-ins, of whose standing nothing is known.
        head_keeps: whether the data peer keeps the gradient of the loss.
    """
    kept, head = first_kept(path, standings), len(path) + 1
    needs = {
        place
        for place, relay in enumerate(path[: kept - 1], 1)
        if standings.get(relay) is not Standing.WAITS
    }
    if kept == head and not head_keeps:
        needs.add(head)
    orders = []
    for place in range(head + 1):
        until = 0
        if place not in needs:
            until = _end_of_run(needs, place + 1)
        orders.append(ResumeOrder(place, until, returns=place == kept and place not in needs))
    return orders


def _end_of_run(needs: set[int], start: int) -> int:
    """The last of the neighbouring places from `start` on that are needed; 0 for none."""
    place = start
    while place in needs:
        place += 1
    return place - 1 if place > start else 0
