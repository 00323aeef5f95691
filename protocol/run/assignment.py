"""Which stage a peer holds: what a newcomer takes, and when a peer goes over to another stage.

Nobody assigns stages. Every peer sees who holds what, and finds by the same rule what is out of
balance and which peer mends that.

Rules
  1. A path visits stage 0 always, and each other stage with the chance
     (visited - 1) / (stages - 1), as in SkipPipe's settings: relays of one stage can serve that
     many more data peers. A stage's *load* is its peers over that share.
  2. A newcomer takes the stage with the smallest load; among equals, the first.
  3. A peer goes from the stage with the largest load, of those that have several peers, to the one
     with the smallest, if that stage is no better off with it than the one it left is without it.
     So the next move never undoes this one.
  4. A stage that nobody holds stops all training: then it is enough that the other keeps a peer.
  5. It goes when that has lasted for a while, so that a machine that starts again is not replaced:
     EMPTY_S where nothing trains, CROWDED_S where training would only be faster.
  6. The peers of a stage go in the order of the digests of their ids, each one such while later
     than the one before: some are told to stay where they are.
  7. Newcomers that come together may all choose one stage. So each looks again, a few times, before
     it begins. The nth of those that have not begun, in that order, goes at its nth look, when that
     costs nothing yet.

Views differ for moments, so now and then two peers go where one was needed; rule 3 mends that.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

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
    loads = _loads(holders, visited)
    return min(range(len(holders)), key=lambda stage: (loads[stage], stage))


@dataclass(frozen=True, slots=True)
class Move:
    source: int
    target: int


def needed_move(holders: Sequence[int], visited: int) -> Move | None:
    """The move that would help most; None where the stages are as even as they can be (rule 3)."""
    loads, target = _loads(holders, visited), needed_stage(holders, visited)
    several = [stage for stage, count in enumerate(holders) if count > 1]
    source = max(several, key=lambda stage: (loads[stage], -stage), default=target)
    if source == target:
        return None
    one = [1 / share for share in _shares(len(holders), visited)]
    if holders[target] and loads[target] + one[target] > loads[source] - one[source]:
        return None
    return Move(source, target)


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
    move = needed_move([len(peers) for peers in holders], visited)
    if move is None or move.source != own:
        return own
    turns = sorted(set(newcomers) & set(holders[own]), key=_digest)
    return move.target if turns.index(peer_id) < look else None


class Balance:
    """Watches whether the stages stay out of balance, and whether it is on us to mend it."""

    def __init__(self, peer_id: str, visited: int) -> None:
        self._peer_id = peer_id
        self._visited = visited
        self._move: Move | None = None
        self._since_s = 0.0

    def due_move(self, holders: Sequence[Collection[str]], now_s: float) -> Move | None:
        """The move that we should make now (rules 5 and 6).

        Args:
            holders: the ids of the peers that hold each stage, ours among them.
        """
        move = needed_move([len(peers) for peers in holders], self._visited)
        if move != self._move:
            self._move, self._since_s = move, now_s
        if move is None or self._peer_id not in holders[move.source]:
            return None
        turn = 1 + sorted(holders[move.source], key=_digest).index(self._peer_id)
        wait_s = turn * (CROWDED_S if holders[move.target] else EMPTY_S)
        return move if now_s - self._since_s >= wait_s else None


def _shares(stages: int, visited: int) -> list[Fraction]:
    relay_stages = stages - 1
    return [Fraction(relay_stages, max(1, visited - 1)), *[Fraction(1)] * relay_stages]


def _loads(holders: Sequence[int], visited: int) -> list[Fraction]:
    shares = _shares(len(holders), visited)
    return [count / share for count, share in zip(holders, shares, strict=True)]


def _digest(peer_id: str) -> bytes:
    return blake3.blake3(peer_id.encode()).digest()
