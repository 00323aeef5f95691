"""The low level of conflict-based search: the soonest path of one agent, by A*.

An agent stands for a slot of a data peer, or several of them: all their microbatches take its path.
Its path is timed as if it were alone but for *windows* in which it must not enter a machine; there
it waits. An agent may be barred from stages and from machines.

Idea (SkipPipe's modified A*): nodes are partial paths; the cost of one is when it gets there plus
what its backward will cost at least. A complete path is timed exactly, forward, loss and backward
with waits, and put back into the heap; the first to come out is the soonest. Ours adds an estimate
of what is missing that is never too high (the cheapest way home along the legal orders, if nothing
were barred), so fewer nodes are opened; without it the search is the one described.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.pipeline.planner import hop_prices
from protocol.pipeline.problem import THOUSAND, Problem, RelayNumbers, Stages, stage_orders

MAX_OPENED = 200_000
"""Nodes opened by one search: where windows are many, it gives up."""


class Agent(NamedTuple):
    """One or more slots of a data peer."""

    origin: int
    start_us: int


class Visit(NamedTuple):
    """A stay at a machine."""

    machine: int
    enter_us: int
    leave_us: int
    backward: bool


class Route(NamedTuple):
    """A timed path."""

    home_us: int
    relays: RelayNumbers
    visits: tuple[Visit, ...]


Windows = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Limits:
    """What one agent must keep to."""

    stages: frozenset[int] = frozenset()
    machines: frozenset[int] = frozenset()
    windows: Mapping[int, Windows] = field(default_factory=dict)

    def key(self) -> tuple[object, ...]:
        return self.stages, self.machines, tuple(sorted(self.windows.items()))


class LowLevel:
    """Soonest paths on one arrangement."""

    def __init__(self, problem: Problem, stages: tuple[int, ...]) -> None:
        self.problem = problem
        self.stages = stages
        work = problem.work
        self.forward_us = [peer.forward_us for peer in problem.peers]
        self.backward_us = [us * work.backward_permille // THOUSAND for us in self.forward_us]
        self.loss_us = [us * work.loss_permille // THOUSAND for us in self.forward_us]
        orders = stage_orders(problem.num_stages, problem.visited, problem.rules)
        self.endings: dict[Stages, set[Stages]] = {}
        for order in orders:
            for length in range(len(order) + 1):
                self.endings.setdefault(order[:length], set()).add(order[length:])
        numbers = range(len(stages))
        self.travel_us = [
            [problem.travel_us(a, b) if a != b else 0 for b in numbers] for a in numbers
        ]
        self.relays = [m for m in numbers if stages[m] > 0]
        self.members = [[m for m in numbers if stages[m] == s] for s in range(problem.num_stages)]
        self._prices = hop_prices(problem)
        self._rests: dict[tuple[int, Stages, int], int] = {}
        self._endings_us: dict[tuple[int, Stages, int], int] = {}
        self._found: dict[object, Route | None] = {}
        self.searches = 0

    def soonest(self, agent: Agent, limits: Limits) -> Route | None:
        """The soonest path within limits; None if there is none."""
        key = (agent, limits.key())
        if key not in self._found:
            self.searches += 1
            self._found[key] = self._search(agent, limits)
        return self._found[key]

    def _search(self, agent: Agent, limits: Limits) -> Route | None:
        origin = agent.origin
        travel, stages = self.travel_us, self.stages
        after_us = self._enter(limits, origin, agent.start_us, self.forward_us[origin])
        after_us += self.forward_us[origin]
        opened = [(0, 0, after_us, 0, (), ())]
        heap: list[tuple[int, int, int, int, RelayNumbers, tuple[int, ...]]] = list(opened)
        done: dict[int, Route] = {}
        pushed, depth = 0, self.problem.visited - 1
        while heap and pushed < MAX_OPENED:
            _, number, now, behind, path, order = heapq.heappop(heap)
            if number in done:
                return done[number]
            if len(path) == depth:
                route = self._timed(agent, limits, path)
                pushed += 1
                done[pushed] = route
                heapq.heappush(heap, (route.home_us, pushed, 0, 0, path, order))
                continue
            last = path[-1] if path else origin
            for machine in self.relays:
                stage = stages[machine]
                longer = (*order, stage)
                if (
                    longer not in self.endings
                    or stage in limits.stages
                    or machine in limits.machines
                ):
                    continue
                work_us = self.forward_us[machine]
                there_us = self._enter(limits, machine, now + travel[last][machine], work_us)
                later_us = behind + travel[machine][last] + self.backward_us[machine]
                pushed += 1
                least_us = there_us + work_us + later_us + self._rest(origin, longer, machine)
                heapq.heappush(
                    heap, (least_us, pushed, there_us + work_us, later_us, (*path, machine), longer)
                )
        return None

    def _rest(self, origin: int, order: Stages, machine: int) -> int:
        """The least that is still to come after so many stages, the last one at this machine."""
        key = (origin, order, machine)
        if (found := self._rests.get(key)) is None:
            found = self._rests[key] = min(
                self._ending_us(origin, ending, machine) for ending in self.endings[order]
            )
        return found

    def _ending_us(self, origin: int, ending: Stages, machine: int) -> int:
        key = (origin, ending, machine)
        if (found := self._endings_us.get(key)) is None:
            if ending:
                found = min(
                    self._prices[machine][m] + self._ending_us(origin, ending[1:], m)
                    for m in self.members[ending[0]]
                )
            else:
                travel = self.travel_us
                found = travel[machine][origin] + travel[origin][machine]
                found += self.loss_us[origin] + self.backward_us[origin]
            self._endings_us[key] = found
        return found

    def _timed(self, agent: Agent, limits: Limits, relays: RelayNumbers) -> Route:
        """Forward, loss and backward with all waits."""
        origin, visits, now = agent.origin, [], agent.start_us
        there = [origin, *relays]
        kinds = [
            *((m, self.forward_us[m], False) for m in there),
            (origin, self.loss_us[origin], True),
            *((m, self.backward_us[m], True) for m in reversed(there)),
        ]
        last = origin
        for machine, work_us, backward in kinds:
            now += self.travel_us[last][machine]
            now = self._enter(limits, machine, now, work_us)
            visits.append(Visit(machine, now, now + work_us, backward))
            now, last = now + work_us, machine
        return Route(now, relays, tuple(visits))

    def _enter(self, limits: Limits, machine: int, now: int, work_us: int) -> int:
        """When the machine may be entered, at the earliest."""
        for start_us, end_us in limits.windows.get(machine, ()):  # sorted
            if start_us < now + work_us and now < end_us:
                now = end_us
        return now
