"""Which stage a newcomer takes, and when one peer goes over to another stage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.run.assignment import (
    CROWDED_S,
    EMPTY_S,
    Balance,
    Move,
    needed_stage,
    newcomers_stage,
    stage_need,
)

VISITED = 3


def needed_move(holders, visited):
    """The move between stages that so many peers hold."""
    peers = [[f"{stage}/{number}" for number in range(of)] for stage, of in enumerate(holders)]
    need = stage_need(peers, visited)
    return need and need.move


@pytest.mark.parametrize(
    ("holders", "visited", "needed"),
    [
        ((1, 0, 0), 3, 1),
        ((1, 1, 0), 3, 2),
        ((1, 1, 1), 3, 0),
        ((2, 1, 1), 3, 1),
        ((0, 3, 3), 3, 0),
        ((1, 1, 1), 2, 0),  # half of the relays are visited, so twice as many data peers
        ((2, 1, 1), 2, 0),
    ],
)
def test_a_newcomer_takes_the_stage_that_has_fewest_for_its_share(holders, visited, needed):
    assert needed_stage(holders, visited) == needed


def test_a_swarm_grows_to_the_published_shares():
    """SkipPipe's settings: 5 data peers and 3 relays a stage (6 stages, 4 visited), and 6 and 4."""
    for stages, visited, shares in ((6, 4, [5, 3, 3, 3, 3, 3]), (4, 3, [6, 4, 4, 4])):
        holders = [1, *[0] * (stages - 1)]
        while sum(holders) < sum(shares):
            holders[needed_stage(holders, visited)] += 1
        assert holders == shares


@pytest.mark.parametrize(
    ("holders", "move"),
    [
        ((1, 1, 1), None),
        ((1, 2, 1), None),
        ((1, 3, 1), Move(1, 0)),
        ((1, 1, 0), None),  # every other stage has one peer only
        ((2, 1, 0), Move(0, 2)),
        ((0, 1, 2), Move(2, 0)),
        ((3, 0, 0), Move(0, 1)),
    ],
)
def test_a_move_leaves_no_stage_worse_off_than_it_finds_one(holders, move):
    assert needed_move(holders, VISITED) == move


@given(st.lists(st.integers(0, 6), min_size=2, max_size=6), st.data())
def test_moves_come_to_an_end(holders, data):
    visited = data.draw(st.integers(2, len(holders)))
    for _ in range(sum(holders) + len(holders)):
        move = needed_move(holders, visited)
        if move is None:
            break
        holders[move.source] -= 1
        holders[move.target] += 1
    assert needed_move(holders, visited) is None
    assert all(holders) or sum(holders) < len(holders)


EMPTY: tuple[set[str], ...] = ({"a"}, {"b", "c"}, set())
CROWDED = ({"a"}, {"b", "c", "d"}, {"e"})


def due_at(peer_id, holders):
    """When a peer goes, watching once a second from second 0 on; None if not within the hour."""
    balance, need = Balance(peer_id), stage_need(holders, VISITED)
    return next((s for s in range(3600) if balance.due_move(need, float(s))), None)


def test_an_empty_stage_is_filled_soon_by_one_peer_and_by_the_next_if_that_stays():
    assert sorted(due_at(peer_id, EMPTY) for peer_id in "bc") == [EMPTY_S, 2 * EMPTY_S]
    assert due_at("a", EMPTY) is None


def test_a_crowded_stage_is_left_late_and_one_by_one():
    due = sorted(due_at(peer_id, CROWDED) for peer_id in "bcd")
    assert due == [CROWDED_S, 2 * CROWDED_S, 3 * CROWDED_S]
    assert due_at("a", CROWDED) is due_at("e", CROWDED) is None


def test_a_machine_that_comes_back_in_time_is_not_replaced():
    full = (*EMPTY[:2], {"d"})
    for peer_id in "bc":
        balance = Balance(peer_id)
        for second in range(4 * int(EMPTY_S)):
            is_gone = second % int(EMPTY_S)
            need = stage_need(EMPTY if is_gone else full, VISITED)
            assert balance.due_move(need, float(second)) is None


# --- newcomers that come together (rule 7) --------------------------------------------------------
@given(newcomers=st.integers(1, 8), stages=st.integers(2, 4), data=st.data())
def test_newcomers_that_all_chose_one_stage_spread_over_all(newcomers, stages, data):
    """They look in turn, each hearing those before it; as often as there are newcomers."""
    names = [f"newcomer{number}" for number in range(newcomers)]
    holders = [{"founder"}, *({f"relay{stage}"} for stage in range(1, stages))]
    crowded = data.draw(st.integers(0, stages - 1))
    holders[crowded] |= set(names)
    settled: set[str] = set()
    for look in range(1, newcomers + 1):
        for name in data.draw(st.permutations(names)):
            if name in settled:
                continue
            stage = newcomers_stage(name, holders, set(names) - settled, stages, look)
            if stage is not None:
                for held in holders:
                    held.discard(name)
                holders[stage].add(name)
                settled.add(name)
    counts = [len(held) for held in holders]
    assert max(counts) - min(counts) <= 1


def test_a_newcomer_stays_where_it_is_needed_and_waits_for_its_turn():
    alone = [{"founder"}, {"me"}]
    assert newcomers_stage("me", alone, {"me"}, 2, 1) == 1
    crowd = [{"founder"}, {"a", "b", "c"}]
    turns = {name: newcomers_stage(name, crowd, set("abc"), 2, 1) for name in "abc"}
    assert sorted(turns.values(), key=str) == [0, None, None]
    second = {name: newcomers_stage(name, crowd, set("abc"), 2, 2) for name in "abc"}
    assert sorted(second.values(), key=str) == [0, 0, None]
    assert newcomers_stage("a", [{"founder"}, {"a", "b", "c"}], {"a"}, 2, 1) == 0
