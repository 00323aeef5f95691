"""All planners in one setting, with what each of them took."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.memory_maps import KIB
from bench.pipeline.checker import violations
from bench.pipeline.columns import at_full_depth
from bench.pipeline.conflicts import NoSchedule
from bench.pipeline.genetic import Breeding, Stages, arranged
from bench.pipeline.rivals import NEVER_US, RIVALS, Rival, priced_us
from bench.pipeline.settings import Setting
from bench.report import Row
from protocol.pipeline.pipelines import lower_bound_us
from protocol.pipeline.planner import Planned, plan
from protocol.pipeline.problem import US_PER_S, Problem
from protocol.pipeline.simulator import Plan

OURS: Final = "ours"
OURS_FULL: Final = "ours, full"
MB: Final = 1_000_000


@dataclass(slots=True)
class Measured:
    """One planner's iteration, and what planning it took.

    Attributes:
        bound_s: the published time, for published schedules.
    """

    name: str
    seconds: float
    bound_s: float | None
    evaluations: int = 0
    used_s: float = 0.0
    peak_mb: float = 0.0

    def row(self) -> Row:
        return {
            "setting": self.name,
            "iteration s": self.seconds,
            "bound s": self.bound_s,
            "evaluations": self.evaluations,
            "processor s": self.used_s,
            "peak MB": self.peak_mb,
        }


@dataclass(slots=True)
class Comparison:
    """What came out in one setting.

    Attributes:
        ours: one for each seed.
        plan: ours, of the first seed.
        rivals: by name; those that found nothing are not there.
        illegal: plans, ours or not, that the checker refuses.
    """

    setting: Setting
    bound_s: float
    ours: list[Measured]
    ours_full: Measured
    plan: Plan
    rivals: dict[str, Measured] = field(default_factory=dict)
    illegal: int = 0

    @property
    def over_best_rival(self) -> float:
        """Our slowest seed over the fastest rival that skips."""
        theirs = [self.rivals[r.name].seconds for r in RIVALS if self._in(r, full=False)]
        return max(each.seconds for each in self.ours) / min(theirs)

    @property
    def over_best_full(self) -> float:
        """Ours without skipping over the fastest rival without."""
        theirs = [self.rivals[r.name].seconds for r in RIVALS if self._in(r, full=True)]
        return self.ours_full.seconds / min(theirs)

    def _in(self, rival: Rival, *, full: bool) -> bool:
        return rival.full_depth == full and rival.name in self.rivals

    def rows(self) -> Iterator[Measured]:
        yield from self.ours
        yield self.ours_full
        yield from self.rivals.values()


@dataclass(frozen=True, slots=True)
class Contest:
    """How long everybody may search.

    Attributes:
        breeding: of each arrangement for the rivals.
        arrangements: that rivals may try; their best counts.
        evaluations: of our planner.
    """

    breeding: Breeding
    arrangements: int
    evaluations: int

    def held(self, setting: Setting, seeds: Sequence[int]) -> Comparison:
        """Let all planners plan."""
        problem, name = setting.problem, setting.name
        bound_s = lower_bound_us(problem) / US_PER_S
        found = [
            measured(
                f"{name}: {OURS}, seed {seed}",
                bound_s,
                lambda: plan(problem, self.evaluations, seed),  # noqa: B023 - at once
            )
            for seed in seeds
        ]
        full = at_full_depth(problem)
        ours_full, at_depth = measured(
            f"{name}: {OURS_FULL}", None, lambda: plan(full, self.evaluations)
        )
        comparison = Comparison(
            setting, bound_s, [each for each, _ in found], ours_full, found[0][1].plan
        )
        comparison.illegal = sum(bool(violations(problem, each.plan)) for _, each in found)
        comparison.illegal += bool(violations(full, at_depth.plan))
        self._rivals(comparison, problem)
        return comparison

    def _rivals(self, comparison: Comparison, problem: Problem) -> None:
        start_s = time.process_time()
        tried = [
            arranged(problem, Breeding(self.breeding.population, self.breeding.children, seed))
            for seed in range(self.arrangements)
        ]
        arranging_s = time.process_time() - start_s
        for rival in RIVALS:
            posed = rival.posed(problem)
            name = f"{comparison.setting.name}: {rival.name}"
            found, planned = measured(name, None, lambda: _best(rival, posed, tried))  # noqa: B023
            if planned.makespan_us < NEVER_US:
                found.used_s += arranging_s
                comparison.rivals[rival.name] = found
                comparison.illegal += bool(violations(posed, planned.plan))


def _best(rival: Rival, problem: Problem, tried: Sequence[Stages]) -> Planned:
    best = Planned(Plan((), ()), NEVER_US, 0)
    for stages in tried:
        try:
            each = rival.plan(problem, stages)
        except NoSchedule:
            continue
        if (took_us := priced_us(problem, each)) < best.makespan_us:
            best = Planned(each, took_us, 0)
    return best


def measured(
    name: str, bound_s: float | None, search: Callable[[], Planned]
) -> tuple[Measured, Planned]:
    """Plan, and see what it takes."""
    process = Path("/proc/self")
    (process / "clear_refs").write_text("5")  # begins the count of the peak anew
    start_s = time.process_time()
    planned = search()
    used_s = time.process_time() - start_s
    lines = (process / "status").read_text().splitlines()
    peak = next(int(line.split()[1]) * KIB for line in lines if line.startswith("VmHWM:"))
    seconds = planned.makespan_us / US_PER_S
    return Measured(name, seconds, bound_s, planned.evaluations, used_s, peak / MB), planned
