"""What the two kinds of cores have in common: events, commands and counts.

Events come from trainer and streams; relay.py and data_peer.py say what they mean. Every event
returns what is to be done by the streams to other peers and by the trainer: commands. What the
trainer is to do is said in the very messages that it is sent (trainer_messages.py). What is counted
of microbatches is in status and metrics by the names that it has here.

Slots are those of the memory that daemon and trainer share (peer/training/ring.py); a
*number* is what a microbatch is called between those two.
"""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from protocol.outcomes import RefusalReason

from .trainer_messages import StageCommand
from .trip import Leg, Microbatch, Trip


# --- counts ---------------------------------------------------------------------------------------
class Counted(StrEnum):
    """What has happened to a microbatch here."""

    BEGUN = "begun"
    """It set out (at its data peer)."""
    DONE = "done"
    """Its gradient has been added here."""
    WITHOUT = "without"
    """It is done, and had set out while a stage had nobody, which got no gradient of it (at its
    data peer)."""
    AGAIN = "again"
    """It was lost on its way to the loss, and set out again (at its data peer)."""
    MENDED = "mended"
    """It was lost on its way back, and others did again what was gone (at its data peer)."""
    REPLAYED = "replayed"
    """Its gradient has been added here in the place of a relay that was gone (at a relay)."""
    GONE = "gone"
    """A stage's gradient of it was gone before it moved any weight: its relay died (at its data
    peer, once for each such stage), or its trainer did (at the relay)."""
    LOST = "lost"
    """It set out or was held here, and its gradient will not come."""
    LATE = "late"
    """Its gradient came when it was not held any more (at a relay)."""
    BUSY = "busy"
    """It was sent away, for too many wait (at a relay)."""
    REFUSED = "refused"
    """What came of it here was no boundary, or of a size that cannot be right, and was refused."""
    CLIPPED = "clipped"
    """Its gradient was far longer than usual, and counted less in the step here."""
    SCORED = "scored"
    """It passed for validation alone (at a relay)."""


# --- commands -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class AnswerOffer:
    """Answer an offer: it is welcome, or why not.

    Attributes:
        ticket: of the offer.
    """

    ticket: int
    refusal: RefusalReason | None = None


@dataclass(frozen=True, slots=True)
class SendBoundary:
    """Send what lies in this outbound slot.

    Attributes:
        keeps: whether the slot stays ours afterwards, until `Release`.
    """

    trip: Trip
    slot: int
    loss: float | None
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class OfferAhead:
    """Offer a move whose boundary will be there soon."""

    trip: Trip


@dataclass(frozen=True, slots=True)
class FreeInbound:
    """This inbound slot is free again: nobody works on what lies in it."""

    slot: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell relays that nothing of ours before this iteration is under way."""

    iteration: int
    relays: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TellLost:
    """Tell others that this microbatch will not come again.

    Attributes:
        to: whom; its data peer, where nobody is named.
        attempt: the one that failed.
        failed: who could not be sent it, or has sent what cannot be right, if anybody.
        refused: whether it is the latter.
    """

    microbatch: Microbatch
    to: tuple[str, ...] = ()
    attempt: int = 0
    failed: str | None = None
    refused: bool = False


@dataclass(frozen=True, slots=True)
class TellPassed:
    """Tell the one that sent us this microbatch's gradient that ours has been taken."""

    microbatch: Microbatch
    to: str
    attempt: int


@dataclass(frozen=True, slots=True)
class HaltRelays:
    """Ask relays where they stand with a microbatch, and have them wait (mending.py)."""

    microbatch: Microbatch
    attempt: int
    relays: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResumeRelay:
    """Tell a relay how a microbatch goes on (mending.py).

    Attributes:
        trip: a forward to that relay, with the new path and attempt. Its `until` is the last place
            to which the relay's activations go once more; 0 where they do not.
        returns: whether it sends the gradient that it has kept.
    """

    trip: Trip
    returns: bool


Command = (
    StageCommand | AnswerOffer | SendBoundary | OfferAhead | FreeInbound
    | Announce | TellLost | TellPassed | HaltRelays | ResumeRelay
)  # fmt: skip


# --- events ---------------------------------------------------------------------------------------
class StageCore(Protocol):
    """The core of a peer that holds a stage.

    Attributes:
        counts: since the start.
    """

    counts: Counter[Counted]

    # --- the trainer ------------------------------------------------------------------------------
    def produced(
        self, leg: Leg, number: int, slot: int, loss: float | None, now_s: float
    ) -> list[Command]:
        """A boundary lies in an outbound slot."""

    def returned(self, number: int, now_s: float) -> list[Command]:
        """A microbatch's gradient has been added."""

    def restarted(self, slots: int) -> list[Command]:
        """The trainer is a new one, holds nothing, and has room for so many."""

    # --- streams ----------------------------------------------------------------------------------
    def offered(self, ticket: int, trip: Trip) -> list[Command]:
        """A boundary is offered; `ticket` names the offer until it is answered."""

    def withdrawn(self, ticket: int) -> list[Command]:
        """An offer without an answer is no longer there."""

    def arrived(self, trip: Trip, slot: int, loss: float | None) -> list[Command]:
        """What was welcome lies in an inbound slot."""

    def broke_off(self, trip: Trip, now_s: float, *, refused: bool = False) -> list[Command]:
        """What was welcome has not come whole; or it has, cannot be right, and was refused."""

    def sent(self, trip: Trip, now_s: float, *, taken: bool) -> list[Command]:
        """What was to be sent has been taken by the other, or has not."""

    def passed(self, microbatch: Microbatch, sender: str, attempt: int) -> list[Command]:
        """The one that we have sent a gradient has passed its own on, in this attempt."""

    def ticked(self, now_s: float) -> list[Command]:
        """Time has passed."""
