"""Which relay makes something else than its stage's replicas: who is odd, and who is left out."""

from itertools import combinations
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.microbatch import checks
from protocol.microbatch.checks import (
    CHECKED,
    COPIES,
    FACTOR,
    FLOOR,
    PAUSES,
    SUSPECTED,
    Checks,
    Differing,
)
from protocol.microbatch.data_peer import without_failed
from protocol.pipeline.problem import PathRules
from protocol.routing.routers import RandomRouter
from protocol.wire.stage_messages import Microbatch, Path, RelaysByStage

STAGES: RelaysByStage = (("a1", "b1", "c1"), ("a2", "b2", "c2"), ("a3", "b3", "c3"))
SHARE = 0.03
HONEST = 0.15
"""How far honest replicas are apart, at most (docs/log.md)."""


class Judge:
    """Has microbatches checked, over random paths, whose relays make what `made` says.

    One of `every` is checked, on average.
    """

    def __init__(self, made, relays=STAGES, seed="secret", every=1):
        self.made, self.relays, self.every = made, relays, every
        self.checks = Checks(seed)
        self.router = RandomRouter("data", 0, len(relays) + 1, PathRules())
        self.found: list[Differing] = []
        self.checked = self.sent = 0

    @property
    def left_out(self):
        every = [relay for stage in self.relays for relay in stage]
        return self.checks.left_out(every, 0.0)

    def send(self, microbatches):
        for _ in range(microbatches):
            self.sent += 1
            relays = without_failed(self.relays, self.left_out)
            (path,) = self.router.paths(self.sent, 1, relays)
            with mock.patch.object(checks, "CHECKED", self.every):
                drawn = self.checks.draw(Microbatch("data", self.sent, self.sent), path, relays)
            if drawn is not None:
                self._judge(*drawn)

    def _judge(self, check, copies):
        self.checked += 1
        for number, path in enumerate((check.path, *copies)):
            check.outputs[path.relays[check.place]] = self._output(path, number)
        outputs = check.outputs.values()
        distances = [abs(one - other) for one, other in combinations(outputs, 2)]
        differing = self.checks.judge(check, distances, 0.0)
        self.found += [differing] if differing else []

    def _output(self, path, number):
        return sum(self.made(relay, number) for relay in path.relays)


def honest(relay, _number):
    return {"a": 0.0, "b": HONEST / 2, "c": HONEST}[relay[0]] if relay[1] == "2" else 0.0


def lying(relay, number):
    return honest(relay, number) + (1.0 if relay == "b2" else 0.0)


def test_a_relay_that_always_lies_is_left_out_and_nobody_else():
    judge = Judge(lying)
    judge.send(30)
    assert judge.left_out == {"b2"}
    assert {found.odd for found in judge.found} == {"b2"}


def test_without_checks_nobody_notices():
    judge = Judge(lying, seed=None)
    judge.send(30)
    assert (judge.left_out, judge.found, judge.checked) == (set(), [], 0)


def test_honest_relays_differ_from_each_other_and_nobody_is_odd():
    judge = Judge(honest)
    judge.send(50)
    assert not judge.found
    assert judge.checked > 30


def test_a_check_costs_less_than_three_of_a_hundred():
    """A forward is a third of the work of a microbatch, and half of its bytes."""
    judge = Judge(honest, every=CHECKED)
    judge.send(200 * CHECKED)
    share = COPIES * judge.checked / judge.sent
    assert 0.01 < share / 3 < share / 2 < SHARE


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([relay for stage in STAGES for relay in stage]),
    st.lists(st.sampled_from([0.0, 1.0, -1.0, 5.0]), min_size=97, max_size=97),
    st.integers(0, 1000),
)
def test_one_that_lies_when_it_likes_has_nobody_else_left_out(liar, lies, seed):
    drawn = iter(lies * 10_000)

    def made(relay, number):
        return honest(relay, number) + (next(drawn) if relay == liar else 0.0)

    judge = Judge(made, seed=str(seed))
    judge.send(60)
    assert judge.left_out <= {liar}


@pytest.mark.parametrize("lies_in", ["originals", "copies"])
def test_one_that_knows_copies_is_found_or_harms_nobody(lies_in):
    """It is odd where it is asked itself; where another is asked, it was there each time."""

    def made(relay, number):
        lies = relay == "b2" and (number == 0) == (lies_in == "originals")
        return honest(relay, number) + (1.0 if lies else 0.0)

    judge = Judge(made)
    judge.send(100)
    assert judge.left_out == {"b2"}


def test_a_stage_of_two_relays_is_not_checked():
    judge = Judge(lying, relays=tuple(stage[:2] for stage in STAGES))
    judge.send(50)
    assert not judge.checked


def test_a_stage_with_one_relay_is_not_checked_and_covers_for_nobody():
    relays = (("a1",), STAGES[1], ("a3",))
    judge = Judge(lying, relays=relays)
    judge.send(10)
    assert judge.left_out == {"b2"}
    alone = Judge(lying, relays=(("a1",), ("b2",)))
    alone.send(10)
    assert not alone.checked


def test_where_all_three_differ_nobody_is_odd():
    judge = Judge(lambda relay, _number: float("abc".index(relay[0])))
    judge.send(50)
    assert {found.odd for found in judge.found} <= {None}
    assert not judge.left_out


def test_the_bound_follows_what_is_usual_where_replicas_are_further_apart():
    """Replicas of a wild run: far beyond the floor, and no one of them is odd for long."""

    def made(relay, _number):
        return 3 * FLOOR * "abc".index(relay[0])

    judge = Judge(made)
    judge.send(60)
    assert judge.found  # at first
    assert not judge.left_out
    found = len(judge.found)
    judge.send(60)
    assert len(judge.found) == found
    judge.made = lambda relay, number: made(relay, number) + 9 * FACTOR * FLOOR * (relay == "a1")
    judge.send(60)
    assert judge.left_out == {"a1"}


def test_paths_are_drawn_while_somebody_is_suspected_and_not_for_ever():
    lies = [1.0]

    def made(relay, number):
        return honest(relay, number) + (lies[0] if relay == "b2" else 0.0)

    judge = Judge(made)
    while not judge.found:
        judge.send(1)
    assert judge.checks.is_suspecting
    lies[0] = 0.0
    checked = judge.checked
    while judge.checked < checked + SUSPECTED:
        assert judge.checks.is_suspecting
        judge.send(1)
    assert not judge.checks.is_suspecting


def test_one_that_is_left_out_is_used_again_after_a_pause():
    judge = Judge(lying)
    judge.send(30)
    assert judge.checks.left_out(["b2"], PAUSES.first_s - 1.0) == {"b2"}
    assert judge.checks.left_out(["b2"], PAUSES.first_s) == set()


def test_copies_go_the_same_way_but_for_one_relay():
    path = Path(("a1", "b2", "c3"), (1, 2, 3), "ab" * 16)
    with mock.patch.object(checks, "CHECKED", 1):
        drawn = Checks("secret").draw(Microbatch("data", 1, 1), path, STAGES)
    assert drawn is not None
    check, copies = drawn
    assert len(copies) == COPIES
    for copy in copies:
        differ = [i for i in range(3) if copy.relays[i] != path.relays[i]]
        assert differ == [check.place]
        assert copy.relays[check.place] in STAGES[check.place]
        assert (copy.stages, copy.plan) == (path.stages, path.plan)
    assert check.companions == set(path.relays) - {path.relays[check.place]}
