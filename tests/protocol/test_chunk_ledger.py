"""Stamps and results: one winner, whoever sees what first."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.chunk_ledger import NEVER, ChunkLedger, Outcome, Stamp, Verdict
from protocol.errors import LocalProtocolError

BASE = Stamp(3, 9, b"base")
OTHER = Stamp(3, 9, b"athe")
"""Beats BASE by its lower digest."""

stamps = st.builds(Stamp, st.integers(0, 3), st.integers(0, 3), st.sampled_from([b"a", b"b"]))
outcomes = st.builds(Outcome, st.integers(1, 3), st.sampled_from([b"a", b"b", b"c"]))


def after(base: Stamp, outcome: Outcome) -> Stamp:
    """A stamp as the arithmetic would give it: a function of base and result alone."""
    return Stamp(base.steps + 1, base.weight + outcome.weight, base.digest + outcome.digest)


def offer(ledger: ChunkLedger, cycle: int, base: Stamp, outcome: Outcome) -> Verdict:
    verdict = ledger.judge(0, cycle, base, outcome)
    if verdict is Verdict.STEP:
        ledger.stepped(0, cycle, outcome, after(base, outcome))
    elif verdict is Verdict.REDO:
        ledger.redone(0, outcome, after(base, outcome))
    return verdict


@given(stamps, stamps, stamps)
def test_stamps_are_in_a_total_order(a, b, c):
    assert not a.beats(a)
    assert a == b or a.beats(b) != b.beats(a)
    assert not (a.beats(b) and b.beats(c)) or a.beats(c)


def test_longer_history_then_weight_then_lower_digest():
    assert Stamp(2, 1, b"z").beats(Stamp(1, 9, b"a"))
    assert Stamp(1, 9, b"z").beats(Stamp(1, 8, b"a"))
    assert Stamp(1, 9, b"a").beats(Stamp(1, 9, b"b"))


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
    ledger, outcome = ChunkLedger([BASE], [6]), Outcome(2, b"x")
    assert offer(ledger, 7, BASE, outcome) is Verdict.STEP
    assert offer(ledger, 7, BASE, outcome) is Verdict.IGNORE
    assert offer(ledger, 6, BASE, outcome) is Verdict.IGNORE
    assert (ledger.cycle(0), ledger.stamp(0)) == (7, after(BASE, outcome))


def test_a_heavier_result_replaces_a_lighter_one_until_the_next_send():
    ledger = ChunkLedger([BASE])
    offer(ledger, 7, BASE, Outcome(2, b"x"))
    assert offer(ledger, 7, BASE, Outcome(3, b"y")) is Verdict.REDO
    assert offer(ledger, 7, BASE, Outcome(2, b"a")) is Verdict.IGNORE
    ledger.sent()
    assert offer(ledger, 7, BASE, Outcome(4, b"z")) is Verdict.IGNORE
    assert ledger.stamp(0) == after(BASE, Outcome(3, b"y"))


@pytest.mark.parametrize("cycle", [7, 8])
def test_a_result_on_a_better_base_means_that_we_differ(cycle):
    ledger = ChunkLedger([BASE])
    offer(ledger, 7, BASE, Outcome(2, b"x"))
    base = OTHER if cycle == 7 else after(OTHER, Outcome(2, b"a"))
    assert offer(ledger, cycle, base, Outcome(2, b"x")) is Verdict.HEAL


@pytest.mark.parametrize("cycle", [7, 8])
def test_a_result_on_a_worse_base_is_for_others_to_heal(cycle):
    ledger = ChunkLedger([OTHER])
    offer(ledger, 7, OTHER, Outcome(2, b"x"))
    base = BASE if cycle == 7 else after(BASE, Outcome(2, b"y"))
    assert offer(ledger, cycle, base, Outcome(9, b"x")) is Verdict.IGNORE


def test_who_missed_a_step_heals():
    ledger = ChunkLedger([BASE])
    ahead = after(BASE, Outcome(2, b"x"))
    assert offer(ledger, 8, ahead, Outcome(2, b"y")) is Verdict.HEAL
    ledger.healed(0, 8, after(ahead, Outcome(2, b"y")))
    assert offer(ledger, 8, ahead, Outcome(2, b"y")) is Verdict.IGNORE
    assert offer(ledger, 9, ledger.stamp(0), Outcome(2, b"z")) is Verdict.STEP


def test_steps_out_of_order_are_our_own_fault():
    ledger = ChunkLedger([BASE])
    assert ledger.cycle(0) == NEVER
    with pytest.raises(LocalProtocolError):
        ledger.redone(0, Outcome(1, b"x"), OTHER)
    ledger.stepped(0, 3, Outcome(1, b"x"), OTHER)
    with pytest.raises(LocalProtocolError):
        ledger.stepped(0, 3, Outcome(1, b"x"), OTHER)
