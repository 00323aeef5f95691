"""The relays that a data peer can send its microbatches to."""

from collections.abc import Collection

from .paths import Relays


class RelaysThere:
    """See the top of the file.

    Attributes:
        stages: the peers of each stage from the second on that train, sorted.
        all: all of them.
        failed: those that have lost a microbatch in this iteration; others are preferred.
    """

    def __init__(self) -> None:
        self.stages: Relays = ()
        self.all: frozenset[str] = frozenset()
        self.failed: set[str] = set()

    def __repr__(self) -> str:
        return f"<RelaysThere, {len(self.all)} in {len(self.stages)} stages>"

    def update(self, stages: Relays) -> tuple[frozenset[str], frozenset[str]]:
        """Take over who is there now. Returns those that have come, and those that have gone."""
        before, self.stages = self.all, stages
        self.all = frozenset(relay for stage in stages for relay in stage)
        come, gone = self.all - before, before - self.all
        self.failed.difference_update(come)
        self.failed.update(gone)
        return come, gone

    @property
    def missing(self) -> tuple[int, ...]:
        """The stages that nobody holds; counted from 1, for the data peers hold stage 0."""
        return tuple(stage for stage, peers in enumerate(self.stages, 1) if not peers)

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
