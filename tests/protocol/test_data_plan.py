"""The data plan: each block once per epoch, and what a change of membership costs."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import LocalProtocolError
from protocol.limits import MAX_COUNT
from protocol.schedule import data_plan
from protocol.schedule.data_plan import (
    DataPlan,
    MemberPosition,
    Members,
)

SIZES = (1, 2, 3, 5, 7, 64, 65, 1000, 1023, 4097)


def swarm(size: int) -> tuple[tuple[str, int], ...]:
    return tuple((f"peer-{i}", 1 + 3 * (i % 4)) for i in range(size))


def walk_epoch(plan: DataPlan, me: str, members: Members, step: int) -> list[int]:
    """All blocks of one member in epoch 0, taken `step` at a time."""
    blocks: list[int] = []
    epoch, position = 0, 0
    while epoch == 0:
        taken = plan.take(epoch, position, step, me, members)
        if taken.epoch == 0:
            blocks += taken.blocks.tolist()
        else:
            own = np.flatnonzero(
                plan.owners(0, position, plan.num_places, members)
                == sorted(members).index((me, dict(members)[me]))
            )
            left = plan.blocks_at(0, position + own)
            blocks += taken.blocks[: np.count_nonzero(left >= 0)].tolist()
        epoch, position = taken.epoch, taken.position
    return blocks


@pytest.mark.parametrize("num_blocks", SIZES)
def test_the_order_of_an_epoch_is_a_permutation(num_blocks: int) -> None:
    plan = DataPlan(5, num_blocks)
    order = plan.blocks_at(2, np.arange(num_blocks))
    assert sorted(order.tolist()) == list(range(num_blocks))


def test_orders_differ_by_seed_and_epoch_and_look_shuffled() -> None:
    places = np.arange(4097)
    orders = [
        DataPlan(seed, 4097).blocks_at(epoch, places) for seed, epoch in ((1, 0), (1, 1), (2, 0))
    ]
    for i, order in enumerate(orders):
        assert abs(np.corrcoef(places, order)[0, 1]) < 0.05
        # A random permutation keeps one place, and one neighbour on either side, on average.
        assert np.count_nonzero(order == places) < 8
        assert np.count_nonzero(np.abs(np.diff(order)) == 1) < 12
        assert np.count_nonzero(order == orders[i - 1]) < 8


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("num_blocks", [50, 1001])
def test_each_block_is_trained_exactly_once_per_epoch(size: int, num_blocks: int) -> None:
    plan, members = DataPlan(3, num_blocks), swarm(size)
    trained = [
        block
        for number, (peer_id, _) in enumerate(members)
        for block in walk_epoch(plan, peer_id, members, step=7 + number)
    ]
    assert sorted(trained) == list(range(num_blocks))


@settings(max_examples=30)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_it_does_not_matter_how_one_takes(counts: list[int]) -> None:
    plan, members = DataPlan(3, 61), swarm(3)
    epoch, position, pieces = 0, 0, []
    for count in counts:
        taken = plan.take(epoch, position, count, "peer-1", members)
        assert len(taken.blocks) == count
        assert taken.blocks.dtype == np.int64
        epoch, position = taken.epoch, taken.position
        pieces += taken.blocks.tolist()
    at_once = plan.take(0, 0, sum(counts), "peer-1", members[::-1])
    assert at_once.blocks.tolist() == pieces
    assert (at_once.epoch, at_once.position) == (epoch, position)


def test_a_lone_member_owns_all_and_goes_on_into_the_next_epoch() -> None:
    plan = DataPlan(9, 10)
    taken = plan.take(0, 0, 25, "me", (("me", 3),))
    assert sorted(taken.blocks[:10].tolist()) == list(range(10))
    assert sorted(taken.blocks[10:20].tolist()) == list(range(10))
    assert (taken.epoch, taken.position) == (2, 5)
    assert taken.blocks[20:].tolist() == plan.blocks_at(2, np.arange(5)).tolist()


def test_shares_follow_weights() -> None:
    members = (("a", 1), ("b", 2), ("c", 5), ("idle", 0))
    owned = np.bincount(DataPlan(1, 40_000).owners(0, 0, 40_000, members), minlength=4)
    assert owned[3] == 0
    assert owned[:3] / 40_000 == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.01)


def test_owners_of_a_part_are_the_owners_of_the_whole() -> None:
    plan, members = DataPlan(1, 1000), swarm(5)
    whole = plan.owners(4, 0, 1000, members)
    for start, end in ((0, 1), (1, 2), (7, 7), (3, 998), (999, 1000)):
        assert plan.owners(4, start, end, members).tolist() == whole[start:end].tolist()


@pytest.mark.parametrize("piece_blocks", [None, 64])
def test_a_newcomer_takes_places_from_others_and_moves_few_others(piece_blocks: int | None) -> None:
    plan, members = DataPlan(1, 16_384, piece_blocks), swarm(4)
    before = plan.owners(0, 0, 16_384, members)
    after = plan.owners(0, 0, 16_384, (*members, ("peer-9", 4)))
    moved = before != after
    assert np.mean(moved & (after == 4)) == pytest.approx(4 / 26, abs=0.01)
    assert np.mean(moved & (after != 4)) < 0.05


def positions_after(
    plan: DataPlan, members: Members, steps: int, later: int = 0
) -> list[MemberPosition]:
    """Everybody has trained `steps` steps of as many blocks as it has weight.

    Args:
        later: further steps of each member in comparison with the one before it.
    """
    return [
        MemberPosition(peer_id, weight, taken.epoch, taken.position)
        for number, (peer_id, weight) in enumerate(members)
        for taken in [plan.take(0, 0, (steps + number * later) * weight, peer_id, members)]
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("num_peers", "piece_blocks"), [(4, None), (4, 1024), (5, 1024)])
def test_members_do_not_drift_apart(num_peers: int, piece_blocks: int | None) -> None:
    """How many blocks one that leaves costs, when all have trained the same number of them."""
    members = tuple((f"peer-{i}", 4) for i in range(num_peers))
    costs = []
    for seed in range(8):
        plan = DataPlan(seed, 3 * 9600 * num_peers, piece_blocks)
        before = positions_after(plan, members, steps=2400)
        for leaver in before:
            rest = [member for member in before if member is not leaver]
            cost = plan.lost_and_repeated(before, rest)
            costs.append(sum(cost))
    assert np.median(costs) <= 16
    assert max(costs) <= 40


def test_each_member_needs_its_share_of_the_pieces() -> None:
    plan = DataPlan(1, 256 * 128, 128)
    for size in (2, 16, 100):
        members = tuple((f"peer-{i}", 4) for i in range(size))
        owned = plan.ownership(0, 0, members)
        columns = [len(owned.columns_of(member)) for member in range(size)]
        assert sum(columns) < 256 + size
        assert max(columns) <= -(-256 // size) + 3


@pytest.mark.slow
@pytest.mark.parametrize(("num_blocks", "piece_blocks"), [(1, 1), (20, 8), (2600, 8), (513, 1)])
def test_pieces_are_gone_through_a_stratum_at_a_time(num_blocks: int, piece_blocks: int) -> None:
    plan = DataPlan(4, num_blocks, piece_blocks)
    order = plan.blocks_at(1, np.arange(plan.num_places))
    blocks = order[order >= 0]
    assert sorted(blocks.tolist()) == list(range(num_blocks))
    stratum_of_piece: dict[int, int] = {}
    for place, block in enumerate(order.tolist()):
        if block >= 0:
            stratum = plan.stratum_at(place)
            assert stratum_of_piece.setdefault(block // piece_blocks, stratum) == stratum
    trained = [
        block
        for number, (peer_id, _) in enumerate(swarm(3))
        for block in walk_epoch(plan, peer_id, swarm(3), step=7 + number)
    ]
    assert sorted(trained) == list(range(num_blocks))


def count_by_hand(
    plan: DataPlan, before: list[MemberPosition], after: list[MemberPosition]
) -> tuple[int, int]:
    """What was trained in epoch 0 before, and what will be after, block by block."""

    def parts(members: list[MemberPosition]) -> tuple[set[int], set[int]]:
        ordered = sorted(members, key=lambda m: m.peer_id)
        owners = plan.owners(0, 0, plan.num_blocks, [(m.peer_id, m.weight) for m in ordered])
        done = {p for p, owner in enumerate(owners) if p < ordered[owner].position}
        return done, set(range(plan.num_blocks)) - done

    done, to_do = parts(before)[0], parts(after)[1]
    return plan.num_blocks - len(done | to_do), len(done & to_do)


@pytest.mark.parametrize("change", ["join", "leave", "nothing"])
def test_a_change_of_membership_costs_what_is_counted_and_little(change: str) -> None:
    plan, members = DataPlan(11, 4000), swarm(4)
    before = positions_after(plan, members, steps=100, later=5)
    where = plan.start_position([(m.epoch, m.position) for m in before])
    after = {
        "join": [*before, MemberPosition("peer-9", 4, *where)],
        "leave": before[1:],
        "nothing": before,
    }[change]
    cost = plan.lost_and_repeated(before, after)
    assert cost == count_by_hand(plan, before, after)
    spread = max(m.position for m in before) - min(m.position for m in before)
    assert sum(cost) <= spread
    assert (cost == (0, 0)) == (change == "nothing")


def test_costs_are_counted_across_an_epochs_end() -> None:
    plan = DataPlan(1, 100)
    ahead, behind = MemberPosition("a", 1, 1, 10), MemberPosition("b", 1, 0, 90)
    owners = [
        plan.owners(epoch, start, end, [("a", 1), ("b", 1)])
        for epoch, start, end in ((0, 90, 100), (1, 0, 10))
    ]
    undone_by_b = sum(int(np.count_nonzero(part == 1)) for part in owners)
    assert undone_by_b > 0
    assert plan.lost_and_repeated([ahead, behind], [ahead]) == (undone_by_b, 0)
    done_by_a = sum(int(np.count_nonzero(part == 0)) for part in owners)
    assert plan.lost_and_repeated([ahead, behind], [behind]) == (0, done_by_a)


def test_nothing_is_counted_when_nobody_was_there() -> None:
    assert DataPlan(1, 9).lost_and_repeated([], [MemberPosition("a", 1, 0, 5)]) == (0, 0)


@pytest.mark.parametrize(
    ("positions", "start"),
    [
        ([], (0, 0)),
        ([(2, 5)], (2, 5)),
        ([(0, 90), (1, 3), (0, 95)], (0, 95)),
        ([(0, 1), (0, 2), (0, 3), (9, 9)], (0, 2)),
        ([(0, 101), (MAX_COUNT, 0), (0, MAX_COUNT)], (0, 0)),
        ([(3, MAX_COUNT), (2, 100), (MAX_COUNT, 1)], (2, 100)),
    ],
)
def test_a_joiner_starts_at_the_median_of_those_who_can_be_where_they_say(
    positions: list[tuple[int, int]], start: tuple[int, int]
) -> None:
    assert DataPlan(1, 100).start_position(positions) == start


@pytest.mark.parametrize(
    ("position", "me", "members"),
    [
        (0, "stranger", swarm(2)),
        (0, "idle", (("idle", 0), ("b", 1))),
        (0, "b", (("b", 1), ("b", 2))),
        (0, "b", (("a", -1), ("b", 2))),
        (-1, "peer-0", swarm(2)),
        (11, "peer-0", swarm(2)),
    ],
)
def test_misuse_is_refused(position: int, me: str, members: Members) -> None:
    with pytest.raises(LocalProtocolError):
        DataPlan(1, 10).take(0, position, 1, me, members)


def test_an_empty_corpus_has_no_plan() -> None:
    with pytest.raises(LocalProtocolError, match="0 blocks"):
        DataPlan(1, 0)


def test_a_corpus_too_small_to_share_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_plan._MAX_EPOCHS_PER_TAKE <= 10_000  # some seconds
    monkeypatch.setattr(data_plan, "_MAX_EPOCHS_PER_TAKE", 100)
    members = (("giant", 1 << 32), ("dwarf", 1))
    with pytest.raises(LocalProtocolError, match="too few"):
        DataPlan(1, 1).take(0, 0, 1, "dwarf", members)


def test_a_member_without_a_place_in_one_epoch_finds_one_in_another() -> None:
    epochs = {DataPlan(1, 1).take(0, 0, 1, me, swarm(4)).epoch for me, _ in swarm(4)}
    assert len(epochs) == 4


def test_the_plan_is_the_same_everywhere_and_always() -> None:
    """A golden value: to change it is to change the protocol."""
    taken = DataPlan(7, 1_000_003).take(3, 500, 6, "peer-1", swarm(3))
    assert (taken.blocks.tolist(), taken.position) == (
        [711689, 597118, 236932, 617593, 937406, 40199],
        530,
    )


def test_taking_is_fast_in_a_large_swarm() -> None:
    plan, members = DataPlan(7, 10**9, 1024), swarm(64)
    plan.take(0, 0, 8, "peer-0", members)
    start_s = time.process_time()
    taken = plan.take(0, 123_456, 4096, "peer-3", members)
    assert time.process_time() - start_s < 0.25
    assert len(np.unique(taken.blocks)) == 4096
