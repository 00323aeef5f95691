"""What a swarm trained and averaged, in order: a program by which replicas can be trained again.

Two ways to write one, for the same machines and lines:

    free_pairings       gossip without a clock, as it came out of gossip_world.py
    same_round_pairings pairs of the same round: all close each round at the same nominal step, are
                        paired at random, and merge after the same share of the round. It is what
                        the rule that had this condition would do if it never failed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from bench.gossip.world import INNER_STEPS, ROUND_S, World, world_of
from bench.gossip_world import GossipWorld, Side
from protocol.schedule.rounds import Quotas

from .pairing import groups_of_round

SLACK: Final = 1.5
SLACK_ROUNDS: Final = 10
"""Slow rounds included, a run of so many times its length, and so many more rounds, has all the
nominal steps."""


@dataclass(frozen=True, slots=True)
class TrainedRound:
    """One round of one peer: own steps, and the nominal step at its end."""

    own_steps: int
    end_step: float


@dataclass(frozen=True, slots=True)
class Part:
    """One peer in a merge: its snapshot's round, and own steps trained since the snapshot."""

    peer: int
    round: int
    late_steps: int


@dataclass(frozen=True, slots=True)
class Pairings:
    """A program.

    Attributes:
        rounds: of each peer, in order.
        merges: of two peers, or of one that found nobody; each peer's in the order of its rounds,
            those whose snapshots were taken before the run's last step.
        ages: of all merges, in rounds.
    """

    rounds: Sequence[Sequence[TrainedRound]]
    merges: Sequence[tuple[Part, ...]]
    ages: Sequence[float]


def machines(num_peers: int, ratio: float, seed: int, inner_steps: int) -> World:
    """The unequal world of gossip_links.py, with rounds of `inner_steps`."""
    world = world_of(num_peers, ratio, seed)
    longer = INNER_STEPS / inner_steps
    step_s = tuple(seconds * longer for seconds in world.step_s)
    return replace(world, inner_steps=inner_steps, step_s=step_s)


def free_pairings(world: World, seed: int, total_steps: int) -> Pairings:
    """Gossip without a clock."""
    run = GossipWorld(world, seed)
    run.run((SLACK * total_steps / world.inner_steps + SLACK_ROUNDS) * ROUND_S)
    rounds: list[list[TrainedRound]] = [[] for _ in run.records]
    for closed in run.closed:
        rounds[closed.peer].append(TrainedRound(closed.own_steps, closed.step))
    if min(own[-1].end_step for own in rounds) < total_steps:
        raise ValueError(f"{total_steps} steps take longer than {run.now_s:.0f} s")
    sides = [
        *((each.ended_s, each.sides) for each in run.exchanges),
        *((each.ended_s, (each.side,)) for each in run.alone),
    ]
    in_order = [
        merged
        for _, merged in sorted(sides, key=lambda each: each[0])
        if all(side.step < total_steps for side in merged)
    ]
    ages = [side.age / world.inner_steps for merged in in_order for side in merged]
    return Pairings(rounds, [tuple(_part(side) for side in merged) for merged in in_order], ages)


def _part(side: Side) -> Part:
    return Part(side.peer, side.round, side.late_steps)


def same_round_pairings(world: World, seed: int, total_steps: int, delay: float) -> Pairings:
    """Pairs of the same round.

    Args:
        delay: of each merge, in rounds; below 1.
    """
    inner_steps, peers = world.inner_steps, range(world.num_peers)
    quotas = [Quotas() for _ in peers]
    rounds: list[list[TrainedRound]] = [[] for _ in peers]
    merges: list[tuple[Part, ...]] = []
    for round_ in range(-(-total_steps // inner_steps) + 1):
        for peer in peers:
            own_steps = quotas[peer].next(world.owed(peer))
            rounds[peer].append(TrainedRound(own_steps, (round_ + 1.0) * inner_steps))
        if (round_ + 1) * inner_steps >= total_steps:
            continue  # its snapshot is taken when the run is over
        late_steps = [int(delay * world.owed(peer)) for peer in peers]
        groups = groups_of_round("pairs", f"replay-{seed}", round_, world.num_peers)
        merges += [
            tuple(Part(peer, round_, late_steps[peer]) for peer in group) for group in groups
        ]
    return Pairings(rounds, merges, [delay])
