"""The plan of a snapshot: the same for all that hold it.

Paths are planned for machines that keep their stages, each data peer with the microbatches of its
own batch; then the plan is mended (protocol/pipeline/mending.py). Where the stages cannot be shared
out evenly to the last microbatch, a little more is allowed (`stage_slack`), until there is a plan.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from protocol.errors import LocalProtocolError
from protocol.microbatch.paths import Path
from protocol.pipeline.assignment import NoPlan
from protocol.pipeline.mending import mended
from protocol.pipeline.plan import Plan
from protocol.pipeline.planner import Budget, Planned, plan_paths
from protocol.pipeline.problem import US_PER_S, Problem
from protocol.pipeline.simulator import Order

from .snapshots import Snapshot, Terms

BUDGET: Final = Budget(evaluations=200)
MENDING: Final = 200
SLACKS: Final = (0, 1, 2, 4, 8, 16, 64)


@dataclass(frozen=True, slots=True)
class PlannedPaths:
    """A plan, as its data peers use it.

    Attributes:
        snapshot: digest of the snapshot that it is made from.
        digest: of the plan itself.
        iteration_us: what an iteration takes, as planned.
        paths: of each data peer, in the order in which its microbatches set out.
    """

    snapshot: str
    digest: str
    iteration_us: int
    paths: Mapping[str, tuple[Path, ...]]

    @property
    def iteration_s(self) -> float:
        """`iteration_us` in seconds."""
        return self.iteration_us / US_PER_S


def plan_of(snapshot: Snapshot, terms: Terms, visited: int) -> PlannedPaths | None:
    """The plan; None where there is none, or too many ways to choose from."""
    problem = snapshot.problem(terms, visited)
    if problem is None:
        return None
    stages = snapshot.stages
    quotas = {peer: terms.microbatches for peer, stage in enumerate(stages) if stage == 0}
    for slack in SLACKS:
        looser = replace(problem, rules=replace(problem.rules, stage_slack=slack))
        try:
            found = plan_paths(looser, stages, quotas, BUDGET, Order.BACKWARD_FIRST)
        except NoPlan:
            continue
        except LocalProtocolError:
            return None
        better = mended(looser, found.plan, MENDING, Order.BACKWARD_FIRST)
        return _told(snapshot, looser, found if better is None else better)
    return None


def _told(snapshot: Snapshot, problem: Problem, planned: Planned) -> PlannedPaths:
    plan = planned.plan
    digest = plan.digest(problem)
    names = [peer.name for peer in problem.peers]
    paths = {
        names[origin]: tuple(_path(plan, relays, names, digest) for relays in own)
        for origin, own in enumerate(plan.paths)
        if plan.stages[origin] == 0
    }
    return PlannedPaths(snapshot.digest, digest, planned.makespan_us, paths)


def _path(plan: Plan, relays: tuple[int, ...], names: list[str], digest: str) -> Path:
    stages = tuple(plan.stages[relay] for relay in relays)
    return Path(tuple(names[relay] for relay in relays), stages, digest)
