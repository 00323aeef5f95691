"""What the measurement of whole exchanges computes: sizes, limits, goals, values and their mean."""

import pytest
import torch

from bench.exchange_speed import GLOO, HIVEMIND, OURS, Case, goals, row
from bench.exchange_speed_data import (
    REPEATED,
    mean_of_all,
    model_layout,
    noise,
    relative_error,
)
from bench.exchange_speed_group import Measured

CASE = Case(model_mb=64, num_peers=4, mbit_per_s=200.0)
CODES_MB = 16.0 * (1 + 2 / 128)


def measured(*times_s: float) -> Measured:
    return Measured(list(times_s), 1.0, 0.5, 0.1, 25e6, 0.01)


def test_each_peer_sends_what_others_own_once_and_its_own_to_all():
    sent_mb = 3 / 4 * CODES_MB + 1 / 4 * CODES_MB * 3
    assert CASE.code_bytes / 1e6 == pytest.approx(sent_mb, rel=1e-3)
    assert CASE.limit_s == pytest.approx(8 * sent_mb / 200, rel=1e-3)


def test_an_unshaped_link_has_no_limit():
    case = Case(64, 4, 0.0)
    assert case.limit_s is None
    assert case.link.up_bits_per_s is None
    assert row(case, OURS, {(case, OURS): measured(1.0)})["of limit"] is None


def test_medians_make_the_goals():
    found = {
        (CASE, OURS): measured(1.0, 1.2, 9.0),
        (CASE, GLOO): measured(3.0, 3.6, 3.7),
        (CASE, HIVEMIND): measured(0.6),
    }
    over_gloo, of_limit, over_hivemind = goals([CASE], found)
    assert over_gloo.measured == pytest.approx(3.0)
    assert over_gloo.met
    assert CASE.limit_s is not None
    assert of_limit.measured == pytest.approx(CASE.limit_s / 1.2)
    assert not of_limit.met
    assert over_hivemind.measured == pytest.approx(0.5)
    assert not over_hivemind.met
    assert row(CASE, OURS, found)["times gloo"] == pytest.approx(3.0)


def test_without_rivals_the_link_alone_is_a_goal():
    assert len(goals([CASE], {(CASE, OURS): measured(1.0)})) == 1


def test_a_model_has_about_the_values_that_were_asked_for():
    layout = model_layout(16_000_000)
    assert layout.padded_parameters == layout.parameters
    assert layout.parameters == pytest.approx(16e6, rel=1e-3)


def test_the_mean_is_that_of_all_peers():
    num_values = REPEATED + 256
    values = [noise(num_values, index) for index in range(3)]
    assert not torch.equal(values[0], values[1])
    mean = mean_of_all(num_values, 3)
    assert relative_error(torch.stack(values).mean(dim=0), mean) < 1e-6
    assert relative_error(values[0], mean) > 1
