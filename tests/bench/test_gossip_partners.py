"""Partners by a bit of their numbers: what bench.gossip_partners compares."""

import pytest

from bench.gossip_partners import BitMatchmaker, in_lockstep, pairs_of_round, where_free
from protocol.gossip.matchmaking_events import BecameFree, PeersSeen, Propose, Snapshot


def test_by_bits_those_whose_partner_is_away_pair_up_too():
    whole = sorted(pairs_of_round(range(8), 8, 1, by_bits=True))
    assert whole == [(0, 2), (1, 3), (4, 6), (5, 7)]
    made = pairs_of_round([0, 1, 2, 3, 4], 8, 1, by_bits=True)
    assert {(0, 2), (1, 3)} <= set(made)
    assert len(made) == 2
    assert (4, 7) in pairs_of_round([0, 2, 4, 7], 8, 1, by_bits=True)


def test_drawn_pairs_change_with_the_round():
    rounds = {tuple(pairs_of_round(range(8), 8, round_, by_bits=False)) for round_ in range(20)}
    assert len(rounds) > 10


@pytest.mark.parametrize("own", range(8))
def test_the_matchmaker_asks_one_of_those_by_a_bit_first(own):
    maker = BitMatchmaker("group", f"peer{own}", 50)
    others = [(f"peer{other}", Snapshot(5, 250)) for other in range(8) if other != own]
    list(maker.step(0.0, PeersSeen(tuple(others), 7)))
    (asked,) = (c for c in maker.step(0.0, BecameFree(Snapshot(5, 250), 1.0, 9.0)))
    assert isinstance(asked, Propose)
    assert (own ^ int(asked.peer_id[-1])).bit_count() == 1


@pytest.mark.slow
def test_by_bits_replicas_are_closer_in_lockstep_and_not_where_they_are_free():
    lockstep, free = in_lockstep(8, 0.0), where_free(8, 0.1, equal=True)
    assert lockstep(True, 0) < 0.85 * lockstep(False, 0)
    assert free(True, 0) == pytest.approx(free(False, 0), rel=0.1)
