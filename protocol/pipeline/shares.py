"""Evening out: visits move from stages that have more than their share (CC2) to stages with room.

Idea: where groups of machines are too few for their quotas to add up to every stage's share, a
stage gets too many visits and another one too few. As long as there is such a pair, one path gives
up its visit to the first and goes to a machine of the second instead, all its machines in their
cheapest legal order: the path that pays least for it, in detour and in what the new machine does
already. Every step takes one visit off what is too much, so it ends; where no path can change,
there is no draft.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from .draft import Draft
from .problem import Problem
from .simulator import Relays
from .stage_orders import Stages, cheapest_relays

Change = tuple[int, int, int, Relays]
"""What it costs more, the data peer, the place in its order, the other path."""


def evened_out(
    problem: Problem, draft: Draft, orders: Sequence[Stages], prices: Sequence[Sequence[int]]
) -> Draft | None:
    """A draft in which every stage has at most its share; None where paths cannot change so."""
    by_set: defaultdict[frozenset[int], list[Stages]] = defaultdict(list)
    for order in orders:
        by_set[frozenset(order)].append(order)
    while True:
        visits = Counter(draft.stages[relay] for _, _, path in draft.each() for relay in path)
        over = [s for s in range(1, problem.num_stages) if visits[s] > problem.stage_cap]
        if not over:
            return draft
        under = [s for s in range(1, problem.num_stages) if visits[s] < problem.stage_cap]
        crowded = max(over, key=lambda s: (visits[s], s))
        found = min(_changes(problem, draft, crowded, under, by_set, prices), default=None)
        if found is None:
            return None
        _, origin, place, path = found
        paths = draft.paths[origin]
        draft = draft.with_paths({origin: (*paths[:place], path, *paths[place + 1 :])})


def _changes(
    problem: Problem,
    draft: Draft,
    crowded: int,
    under: Sequence[int],
    by_set: dict[frozenset[int], list[Stages]],
    prices: Sequence[Sequence[int]],
) -> Iterator[Change]:
    """The paths that could leave a crowded stage for one with room, and what that costs."""
    work_us: Counter[int] = Counter()
    for _, _, path in draft.each():
        work_us.update({relay: problem.peers[relay].forward_us for relay in path})
    held = Counter(
        (place // problem.peers[origin].slots, relay)
        for origin, place, path in draft.each()
        for relay in path
    )
    for origin, place, path in draft.each():
        by_stage = {draft.stages[relay]: relay for relay in path}
        if crowded not in by_stage:
            continue
        wave = place // problem.peers[origin].slots
        before = _length(origin, path, prices)
        for stage in under:
            if stage in by_stage:
                continue
            takers = [
                m
                for m, held_stage in enumerate(draft.stages)
                if held_stage == stage
                and (not problem.rules.waves_fit or held[wave, m] < problem.peers[m].slots)
            ]
            kept = {s: [m] for s, m in by_stage.items() if s != crowded} | {stage: takers}
            for order in by_set.get(frozenset(kept), ()):
                cheapest = cheapest_relays(origin, [kept[s] for s in order], prices)
                if cheapest is not None:
                    length, other = cheapest
                    busy = sum(work_us[m] for m in takers if m in other)
                    yield length - before + busy, origin, place, other


def _length(origin: int, path: Relays, prices: Sequence[Sequence[int]]) -> int:
    return sum(prices[a][b] for a, b in zip((origin, *path), (*path, origin), strict=True))
