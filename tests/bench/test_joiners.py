"""Starts of a joiner: what arrives of a neighbour's moments, and how starts are compared."""

import torch

from bench.joining import row
from bench.quality.joiners import STARTS, JoinResult, carried


def test_second_moments_arrive_without_a_zero_to_divide_by() -> None:
    moments = {
        "exp_avg.0": torch.tensor([1e-9, -0.5, 0.25]),
        "exp_avg_sq.0": torch.tensor([1e-12, 0.25, 0.0625]),
    }
    arrived = dict(carried(moments, "int8"))
    assert float(arrived["exp_avg.0"][0]) == 0.0
    assert float(arrived["exp_avg_sq.0"].min()) > 0.0
    assert torch.allclose(arrived["exp_avg_sq.0"][1:], moments["exp_avg_sq.0"][1:], rtol=0.02)
    assert dict(carried(moments, "none")) == {}
    assert torch.equal(dict(carried(moments, "fp32"))["exp_avg.0"], moments["exp_avg.0"])


def test_starts_are_compared_with_one_state_whole_seed_by_seed() -> None:
    def result(seed: int, loss: float) -> JoinResult:
        return JoinResult({}, {}, seed, curve=[(8, loss)], bytes_per_parameter=8.0)

    runs = {
        "whole": {0: result(0, 2.0), 1: result(1, 3.0)},
        "mixed-4": {0: result(0, 2.5), 1: result(1, 3.5), 2: result(2, 9.0)},
    }
    shown = row("mixed-4", runs)
    assert (shown["to whole"], shown["seeds"], shown["bytes"]) == ("+0.5000", 3, 8.0)
    assert set(runs) <= set(STARTS)
