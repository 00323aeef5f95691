"""Commands and counts that the two kinds of cores have in common.

Events come from trainer and streams; relay.py and data_peer.py say what they mean. Every event
returns commands: what the streams to other peers and the trainer are to do. A command to the
trainer is the message that is sent (trainer_messages.py); those to other peers hold one
(protocol/wire/stage_messages.py). Status and metrics have the counts of microbatches by their names
here.

Slots are those of the memory that daemon and trainer share (peer/training/shared.py); a *number*
names a microbatch between those two.
"""

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from protocol.outcomes import RefusalReason
from protocol.wire.stage_messages import Direction, Hop, Noted, Notice

from .checks import Compare, Differing, Read
from .trainer_messages import Begun, Filled, Freed, GradientAdded, StageCommand, StageEvent, Stepped


class MicrobatchEvent(StrEnum):
    """A thing that happens to a microbatch; `counts` and the metrics have these names."""

    BEGUN = "begun"
    """It set out (at its data peer)."""
    DONE = "done"
    """Its gradient has been added here."""
    WITHOUT = "without"
    """It is done, without a stage that had nobody when it set out (at its data peer)."""
    AGAIN = "again"
    """It was lost on its way to the loss, and set out again (at its data peer)."""
    MENDED = "mended"
    """It was lost on its way back, and set out again (at its data peer)."""
    REPLAYED = "replayed"
    """Its gradient has been added here, after it had been lost elsewhere (at a relay)."""
    GONE = "gone"
    """A stage's gradient of it was gone before it moved any weight: its relay died (at its data
    peer, once for each such stage), or its trainer did (at the relay)."""
    LOST = "lost"
    """It set out or was held here, and its gradient will not come."""
    LATE = "late"
    """Its gradient came when it was no longer held (at a relay)."""
    BUSY = "busy"
    """It was sent away, because too many wait (at a relay)."""
    REFUSED = "refused"
    """What came of it here was no boundary, or of a size that cannot be right, and was refused."""
    CLIPPED = "clipped"
    """Its gradient was far longer than usual, and counted less in the step here."""
    SCORED = "scored"
    """It passed for validation, or for a check (at a relay)."""
    CHECKED = "checked"
    """What came of it was compared with what other relays made of it (at its data peer)."""


@dataclass(frozen=True, slots=True)
class AnswerOffer:
    """Answer the offer with this ticket: it is welcome, or why not."""

    ticket: int
    refusal: RefusalReason | None = None


@dataclass(frozen=True, slots=True)
class SendBoundary:
    """Send what lies in this outbound slot, and free it."""

    hop: Hop
    slot: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class SendNotice:
    to: tuple[str, ...]
    message: Notice


@dataclass(frozen=True, slots=True)
class OfferAhead:
    """Offer this hop now: its boundary will be there soon."""

    hop: Hop


Command = (
    StageCommand | AnswerOffer | SendBoundary | OfferAhead | SendNotice | Read | Compare | Differing
)


class StageCore(ABC):
    """The core of a peer that holds a stage; `counts` are since the start."""

    def __init__(self) -> None:
        self.counts: Counter[MicrobatchEvent] = Counter()

    def on_event(self, event: StageEvent, now_s: float) -> list[Command]:
        match event:
            case Filled(direction, number, slot, loss):
                return self.produced(direction, number, slot, loss, now_s)
            case GradientAdded(number):
                return self.returned(number, now_s)
            case Begun(microbatches):
                return self.begun(microbatches, now_s)
            case Stepped(clipped=clipped):
                self.counts[MicrobatchEvent.CLIPPED] += clipped
                return self.stepped(now_s)
            case Freed():
                return [event]

    @abstractmethod
    def produced(
        self, direction: Direction, number: int, slot: int, loss: float | None, now_s: float
    ) -> list[Command]:
        """The boundary that goes on lies in this outbound slot."""

    @abstractmethod
    def returned(self, number: int, now_s: float) -> list[Command]:
        """The trainer has added a microbatch's gradient, if it was to."""

    def noted(self, peer_id: str, message: Notice, answer: Noted) -> list[Command]:
        """A peer has answered a notice of ours."""
        return []

    def begun(self, microbatches: int, now_s: float) -> list[Command]:
        return []

    def stepped(self, now_s: float) -> list[Command]:
        return []
