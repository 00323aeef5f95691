"""Where a fragment is; what leads from one to the next is decided in keeper.py."""

from dataclasses import dataclass

from .chunk_writes import Occasion
from .fragment_events import Fetched, Held, ResultArrived, Sent, Withdrawn


@dataclass(frozen=True, slots=True)
class Resting:
    """Nothing is under way."""


@dataclass(frozen=True, slots=True)
class AwaitingTurn:
    """It was sent, and waits for fragments that were sent before it."""

    sent: Sent
    began_s: float


@dataclass(frozen=True, slots=True)
class Verifying:
    """Its memory is checked before it leaves."""

    sent: Sent
    began_s: float


@dataclass(slots=True)
class InFlight:
    """Its codes are on their way to the owners, or their results to us.

    Attributes:
        owners: of its chunks, in order.
        answered: chunks for which a result has come, whether it could be applied or not.
        occasion: its time is our patience.
    """

    sent: Sent
    began_s: float
    owners: tuple[str, ...]
    answered: set[int]
    occasion: Occasion


@dataclass(frozen=True, slots=True)
class Holding:
    """Something came that is to be written, and the trainer is told to hold still."""

    item: ResultArrived | Fetched | Withdrawn


@dataclass(frozen=True, slots=True)
class Mending:
    """It is being written."""

    held: Held
    occasion: Occasion


State = Resting | AwaitingTurn | Verifying | InFlight | Holding | Mending
