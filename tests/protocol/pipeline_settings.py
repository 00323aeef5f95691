"""A small setting that the tests of pipelines share."""

from dataclasses import replace

from bench.planner_settings import links_between
from protocol.pipeline.problem import PathRules, PipelinePeer, Problem, StageWork

RULES = PathRules()
WORK_OF_SMALL = StageWork(boundary_bytes=1000)


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


def unequal(problem, compute, places, slots=2):
    latencies, rates = links_between(places)
    peers = tuple(PipelinePeer(f"p{i}", us, slots) for i, us in enumerate(compute))
    work = replace(problem.work, boundary_bytes=8_000_000)
    return replace(problem, peers=peers, latency_us=latencies, bytes_per_s=rates, work=work)
