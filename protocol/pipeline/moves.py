"""The moves of the local search: small changes of a draft that keep it nearly legal.

Paths alone change with those of OF_PATHS, arrangement and quotas with the others. A
move returns None where it has nothing to change.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .draft import Draft
from .draws import Draws
from .simulator import Relays
from .stage_orders import Stages, cheapest_relays

Move = Callable[["Moves", Draft, int], Draft | None]
"""Takes a draft and the data peer that should gain by it."""


@dataclass(frozen=True, slots=True)
class Moves:
    """What moves draw from.

    Attributes:
        orders: the legal ones, by the set of their stages.
        prices: of hops.
    """

    draws: Draws
    orders: Mapping[frozenset[int], Sequence[Stages]]
    prices: Sequence[Sequence[int]]

    def pick(self, draft: Draft, origin: int) -> tuple[int, Relays]:
        """One of a data peer's microbatches."""
        place = self.draws.below(len(draft.paths[origin]))
        return place, draft.paths[origin][place]

    def pick_any(self, draft: Draft) -> tuple[int, int, Relays]:
        """One of all microbatches."""
        origin = self.draws.of([o for o, paths in draft.paths.items() if paths])
        return (origin, *self.pick(draft, origin))

    def ordered(self, draft: Draft, origin: int, relays: Sequence[int]) -> Relays | None:
        """These machines in their cheapest legal order."""
        by_stage = {draft.stages[relay]: relay for relay in relays}
        found = [
            cheapest_relays(origin, [[by_stage[stage]] for stage in order], self.prices)
            for order in self.orders.get(frozenset(by_stage), ())
        ]
        best = min(filter(None, found), default=None)
        return best[1] if best else None


def put(draft: Draft, changes: Sequence[tuple[int, int, Relays]]) -> Draft:
    """Other paths at these places."""
    changed = {origin: list(draft.paths[origin]) for origin, _, _ in changes}
    for origin, place, path in changes:
        changed[origin][place] = path
    return draft.with_paths({origin: tuple(paths) for origin, paths in changed.items()})


def change_relay(moves: Moves, draft: Draft, origin: int) -> Draft | None:
    """Take another replica of one stage."""
    place, path = moves.pick(draft, origin)
    at = moves.draws.below(len(path))
    stage = draft.stages[path[at]]
    replicas = [m for m, s in enumerate(draft.stages) if s == stage and m != path[at]]
    if not replicas:
        return None
    other = moves.draws.of(replicas)
    changes = [(origin, place, (*path[:at], other, *path[at + 1 :]))]
    if moves.draws.below(4):
        users = [each for each in draft.each() if other in each[2] and path[at] not in each[2]]
        if users:
            their_origin, their_place, theirs = moves.draws.of(users)
            if (their_origin, their_place) != (origin, place):
                swapped = tuple(path[at] if m == other else m for m in theirs)
                changes.append((their_origin, their_place, swapped))
    return put(draft, changes)


def reorder(moves: Moves, draft: Draft, origin: int) -> Draft | None:
    """Visit the same machines in another order."""
    place, path = moves.pick(draft, origin)
    by_stage = {draft.stages[relay]: relay for relay in path}
    order = moves.draws.of(moves.orders[frozenset(by_stage)])
    other = tuple(by_stage[stage] for stage in order)
    return put(draft, [(origin, place, other)]) if other != path else None


def exchange_stage(moves: Moves, draft: Draft, origin: int) -> Draft | None:
    """Trade a stage of one path for a stage of another."""
    place, path = moves.pick(draft, origin)
    their_origin, their_place, theirs = moves.pick_any(draft)
    stages = draft.stages
    ours_alone = [m for m in path if stages[m] not in {stages[t] for t in theirs}]
    theirs_alone = [m for m in theirs if stages[m] not in {stages[o] for o in path}]
    if not ours_alone or not theirs_alone:
        return None
    give, take = moves.draws.of(ours_alone), moves.draws.of(theirs_alone)
    mine = moves.ordered(draft, origin, [take if m == give else m for m in path])
    other = moves.ordered(draft, their_origin, [give if m == take else m for m in theirs])
    if mine is None or other is None:
        return None
    return put(draft, [(origin, place, mine), (their_origin, their_place, other)])


def exchange_path(moves: Moves, draft: Draft, origin: int) -> Draft | None:
    """Trade a whole path for another one."""
    place, path = moves.pick(draft, origin)
    their_origin, their_place, theirs = moves.pick_any(draft)
    if path == theirs:
        return None
    return put(draft, [(origin, place, theirs), (their_origin, their_place, path)])


def exchange_place(moves: Moves, draft: Draft, origin: int) -> Draft | None:
    """Let two microbatches of one data peer change places."""
    place, path = moves.pick(draft, origin)
    other_place, other = moves.pick(draft, origin)
    if path == other:
        return None
    return put(draft, [(origin, place, other), (origin, other_place, path)])


def exchange_machines(moves: Moves, draft: Draft, origin: int) -> Draft | None:
    """Let two machines take over all that the other does."""
    number = len(draft.stages)
    one = moves.draws.below(number)
    if moves.draws.below(2):  # a machine that the late data peer depends on
        one = moves.draws.of([origin, *moves.pick(draft, origin)[1]])
    other = moves.draws.below(number)
    if draft.stages[one] == draft.stages[other]:
        return None
    return exchanged(draft, one, other)


def exchanged(draft: Draft, one: int, other: int) -> Draft:
    """Two machines in each other's place: stages, paths and microbatches."""
    stages = list(draft.stages)
    stages[one], stages[other] = stages[other], stages[one]
    other_name = {one: other, other: one}
    paths = {
        other_name.get(o, o): tuple(
            tuple(other_name.get(m, m) for m in path) if one in path or other in path else path
            for path in paths
        )
        for o, paths in draft.paths.items()
    }
    return Draft(tuple(stages), paths)


def shift_quota(moves: Moves, draft: Draft, origin: int) -> Draft | None:
    """Give a microbatch, with its path, to another data peer."""
    receiver = moves.draws.of(sorted(draft.paths))
    if receiver == origin:
        return None
    place, path = moves.pick(draft, origin)
    left = draft.paths[origin][:place] + draft.paths[origin][place + 1 :]
    return draft.with_paths({origin: left, receiver: (*draft.paths[receiver], path)})


OF_PATHS: tuple[Move, ...] = (
    change_relay, change_relay, change_relay, reorder, exchange_stage, exchange_path, exchange_place
)  # fmt: skip
OF_ALL: tuple[Move, ...] = (
    *OF_PATHS, exchange_machines, exchange_machines, exchange_machines, shift_quota, shift_quota
)  # fmt: skip
