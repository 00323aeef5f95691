"""A second opinion on a plan: what it breaks, in words, judged from the constraints alone.

It imports nothing that makes plans, and shares no code with it: an error there is not repeated
here. Measurements and tests ask this file; no peer does.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from protocol.pipeline.problem import Problem
from protocol.pipeline.simulator import Plan


def violations(problem: Problem, plan: Plan) -> list[str]:
    """One sentence for each thing that is wrong; none for a legal plan."""
    number = len(problem.peers)
    if len(plan.stages) != number or len(plan.paths) != number:
        return [f"the plan is for {len(plan.stages)} machines, the problem has {number}"]
    found = [*_arrangement(problem, plan), *_origins(problem, plan)]
    if not found:  # what follows reads stages of machines that exist
        found = [*_paths(problem, plan), *_shares(problem, plan)]
    return found


def _arrangement(problem: Problem, plan: Plan) -> Iterator[str]:
    for stage, size in enumerate(problem.stage_sizes):
        holders = plan.stages.count(stage)
        if holders != size:
            yield f"stage {stage} is held by {holders} machines, not {size}"


def _origins(problem: Problem, plan: Plan) -> Iterator[str]:
    total = sum(len(paths) for paths in plan.paths)
    if total != problem.microbatches:
        yield f"{total} microbatches have a path, not {problem.microbatches}"
    for machine, paths in enumerate(plan.paths):
        name = problem.peers[machine].name
        if paths and plan.stages[machine] != 0:
            yield f"CC1: {name} sends microbatches and holds no data (stage {plan.stages[machine]})"
        for path in paths:
            if any(not 0 <= relay < len(problem.peers) for relay in path):
                yield f"a path of {name} names a machine that does not exist: {path}"


def _paths(problem: Problem, plan: Plan) -> Iterator[str]:
    for machine, paths in enumerate(plan.paths):
        for place, path in enumerate(paths):
            where = f"microbatch {place} of {problem.peers[machine].name}"
            order = [plan.stages[relay] for relay in path]
            yield from (f"{wrong}: {where}" for wrong in _order(problem, order))


def _order(problem: Problem, order: Sequence[int]) -> Iterator[str]:
    if 0 in order:
        yield "CC1: stage 0 is visited on the way"
    if len(order) != problem.visited - 1:
        yield f"{len(order) + 1} stages are visited, not {problem.visited}"
    if len(set(order)) != len(order):
        yield "a stage is visited twice"
    elif list(order) != sorted(order):
        yield f"CC3: stages do not rise: {order}"
    jump = max((after - before for before, after in pairwise((0, *order))), default=0)
    if jump > problem.rules.max_jump:
        yield f"CC3: a jump of {jump}, allowed is {problem.rules.max_jump}"


def _shares(problem: Problem, plan: Plan) -> Iterator[str]:
    visits = Counter(plan.stages[relay] for paths in plan.paths for path in paths for relay in path)
    stages = len(problem.stage_sizes) - 1
    fair = -(-(problem.microbatches * (problem.visited - 1)) // stages) + problem.rules.stage_slack
    for stage in range(1, stages + 1):
        if visits[stage] > fair:
            yield f"CC2: stage {stage} trains {visits[stage]} microbatches, allowed are {fair}"
