"""Paths that look at no latency: legal, drawn from seeds, and alike in what they use."""

from collections import Counter
from itertools import permutations

import pytest

from protocol.pipeline.problem import PathRules, stage_orders, within
from protocol.routing.routers import RandomRouter
from protocol.wire.stage_messages import Path

RELAYS = (("a1", "a2"), ("b1",), ("c1", "c2", "c3"), ("d1", "d2"), ("e1",))
RULES = PathRules()


def router(rules=RULES, visited=4, origin="me", full_every=0):
    return RandomRouter(origin, 7, visited, rules, full_every=full_every)


def test_orders_are_legal_exactly_when_the_planner_enumerates_them():
    for rules in (RULES, PathRules(max_jump=3), PathRules(max_jump=2)):
        legal = set(stage_orders(6, 4, rules))
        everything = permutations(range(1, 6), 3)
        assert {order for order in everything if within(order, rules)} == legal
        assert all(list(order) == sorted(order) for order in legal)


def test_stages_and_relays_are_used_alike_and_orders_are_legal():
    for iteration in range(20):
        paths = router().paths(iteration, 13, RELAYS)
        visits = Counter(stage for path in paths for stage in path.stages)
        assert sorted(visits) == [1, 2, 3, 4, 5]
        assert max(visits.values()) - min(visits.values()) <= 1
        for stage, peers in enumerate(RELAYS, 1):
            counts = Counter(
                relay for path in paths for relay, s in zip(path.relays, path.stages, strict=True)
                if s == stage
            )  # fmt: skip
            assert max(counts.values()) - min(counts[peer] for peer in peers) <= 1
        assert all(within(path.stages, RULES) for path in paths)


def test_draws_differ_between_data_peers_and_iterations_and_can_be_repeated():
    first = router().paths(3, 8, RELAYS)
    assert router().paths(3, 8, RELAYS) == first
    assert router().paths(4, 8, RELAYS) != first
    assert router(origin="you").paths(3, 8, RELAYS) != first


def test_every_so_often_nothing_is_skipped():
    lengths = [
        len(path.stages) for i in range(4) for path in router(full_every=2).paths(i, 1, RELAYS)
    ]
    assert lengths == [5, 3, 5, 3]


def test_what_sets_out_again_keeps_its_stages_where_they_have_a_relay():
    before = router().paths(1, 1, RELAYS)[0]
    left = tuple(tuple(p for p in peers if p not in before.relays) or ("new",) for peers in RELAYS)
    after = router().another(before, 5, left)
    assert after is not None
    assert after.stages == before.stages
    assert not set(after.relays) & set(before.relays)


def test_what_sets_out_again_leaves_out_a_stage_without_relays():
    before = router().paths(1, 1, RELAYS)[0]
    left = tuple(() if s in before.stages[:1] else peers for s, peers in enumerate(RELAYS, 1))
    after = router().another(before, 5, left)
    assert after is not None
    assert len(after.stages) == len(before.stages)
    assert before.stages[0] not in after.stages
    assert router().another(before, 5, ((), (), ("c1",), (), ())) is None
    assert router().whole(5, left) is None


@pytest.mark.parametrize("full_every", [0, 1])
def test_what_has_turned_keeps_what_is_left_of_its_path(full_every):
    """They may have added its gradient, and another of their stages would add it once more."""
    before = router(full_every=full_every).paths(1, 1, RELAYS)[0]
    for turn in range(20):
        for gone in before.stages:
            left = tuple(() if s == gone else peers for s, peers in enumerate(RELAYS, 1))
            after = router().another(before, turn, left, reached_loss=True)
            living = {r for r, s in zip(before.relays, before.stages, strict=True) if s != gone}
            assert after is not None
            assert set(after.relays) >= living


def test_what_has_turned_waits_where_a_path_would_leave_out_what_is_left_of_its_own():
    tight = router(PathRules(max_jump=1))
    before, left = Path(("b1", "c1", "d1"), (2, 3, 4)), (("a1",), ("b1",), ("c1",), (), ())
    assert tight.another(before, 1, left) == Path(("a1", "b1", "c1"), (1, 2, 3))
    without = (("a1",), ("b1",), ("c1",), (), ("e1",))
    assert tight.another(before, 1, without, reached_loss=True) == tight.another(before, 1, left)
    apart = (("a1",), ("b1", "b2"), (), ("d1", "d2"), ("e1",))
    assert tight.another(before, 1, apart, reached_loss=True) is None


def test_jumps_that_are_too_far_are_not_taken():
    tight = PathRules(max_jump=1)
    assert {p.stages for p in router(tight).paths(1, 6, RELAYS)} == {(1, 2, 3)}
