"""The relays of a data peer: those that are there, the paths over them, and what went with them.

The one question that the core asks a router is which relays a microbatch visits; routers stand in
protocol/routing.

A relay steps with an iteration's gradients before it takes a microbatch of the next; so what has
come through it in a later iteration says that it has stepped with those before. What it has added
since is gone if it dies.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final, Protocol

from protocol.wire.stage_messages import Path

Relays = tuple[tuple[str, ...], ...]
"""The peers of each stage from the second on, sorted."""


class Router(Protocol):
    """Chooses paths for the microbatches of one data peer. A path has no relay twice."""

    def paths(self, iteration: int, microbatches: int, relays: Relays) -> Sequence[Path]:
        """One for each microbatch of an iteration; none where a path finds no relay.

        Args:
            relays: those that are there; a stage may be empty, and is left out then.
        """

    def another(self, before: Path, turn: int, relays: Relays) -> Path | None:
        """A path for a microbatch that sets out again.

        Args:
            turn: a number that differs from time to time.
            relays: those that have not failed; a stage may be empty.
        """

    def whole(self, turn: int, relays: Relays) -> Path | None:
        """A path through all stages in order, for validation."""


STAND_IN_S: Final = 120.0
"""How long somebody may take to come to a stage that nobody holds. A peer of another stage goes
over after half a minute (protocol/run/assignment.py), and fetches its new stage then."""


class RelaysThere:
    """Those that a data peer can send microbatches to.

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
        self._unstepped: dict[str, tuple[int, int]] = {}

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

    # --- gradients that may go with a relay -------------------------------------------------------
    def added(self, relays: Iterable[str], iteration: int) -> None:
        """These have added a microbatch of that iteration, and stepped with those before."""
        for relay in relays:
            newest, gradients = self._unstepped.get(relay, (iteration, 0))
            gradients = gradients + 1 if newest == iteration else 1
            self._unstepped[relay] = iteration, gradients

    def gone_with(self, relay: str) -> int:
        """A relay is gone: how many gradients have gone with it."""
        return self._unstepped.pop(relay, (0, 0))[1]

    def forget_before(self, iteration: int) -> None:
        """Nothing of earlier iterations can be gone."""
        newer = {r: each for r, each in self._unstepped.items() if each[0] >= iteration}
        self._unstepped = newer
