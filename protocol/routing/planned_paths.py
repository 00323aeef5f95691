"""Planned paths: those of the newest plan, mended where relays are not there, else random ones.

Rules
  1. An iteration takes the data peer's paths in the plan that holds when it sets out.
  2. A relay that is not there is replaced by one of its stage, the one that this iteration uses
     least. Where its stage has nobody, that microbatch's path is drawn (random_paths.py).
  3. Without a plan, or with one that leaves us out, all paths are drawn.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from protocol.microbatch.paths import Path, Relays

from .plans import PlannedPaths
from .random_paths import RandomRouter


class PlannedRouter:
    """See the top of the file. Is a `Router`.

    Attributes:
        plan: the one that holds; None before the first.
        full: the plan of iterations that skip nothing; None where there are none.
    """

    def __init__(self, origin: str, drawn: RandomRouter) -> None:
        self._origin = origin
        self._drawn = drawn
        self.plan: PlannedPaths | None = None
        self.full: PlannedPaths | None = None

    def own(self, iteration: int, relays: Relays) -> tuple[Path, ...]:
        """Our paths in the plan; empty where it has none."""
        plan = self.full if self._drawn.is_full(iteration, relays) else self.plan
        return () if plan is None else plan.paths.get(self._origin, ())

    def paths(self, iteration: int, microbatches: int, relays: Relays) -> Sequence[Path]:
        """One for each microbatch; none where a path finds no relay."""
        own = self.own(iteration, relays)
        if not own:
            return self._drawn.paths(iteration, microbatches, relays)
        used: Counter[str] = Counter()
        found: list[Path] = []
        for number in range(microbatches):
            before = own[number % len(own)]
            turn = iteration * microbatches + number
            path = _mended(before, relays, used) or self._drawn.another(before, turn, relays)
            if path is None:
                return []
            used.update(path.relays)
            found.append(path)
        return found

    def another(self, before: Path, turn: int, relays: Relays) -> Path | None:
        """Drawn: what the plan says of this one has failed."""
        return self._drawn.another(before, turn, relays)

    def whole(self, turn: int, relays: Relays) -> Path | None:
        """Drawn."""
        return self._drawn.whole(turn, relays)


def _mended(path: Path, relays: Relays, used: Counter[str]) -> Path | None:
    """The path over relays that are there; None if a stage has none."""
    chosen = []
    for relay, stage in zip(path.relays, path.stages, strict=True):
        there = relays[stage - 1]
        if not there:
            return None
        taken = relay if relay in there else min(there, key=lambda other: (used[other], other))
        chosen.append(taken)
    return replace(path, relays=tuple(chosen))
