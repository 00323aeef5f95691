"""Random paths: latencies are not looked at, and every stage is used alike.

Theory. Which stages a microbatch leaves out decides what it trains, so all relay stages must be
visited equally often (CC2, protocol/pipeline/problem.py). Each microbatch therefore takes the
stages that its data peer has used least in this iteration, as far as the limits of paths allow
(CC3); where several are used alike, and which relay of a stage is taken, is drawn. Swaps are drawn
too, within the same limits. Draws are seeded with the run's seed, the data peer and the iteration:
data peers do not move in step, and a run can be repeated.

A stage that nobody holds is left out, as long as others are left for paths of that length. An
iteration that would skip nothing then has paths like all others.

Invariant: within an iteration of one data peer no two stages differ by more than one visit, unless
the limits of paths forbid it; nor do two relays of a stage.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from protocol.microbatch.paths import Path, Relays
from protocol.pipeline.draws import Draws
from protocol.pipeline.problem import PathRules
from protocol.pipeline.stage_orders import Stages, within

TRIES: Final = 16
"""Choices of stages drawn for a path, until one is within the limits."""


@dataclass(slots=True)
class _Used:
    """What this deal has used so far."""

    stages: Counter[int] = field(default_factory=Counter)
    relays: Counter[str] = field(default_factory=Counter)

    def add(self, path: Path) -> None:
        self.stages.update(path.stages)
        self.relays.update(path.relays)


class RandomRouter:
    """See the top of the file. Is a `Router`.

    Args:
        visited: stages of a path, the data peer's among them.
        full_every: every so many iterations paths visit all; 0 is never.
    """

    def __init__(
        self, origin: str, seed: int, visited: int, rules: PathRules, *, full_every: int = 0
    ) -> None:
        self._name = f"{seed}/{origin}"
        self._visited = visited
        self._rules = rules
        self._full_every = full_every

    def is_full(self, iteration: int, relays: Relays) -> bool:
        """Whether paths of this iteration visit all stages."""
        return self._full_every > 0 and iteration % self._full_every == 0 and all(relays)

    def paths(self, iteration: int, microbatches: int, relays: Relays) -> Sequence[Path]:
        """One for each microbatch; none where a path finds no relay."""
        draws, used = Draws(f"{self._name}/{iteration}"), _Used()
        found: list[Path] = []
        for _ in range(microbatches):
            if self.is_full(iteration, relays):
                path = _through(tuple(range(1, len(relays) + 1)), relays, draws, used)
            else:
                path = self._drawn(self._visited - 1, relays, draws, used)
            if path is None:
                return []
            used.add(path)
            found.append(path)
        return found

    def another(self, before: Path, turn: int, relays: Relays) -> Path | None:
        """Over the same stages, if each has a relay; else over as many as are usual."""
        draws, used = Draws(f"{self._name}/again/{turn}"), _Used()
        return _through(before.stages, relays, draws, used) or self._drawn(
            self._visited - 1, relays, draws, used
        )

    def whole(self, turn: int, relays: Relays) -> Path | None:
        """Through all stages in order."""
        draws = Draws(f"{self._name}/whole/{turn}")
        return _through(tuple(range(1, len(relays) + 1)), relays, draws, _Used())

    def _drawn(self, hops: int, relays: Relays, draws: Draws, used: _Used) -> Path | None:
        """A path over so many of the stages that have a relay; None where none is legal."""
        there = [stage for stage, peers in enumerate(relays, 1) if peers]
        for attempt in range(TRIES):
            rank = {s: (used.stages[s] + draws.below(1 + attempt), draws.below(1 << 32), s)
                    for s in there}  # fmt: skip
            stages = tuple(sorted(sorted(there, key=rank.__getitem__)[:hops]))
            if len(stages) == hops and within(stages, self._rules):
                return _through(self._swapped(stages, draws), relays, draws, used)
        stages = tuple(there[:hops])
        fits = len(stages) == hops and within(stages, self._rules)
        return _through(stages, relays, draws, used) if fits else None

    def _swapped(self, stages: Stages, draws: Draws) -> Stages:
        """The same stages with some neighbours exchanged, as far as that is legal."""
        for _ in range(draws.below(self._rules.max_swaps + 1)):
            place = draws.below(max(1, len(stages) - 1))
            moved = (*stages[:place], *stages[place : place + 2][::-1], *stages[place + 2 :])
            if within(moved, self._rules):
                stages = moved
        return stages


def _through(stages: Stages, relays: Relays, draws: Draws, used: _Used) -> Path | None:
    """A path through these stages, by the relays that are used least; None if one has none."""
    chosen = []
    for stage in stages:
        peers = relays[stage - 1]
        if not peers:
            return None
        least = min(used.relays[peer] for peer in peers)
        chosen.append(draws.of([peer for peer in peers if used.relays[peer] == least]))
    return Path(tuple(chosen), stages)
