"""What the cores of a stage want done: by the trainer, and by the streams to other peers.

Slots are those of the memory that daemon and trainer share (peer/training/stages/ring.py); a
*number* is what a microbatch is called between those two.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from protocol.outcomes import RefusalReason

from .trip import Leg, Microbatch, Trip


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer an offer: it is welcome, or why not.

    Attributes:
        ticket: of the offer.
    """

    ticket: int
    refusal: RefusalReason | None = None


@dataclass(frozen=True, slots=True)
class Compute:
    """Have the trainer work on what has come into this inbound slot."""

    leg: Leg
    number: int
    slot: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class Forget:
    """Have the trainer drop a microbatch."""

    number: int


@dataclass(frozen=True, slots=True)
class FinishIteration:
    """Have the trainer step with what is there."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send what lies in this outbound slot."""

    trip: Trip
    slot: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class Release:
    """This outbound slot is free again: nobody is to be sent what lies in it."""

    slot: int


@dataclass(frozen=True, slots=True)
class FreeInbound:
    """This inbound slot is free again: nobody works on what lies in it."""

    slot: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell relays how many microbatches of an iteration will come to each of them."""

    iteration: int
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class TellLost:
    """Tell its data peer that this microbatch will not come back."""

    microbatch: Microbatch


Command = (
    Answer | Compute | Forget | FinishIteration | Send | Release | FreeInbound | Announce | TellLost
)
