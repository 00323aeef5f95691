"""Nodes of the directory: who is known, and whom a search asks."""

import random

import pytest

from protocol.limits import NEAREST_NODES, RECORDS
from protocol.membership.node_table import (
    BEAM,
    CHECKED_AFTER_S,
    MOST_ASKED,
    REPLICAS,
    SILENT_AFTER_S,
    NodeSearch,
    NodeTable,
    position_of,
    position_of_node,
)

PLACE = bytes(range(20))
NAMES = [f"node{number}" for number in range(500)]


def near(names, place=PLACE):
    return sorted(names, key=lambda name: position_of_node(name) ^ position_of(place))


def address(number):
    return f"/ip4/{11 + number // 2**16}.{number // 256 % 256}.{number % 256}.1/tcp/4001"


@pytest.fixture
def table():
    nodes = NodeTable("own")
    for number, name in enumerate(NAMES):
        nodes.asked(name, address(number), 0.0)
    return nodes


def searched(start, answers, silent=()):
    """The names that a search has asked, in turn, and the keepers that it ends with."""
    search, asked = NodeSearch(NodeTable("own"), PLACE), []
    search.hear(start, 0.0)
    while new := search.next_asked(0.0):
        asked += new
        for name in new:
            if name in silent:
                search.silent(name)
            else:
                search.answered(name)
                search.hear(answers(name), 0.0)
    return asked, search.keepers()


def test_the_nearest_are_named_without_who_asks(table):
    nearest = near(NAMES)[: NEAREST_NODES + 1]
    assert table.told(PLACE, but="") == nearest[:-1]
    assert table.told(PLACE, but=nearest[0]) == nearest[1:]


def test_a_peer_is_no_node_of_its_own():
    nodes = NodeTable("own")
    nodes.asked("own", address(1), 0.0)
    nodes.answered("own", address(1), 0.0)
    assert len(nodes) == 0
    assert not nodes.may_ask("own", 0.0)


def test_one_that_is_silent_is_forgotten_and_rests_until_it_answers(table):
    name = near(NAMES)[0]
    for _ in range(3):
        table.silent(name, 10.0)
    assert name not in table.told(PLACE, but="")
    table.asked(name, address(0), 10.0)  # it can ask us, and perhaps not be dialled
    assert table.told(PLACE, but="")[0] == name
    assert name not in table.near(PLACE, 11.0)
    assert not table.may_ask(name, 11.0)
    assert table.may_ask(name, 100.0)
    table.answered(name, address(0), 11.0)
    assert table.may_ask(name, 11.0)


def test_a_network_has_a_share_and_the_first_that_came_stay():
    nodes = NodeTable("own")
    for number in range(RECORDS.per_prefix + 5):
        nodes.asked(f"crowd{number}", "/ip4/11.0.0.1/tcp/4001", 0.0)
    assert len(nodes) == RECORDS.per_prefix
    nodes.asked("another", address(300), 0.0)
    assert len(nodes) == RECORDS.per_prefix + 1
    nodes.silent("crowd0", 0.0)
    nodes.asked("late", "/ip4/11.0.0.2/tcp/4001", 0.0)
    assert len(nodes) == RECORDS.per_prefix + 1


def test_all_together_are_bounded():
    nodes = NodeTable("own")
    for number in range(RECORDS.total + 5):
        nodes.asked(f"node{number}", address(number), 0.0)
    assert len(nodes) == RECORDS.total


def full_table(num_names):
    """A table whose one network has no more room."""
    nodes = NodeTable("own")
    for number in range(num_names):
        nodes.asked(f"node{number}", "/ip4/11.0.0.1/tcp/4001", float(number))
    return nodes


def test_a_full_table_has_the_dead_make_place_for_newcomers():
    nodes = full_table(RECORDS.per_prefix)
    nodes.answered("node0", "/ip4/11.0.0.1/tcp/4001", 300.0)
    for _ in range(2):
        assert not nodes.asked("newcomer", "/ip4/11.0.0.2/tcp/4001", 300.0)
    assert nodes.to_check(CHECKED_AFTER_S) is None
    assert nodes.to_check(CHECKED_AFTER_S + 1.0) == "node1"
    nodes.silent("node1", CHECKED_AFTER_S + 3.0)
    assert nodes.asked("newcomer", "/ip4/11.0.0.2/tcp/4001", CHECKED_AFTER_S + 3.0)
    assert nodes.to_check(CHECKED_AFTER_S + 3.0) == "node2"


def test_a_flood_of_newcomers_drives_out_nobody_that_answers():
    nodes, now_s = full_table(RECORDS.per_prefix), 1000.0
    for number in range(2 * RECORDS.per_prefix):
        now_s += 1.0
        assert not nodes.asked(f"crowd{number}", "/ip4/11.0.0.2/tcp/4001", now_s)
        if (name := nodes.to_check(now_s)) is not None:
            nodes.answered(name, "/ip4/11.0.0.1/tcp/4001", now_s)
    assert len(nodes) == RECORDS.per_prefix
    assert all(nodes.is_proven(f"node{number}") for number in range(RECORDS.per_prefix))


