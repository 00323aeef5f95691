"""What changes of the members cost, as one peer counts it."""

import pytest

from peer.facts import Facts
from peer.rounds.shares import MAX_APART_PLACES, MEMBER_WEIGHT, DataShares
from protocol.membership.view import Member, Progress
from protocol.schedule.data_plan import DataPlan

NUM_BLOCKS = 10_000
PLAN = DataPlan(seed=7, num_blocks=NUM_BLOCKS)


def facts_at(position: int, epoch: int = 0) -> Facts:
    return Facts("a", 1, epoch=epoch, position=position, steps_per_s=10.0)


def member(peer_id: str, position: int, *, speed: float = 10.0, epoch: int = 0) -> Member:
    progress = Progress("training", 0, 0.0, speed, epoch, position)
    return Member(peer_id, 1, alive=True, progress=progress)


def cost(facts: Facts) -> tuple[int, int]:
    return facts.lost_blocks, facts.repeated_blocks


def test_stable_members_lose_nothing():
    facts = facts_at(100)
    shares = DataShares(PLAN, facts)
    assert shares.now([member("b", 140)]) == (("a", MEMBER_WEIGHT), ("b", MEMBER_WEIGHT))
    facts.position = 900
    shares.now([member("b", 950, speed=10.5)])  # about as fast
    assert cost(facts) == (0, 0)


def test_who_went_ahead_and_left_has_trained_what_others_train_again():
    facts = facts_at(100)
    shares = DataShares(PLAN, facts)
    shares.now([member("b", 300)])
    shares.now([])
    lost, repeated = cost(facts)
    theirs = PLAN.owners(0, 100, 300, [("a", MEMBER_WEIGHT), ("b", MEMBER_WEIGHT)]) == 1
    assert (lost, repeated) == (0, theirs.sum())


def test_who_lagged_and_left_leaves_a_hole():
    facts = facts_at(300)
    shares = DataShares(PLAN, facts)
    shares.now([member("b", 100)])
    shares.now([])
    lost, repeated = cost(facts)
    theirs = PLAN.owners(0, 100, 300, [("a", MEMBER_WEIGHT), ("b", MEMBER_WEIGHT)]) == 1
    assert (lost, repeated) == (theirs.sum(), 0)


def test_who_stays_is_counted_where_it_is_now():
    facts = facts_at(100)
    shares = DataShares(PLAN, facts)
    shares.now([member("b", 100), member("c", 100)])
    facts.position = 200
    shares.now([member("b", 200)])  # c went where it stood: at 100
    lost, repeated = cost(facts)
    members = [(peer_id, MEMBER_WEIGHT) for peer_id in "abc"]
    assert (lost, repeated) == ((PLAN.owners(0, 100, 200, members) == 2).sum(), 0)


def test_another_pace_moves_shares_and_is_counted():
    facts = facts_at(100)
    shares = DataShares(PLAN, facts)
    shares.now([member("b", 400), member("c", 400)])
    weights = dict(shares.now([member("b", 400, speed=30.0), member("c", 400)]))
    assert weights["b"] == 3 * MEMBER_WEIGHT
    assert sum(cost(facts)) > 0


@pytest.mark.parametrize("epoch", [0, 10**9])
def test_a_claim_to_be_far_away_costs_no_work(epoch):
    facts = facts_at(0)
    plan = DataPlan(seed=7, num_blocks=1 << 40)
    shares = DataShares(plan, facts)
    shares.now([member("liar", MAX_APART_PLACES + 1, epoch=epoch)])
    shares.now([])
    assert cost(facts) == (0, 0)


def test_a_place_behind_the_end_of_an_epoch_is_nobodys():
    facts = facts_at(NUM_BLOCKS - 5)
    shares = DataShares(PLAN, facts)
    shares.now([member("liar", NUM_BLOCKS + 5)])
    shares.now([])
    assert cost(facts) == (0, 0)
