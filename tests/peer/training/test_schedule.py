"""The learning rate is a function of the nominal step."""

import pytest

from peer.training.schedule import learning_rate, nominal_step
from protocol.run_spec import OptimizerSection

TOTAL = 1000


def _section(**changes):
    return OptimizerSection(learning_rate=1.0, warmup_steps=100, **changes)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_and_starts_above_zero(schedule):
    section = _section(schedule=schedule)
    assert learning_rate(section, 0, TOTAL) == pytest.approx(0.01)
    assert learning_rate(section, 49, TOTAL) == pytest.approx(0.5)
    assert learning_rate(section, 100, TOTAL) == pytest.approx(1.0)


def test_cosine_is_half_way_in_the_middle_and_ends_at_the_floor():
    section = _section(schedule="cosine", min_learning_rate_ratio=0.2)
    assert learning_rate(section, 550, TOTAL) == pytest.approx(0.6)
    assert learning_rate(section, TOTAL, TOTAL) == pytest.approx(0.2)
    assert learning_rate(section, 5 * TOTAL, TOTAL) == pytest.approx(0.2)


def test_wsd_stays_and_then_falls_in_a_line():
    section = _section(schedule="wsd", min_learning_rate_ratio=0.0, decay_fraction=0.2)
    assert learning_rate(section, 799, TOTAL) == pytest.approx(1.0)
    assert learning_rate(section, 900, TOTAL) == pytest.approx(0.5)
    assert learning_rate(section, TOTAL, TOTAL) == pytest.approx(0.0)


def test_constant_stays():
    assert learning_rate(_section(schedule="constant"), TOTAL, TOTAL) == 1.0


def test_a_run_shorter_than_its_warm_up_never_passes_the_peak():
    section = _section(schedule="cosine")
    rates = [learning_rate(section, step, 50) for step in range(60)]
    assert max(rates) <= 1.0
    assert min(rates) > 0


def test_peers_of_all_speeds_have_the_same_nominal_step():
    assert nominal_step(3, 50, 10, 20) == nominal_step(3, 50, 40, 80) == 175
    assert nominal_step(3, 50, 90, 80) == 200
