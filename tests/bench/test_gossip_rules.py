"""The simulation that weighs rules of pairing: its lines, its measures, what rules cannot do."""

import math

import pytest

from bench.gossip.agenda import Agenda
from bench.gossip.lines import SharedLines
from bench.gossip.measures import pair_figures, quantile
from bench.gossip.swarm import Setting
from bench.gossip_rules import RULES, figures, row


# --- lines ----------------------------------------------------------------------------------------
def _arrivals(*transfers):
    """When each arrives, of (begin, seconds alone by line)."""
    agenda = Agenda()
    lines = SharedLines(agenda)
    arrived: dict[int, float] = {}
    for number, (begin_s, alone_s) in enumerate(transfers):

        def arrive(number=number):
            arrived[number] = agenda.now_s

        def begin(alone_s=alone_s, arrive=arrive):
            lines.begin(alone_s, arrive)

        agenda.after(begin_s, begin)
    agenda.run(1000.0)
    return [arrived[number] for number in range(len(transfers))]


def test_a_transfer_alone_is_as_fast_as_its_worst_line():
    assert _arrivals((0, {"a": 10.0})) == pytest.approx([10.0])
    assert _arrivals((0, {"a": 10.0, "home": 25.0})) == pytest.approx([25.0])


def test_two_on_one_line_take_twice_as_long_while_both_are_there():
    both = _arrivals((0, {"home": 10.0}), (0, {"home": 10.0}))
    assert both == pytest.approx([20.0, 20.0])
    # The first has 5 s left when the second comes: 10 s for that, then the second is alone again.
    assert _arrivals((0, {"home": 10.0}), (5, {"home": 10.0})) == pytest.approx([15.0, 20.0])
    assert _arrivals((0, {"a": 10.0}), (0, {"b": 10.0})) == pytest.approx([10.0, 10.0])


def test_what_is_given_up_frees_its_line():
    agenda = Agenda()
    lines, arrived = SharedLines(agenda), []
    lines.begin({"home": 10.0}, lambda: arrived.append(agenda.now_s))
    other = lines.begin({"home": 10.0}, lambda: arrived.append(math.nan))
    agenda.after(10.0, lambda: lines.give_up(other))
    agenda.run(1000.0)
    assert arrived == pytest.approx([15.0])


# --- measures -------------------------------------------------------------------------------------
def test_evenness_of_pairs():
    even = pair_figures([(0, 1), (0, 2), (2, 1)] * 4, 3)
    assert (even.meetings, even.least, even.most, even.cv, even.repeats) == (12, 1, 1, 0, 0)
    one = pair_figures([(0, 1), (1, 0), (0, 1), (1, 0)], 3)
    assert one.repeats == 3 / 4
    assert (one.least, one.most) == (0, 3)
    assert one.cv == pytest.approx(math.sqrt(2))
    assert one.chi_squared == pytest.approx(8 / 3)


def test_a_repeat_is_of_the_partner_just_before():
    assert pair_figures([(0, 1), (2, 3), (1, 0), (0, 2)], 4).repeats == pytest.approx(2 / 8)


def test_quantiles():
    assert quantile([3.0, 1.0, 2.0, 4.0], 0.5) == 3.0
    assert quantile([1.0], 0.99) == 1.0
    assert math.isnan(quantile([], 0.5))


# --- rules ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", RULES)
def test_nobody_averages_more_than_once_a_round_or_than_the_line_carries(rule):
    thin = figures(rule, Setting(6, ratio=1.0, rounds=60))
    assert thin["exchanged"] <= 1.01
    assert 0.5 < thin["busy"] <= 1.0
    assert thin["sent"] >= 1.0
    assert figures(rule, Setting(6, ratio=1.0, rounds=60)) == thin, "it follows its seed"


def test_rounds_of_one_number_lose_what_free_peers_do_not():
    setting = Setting(6, ratio=0.7, rounds=100)
    assert figures("same round", setting)["exchanged"] < 0.65
    assert figures("free", setting)["exchanged"] > 0.75


def test_without_debt_long_rounds_are_lost():
    setting = Setting(6, ratio=0.5, rounds=100)
    assert figures("free", setting)["exchanged"] > figures("no debt", setting)["exchanged"] + 0.03


@pytest.mark.parametrize("rule", ["no savings", "no put-off"])
def test_without_longer_waits_two_peers_meet_for_ever(rule):
    setting = Setting(6, ratio=1.5, rounds=150)
    assert figures("free", setting)["repeats"] < 0.6
    assert figures(rule, setting)["repeats"] > 0.9


def test_an_exchange_longer_than_a_round_never_ends_where_rounds_have_one_number():
    assert row("same round", 6, 2.0, seeds=1)["age"] is None
    assert row("same round", 6, 2.0, seeds=1)["exchanged"] == 0
