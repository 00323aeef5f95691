"""What the cores of a stage want done: by the trainer, and by the streams to other peers.

Slots are those of the memory that daemon and trainer share (peer/training/stages/ring.py); a
*number* is what a microbatch is called between those two.
"""

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
    """Have the trainer work on what has come into this inbound slot.

    Attributes:
        adds: whether the weights' gradient counts; it does not where it has been added before.
    """

    leg: Leg
    number: int
    slot: int
    loss: float | None
    adds: bool = True


@dataclass(frozen=True, slots=True)
class Forget:
    """Have the trainer drop a microbatch."""

    number: int


@dataclass(frozen=True, slots=True)
class FinishIteration:
    """Have the trainer step with what is there."""


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
class Release:
    """This outbound slot is free again: nobody is to be sent what lies in it any more."""

    slot: int


@dataclass(frozen=True, slots=True)
class FreeInbound:
    """This inbound slot is free again: nobody works on what lies in it."""

    slot: int


@dataclass(frozen=True, slots=True)
class Resend:
    """Have the trainer put a microbatch's activations into a slot once more."""

    number: int


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
    Answer | Compute | Forget | Resend | FinishIteration | Send | OfferAhead | Release | FreeInbound
    | Announce | TellLost | TellPassed | Halt | Resume
)  # fmt: skip
