"""The relays that a data peer can send its microbatches to."""

from collections.abc import Collection
from typing import Final

from .paths import Relays

STAND_IN_S: Final = 120.0
"""How long somebody may take to come to a stage that nobody holds. A peer of another stage goes
over after half a minute (protocol/run/assignment.py), and fetches its new stage then."""


class RelaysThere:
    """See the top of the file.

    Attributes:
        stages: the peers of each stage from the second on that train, sorted.
        all: all of them.
        failed: those that have lost a microbatch in this iteration; others are preferred.
        trained: whether the run has been: before that a stage has not come yet, rather than gone.
    """

    def __init__(self) -> None:
        self.stages: Relays = ()
        self.all: frozenset[str] = frozenset()
        self.failed: set[str] = set()
        self.trained = False
        self._empty_since_s: dict[int, float] = {}

    def update(self, stages: Relays, now_s: float) -> tuple[frozenset[str], frozenset[str]]:
        """Take over who is there now. Returns those that have come, and those that have gone."""
        before, self.stages = self.all, stages
        self.all = frozenset(relay for stage in stages for relay in stage)
        come, gone = self.all - before, before - self.all
        self.failed.difference_update(come)
        self.failed.update(gone)
        self._empty_since_s = {s: self._empty_since_s.get(s, now_s) for s in self.missing}
        return come, gone

    @property
    def missing(self) -> tuple[int, ...]:
        """The stages that nobody holds; counted from 1, for the data peers hold stage 0."""
        return tuple(stage for stage, peers in enumerate(self.stages, 1) if not peers)

    def are_long_gone(self, stages: Collection[int], now_s: float) -> bool:
        """Whether one of these stages has had nobody for longer than a stand-in may take."""
        return any(
            stage in stages and now_s - since_s >= STAND_IN_S
            for stage, since_s in self._empty_since_s.items()
        )

    @property
    def sound(self) -> Relays:
        """Those that have not failed; a stage where all have failed is as it is."""
        return tuple(
            tuple(relay for relay in stage if relay not in self.failed) or stage
            for stage in self.stages
        )

    def stand_in(self, stage: int, path: Collection[str], turn: int) -> str | None:
        """Another peer of a stage, that is not on this path; None where there is none."""
        if not 0 < stage <= len(self.stages):
            return None
        others = [relay for relay in self.sound[stage - 1] if relay not in path]
        return others[turn % len(others)] if others else None
