"""What is read out of the event logs of peers that average in pairs."""

import pytest

from bench.gossip_report import (
    Window,
    pair_counts,
    peer_figures,
    quantiles,
    together,
    told,
    told_quantiles,
)

H = 10
WINDOW = Window(100.0, 200.0)


def event(name, time, **fields):
    return {"event": name, "time": time, "monotonic_s": time - 7.0, "peer": "a", **fields}


def closed(time, seconds, steps=H):
    return event("RoundClosed", time, round=0, steps=steps, tokens=1, loss=1.0, seconds=seconds)


def averaged(time, partner="b", seconds=1.0):
    return event("RoundAveraged", time, round=0, partner=partner, seconds=seconds, distance=0.1)


LOG = [
    event("TrainerStarted", 10.0, steps_per_s=1.5),
    closed(99.0, 5.0),
    averaged(99.5),
    event("RoundOpened", 100.0, round=7, quota=H, members=3),
    closed(110.0, 4.0, steps=12),
    averaged(111.0, "b", 1.0),
    event("RoundOpened", 112.0, round=8, quota=H, members=3),
    event("ProposalRefused", 113.0, round=8, remote="b", reason="busy", sentence=""),
    event("ProposalRefused", 114.0, round=8, remote="c", reason="busy", sentence=""),
    event("ProposalRefused", 115.0, round=8, remote="c", reason="behind", sentence=""),
    event("RoundSkipped", 116.0, round=8, reason="deadline", partner=None),
    event("RoundOpened", 120.0, round=11, quota=H, members=3),
    closed(130.0, 8.0, steps=18),
    averaged(131.0, "c", 3.0),
    averaged(200.0, "c", 9.0),
]


def test_only_what_lies_in_the_window_counts():
    found = peer_figures("a", LOG, WINDOW, H)
    assert found.exchanges == {"b": 1, "c": 1}
    assert found.skipped == {"deadline": 1}
    assert found.refused == {"busy": 2, "behind": 1}
    assert found.round_s == [4.0, 8.0]
    assert found.exchange_s == [1.0, 3.0]
    assert found.steps == 30


def test_exchanges_are_counted_beside_nominal_steps_and_beside_settled_rounds():
    found = peer_figures("a", LOG, WINDOW, H)
    assert found.nominal_steps == 40  # from round 7 to round 11
    assert found.exchanged == pytest.approx(2 * H / 40)
    assert found.averaged == pytest.approx(2 / 3)
    told_by_status = peer_figures("a", LOG, WINDOW, H, nominal_steps=50)
    assert told_by_status.exchanged == pytest.approx(2 * H / 50)


def test_speed_and_time_in_exchange_are_of_the_window():
    found = peer_figures("a", LOG, WINDOW, H)
    assert found.exchange_share == pytest.approx(0.04)
    assert found.steps_per_s == pytest.approx(0.3)
    assert found.speed_share == pytest.approx(0.2)


def test_an_empty_window_has_figures_too():
    found = peer_figures("a", LOG[1:], Window(300.0, 400.0), H)
    assert (found.exchanged, found.averaged, found.steps_per_s) == (0.0, 0.0, 0.0)
    assert found.speed_share is None
    assert found.to_json()["round_s"] == {"10%": None, "50%": None, "90%": None}


def test_all_together_are_sums():
    one = peer_figures("a", LOG, WINDOW, H)
    everyone = together([one, peer_figures("b", [averaged(150.0, "a", 2.0)], WINDOW, H, 60.0)])
    assert everyone.exchanged == pytest.approx(3 * H / 100)
    assert everyone.exchanges == {"b": 1, "c": 1, "a": 1}
    assert everyone.exchange_s == [1.0, 3.0, 2.0]
    assert everyone.steps_per_s == pytest.approx(0.15)  # of one peer, on average
    assert everyone.alone_steps_per_s == 1.5


def test_pairs_that_never_met_are_listed_and_the_larger_count_stands():
    one = peer_figures("a", LOG, WINDOW, H)
    two = peer_figures("b", [averaged(150.0, "a"), averaged(199.0, "a")], WINDOW, H)
    three = peer_figures("c", [], WINDOW, H)
    assert pair_counts([one, two, three]) == {("a", "b"): 2, ("a", "c"): 1, ("b", "c"): 0}


def test_quantiles_are_values_that_were_seen():
    assert quantiles(list(range(100))) == {"10%": 10, "50%": 50, "90%": 90}
    assert quantiles([3.0]) == {"10%": 3.0, "50%": 3.0, "90%": 3.0}
    assert told_quantiles([2.26, 3.7]) == "2.3/3.7/3.7"
    assert told_quantiles([]) == "-/-/-"


def test_counts_are_told_with_the_largest_first():
    assert told({"jumped": 1, "deadline": 3, "busy": 1}) == "deadline 3, busy 1, jumped 1"
    assert told({}) == "none"
