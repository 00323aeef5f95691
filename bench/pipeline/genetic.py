"""SkipPipe's arrangement of machines on stages: a genetic algorithm over DT-FM's cost.

Idea (GCMA in SkipPipe's published code, after DT-FM, Yuan et al. 2022): stages of given sizes; an
arrangement costs DP + 2 * PP, where

    DP  the dearest link inside any stage (there its machines average)
    PP  the shortest closed tour of the stages from stage 0, where two stages are as far apart as
        the dearest pair of their bottleneck matching (travel and a forward)

A population of random arrangements; a child is made of two parents by five-point crossover, its
sizes are repaired, then one chain of moves (a machine to another stage, one of that to the next,
the last back to the first) lets machines leave stages inside which they are far. A child replaces
the worse of its parents unless it is worse than both. In the end stages are numbered along the
tour.

Left out: DT-FM's weight of the bytes of averaging in the chain's gain (the release switches it off
by a misspelt mode). Its budget, 200 arrangements and 8000 children, is an argument. All relay
stages have one size, as in SkipPipe.

Source: read about in descriptions of schedulers/gcma.py, tsp.py, bipartite_matching.py of SkipPipe;
written anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bench.pipeline.matching import bottleneck
from bench.pipeline.tour import shortest_tour
from protocol.pipeline.problem import Draws, Problem

Stages = tuple[int, ...]
"""The stage of each machine."""
CROSSINGS: Final = 5
EXCHANGED: Final = 4
"""One child in so many is a crossing, the others are exchanges."""


@dataclass(frozen=True, slots=True)
class Breeding:
    """How long to search; SkipPipe's own is 200 and 8000."""

    population: int = 100
    children: int = 1000
    seed: int = 0


def arranged(problem: Problem, breeding: Breeding) -> Stages:
    """The best arrangement of the last population, stages numbered along its tour."""
    draws = Draws(f"genetic/{problem.digest()}/{breeding.seed}")
    prices = _Prices(problem)
    labels = [stage for stage, size in enumerate(problem.stage_sizes) for _ in range(size)]
    alive = [_shuffled(labels, draws) for _ in range(breeding.population)]
    costs = [prices.cost(each) for each in alive]
    for _ in range(breeding.children):
        one, other = draws.below(len(alive)), draws.below(len(alive))
        if draws.below(EXCHANGED):
            other, child = one, _exchanged(alive[one], draws)
        else:
            child = _repaired(problem, _crossed(alive[one], alive[other], draws), draws)
            child = _chained(child, prices.edges, problem.num_stages, draws)
        worse = max((one, other), key=lambda parent: costs[parent])
        cost = prices.cost(child)
        if cost <= costs[worse]:
            alive[worse], costs[worse] = child, cost
    best = alive[min(range(len(alive)), key=lambda each: (costs[each], alive[each]))]
    return _numbered_along(prices.tour(best)[1], best)


class _Prices:
    """Costs of arrangements; matchings of two stages are kept."""

    def __init__(self, problem: Problem) -> None:
        numbers = range(len(problem.peers))
        self.num_stages = problem.num_stages
        there = [[problem.travel_us(a, b) if a != b else 0 for b in numbers] for a in numbers]
        self.edges = [[(there[a][b] + there[b][a]) // 2 for b in numbers] for a in numbers]
        self.forward_us = [peer.forward_us for peer in problem.peers]
        self._apart: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}

    def cost(self, stages: Stages) -> int:
        inside = max(
            (self.edges[a][b] for group in groups_of(stages) for a in group for b in group),
            default=0,
        )
        return inside + 2 * self.tour(stages)[0]

    def tour(self, stages: Stages) -> tuple[int, tuple[int, ...]]:
        groups = groups_of(stages)
        return shortest_tour(
            [[self._between(a, b) if a != b else 0 for b in groups] for a in groups]
        )

    def _between(self, one: tuple[int, ...], other: tuple[int, ...]) -> int:
        key = (one, other) if (len(one), one) <= (len(other), other) else (other, one)
        if (found := self._apart.get(key)) is None:
            rows, columns = key
            work = self.forward_us
            prices = [[self.edges[a][b] + (work[a] + work[b]) // 2 for b in columns] for a in rows]
            found = self._apart[key] = bottleneck(prices)[0]
        return found


def groups_of(stages: Sequence[int]) -> list[tuple[int, ...]]:
    """The machines of each stage."""
    return [
        tuple(m for m, held in enumerate(stages) if held == stage)
        for stage in range(max(stages) + 1)
    ]  # fmt: skip


def _shuffled(labels: Sequence[int], draws: Draws) -> Stages:
    left = list(labels)
    return tuple(left.pop(draws.below(len(left))) for _ in labels)


def _crossed(one: Stages, other: Stages, draws: Draws) -> list[int]:
    cuts = sorted(draws.below(len(one)) for _ in range(CROSSINGS))
    return [
        (one, other)[sum(cut <= machine for cut in cuts) % 2][machine]
        for machine in range(len(one))
    ]  # fmt: skip


def _repaired(problem: Problem, stages: list[int], draws: Draws) -> Stages:
    """The same with the right sizes: machines drawn from stages too large fill those too small."""
    sizes = problem.stage_sizes
    lacking = [
        stage for stage, size in enumerate(sizes) for _ in range(size - stages.count(stage))
    ]  # fmt: skip
    while lacking:
        machine = draws.below(len(stages))
        if stages.count(stages[machine]) > sizes[stages[machine]]:
            stages[machine] = lacking.pop()
    return tuple(stages)


def _exchanged(stages: Stages, draws: Draws) -> Stages:
    """Two machines of different stages in each other's place."""
    while True:
        one, other = draws.below(len(stages)), draws.below(len(stages))
        if stages[one] != stages[other]:
            moved = list(stages)
            moved[one], moved[other] = moved[other], moved[one]
            return tuple(moved)


def _chained(
    stages: Stages, edges: Sequence[Sequence[int]], num_stages: int, draws: Draws
) -> Stages:
    """One chain of moves, cut where it has gained most."""
    first = current = draws.below(num_stages)
    moved = list(stages)
    best, best_gain, gain = stages, 0, 0
    left = set(range(num_stages)) - {first}
    start = None
    while left:
        machine, target, gained = max(
            (
                (m, to, _slowest(m, moved, edges, current) - _slowest(m, moved, edges, to))
                for m, stage in enumerate(moved)
                if stage == current and m != start
                for to in left
            ),
            key=lambda move: (move[2], -move[0], -move[1]),
            default=(None, None, 0),
        )
        if machine is None or target is None:
            break
        moved[machine], gain, start = target, gain + gained, machine
        left.remove(target)
        back = max(
            (m for m, stage in enumerate(moved) if stage == target and m != machine),
            key=lambda m: -_slowest(m, moved, edges, first),
            default=None,
        )
        if back is not None:
            closed_gain = (
                gain + _slowest(back, moved, edges, target) - _slowest(back, moved, edges, first)
            )
            if closed_gain > best_gain:
                closed = list(moved)
                closed[back] = first
                best, best_gain = tuple(closed), closed_gain
        current = target
    return best


def _slowest(machine: int, stages: Sequence[int], edges: Sequence[Sequence[int]], of: int) -> int:
    row = edges[machine]
    return max(
        (row[m] for m, stage in enumerate(stages) if stage == of and m != machine), default=0
    )


def _numbered_along(tour: tuple[int, ...], stages: Stages) -> Stages:
    numbers = {stage: place for place, stage in enumerate(tour)}
    return tuple(numbers[stage] for stage in stages)
