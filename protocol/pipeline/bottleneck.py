"""What holds an iteration up, in words.

The data peer that is home last decides when the iteration ends. Its microbatches' time is work, the
way over links, or waiting for busy machines, busy links and slots. Where work and waiting weigh
more, the machine that works most is named; where the way does, the machine of its paths whose links
take most of it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .problem import Problem
from .simulator import Job, Outcome, Simulator, Stretch


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What holds an iteration up.

    Attributes:
        machine: the one to help first.
    """

    machine: int
    sentence: str


def bottleneck_of(
    problem: Problem, jobs: Sequence[Job], outcome: Outcome, record: Sequence[Stretch]
) -> Bottleneck:
    """Judge a simulated iteration."""
    names = [peer.name for peer in problem.peers]
    last = jobs[outcome.done_us.index(max(outcome.done_us))].origin
    own = [index for index, job in enumerate(jobs) if job.origin == last]
    started = {index: min(s.start_us for s in record if s.job == index) for index in own}
    total = sum(outcome.done_us[index] - started[index] for index in own)
    work, way, ways = _shares(problem, [jobs[index] for index in own])
    waiting = total - work - way
    busy = Counter[int]()
    for stretch in record:
        busy[stretch.machine] += stretch.end_us - stretch.start_us
    busiest = min(busy, key=lambda m: (-busy[m], m))
    shares = (
        f"{names[last]} is home last; {_percent(way, total)} of its microbatches' time passes on"
        f" links, {_percent(work, total)} in work, {_percent(waiting, total)} in waiting"
    )
    if way >= work + waiting:
        far = min(ways, key=lambda m: (-ways[m], m))
        return Bottleneck(far, f"{shares}. The links of {names[far]} take most of the way")
    makespan = outcome.makespan_us or max(outcome.done_us)
    load = _percent(busy[busiest], makespan)
    return Bottleneck(busiest, f"{shares}. {names[busiest]} works most: {load} of the iteration")


def _shares(problem: Problem, jobs: Sequence[Job]) -> tuple[int, int, Counter[int]]:
    """Work, the way over links, and the way by each machine at either end of a link."""
    simulator, work, way = Simulator(problem), 0, 0
    ways: Counter[int] = Counter()
    for job in jobs:
        for piece in simulator.route(job.origin, job.relays):
            travel = piece.transfer_us + piece.flight_us
            work += piece.work_us
            way += travel
            if travel:
                ways.update({piece.machine: travel, piece.next: travel})
    return work, way, ways


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "0%"
