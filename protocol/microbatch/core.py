"""What the two kinds of cores have in common: the events that come from trainer and streams.

Every event returns what is to be done. relay.py and data_peer.py say what they mean.
"""

from collections import Counter
from typing import Protocol

from .commands import Command
from .counts import Counted
from .trip import Leg, Microbatch, Trip


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
