"""Stamps and results: one winner, whoever sees what first."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.diloco.chunk_ledger import NEVER, ChunkLedger, ResultVerdict
from protocol.errors import LocalProtocolError
from protocol.wire.fragment_messages import ResultRank, Stamp

BASE = Stamp(0, 3, 9, b"base")
AHEAD = Stamp(0, 3, 10, b"zzzz")
TIED = Stamp(0, 3, 9, b"athe")
"""As far as BASE, with a lower digest."""

stamps = st.builds(
    Stamp, st.just(0), st.integers(0, 3), st.integers(0, 3), st.sampled_from([b"a", b"b"])
)
outcomes = st.builds(ResultRank, st.integers(1, 3), st.sampled_from([b"a", b"b", b"c"]))


def after(base: Stamp, outcome: ResultRank) -> Stamp:
    """A stamp as the arithmetic would give it: a function of base and result alone."""
    return Stamp(0, base.steps + 1, base.weight + outcome.weight, base.digest + outcome.digest)


def offer(ledger: ChunkLedger, cycle: int, base: Stamp, outcome: ResultRank) -> ResultVerdict:
    verdict = ledger.judge(0, cycle, base, outcome)
    if verdict is ResultVerdict.STEP:
        ledger.stepped(0, cycle, outcome, after(base, outcome))
    elif verdict is ResultVerdict.REDO:
        ledger.redone(0, outcome, after(base, outcome))
    return verdict


@given(stamps, stamps, stamps)
def test_to_be_ahead_is_an_order(a, b, c):
    assert not (a.is_ahead_of(b) and b.is_ahead_of(a))
    assert not (a.is_ahead_of(b) and b.is_ahead_of(c)) or a.is_ahead_of(c)


def test_longer_history_then_weight():
    assert Stamp(0, 2, 1, b"z").is_ahead_of(Stamp(0, 1, 9, b"a"))
    assert Stamp(0, 1, 9, b"z").is_ahead_of(Stamp(0, 1, 8, b"a"))
    assert not Stamp(0, 1, 9, b"a").is_ahead_of(Stamp(0, 1, 9, b"b"))


@given(st.lists(outcomes, min_size=1, max_size=4, unique=True))
def test_whoever_sees_the_same_results_ends_at_the_same_stamp(results):
    ends = set()
    for order in permutations(results):
        ledger = ChunkLedger([BASE])
        for outcome in order:
            offer(ledger, 7, BASE, outcome)
        ends.add(ledger.stamp(0))
    assert len(ends) == 1


def test_a_result_for_the_next_cycle_is_stepped_once():
    ledger, outcome = ChunkLedger([BASE]), ResultRank(2, b"x")
    ledger.healed(0, 6, BASE)
    assert offer(ledger, 7, BASE, outcome) is ResultVerdict.STEP
    assert offer(ledger, 7, BASE, outcome) is ResultVerdict.IGNORE
    assert offer(ledger, 6, BASE, outcome) is ResultVerdict.IGNORE
    assert (ledger.cycle(0), ledger.stamp(0)) == (7, after(BASE, outcome))


def test_a_heavier_result_replaces_a_lighter_one_until_the_next_send():
    ledger = ChunkLedger([BASE])
    offer(ledger, 7, BASE, ResultRank(2, b"x"))
    assert offer(ledger, 7, BASE, ResultRank(3, b"y")) is ResultVerdict.REDO
    assert offer(ledger, 7, BASE, ResultRank(2, b"a")) is ResultVerdict.IGNORE
    ledger.sent()
    assert offer(ledger, 7, BASE, ResultRank(4, b"z")) is ResultVerdict.IGNORE
    assert ledger.stamp(0) == after(BASE, ResultRank(3, b"y"))


@pytest.mark.parametrize("cycle", [7, 8])
@pytest.mark.parametrize(
    ("ours", "theirs", "weight", "verdict"),
    [
        (BASE, AHEAD, 1, ResultVerdict.HEAL),
        (AHEAD, BASE, 9, ResultVerdict.IGNORE),
        (BASE, TIED, 1, ResultVerdict.HEAL),
        (TIED, BASE, 1, ResultVerdict.IGNORE),
        (TIED, BASE, 2, ResultVerdict.HEAL),
        (BASE, TIED, 2, ResultVerdict.HEAL),
    ],
)
def test_a_result_on_another_base_shows_who_differs(ours, theirs, weight, verdict, cycle):
    ledger, step = ChunkLedger([ours]), ResultRank(2, b"x")
    offer(ledger, 7, ours, step)
    base = theirs if cycle == 7 else after(theirs, step)
    assert offer(ledger, cycle, base, ResultRank(weight, b"y")) is verdict


def test_who_missed_a_step_heals():
    ledger = ChunkLedger([BASE])
    ahead = after(BASE, ResultRank(2, b"x"))
    assert offer(ledger, 8, ahead, ResultRank(2, b"y")) is ResultVerdict.HEAL
    ledger.healed(0, 8, after(ahead, ResultRank(2, b"y")))
    assert offer(ledger, 8, ahead, ResultRank(2, b"y")) is ResultVerdict.IGNORE
    assert offer(ledger, 9, ledger.stamp(0), ResultRank(2, b"z")) is ResultVerdict.STEP


def test_steps_out_of_order_are_our_own_fault():
    ledger = ChunkLedger([BASE])
    assert ledger.cycle(0) == NEVER
    with pytest.raises(LocalProtocolError):
        ledger.redone(0, ResultRank(1, b"x"), TIED)
    ledger.stepped(0, 3, ResultRank(1, b"x"), TIED)
    with pytest.raises(LocalProtocolError):
        ledger.stepped(0, 3, ResultRank(1, b"x"), TIED)


def test_a_step_that_is_undone_leaves_its_cycle_over_and_without_a_step():
    ledger, outcome = ChunkLedger([BASE]), ResultRank(2, b"a")
    assert offer(ledger, 4, BASE, outcome) is ResultVerdict.STEP
    assert ledger.can_undo(0)
    ledger.undone(0)
    assert (ledger.stamp(0), ledger.cycle(0)) == (BASE, NEVER)
    assert ledger.is_undone(0)
    assert not ledger.can_undo(0)
    for late in (outcome, ResultRank(9, b"b")):
        assert offer(ledger, 4, BASE, late) is ResultVerdict.IGNORE
        assert offer(ledger, 4, AHEAD, late) is ResultVerdict.IGNORE
    ledger.sent()
    assert not ledger.is_undone(0)
    assert offer(ledger, 4, BASE, outcome) is ResultVerdict.IGNORE
    assert offer(ledger, 5, BASE, outcome) is ResultVerdict.STEP


def test_no_step_is_undone_once_the_fragment_was_sent_again():
    ledger = ChunkLedger([BASE])
    offer(ledger, 4, BASE, ResultRank(2, b"a"))
    ledger.sent()
    assert not ledger.can_undo(0)
    with pytest.raises(LocalProtocolError, match="no step"):
        ledger.undone(0)


def test_what_was_healed_is_not_undone_and_its_cycles_stay_over():
    ledger = ChunkLedger([BASE])
    offer(ledger, 4, BASE, ResultRank(2, b"a"))
    ledger.undone(0)
    ledger.healed(0, 3, AHEAD)
    assert not ledger.is_undone(0)
    assert offer(ledger, 4, AHEAD, ResultRank(2, b"a")) is ResultVerdict.IGNORE