def test_a_node_is_proven_from_its_answer_until_it_is_silent(table):
    *_, name = near(NAMES)
    assert not table.has_proven()
    table.answered(name, address(0), 1.0)
    assert table.is_proven(name)
    assert table.has_proven()
    table.silent(name, 2.0)
    table.asked(name, address(0), 2.0)
    assert not table.is_proven(name)


def test_proven_nodes_are_named_first_however_far_they_are(table):
    names = near(NAMES)
    for name in names[-3:]:
        table.answered(name, address(0), 0.0)
    assert table.told(PLACE, but="") == [*names[-3:], *names[: NEAREST_NODES - 3]]


def test_half_a_beam_of_proven_nodes_is_asked_beside_the_nearest(table):
    names = near(NAMES)
    for name in names[-7:]:
        table.answered(name, address(0), 0.0)
    search = NodeSearch(table, PLACE)
    search.hear(table.near(PLACE, 0.0), 0.0)
    asked = search.next_asked(0.0)
    assert set(asked) == {*names[-7:-2], *names[: BEAM // 2]}
    search.silent(names[-7])
    assert search.next_asked(0.0) == [names[-2]]


def test_the_peer_that_we_enter_by_counts_as_proven():
    names = near(NAMES)
    search = NodeSearch(NodeTable("own"), PLACE, names[-1:])
    search.hear(names, 0.0)
    assert set(search.next_asked(0.0)) == {names[-1], *names[: BEAM - 1]}


def test_who_was_asked_in_good_time_before_a_search_was_cut_off_has_been_silent(table):
    search = NodeSearch(table, PLACE)
    search.hear(table.near(PLACE, 0.0), 0.0)
    early = search.next_asked(0.0)
    search.silent(early.pop(0))
    [late] = search.next_asked(SILENT_AFTER_S - 1.2)  # two round trips of 600 ms
    search.end(SILENT_AFTER_S)
    assert [table.may_ask(name, SILENT_AFTER_S) for name in early] == [False] * len(early)
    assert table.may_ask(late, SILENT_AFTER_S)
    assert late in table.near(PLACE, SILENT_AFTER_S)


def test_a_search_ends_at_the_nearest_whoever_it_began_with():
    rng = random.Random(1)
    known = {name: [*near(rng.sample(NAMES, 60))[:5], *rng.sample(NAMES, 5)] for name in NAMES}
    asked, keepers = searched([NAMES[7]], known.__getitem__)
    assert set(near(NAMES)[:2]) <= set(keepers)
    assert len(asked) == len(set(asked)) < len(NAMES) / 4


def test_a_search_asks_the_nearest_alone_where_it_knows_them():
    asked, keepers = searched(NAMES, lambda _: NAMES)
    assert asked == near(NAMES)[:BEAM]
    assert keepers == near(NAMES)[:REPLICAS]


def test_those_that_are_silent_give_way_to_the_next_nearest():
    silent = near(NAMES)[:7]
    asked, keepers = searched(NAMES, lambda _: silent, silent)
    assert asked == near(NAMES)[: BEAM + 7]
    assert keepers == near(NAMES)[7 : 7 + REPLICAS]


def test_nobody_that_rests_is_asked(table):
    table.silent(NAMES[3], 0.0)
    search = NodeSearch(table, PLACE)
    search.hear(["own", *NAMES[3:5]], 0.1)
    assert search.next_asked(0.0) == [NAMES[4]]


def test_liars_that_name_nearer_ones_without_end_have_few_asked_at_once_and_not_many_in_all():
    names = near(f"liar{number}" for number in range(2_000))[::-1]
    search, asked = NodeSearch(NodeTable("own"), PLACE), 0
    waiting: list[str] = []
    search.hear(names[:NEAREST_NODES], 0.0)
    told = iter(range(NEAREST_NODES, len(names), NEAREST_NODES))
    while waiting := [*waiting, *search.next_asked(0.0)]:
        assert len(waiting) <= BEAM
        liar = waiting.pop()
        asked += 1
        search.answered(liar)
        begin = next(told)
        search.hear(names[begin : begin + NEAREST_NODES], 0.0)
    assert asked == MOST_ASKED


def test_a_search_among_a_thousand_who_know_few_of_them_is_not_cut_short():
    names, rng = near(f"node{number}" for number in range(1000)), random.Random(2)

    def known(name):
        """Those near to the place know each other; any other knows some of all."""
        sample = names if name in names[:40] else near(rng.sample(names, 100))
        return sample[:NEAREST_NODES]

    asked, keepers = searched(rng.sample(names, 3), known)
    assert keepers == names[:REPLICAS]
    assert len(asked) < MOST_ASKED / 2
