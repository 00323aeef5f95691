"""Which pieces of the corpus a peer needs, and when, by the data plan.

Rules
  1. First come the pieces of the blocks that are trained next, in that order.
  2. Then the peer's columns of the present stratum and the next (protocol/schedule/data_plan.py).
  3. Each piece has COPIES *keepers*, drawn by rendezvous hashing over the peers that are there.
     They fetch it when nothing else is to be fetched, so that the corpus outlives any of them.
  4. When the disk is full, pieces go that are not kept for others, of these first what the plan
     comes to last. Nothing goes that is needed first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from protocol.schedule.data_plan import DataPlan, Members
from protocol.schedule.shuffle import Int64Vector, digest_words, splitmix64

COPIES: Final = 3


@dataclass(frozen=True)
class CorpusNeeds:
    """The pieces that one peer needs from a position on.

    Args:
        members: those that take data, `me` with a weight among them.
        first_blocks: how many blocks count as trained next.
    """

    plan: DataPlan
    epoch: int
    position: int
    me: str
    members: Members
    first_blocks: int

    @cached_property
    def first(self) -> tuple[int, ...]:
        taken = self.plan.take(self.epoch, self.position, self.first_blocks, self.me, self.members)
        return tuple(dict.fromkeys((taken.blocks // self.plan.piece_blocks).tolist()))

    @cached_property
    def soon(self) -> tuple[int, ...]:
        """Further pieces of this stratum and the next."""
        taking = sorted(peer_id for peer_id, weight in self.members if weight)
        found, total = dict.fromkeys(self.first), self.plan.num_strata
        for number in range(self.order_stratum, self.order_stratum + min(2, total)):
            place = self.epoch + number // total, number % total
            owned = self.plan.ownership(*place, self.members)
            columns = owned.columns_of(taking.index(self.me))
            found |= dict.fromkeys(self.plan.pieces_of(*place)[columns].tolist())
        return tuple(found)[len(self.first) :]

    def distance(self) -> Int64Vector:
        """The number of strata until the plan comes to each piece; int64 [pieces]."""
        plan, now = self.plan, self.order_stratum
        ahead = plan.strata_of_pieces(self.epoch) - now
        later = plan.strata_of_pieces(self.epoch + 1) + plan.num_strata - now
        return np.where(ahead >= 0, ahead, later)

    @property
    def order_stratum(self) -> int:
        return min(self.plan.stratum_at(self.position), self.plan.num_strata - 1)


def kept_pieces(num_pieces: int, me: str, peers: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Which pieces `me`, one of `peers`, keeps for others (rule 3)."""
    pieces = splitmix64(np.arange(num_pieces, dtype=np.uint64) + digest_words("keeper", 1))
    own = splitmix64(pieces ^ digest_words(f"member/{me}", 1))
    before = np.zeros(num_pieces, np.int64)
    for peer_id in peers:
        if peer_id != me:
            before += splitmix64(pieces ^ digest_words(f"member/{peer_id}", 1)) < own
    return before < COPIES


def first_to_go(
    held: Int64Vector, distance: Int64Vector, kept: npt.NDArray[np.bool_], needed: Iterable[int]
) -> list[int]:
    """The pieces that are held and not needed, in the order in which they may go (rule 4).

    Args:
        distance, kept: of all pieces (`CorpusNeeds.distance`, `kept_pieces`).
    """
    may_go = held[~np.isin(held, np.fromiter(needed, np.int64))]
    order = np.lexsort((may_go, -distance[may_go], kept[may_go]))
    return [int(piece) for piece in may_go[order]]
