"""The learning rate is a function of the nominal step."""

import pytest

from peer.training.schedule import learning_rate
from protocol.run.sections import OptimizerSection

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


def test_a_newcomer_warms_up_over_what_its_second_moment_remembers():
    section = _section(schedule="constant", betas=(0.9, 0.95))
    rates = [learning_rate(section, 500 + own, TOTAL, own) for own in range(25)]
    assert rates[:20] == pytest.approx([(own + 1) / 20 for own in range(20)])
    assert rates[20:] == [1.0] * 5


@pytest.mark.parametrize("warmup_steps", [0, 5, 20, 100])
def test_a_founder_has_the_warm_up_of_the_run_and_no_other(warmup_steps):
    section = OptimizerSection(warmup_steps=warmup_steps)
    for step in range(120):
        assert learning_rate(section, step, 50, step) == learning_rate(section, step, 50)


def test_a_newcomer_warms_up_no_longer_than_the_run():
    section = OptimizerSection(learning_rate=1.0, warmup_steps=4, schedule="constant")
    rates = [learning_rate(section, 500 + own, TOTAL, own) for own in range(5)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_who_comes_during_the_warm_up_never_trains_at_more_than_the_runs_rate():
    section = _section()
    for own in range(100):
        assert learning_rate(section, 90 + own, TOTAL, own) <= learning_rate(
            section, 90 + own, TOTAL
        )
