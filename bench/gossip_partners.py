"""Partners whose numbers differ in one bit, against drawn ones: how far apart replicas stay.

Each replica moves at random, by a variance of 1 for each of its own steps, and averages in pairs.
What is measured is the variance among the replicas right after each average, in that of a round of
H steps: what averaging does not undo. No model, no bytes; differences that matter to it would show
here first.

    lockstep    all close each round at once and pair up; with `away`, so many of them, drawn anew
                in each round, are not there, and those whose partner is away pair up as drawn
    free        the protocol's own matchmaking in virtual time (gossip_world.py), where steps take
                25% more or less; `ratio` is an exchange in rounds, `unequal` as in gossip_links.py

By bits, a pair whose numbers differ in one bit goes before all others. The bits take turns: in
lockstep by the round's number, and else since the peers met last are put off.

    python -m bench.gossip_partners [--full] [--json FILE]
"""

import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from bench.gossip.world import ROUND_S, world_of
from bench.gossip_world import ClosedRound, Exchange, GossipWorld
from bench.quality.pairing import greedy_pairs
from bench.report import Report, Row, options
from protocol.gossip.matchmaking import Matchmaker, pair_rank
from protocol.gossip.matchmaking_events import Snapshot

PEERS: Final = (4, 8, 16)
AWAY: Final = (0.0, 0.1, 0.3)
RATIOS: Final = (0.1, 0.7)
ROUNDS: Final = 150
SEEDS: Final = 3
FULL_TIMES: Final = 4
"""So many times as many seeds."""
SETTLED: Final = 0.3
"""Share of a run after which the distance of replicas no longer rises."""
WALKS: Final = 200
"""Independent random walks of each replica: as many values of a vector."""
DIGITS: Final = 3

Floats = npt.NDArray[np.float64]


def main() -> None:
    arguments = options(__doc__).parse_args()
    seeds = range(SEEDS * (FULL_TIMES if arguments.full else 1))
    report = Report("gossip_partners", "Partners by a bit of their numbers, against drawn ones")
    report.settings = {"rounds": ROUNDS, "seeds": len(seeds)}
    for num_peers in PEERS:
        for away in AWAY:
            report.rows.append(
                row(f"lockstep, {away:.0%} away", num_peers, seeds, in_lockstep(num_peers, away))
            )
        for equal, ratio in itertools.product((True, False), RATIOS):
            kind = f"free, {'equal' if equal else 'unequal'}, ratio {ratio}"
            report.rows.append(row(kind, num_peers, seeds, where_free(num_peers, ratio, equal)))
    report.publish(arguments.json)


def row(
    world: str, num_peers: int, seeds: Sequence[int], apart: Callable[[bool, int], float]
) -> Row:
    """Both ways in one world.

    Args:
        apart: how far replicas are apart, by bits or not, with a seed.
    """
    drawn, bits = ([apart(by_bits, seed) for seed in seeds] for by_bits in (False, True))
    return {
        "world": world,
        "peers": num_peers,
        "drawn": round(statistics.fmean(drawn), DIGITS),
        "by bits": round(statistics.fmean(bits), DIGITS),
        "ratio": round(statistics.fmean(bits) / statistics.fmean(drawn), DIGITS),
    }


def in_lockstep(num_peers: int, away: float) -> Callable[[bool, int], float]:
    """All close each round at once."""

    def apart(by_bits: bool, seed: int) -> float:
        walks, absences = np.random.default_rng(seed), random.Random(seed)
        x_NW = np.zeros((num_peers, WALKS))
        found = []
        for round_ in range(ROUNDS):
            x_NW += walks.standard_normal(x_NW.shape)
            there = [peer for peer in range(num_peers) if absences.random() >= away]
            for one, other in pairs_of_round(there, num_peers, round_, by_bits=by_bits):
                x_NW[one] = x_NW[other] = (x_NW[one] + x_NW[other]) / 2
            if round_ >= SETTLED * ROUNDS:
                found.append(_variance(x_NW))
        return statistics.fmean(found)

    return apart


def pairs_of_round(
    there: Sequence[int], num_peers: int, round_: int, *, by_bits: bool
) -> list[tuple[int, int]]:
    """The pairs of those that are there; at most one is left over."""
    bit = 1 << round_ % max(1, (num_peers - 1).bit_length())

    def rank(pair: tuple[int, int]) -> tuple[bool, bytes]:
        one, other = ((str(peer), round_) for peer in pair)
        return by_bits and pair[0] ^ pair[1] != bit, pair_rank("lockstep", one, other)

    return greedy_pairs(there, rank)


class BitMatchmaker(Matchmaker):
    """Ranks pairs whose numbers differ in one bit before all others."""

    def _rank(self, peer_id: str, theirs: Snapshot) -> bytes:
        difference = _number(self._own_id) ^ _number(peer_id)
        is_other = difference & (difference - 1) != 0
        return bytes([is_other]) + super()._rank(peer_id, theirs)


def _number(peer_id: str) -> int:
    return int("".join(filter(str.isdigit, peer_id)))


def where_free(num_peers: int, ratio: float, equal: bool) -> Callable[[bool, int], float]:
    """Peers that average with whoever is free."""

    def apart(by_bits: bool, seed: int) -> float:
        world = world_of(num_peers, ratio, seed, equal=equal)
        run = GossipWorld(world, seed, BitMatchmaker if by_bits else Matchmaker)
        run.run(ROUNDS * ROUND_S)
        return _apart(run, num_peers, world.inner_steps, seed)

    return apart


def _apart(run: GossipWorld, num_peers: int, inner_steps: int, seed: int) -> float:
    """The variance after merges of replicas that do what these peers did."""
    walks = np.random.default_rng(seed)
    x_NW = np.zeros((num_peers, WALKS))
    snapshots: dict[tuple[int, int], Floats] = {}
    found = []
    events: list[tuple[float, int, ClosedRound | Exchange]] = [
        *((closed.closed_s, 0, closed) for closed in run.closed),
        *((exchange.ended_s, 1, exchange) for exchange in run.exchanges),
    ]
    for now_s, _, event in sorted(events, key=lambda each: each[:2]):
        if isinstance(event, ClosedRound):
            walked = walks.standard_normal(WALKS) * (event.own_steps / inner_steps) ** 0.5
            x_NW[event.peer] += walked
            snapshots[event.peer, event.round] = x_NW[event.peer].copy()
            continue
        sent = [snapshots.pop((side.peer, side.round)) for side in event.sides]
        mean_W = (sent[0] + sent[1]) / 2
        for side, snapshot_W in zip(event.sides, sent, strict=True):
            x_NW[side.peer] += mean_W - snapshot_W
        if now_s >= SETTLED * run.now_s:
            found.append(_variance(x_NW))
    return statistics.fmean(found)


def _variance(x_NW: Floats) -> float:
    return float(x_NW.var(0).mean())


if __name__ == "__main__":
    main()
