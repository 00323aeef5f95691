"""The stage or expert that a peer holds: as a newcomer, and when it goes over to another.

Nobody assigns them. Every peer sees who holds what, and finds by the same rule what is out of
balance and which peer mends that.

Rules of stages
  1. A path visits stage 0 always, and each other stage with the chance
     (visited - 1) / (stages - 1), as in SkipPipe's settings: relays of one stage can serve that
     many more data peers. So a stage is as an expert (below) with work by that share, all of whose
     peers are equally fast: its *load* is the share over its peers.
  2. A newcomer takes the stage with the largest load; among equals, the first.
  3. A peer goes over as between experts (their rule 2).
  4. A stage that nobody holds stops all training: then it is enough that the other keeps a peer.
  5. It goes when that has lasted for a while, so that a machine that starts again is not replaced:
     EMPTY_S where nothing trains, CROWDED_S where training would only be faster.
  6. The peers of a stage go in the order of the digests of their ids, and each waits one such
     period longer than the one before.
  7. Newcomers that come together may all choose one stage. So each looks again, a few times, before
     it begins. The nth of those that have not begun, in that order, goes at its nth look, when that
     costs nothing yet.

Views differ for moments, so now and then two peers go where one was needed; rule 3 mends that.

Rules of experts (docs/decisions/0056-experts-are-budgets.md). An expert has a budget of FLOPs. Its
*load* is the time that it still takes: the FLOPs that are left, over the speed of its peers. Where
all have the same load, all end together, with no machine idle.

  1. A peer that trains nothing takes the largest load among the experts that fit its memory; of
     those that nobody trains, the one with the most FLOPs left; of equal ones, by a digest of peer
     and expert. Such peers are newcomers, those at the branch, and those of an expert whose budget
     is spent. Of several, each counts those before it, in the order of the digests of their ids: so
     all find the same placing.
  2. A peer goes from the expert with the smallest load, of those that have several peers, to the
     one with the largest that it fits, if that is no better off with it than the one it left is
     without it. Each such move lowers the larger load of two, and raises the other no further than
     that, so moves come to an end.
  3. The last peer of an expert stays until the budget is spent. An expert that nobody trains stands
     still, and no other waits for it; but then it is enough that the other one keeps a peer.
  4. Patience is that of stages (rules 5 and 6): EMPTY_S where nobody trains an expert, CROWDED_S
     where the end would only come sooner, once more for each that goes before.
  5. A pinned peer stays with its expert.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import blake3

EMPTY_S: Final = 30.0
"""How long nobody has held a stage before a peer of another goes there."""
CROWDED_S: Final = 300.0
"""How long a stage has had too many peers before one of them goes to another."""


def needed_stage(holders: Sequence[int], visited: int) -> int:
    """The stage that needs a newcomer most (rule 2).

    Args:
        holders: the number of peers that hold each stage.
        visited: stages of a path.
    """
    loads = list(map(_load, _stage_work(len(holders), visited), holders))
    return loads.index(max(loads))


def _stage_work(stages: int, visited: int) -> list[int]:
    relay_share = max(1, visited - 1)
    return [stages - 1, *[relay_share] * (stages - 1)]


def newcomers_stage(
    peer_id: str,
    holders: Sequence[Collection[str]],
    newcomers: Collection[str],
    visited: int,
    look: int,
) -> int | None:
    """The stage to begin with; None to look again, since others are to go before us (rule 7).

    Args:
        holders: the ids of the peers that hold each stage, ours among them.
        newcomers: those of them that have not begun, ours among them.
        look: our first look is 1.
    """
    (own,) = (stage for stage, peers in enumerate(holders) if peer_id in peers)
    need = stage_need(holders, visited)
    if need is None or need.move.source != own:
        return own
    turns = sorted(set(newcomers) & set(holders[own]), key=turn_of)
    return need.move.target if turns.index(peer_id) < look else None


@dataclass(frozen=True, slots=True)
class Move:
    source: int
    target: int


class Need(NamedTuple):
    """A move that is needed, who could make it, and whether nobody is there yet."""

    move: Move
    movers: Collection[str]
    to_empty: bool


def stage_need(holders: Sequence[Collection[str]], visited: int) -> Need | None:
    """Args: holders: the ids of the peers that hold each stage, ours among them."""
    stages = range(len(holders))
    fits = frozenset(stages)
    trainers = {
        peer: ExpertTrainer(1.0, fits, stage) for stage in stages for peer in holders[stage]
    }
    return expert_need(trainers, _stage_work(len(holders), visited))


class Balance:
    """Watches whether a move stays needed, and whether it is on us to make it (rules 5 and 6)."""

    def __init__(self, peer_id: str) -> None:
        self._peer_id = peer_id
        self._move: Move | None = None
        self._since_s = 0.0

    def due_move(self, need: Need | None, now_s: float) -> Move | None:
        """The move that we should make now."""
        move = None if need is None else need.move
        if move != self._move:
            self._move, self._since_s = move, now_s
        if need is None or self._peer_id not in need.movers:
            return None
        turn = 1 + sorted(need.movers, key=turn_of).index(self._peer_id)
        patience_s = turn * (EMPTY_S if need.to_empty else CROWDED_S)
        return move if now_s - self._since_s >= patience_s else None


def turn_of(peer_id: str) -> bytes:
    """Peers go in this order, where one after the other is to go."""
    return blake3.blake3(peer_id.encode()).digest()


# --- experts --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ExpertTrainer:
    """A peer of a run with experts.

    Attributes:
        speed: FLOPs a second; above 0.
        fits: experts that its memory holds.
        expert: that it trains; None where it trains nothing.
        pinned: stays with its expert, by its user's wish.
    """

    speed: float
    fits: frozenset[int]
    expert: int | None = None
    pinned: bool = False


ExpertTrainers = Mapping[str, ExpertTrainer]
"""Peers by their ids."""


def expert_loads(flops_left: Sequence[float], trainers: Iterable[ExpertTrainer]) -> list[float]:
    """Seconds that each expert still takes; infinite where nobody trains it."""
    return list(map(_load, flops_left, _speeds(len(flops_left), trainers)))


def _speeds(experts: int, trainers: Iterable[ExpertTrainer]) -> list[float]:
    speeds = [0.0] * experts
    for trainer in trainers:
        if trainer.expert is not None:
            speeds[trainer.expert] += trainer.speed
    return speeds


def _load(flops: float, speed: float) -> float:
    if flops <= 0:
        return 0.0
    return flops / speed if speed > 0 else math.inf


def placed(trainers: ExpertTrainers, flops_left: Sequence[float]) -> dict[str, int]:
    """Where each peer that trains nothing should begin (rule 1).

    One that fits no expert with FLOPs left is not among them. Before the branch, the generalist
    alone has some.
    """
    found: dict[str, int] = {}
    known = dict(trainers)
    for peer_id in sorted(trainers, key=turn_of):
        if trainers[peer_id].expert is None:
            expert = _largest(peer_id, known, flops_left)
            if expert is not None:
                found[peer_id] = expert
                known[peer_id] = replace(trainers[peer_id], expert=expert)
    return found


def _largest(peer_id: str, trainers: ExpertTrainers, flops_left: Sequence[float]) -> int | None:
    loads = expert_loads(flops_left, trainers.values())
    fits = trainers[peer_id].fits
    fitting = [expert for expert, flops in enumerate(flops_left) if flops > 0 and expert in fits]
    return max(
        fitting,
        key=lambda e: (loads[e], flops_left[e], turn_of(f"{peer_id}/{e}")),
        default=None,
    )


def expert_need(trainers: ExpertTrainers, flops_left: Sequence[float]) -> Need | None:
    """The move that would help most, and the peers that could make it (rules 2, 3 and 5)."""
    speeds = _speeds(len(flops_left), trainers.values())
    loads = list(map(_load, flops_left, speeds))
    of: list[list[str]] = [[] for _ in loads]
    for peer_id, trainer in trainers.items():
        if trainer.expert is not None:
            of[trainer.expert].append(peer_id)
    unspent = [expert for expert, flops in enumerate(flops_left) if flops > 0]
    several = sorted((e for e in unspent if len(of[e]) > 1), key=lambda e: (loads[e], e))
    for target in sorted(unspent, key=lambda e: (-loads[e], -flops_left[e], e)):
        for source in several:
            movers = [
                peer_id
                for peer_id in of[source]
                if source != target
                and not trainers[peer_id].pinned
                and target in trainers[peer_id].fits
                and _helps(trainers[peer_id].speed, flops_left, speeds, source, target)
            ]
            if movers:
                return Need(Move(source, target), movers, not of[target])
    return None


def _helps(
    speed: float, flops_left: Sequence[float], speeds: Sequence[float], source: int, target: int
) -> bool:
    """Whether the target is still no better off than the source, when a peer has gone over.

    Where nobody trains the target, it is enough that the source keeps a peer.
    """
    if not speeds[target]:
        return True
    with_it, without_it = speeds[target] + speed, speeds[source] - speed
    return _load(flops_left[target], with_it) >= _load(flops_left[source], without_it)
