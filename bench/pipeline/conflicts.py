"""SkipPipe's paths: a modified conflict-based search over agents (agents.py).

Idea. A node of the search tree is a set of limits and the soonest path of each agent within them.
The node whose slowest agent is soonest is looked at first. Where its paths conflict, children each
get one more limit, and the agents that it concerns are planned again:

1. CC2: a stage has more agents than its share. Its agents are sorted fastest first (they have
   slack), those that cannot leave are dropped; up to 3 combinations of as many as are too many are
   barred from the stage. A node without such a stage is a *root*: its agents keep their stages.
2. TC1, from the roots: a relay has more agents than its memory. The same with 2 combinations,
   barred from the relay.
3. TC2: two agents are at a machine at once (two backwards do not count). Slowest agents first; of a
   forward and a backward the later one waits; of two forwards the faster agent waits, and, if the
   other is among the faster three quarters, in a second child the slower one. Every node is run by
   the event simulator; one that is slower than the best by 5 s is dropped; the best is kept.

It ends after so many nodes without conflicts, when nothing is left, or when its budget is spent.
Left out: their early stop at 0.88 of the first time, and the little penalty for other relays that
are too full. Quotas are equal, as theirs.

Source: read about in descriptions of schedulers/CBS.py of SkipPipe; written anew.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, count, islice
from typing import Final, NamedTuple

from bench.pipeline.agents import Agent, Limits, LowLevel, Route, Visit
from protocol.pipeline.planner import even_quotas
from protocol.pipeline.problem import US_PER_S, Problem, RelayNumbers
from protocol.pipeline.simulator import Plan, Simulator, jobs_of

STAGE_CHILDREN: Final = 3
RELAY_CHILDREN: Final = 2
ROOTS: Final = 32
SOLUTIONS: Final = 8
SLOWER_US: Final = 5 * US_PER_S


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to search.

    Attributes:
        merged: slots that share one agent; None merges all of a data peer.
        nodes: looked at in each phase, at most.
    """

    merged: int | None = None
    nodes: int = 400


class _Node(NamedTuple):
    limits: tuple[Limits, ...]
    routes: tuple[Route, ...]

    @property
    def cost_us(self) -> int:
        return max(route.home_us for route in self.routes)


Expand = Callable[[_Node], list[_Node] | None]
"""Children of a node; None where it has no conflict."""
Excess = Callable[[_Node], int]
"""How far a node is from having none."""


class NoSchedule(Exception):
    """The search ended without paths for all agents."""


def conflict_search(
    problem: Problem,
    stages: tuple[int, ...],
    effort: Effort,
    *,
    collisions: bool = True,
    judge: Problem | None = None,
) -> Plan:
    """Paths for an arrangement.

    Args:
        collisions: whether phase 3 is run.
        judge: what the simulator prices by, if links are not to be seen by the search.

    Raises:
        NoSchedule
    """
    return _Tree(problem, stages, effort, judge or problem).searched(collisions=collisions)


