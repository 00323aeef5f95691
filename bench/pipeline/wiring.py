"""SWARM's and Agora's choice of replicas: nobody plans; every sender picks the next machine.

Both choose among the machines of the next stage while microbatches are under way. Stages are
arranged by cost (genetic.py), as neither says who should hold what beyond how many. What is skipped
is not their choice: orders of stages are dealt out evenly beforehand; with every stage visited it
is the choice as it is described.

    SWARM (Ryabinin et al. 2023): a data peer keeps a heap of the machines of each stage, by the
        load that it expects to have given them: it takes the least, adds the time that a task
        takes there by its own measurements, and puts it back (interleaved weighted round-robin).
        Its activations all pass through the data peer, so its measurements are round trips from
        there. Newcomers, bans and rebalancing have no part in one iteration.
    Agora (Pluralis 2026, the version that sends from worker to worker): the machine that holds the
        microbatch sends it to the one that is expected to have finished it first. Ours knows what
        all senders have given to a machine, where the real one knows its own receipts: a better
        informed choice than it has. A machine full of microbatches answers BUSY; the simulator
        lets them wait for a slot instead.

Source: read about in descriptions of balancer.py and balanced_expert.py of SWARM and of Agora's
test release; written anew.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from bench.pipeline.genetic import Stages, groups_of
from protocol.pipeline.planner import even_quotas, hop_prices
from protocol.pipeline.problem import THOUSAND, Draws, Problem, RelayNumbers, stage_orders
from protocol.pipeline.simulator import Plan


def swarm(problem: Problem, stages: Stages) -> Plan:
    """Every data peer's own weighted round-robin over each stage."""
    draws = Draws(f"swarm/{problem.digest()}")
    groups, prices = groups_of(stages), hop_prices(problem)
    quotas = even_quotas(problem, stages)
    heaps = {
        origin: [[(0, draws.below(1 << 30), m) for m in group] for group in groups]
        for origin in quotas
    }
    paths: dict[int, list[RelayNumbers]] = {origin: [] for origin in quotas}
    for origin, order in _dealt(problem, quotas):
        chosen = []
        for stage in order:
            heap = heaps[origin][stage]
            heapq.heapify(heap)
            load, _, machine = heap[0]
            heapq.heapreplace(heap, (load + prices[origin][machine], draws.below(1 << 30), machine))
            chosen.append(machine)
        paths[origin].append(tuple(chosen))
    return _plan(stages, paths)


def agora(problem: Problem, stages: Stages) -> Plan:
    """Every sender's expected finish, hop by hop, in the order of time."""
    groups = groups_of(stages)
    quotas = even_quotas(problem, stages)
    orders: dict[int, list[Stages]] = {origin: [] for origin in quotas}
    for origin, order in _dealt(problem, quotas):
        orders[origin].append(order)
    paths: dict[int, list[RelayNumbers]] = {o: [()] * quota for o, quota in quotas.items()}
    busy_us = [0] * len(stages)
    moving = [
        ((place + 1) * problem.peers[origin].forward_us, origin, place)
        for origin, quota in quotas.items()
        for place in range(min(quota, problem.peers[origin].slots))
    ]
    heapq.heapify(moving)
    while moving:
        now_us, origin, place = heapq.heappop(moving)
        path = paths[origin][place]
        last, order = path[-1] if path else origin, orders[origin][place]
        left_us, chosen = min(
            (_finished_us(problem, busy_us[m], now_us + problem.travel_us(last, m), m), m)
            for m in groups[order[len(path)]]
        )
        busy_us[chosen] = left_us + _backward_us(problem, chosen)
        paths[origin][place] = path = (*path, chosen)
        if len(path) < len(order):
            heapq.heappush(moving, (left_us, origin, place))
        elif place + problem.peers[origin].slots < quotas[origin]:
            home_us = left_us + _way_home_us(problem, origin, path)
            heapq.heappush(moving, (home_us, origin, place + problem.peers[origin].slots))
    return _plan(stages, paths)


def _finished_us(problem: Problem, busy_us: int, arrives_us: int, machine: int) -> int:
    return max(arrives_us, busy_us) + problem.peers[machine].forward_us


def _backward_us(problem: Problem, machine: int) -> int:
    return problem.peers[machine].forward_us * problem.work.backward_permille // THOUSAND


def _way_home_us(problem: Problem, origin: int, path: RelayNumbers) -> int:
    """From the last forward until the next microbatch of its slot has left the data peer."""
    peer = problem.peers[origin]
    back = (origin, *reversed(path), origin)
    way_us = sum(problem.travel_us(a, b) for a, b in pairwise(back))
    work_us = sum(_backward_us(problem, machine) for machine in back[1:])
    loss_us = peer.forward_us * problem.work.loss_permille // THOUSAND
    return problem.travel_us(path[-1], origin) + loss_us + way_us + work_us + peer.forward_us


def _dealt(problem: Problem, quotas: Mapping[int, int]) -> Iterator[tuple[int, Stages]]:
    """Data peers in turn, each with an order of stages, so that shares come out even."""
    orders = stage_orders(problem.num_stages, problem.visited, problem.rules)
    left = [problem.stage_cap] * problem.num_stages
    paths = sum(quotas.values())
    for turn in range(max(quotas.values())):
        for origin in (o for o, quota in quotas.items() if quota > turn):
            paths -= 1
            order = max(orders, key=lambda o: (_leaves_enough(o, left, paths), _room(o, left)))
            for stage in order:
                left[stage] -= 1
            yield origin, order


def _leaves_enough(order: Stages, left: Sequence[int], paths: int) -> bool:
    """Whether as many paths as are left can still be dealt (as in assignment.py)."""
    after = [visits - (stage in order) for stage, visits in enumerate(left)][1:]
    return min(after) >= 0 and sum(min(v, paths) for v in after) >= paths * len(order)


def _room(order: Stages, left: Sequence[int]) -> int:
    return sum(left[stage] for stage in order)


def _plan(stages: Stages, paths: Mapping[int, Sequence[RelayNumbers]]) -> Plan:
    return Plan(stages, tuple(tuple(paths.get(m, ())) for m in range(len(stages))))
