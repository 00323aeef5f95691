"""Which pieces a peer needs, which it keeps for others, and which go first."""

import numpy as np
import pytest

from protocol.content.needs import CorpusNeeds, first_to_go, kept_pieces
from protocol.schedule.data_plan import DataPlan

MEMBERS = tuple((f"peer-{number}", 4) for number in range(8))
PLAN = DataPlan(3, 600 * 32 - 5, 32)
"""600 pieces: three strata of 200."""
KEEPERS = 3
"""Of each piece, as docs/how-it-works.md says: a corpus outlives any two of them."""


def needs(position: int = 0, epoch: int = 0, me: str = "peer-2") -> CorpusNeeds:
    return CorpusNeeds(PLAN, epoch, position, me, MEMBERS, first_blocks=48)


def test_what_is_needed_first_are_the_pieces_of_the_next_blocks_in_order() -> None:
    blocks = PLAN.take(0, 0, 48, "peer-2", MEMBERS).blocks
    assert needs().first == tuple(dict.fromkeys((blocks // 32).tolist()))


def test_what_is_needed_soon_are_own_pieces_of_this_stratum_and_the_next() -> None:
    wanted = {*needs().first, *needs().soon}
    assert len(needs().soon) + len(needs().first) == len(wanted)
    trained = PLAN.take(0, 0, 2 * 200 * 32 // 8 - 200, "peer-2", MEMBERS).blocks // 32
    assert set(trained.tolist()) <= wanted
    assert len(wanted) <= 2 * (200 // 8 + 4)  # its share, and a few that it has with others


def test_the_end_of_an_epoch_is_followed_by_the_next() -> None:
    place = PLAN.num_places - 10
    wanted = {*needs(place).first, *needs(place).soon}
    coming = PLAN.take(0, place, 200, "peer-2", MEMBERS).blocks // 32
    assert set(coming.tolist()) <= wanted
    assert needs(PLAN.num_places).order_stratum == 2


def test_what_has_to_go_is_needed_last_and_nobodys_duty() -> None:
    at = needs(position=200 * 32 + 5)  # in the second stratum
    distance = at.distance()
    strata = PLAN.strata_of_pieces(0)
    again = PLAN.strata_of_pieces(1)
    assert set(distance[strata == 1]) == {0}
    assert set(distance[strata == 2]) == {1}
    assert (distance[strata == 0] == 2 + again[strata == 0]).all()
    held = np.arange(0, 600, 5)
    kept = np.zeros(600, bool)
    kept[::10] = True
    going = first_to_go(held, distance, kept, needed=(5, 10))
    assert not {5, 10} & set(going)
    assert sorted([*going, 5, 10]) == held.tolist()
    assert [bool(kept[piece]) for piece in going] == sorted(bool(kept[piece]) for piece in going)
    free = [int(distance[piece]) for piece in going if not kept[piece]]
    assert free == sorted(free, reverse=True)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_each_piece_has_its_keepers(size: int) -> None:
    peers = [f"peer-{number}" for number in range(size)]
    copies = sum(kept_pieces(500, me, peers).astype(int) for me in peers)
    assert set(np.asarray(copies).tolist()) == {min(size, KEEPERS)}
    if size > KEEPERS:
        share = kept_pieces(500, "peer-1", peers).mean()
        assert share == pytest.approx(KEEPERS / size, abs=0.08)
        fewer = kept_pieces(500, "peer-1", peers[:-1])
        assert (kept_pieces(500, "peer-1", peers) <= fewer).all()  # nothing is given up for a loss
