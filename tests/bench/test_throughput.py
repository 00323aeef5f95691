"""What tokens per second are counted in, and that both loops do the same work."""

import numpy as np
import pytest
import torch

from bench.throughput import (
    Share,
    Size,
    Turn,
    Work,
    cut,
    flops_per_token,
    measure,
    rows_of,
    share_of,
    take_turns,
)
from bench.throughput_loops import OurLoop, PlainLoop, Way, fit_together
from peer.cli.new import OPTIMIZERS, preset_spec
from peer.training.model import initial_module, model_config
from protocol.run.run_spec import RunSpec

TINY = RunSpec.model_validate(
    {
        "model": {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_layers": 1,
            "num_heads": 2,
            "context_length": 8,
        },
        "optimizer": {"learning_rate": 1e-2, "weight_decay": 0.0},
        "training": {"batch_size": 4},
    }
)
VOCABULARY = 32
CPU = Way(torch.device("cpu"), "fp32")


def blocks(seed):
    return np.random.default_rng(seed).integers(0, VOCABULARY, (4, 9), dtype=np.int64)


def test_a_preset_is_cut_in_depth_and_length_and_not_in_width():
    whole, part = preset_spec("1b"), cut(preset_spec("1b"))
    assert part.model.hidden_size == whole.model.hidden_size
    assert part.model.intermediate_size == whole.model.intermediate_size
    assert (part.model.num_layers, part.model.context_length) == (2, 128)
    assert part.training.batch_size == 2


def test_flops_are_six_for_each_multiplied_weight_and_those_of_attention():
    module = initial_module(TINY, VOCABULARY)
    weights = sum(p.numel() for p in module.parameters() if p.ndim >= 2)
    # The embedding is tied: it is the output layer's weight, and counts once.
    config = model_config(TINY, VOCABULARY)
    assert flops_per_token(config, 0) == 6 * weights
    assert flops_per_token(config, 8) == 6 * weights + 12 * 16 * 8


def test_fewer_heads_for_keys_cost_less():
    spec = preset_spec("1b")
    assert spec.model.num_kv_heads == 8
    config = model_config(spec, 1000)
    width = 2048
    layer = width * (2 * width + 2 * width * 8 // 32 + 3 * 5632)
    assert flops_per_token(config, 0) == 6 * (22 * layer + 1000 * width)


def test_rates_are_medians_and_the_ratio_is_of_turns():
    turns = [Turn(1.0, 2.0, 0.5), Turn(4.0, 4.0, 0.25), Turn(2.0, 3.0, 1.0)]
    ours, plain = rows_of("any", 10**6, turns, Work(tokens=100, flops_per_token=3, peak_flops=500))
    assert ours["tokens/s"] == 50
    assert plain["tokens/s"] == pytest.approx(100 / 3)
    assert ours["of plain"] == 1.5
    assert ours["MFU"] == pytest.approx(0.3)  # of 0.3, 0.0375 and 0.3
    assert ours["peak GFLOP/s"] == pytest.approx(1e-6)


def test_a_larger_batch_makes_the_optimizers_share_smaller():
    share = share_of(optimizer_s=1.0, step_s=4.0, times_the_batch=3.0)
    assert (share.measured, share.at_full_batch) == (0.25, 0.1)
    assert share_of(2.0, 1.0, 3.0) == Share(1.0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_demo_is_measured_with_either_optimizer(optimizer):
    size = Size(turns=1, steps=1, matrix=16, products=1)
    ours, plain = measure("demo", optimizer, CPU.device, size, compile=False)
    assert 0 < ours["optimizer"] == ours["at full batch"] <= 1
    assert plain["optimizer"] is None


def test_turns_change_who_goes_first():
    now_s, said = [0.0], []

    def task(name, seconds):
        def run():
            said.append(name)
            now_s[0] += seconds

        return run

    turns = take_turns(
        task("ours", 1.0), task("plain", 2.0), task("peak", 4.0), 2, clock_s=lambda: now_s[0]
    )
    assert turns == [Turn(1.0, 2.0, 4.0)] * 2
    assert said[-6:] == ["ours", "peak", "plain", "plain", "peak", "ours"]


@pytest.mark.slow
def test_both_loops_train_the_same_model():
    steps = [blocks(0)] * 5
    ours, plain = (
        kind(initial_module(TINY, VOCABULARY), TINY, CPU, 2) for kind in (OurLoop, PlainLoop)
    )
    first = ours.run(steps[:1]), plain.run(steps[:1])
    last = ours.run(steps), plain.run(steps)
    assert first[0] == pytest.approx(first[1], abs=1e-5)
    assert last[0] == pytest.approx(last[1], abs=1e-4)
    assert last[0] < first[0] - 0.1


class Cramped(OurLoop):
    """Has room for one sequence."""

    def run(self, steps):
        if self.micro_batch > 1:
            super().run(steps)  # leaves something behind
            raise torch.OutOfMemoryError("no room")
        return super().run(steps)


@pytest.mark.slow
def test_the_micro_batch_is_what_fits_beside_the_other():
    plain = PlainLoop(initial_module(TINY, VOCABULARY), TINY, CPU, 4)
    cramped = Cramped(initial_module(TINY, VOCABULARY), TINY, CPU, 4)
    fit_together([plain, cramped], blocks(0))
    assert (plain.micro_batch, cramped.micro_batch) == (1, 1)


def test_what_is_no_lack_of_memory_is_not_hidden():
    class Broken(OurLoop):
        def run(self, steps):
            raise RuntimeError("wrong")

    with pytest.raises(RuntimeError, match="wrong"):
        fit_together([Broken(initial_module(TINY, VOCABULARY), TINY, CPU, 4)], blocks(0))
