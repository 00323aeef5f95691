"""A small setting that the tests of pipelines share."""

from dataclasses import replace
from itertools import combinations_with_replacement, permutations, product

from bench.planner_settings import links_between
from protocol.pipeline.plan import Plan
from protocol.pipeline.problem import PathRules, PipelinePeer, Problem, Work
from protocol.pipeline.stage_orders import legal_paths, stage_orders

RULES = PathRules()
WORK_OF_SMALL = Work(boundary_bytes=1000)


def small_problem(
    sizes=(1, 1, 1),
    visited=3,
    microbatches=1,
    *,
    forward_us=100_000,
    latency_us=10_000,
    slots=2,
    rules=RULES,
    work=WORK_OF_SMALL,
    **changes,
) -> Problem:
    """Equal machines on equal links of 1 MB/s."""
    number = sum(sizes)
    peers = tuple(PipelinePeer(f"p{i}", forward_us, slots) for i in range(number))
    latencies = ((latency_us,) * number,) * number
    rates = ((1_000_000,) * number,) * number
    return Problem(
        peers, latencies, rates, work, tuple(sizes), visited, microbatches, rules, **changes
    )  # fmt: skip


def every_plan(problem):
    """All plans of a problem, by brute force: every arrangement, quota and path."""
    labels = [s for s, size in enumerate(problem.stage_sizes) for _ in range(size)]
    orders = stage_orders(problem.num_stages, problem.visited, problem.rules)
    for stages in sorted(set(permutations(labels))):
        members = [[m for m, s in enumerate(stages) if s == k] for k in range(problem.num_stages)]
        paths = list(legal_paths(orders, members))
        for origins in combinations_with_replacement(members[0], problem.microbatches):
            for chosen in product(paths, repeat=problem.microbatches):
                by_origin = [()] * len(stages)
                for origin, path in zip(origins, chosen, strict=True):
                    by_origin[origin] = (*by_origin[origin], path)
                yield Plan(stages, tuple(by_origin))


def unequal(problem, compute, places, slots=2):
    latencies, rates = links_between(places)
    peers = tuple(PipelinePeer(f"p{i}", us, slots) for i, us in enumerate(compute))
    work = replace(problem.work, boundary_bytes=8_000_000)
    return replace(problem, peers=peers, latency_us=latencies, bytes_per_s=rates, work=work)
