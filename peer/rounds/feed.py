"""What brings the corpus to the trainer, as the outer loop sees it."""

from collections.abc import Sequence
from typing import Protocol

from protocol.schedule.data_plan import Members


class DataFeed(Protocol):
    """Sees to it that pieces of the corpus are here when they are trained on."""

    def plan(self, members: Members, epoch: int, position: int) -> None:
        """A round begins there, with these shares of the data."""

    async def bring(self, pieces: Sequence[int]) -> None:
        """Returns when all of these pieces are here."""


class AllHere:
    """All of the corpus is here, or none of it is needed. Implements `DataFeed`."""

    def plan(self, members: Members, epoch: int, position: int) -> None:
        """Nothing is to be done."""

    async def bring(self, pieces: Sequence[int]) -> None:
        """They are here."""
