"""The matrix of experts and domains, and the advice where training gains most."""

import random

import pytest

from protocol.experts.matrix import (
    KEPT_VALIDATIONS,
    Advice,
    LossCurve,
    MarginalGain,
    advice_at_one_share,
    advice_of,
    gain_of,
    lines_of_table,
    losses_of_expert,
)

DOMAINS = ("general", "code", "mathematics")
ROWS = [
    ("general", (1.5, 2.0, 2.5)),
    ("code", (1.9, 1.25, None)),
    ("math", (2.0, 2.5, 1.75)),
    ("ensemble", (1.5, 1.2, 1.8)),
]


def test_each_column_has_a_star_where_the_loss_is_lowest_or_several_for_equals():
    assert list(lines_of_table(DOMAINS, ROWS)) == [
        "          general     code   mathematics ",
        "general    1.5000*  2.0000        2.5000 ",
        "code       1.9000   1.2500             - ",
        "math       2.0000   2.5000        1.7500*",
        "ensemble   1.5000*  1.2000*       1.8000 ",
    ]


def test_a_domain_that_nobody_has_measured_has_no_star():
    lines = lines_of_table(("a", "b"), [("a", (None, 2.0)), ("ensemble", (None, None))])
    assert [line.count("*") for line in lines] == [0, 1, 0]


def test_the_gain_is_the_slope_at_the_end_of_the_curve():
    early = [(flops, 9.0 - flops) for flops in range(20)]
    late = [(20.0 + flops, 5.0 - 0.25 * flops) for flops in range(KEPT_VALIDATIONS)]
    gain = gain_of(early + late)
    assert gain is not None
    assert gain.per_flop == pytest.approx(0.25)
    assert gain.error == pytest.approx(0.0, abs=1e-9)


def test_its_error_is_the_spread_of_such_slopes():
    draws = random.Random(5)
    gains = []
    for _ in range(400):
        found = gain_of(
            [(step, 3.0 - 0.1 * step + draws.gauss(0, 0.05)) for step in range(KEPT_VALIDATIONS)]
        )
        assert found is not None
        gains.append(found)
    mean = sum(g.per_flop for g in gains) / len(gains)
    spread = (sum((g.per_flop - mean) ** 2 for g in gains) / len(gains)) ** 0.5
    told = (sum(g.error**2 for g in gains) / len(gains)) ** 0.5
    assert mean == pytest.approx(0.1, abs=0.002)
    assert told == pytest.approx(spread, rel=0.1)


@pytest.mark.parametrize("curve", [[], [(1.0, 2.0)], [(1.0, 2.0), (2.0, 1.0)], [(1.0, 2.0)] * 5])
def test_without_a_curve_no_gain_is_told(curve):
    assert gain_of(curve) is None


def test_steps_are_advised_from_the_least_gain_to_the_largest_where_that_is_sure():
    gains = {
        "code": MarginalGain(0.3, 0.02),
        "math": MarginalGain(0.1, 0.02),
        "web": MarginalGain(0.2, 0.5),
    }
    assert advice_of(gains) == Advice("math", "code", 0.3 - 0.1)
    assert advice_of({**gains, "math": MarginalGain(0.1, 0.2)}) is None
    assert advice_of({"code": MarginalGain(0.3, 0.0)}) is None
    assert advice_of({}) is None


def test_gains_stand_beside_the_losses_of_experts_alone():
    lines = list(lines_of_table(DOMAINS, ROWS, [2e-15, None, 1.234e-13]))
    assert [line.split()[-1] for line in lines] == ["gain", "2", "-", "123", "-"]


def test_an_expert_has_the_middle_of_what_its_peers_tell():
    told = [{0: 1.5, 1: 2.0}, {0: 0.001}, {0: 1.6}, {}]
    assert losses_of_expert(told, 3) == (1.5, 2.0, None)


def curve_to(share: float, per_flop: float) -> LossCurve:
    curve = LossCurve()
    for step in range(8):
        spent = share * (step + 1) / 8
        curve.note(spent, 10.0, 5.0 - per_flop * 10.0 * spent + 1e-6 * (step % 2))
        curve.note(spent, 10.0, 4.0)  # of the same moment
    return curve


def test_slopes_are_compared_between_experts_that_have_spent_as_much():
    curves = {"code": curve_to(0.5, 0.3), "math": curve_to(0.5, 0.1), "web": curve_to(0.2, 0.01)}
    advice = advice_at_one_share(curves)
    assert advice is not None
    assert (advice.source, advice.target) == ("math", "code")
    assert advice.per_flop == pytest.approx(0.2, rel=1e-3)
    assert advice_at_one_share({"code": curves["code"], "web": curves["web"]}) is None


def test_a_loss_that_is_told_again_is_no_new_point():
    curve = LossCurve()
    for share in (0.1, 0.2, 0.3, 0.4):
        curve.note(share, 10.0, 2.0)
    curve.note(0.4, 10.0, None)
    assert list(curve.points) == [(1.0, 2.0)]
    assert curve.gain is None
