"""How much is tried for how many machines.

The time of a simulated iteration grows with the machines, that of a start and of a bound with their
square and cube. So many machines get fewer simulated iterations, fewer numbers of data peers and
fewer changes that could help; `told` says so to the user.
"""

from dataclasses import dataclass, replace
from typing import Final

from .planner import SearchBudget


@dataclass(frozen=True, slots=True)
class Effort:
    """What is tried.

    Attributes:
        machines: up to so many get this effort.
        numbers: numbers of data peers; one is the likeliest alone.
        searches: for a plan with each of them, with different seeds; the best one counts.
        budget: of a search.
        mending: evaluations by which a plan is mended.
        judging: evaluations by which it is mended for other ways of working and for changes.
        places: stages and places at which one more machine is tried.
        brief: evaluations by which these are compared.
        planned_anew: searches by which the best of them are planned anew; 0 mends alone.
        bound: whether the lower bound is computed.
    """

    machines: int
    numbers: int
    searches: int
    budget: SearchBudget
    mending: int
    judging: int
    places: int
    brief: int
    planned_anew: int
    bound: bool = True

    @property
    def evaluations(self) -> int:
        """Iterations simulated for a plan, at most."""
        return self.numbers * self.searches * (self.budget.evaluations + self.mending)

    def told(self, machines: int) -> str:
        """What is less than for few machines; empty where nothing is."""
        whole = EFFORTS[0]
        if self.machines == whole.machines:
            return ""
        counts = (
            (self.evaluations, whole.evaluations, "iterations simulated for a plan"),
            (self.numbers, whole.numbers, "numbers of data peers tried"),
            (self.places, whole.places, "places tried for one more machine"),
        )
        less = [f"{what}: {own:,}, not {usual:,}" for own, usual, what in counts if own < usual]
        if whole.planned_anew and not self.planned_anew:
            less.append("nothing that would help was planned anew")
        if not self.bound:
            less.append("no lower bound")
        return f"{machines} machines are many, so less was tried ({'; '.join(less)})"


EFFORTS: Final = (
    Effort(
        16, 3, 3, SearchBudget(100), mending=200, judging=200, places=24, brief=60, planned_anew=2
    ),
    Effort(
        48, 3, 1, SearchBudget(100), mending=200, judging=60, places=8, brief=30, planned_anew=1
    ),
    Effort(
        128, 2, 1, SearchBudget(100), mending=150, judging=40, places=6, brief=20, planned_anew=0
    ),
    Effort(
        256, 1, 1, SearchBudget(150), mending=150, judging=40, places=3, brief=20, planned_anew=0
    ),
    Effort(
        1024,
        1,
        1,
        SearchBudget(20),
        mending=20,
        judging=8,
        places=1,
        brief=8,
        planned_anew=0,
        bound=False,
    ),
)
"""The next ones are for more machines than the one before is for."""


def effort_for(machines: int, budget: SearchBudget | None = None) -> Effort:
    """The effort for so many machines; a budget that is given replaces its own."""
    effort = next((each for each in EFFORTS if machines <= each.machines), EFFORTS[-1])
    return effort if budget is None else replace(effort, budget=budget)