class _Tree:
    """One search."""

    def __init__(
        self, problem: Problem, stages: tuple[int, ...], effort: Effort, judge: Problem
    ) -> None:
        self.problem = problem
        self.stages = stages
        self.low = LowLevel(problem, stages)
        self.simulator = Simulator(judge)
        self.effort = effort
        self.greedy = False
        self.quotas = even_quotas(problem, stages)
        slots = min(problem.peers[origin].slots for origin in self.quotas)
        self.merged = min(effort.merged or slots, slots)
        self.agents = [
            Agent(origin, first * problem.peers[origin].forward_us)
            for origin in self.quotas
            for first in range(0, slots, self.merged)
        ]
        self.per_data_peer = len(self.agents) // len(self.quotas)
        self.stage_cap = self._stage_cap(slots)

    def _stage_cap(self, slots: int) -> int:
        """Agents that a stage may have: its memory's share, and no more than CC2."""
        size = min(self.problem.stage_sizes[1:])
        each = -(-max(self.quotas.values()) // self.per_data_peer)
        return min(size * slots // self.merged, self.problem.stage_cap // each)

    def searched(self, *, collisions: bool) -> Plan:
        free = (Limits(),) * len(self.agents)
        root = self._node(free, range(len(self.agents)), None)
        if root is None:
            raise NoSchedule("an agent has no path")
        for self.greedy in (False, True):
            roots = list(self._shared_out(root))
            ready = self._remembered(roots, first=not collisions)
            best = self._apart(ready) if collisions else next(ready, None)
            if best is not None:
                return self._plan(best)
        raise NoSchedule("no paths within the machines' slots")

    def _node(
        self, limits: Sequence[Limits], changed: Sequence[int], parent: _Node | None
    ) -> _Node | None:
        routes: list[Route | None] = [*parent.routes] if parent else [None] * len(self.agents)
        for agent in changed:
            found = self.low.soonest(self.agents[agent], limits[agent])
            if found is None:
                return None
            routes[agent] = found
        return _Node(tuple(limits), tuple(r for r in routes if r is not None))

    # --- phases 1 and 2 ---------------------------------------------------------------------------

    def _shared_out(self, root: _Node) -> Iterator[_Node]:
        """Nodes in which no stage has too many agents (CC2), their stages kept from now on."""
        seen: set[tuple[frozenset[int], ...]] = set()
        wanted, found = max(1, ROOTS // self.merged), 0
        for node in self._looked_at(
            [root], self._stage_children, self._stage_excess, greedy=self.greedy
        ):
            table = tuple(self._stages_of(route) for route in node.routes)
            if table in seen:
                continue
            seen.add(table)
            every = frozenset(range(1, self.problem.num_stages))
            kept = [
                replace(limits, stages=every - used)
                for limits, used in zip(node.limits, table, strict=True)
            ]
            yield _Node(tuple(kept), node.routes)
            found += 1
            if found == wanted:
                return

    def _remembered(self, roots: Sequence[_Node], *, first: bool) -> Iterator[_Node]:
        """Nodes in which no relay has too many agents (TC1)."""
        wanted = 1 if first else ROOTS
        found = self._looked_at(roots, self._relay_children, self._relay_excess, greedy=self.greedy)
        yield from islice(found, wanted)

    def _looked_at(
        self,
        roots: Sequence[_Node],
        children_of: Expand,
        excess_of: Excess,
        *,
        greedy: bool,
    ) -> Iterator[_Node]:
        """Nodes without a conflict, the soonest first; with `greedy` the nearest to one first."""
        heap: list[tuple[int, int, int, _Node]] = []
        number = count()

        def push(node: _Node) -> None:
            cost, excess = node.cost_us, excess_of(node)
            first, second = (excess, cost) if greedy else (cost, excess)
            heapq.heappush(heap, (first, second, -next(number), node))

        for node in roots:
            push(node)
        for _ in range(self.effort.nodes):
            if not heap:
                return
            node = heapq.heappop(heap)[-1]
            children = children_of(node)
            if children is None:
                yield node
                continue
            for child in children:
                push(child)

    def _stage_excess(self, node: _Node) -> int:
        users = Counter(stage for route in node.routes for stage in self._stages_of(route))
        return sum(max(0, number - self.stage_cap) for number in users.values())

    def _relay_excess(self, node: _Node) -> int:
        users = Counter(relay for route in node.routes for relay in route.relays)
        peers, merged = self.problem.peers, self.merged
        return sum(max(0, number - peers[m].slots // merged) for m, number in users.items())

    def _stages_of(self, route: Route) -> frozenset[int]:
        return frozenset(self.stages[relay] for relay in route.relays)

    def _stage_children(self, node: _Node) -> list[_Node] | None:
        """None where all stages are shared out."""
        users: dict[int, list[int]] = {}
        for agent in self._fastest_first(node):
            for stage in self._stages_of(node.routes[agent]):
                users.setdefault(stage, []).append(agent)
        for stage in sorted(users):
            excess = len(users[stage]) - self.stage_cap
            if excess > 0:
                left = self.problem.num_stages - 1 - (self.problem.visited - 1)
                free = [a for a in users[stage] if len(node.limits[a].stages) < left]
                chosen = islice(combinations(free, excess), STAGE_CHILDREN)
                return self._barred(node, chosen, stage=stage)
        return None

    def _relay_children(self, node: _Node) -> list[_Node] | None:
        """None where all relays have memory enough."""
        users: dict[int, list[int]] = {}
        for agent in self._fastest_first(node):
            for relay in node.routes[agent].relays:
                users.setdefault(relay, []).append(agent)
        for relay in sorted(users, key=lambda r: (-len(users[r]), r)):
            excess = len(users[relay]) - self.problem.peers[relay].slots // self.merged
            if excess > 0:
                free = [a for a in users[relay] if self._elsewhere(node.limits[a], relay)]
                chosen = islice(combinations(free, excess), RELAY_CHILDREN)
                return self._barred(node, chosen, relay=relay)
        return None

    def _elsewhere(self, limits: Limits, relay: int) -> bool:
        stage = self.stages[relay]
        return any(
            held == stage and m != relay and m not in limits.machines
            for m, held in enumerate(self.stages)
        )

    def _fastest_first(self, node: _Node) -> list[int]:
        return sorted(range(len(self.agents)), key=lambda a: (node.routes[a].home_us, a))

    def _barred(
        self,
        node: _Node,
        chosen: Iterator[tuple[int, ...]],
        stage: int | None = None,
        relay: int | None = None,
    ) -> list[_Node]:
        children = []
        for agents in chosen:
            limits = list(node.limits)
            for agent in agents:
                old = limits[agent]
                limits[agent] = replace(
                    old,
                    stages=old.stages | ({stage} if stage is not None else frozenset()),
                    machines=old.machines | ({relay} if relay is not None else frozenset()),
                )
            if child := self._node(limits, agents, node):
                children.append(child)
        return children

    # --- phase 3 ----------------------------------------------------------------------------------

    def _apart(self, roots: Iterator[_Node]) -> _Node | None:
        """The node that the simulator likes best, while collisions are taken apart (TC2)."""
        heap = [(node.cost_us, number, node) for number, node in enumerate(roots)]
        heapq.heapify(heap)
        best: _Node | None = None
        best_us, pushed, solutions = 0, len(heap), 0
        wanted = max(1, SOLUTIONS // self.merged**2)
        for _ in range(self.effort.nodes):
            if not heap or solutions == wanted:
                break
            node = heapq.heappop(heap)[2]
            moved = self._relay_children(node)  # waiting may have sent an agent to a full relay
            if moved is not None:
                for child in moved:
                    pushed += 1
                    heapq.heappush(heap, (child.cost_us, pushed, child))
                continue
            took_us = self._simulated(node)
            if took_us is None:
                continue
            if best is None or took_us < best_us:
                best, best_us = node, took_us
            children = self._waiting(node)
            if children is None:
                solutions += 1
            elif took_us <= best_us + SLOWER_US:
                for child in children:
                    pushed += 1
                    heapq.heappush(heap, (child.cost_us, pushed, child))
        return best

    def _simulated(self, node: _Node) -> int | None:
        return self.simulator.run(jobs_of(self.problem, self._plan(node))).makespan_us

    def _waiting(self, node: _Node) -> list[_Node] | None:
        """Children in which one of two colliding agents waits; None without collisions."""
        slowest = self._fastest_first(node)[::-1]
        for rank, one in enumerate(slowest):
            for below, other in enumerate(slowest[rank + 1 :], rank + 1):
                if met := _collision(node.routes[one], node.routes[other]):
                    mine, theirs = met
                    if mine.backward or theirs.backward:
                        waits = [
                            (one, theirs) if mine.enter_us > theirs.enter_us else (other, mine)
                        ]
                    else:
                        waits = [(other, mine)]
                        if below > len(slowest) // 4:
                            waits.append((one, theirs))
                    return [c for who, stay in waits if (c := self._delayed(node, who, stay))]
        return None

    def _delayed(self, node: _Node, agent: int, stay: Visit) -> _Node | None:
        old = node.limits[agent]
        windows = dict(old.windows)
        mine = {*windows.get(stay.machine, ()), (stay.enter_us, stay.leave_us)}
        windows[stay.machine] = tuple(sorted(mine))
        limits = list(node.limits)
        limits[agent] = replace(old, windows=windows)
        return self._node(limits, [agent], node)

    def _plan(self, node: _Node) -> Plan:
        """Microbatch i of a data peer takes the path of the agent that holds its slot."""
        paths: list[tuple[RelayNumbers, ...]] = [()] * len(self.stages)
        for place, (origin, quota) in enumerate(self.quotas.items()):
            own = node.routes[place * self.per_data_peer :][: self.per_data_peer]
            slots = self.problem.peers[origin].slots
            paths[origin] = tuple(
                own[min(turn % slots // self.merged, len(own) - 1)].relays for turn in range(quota)
            )
        return Plan(self.stages, tuple(paths))


def _collision(one: Route, other: Route) -> tuple[Visit, Visit] | None:
    """The first two stays at one machine that overlap, two backwards aside."""
    by_machine: Counter[int] = Counter(visit.machine for visit in other.visits)
    for mine in one.visits:
        if not by_machine[mine.machine]:
            continue
        for theirs in other.visits:
            if (
                theirs.machine == mine.machine
                and not (mine.backward and theirs.backward)
                and mine.enter_us < theirs.leave_us
                and theirs.enter_us < mine.leave_us
            ):
                return mine, theirs
    return None
