"""What the cores of a stage want done, by the streams to other peers and by the trainer.

What the trainer is to do is said in the very messages that it is sent (trainer_messages.py).

Slots are those of the memory that daemon and trainer share (peer/training/stages/ring.py); a
*number* is what a microbatch is called between those two.
"""

from dataclasses import dataclass

from protocol.outcomes import RefusalReason

from .trainer_messages import StageCommand
from .trip import Microbatch, Trip


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer an offer: it is welcome, or why not.

    Attributes:
        ticket: of the offer.
    """

    ticket: int
    refusal: RefusalReason | None = None


@dataclass(frozen=True, slots=True)
class Send:
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
class Halt:
    """Ask relays where they stand with a microbatch, and have them wait (mending.py)."""

    microbatch: Microbatch
    attempt: int
    relays: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """Tell a relay how a microbatch goes on (mending.py).

    Attributes:
        trip: a forward to that relay, with the new path and attempt. Its `until` is the last place
            to which the relay's activations go once more; 0 where they do not.
        returns: whether it sends the gradient that it has kept.
    """

    trip: Trip
    returns: bool


Command = (
    StageCommand | Answer | Send | OfferAhead | FreeInbound
    | Announce | TellLost | TellPassed | Halt | Resume
)  # fmt: skip
