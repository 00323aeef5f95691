"""Mending: a plan that is there, made to fit a problem that has changed a little.

Idea: microbatches move one by one to another machine of the same stage, at first those that come
home last, and a move stays if the simulated iteration is better for it. Stages stay where they are.
It is a plain descent, so it finishes what the planner's search leaves: on eight machines, short
searches with a descent behind each end lower than a long one of as many simulated iterations.

The budget is counted in simulated iterations.
"""

from collections import Counter
from collections.abc import Iterator

from .plan import Draft, Plan, fits, jobs_of
from .planner import EMPHASIS, Planned
from .problem import Problem
from .simulator import Order, Outcome, Relays, Simulator

Priced = tuple[tuple[int, int], Outcome]
"""Price as the planner has it, the end of the iteration, and how it went."""


def mended(
    problem: Problem,
    plan: Plan,
    evaluations: int,
    order: Order = Order.ARRIVAL,
    iterations: int = 1,
) -> Planned | None:
    """A plan that is at least as good for this problem; None where the given one is stuck.

    Args:
        iterations: simulated together, each begun before the last one has ended.
    """
    return _Descent(Simulator(problem, order), plan, evaluations, iterations).done()


class _Descent:
    """One descent."""

    def __init__(self, simulator: Simulator, plan: Plan, evaluations: int, iterations: int) -> None:
        self.problem = simulator.problem
        self.draft = _draft_of(plan)
        self.left = evaluations
        self.iterations = iterations
        self.simulator = simulator
        self.evaluations = 0
        self.holders = [
            [m for m, held in enumerate(plan.stages) if held == stage]
            for stage in range(self.problem.num_stages)
        ]

    def done(self) -> Planned | None:
        found = self._priced(self.draft)
        while found is not None and self.evaluations < self.left:
            (before, _), outcome = found
            for origin, place in self._last_home_first(outcome):
                found = self._improved(origin, place, found)
            if found[0][0] == before:
                break
        return found and Planned(self.draft.to_plan(), found[0][1], self.evaluations)

    def _improved(self, origin: int, place: int, best: Priced) -> Priced:
        """Move one microbatch to the first machine with which the iteration is better."""
        for candidate in self._moves(origin, place):
            if self.evaluations >= self.left:
                break
            found = self._priced(candidate) if fits(self.problem, candidate) else None
            if found is not None and found[0][0] < best[0][0]:
                self.draft = candidate
                return found
        return best

    def _priced(self, draft: Draft) -> Priced | None:
        self.evaluations += 1
        outcome = self.simulator.run(jobs_of(self.problem, draft.to_plan(), self.iterations))
        if outcome.makespan_us is None:
            return None
        mean = sum(outcome.done_us) // len(outcome.done_us)
        return (EMPHASIS * outcome.makespan_us + mean, outcome.makespan_us), outcome

    def _last_home_first(self, outcome: Outcome) -> list[tuple[int, int]]:
        """Data peer and place of every microbatch."""
        each = (
            (origin, place)
            for origin, paths in self.draft.paths.items()
            for _ in range(self.iterations)
            for place in range(len(paths))
        )
        moments = zip(outcome.done_us, each, strict=True)
        return list(dict.fromkeys(one for _, one in sorted(moments, key=lambda p: (-p[0], p[1]))))

    def _moves(self, origin: int, place: int) -> Iterator[Draft]:
        """A microbatch with another machine at one seat, those with the least to do first."""
        if place >= len(self.draft.paths[origin]):
            return  # another one has moved to another data peer
        path, loads = self.draft.paths[origin][place], self._loads()
        for seat, machine in enumerate((origin, *path)):
            others = [m for m in self.holders[self.draft.stages[machine]] if m != machine]
            for other in sorted(others, key=lambda m: (loads[m], m)):
                yield self._moved(origin, place, path, seat, other)

    def _loads(self) -> Counter[int]:
        """The forwards that each machine has to do, in microseconds."""
        loads: Counter[int] = Counter()
        for origin, _, path in self.draft.each():
            for machine in (origin, *path):
                loads[machine] += self.problem.peers[machine].forward_us
        return loads

    def _moved(self, origin: int, place: int, path: Relays, seat: int, other: int) -> Draft:
        """A microbatch with another machine at one seat; seat 0 is its data peer's."""
        own = self.draft.paths[origin]
        if seat:
            relays = (*path[: seat - 1], other, *path[seat:])
            return self.draft.with_paths({origin: (*own[:place], relays, *own[place + 1 :])})
        rest = (*own[:place], *own[place + 1 :])
        return self.draft.with_paths({origin: rest, other: (*self.draft.paths[other], path)})


def _draft_of(plan: Plan) -> Draft:
    return Draft(plan.stages, {m: plan.paths[m] for m, held in enumerate(plan.stages) if held == 0})
