"""Moments in bf16: half of the memory, right in the mean, and nearly the same steps."""

import pytest
import torch
from training_worlds import VOCABULARY, tiny_spec

from peer.training import optimizer as optimizer_module
from peer.training.model import FlatModel, initial_module
from peer.training.optimizer import inner_optimizer, round_into

CPU = torch.device("cpu")
STEPS = 12


def stepped(name, moments):
    """The model and its optimizer after steps by gradients that have a direction, and noise."""
    torch.manual_seed(3)
    spec = tiny_spec()
    section = spec.optimizer.model_copy(update={"name": name, "moments": moments})
    model = FlatModel(initial_module(spec, VOCABULARY), CPU)
    optimizer = inner_optimizer(model, section, "fp32")
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(model.theta_P.shape, generator=generator)
    for _ in range(STEPS):
        noise = torch.randn(model.theta_P.shape, generator=generator)
        model.gradient_P.copy_(direction + noise)
        optimizer.step(1e-3)
    return model, optimizer


@pytest.mark.parametrize("most_together", [1 << 24, 100])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_they_take_half_and_move_weights_nearly_the_same(monkeypatch, name, most_together):
    """Also where a vector is moved in tiles, of which each makes the same step."""
    start = FlatModel(initial_module(tiny_spec(), VOCABULARY), CPU).theta_P
    exact, fine = stepped(name, "fp32")
    monkeypatch.setattr(optimizer_module, "MOST_TOGETHER", most_together)
    rounded, coarse = stepped(name, "bf16")
    fine_moments, coarse_moments = fine.moments(), coarse.moments()
    assert fine_moments.keys() == coarse_moments.keys()
    for key, moment in coarse_moments.items():
        assert 2 * moment.nbytes == fine_moments[key].nbytes
        assert torch.dist(moment.float(), fine_moments[key]) < 0.01 * fine_moments[key].norm()
    off = torch.dist(exact.theta_P, rounded.theta_P) / torch.dist(exact.theta_P, start)
    assert 0 < off < 0.01


def test_chance_is_right_in_the_mean_and_leaves_what_is_exact():
    below, above = 1.0, 1.0 + 2**-7
    exact = torch.full((200_000,), below + 0.25 * 2**-7)
    for sign in (1, -1):
        kept = torch.empty(200_000, dtype=torch.bfloat16)
        round_into(kept, sign * exact)
        values, counts = kept.float().abs().unique(return_counts=True)
        assert values.tolist() == [below, above]
        assert float(counts[1]) / 200_000 == pytest.approx(0.25, abs=0.01)
    kept = torch.tensor([0.0, -3.0, 2.0**-100]).bfloat16()
    before = kept.clone()
    round_into(kept, kept.float())
    assert torch.equal(kept, before)


def test_a_moment_does_not_stand_still_where_a_step_moves_it_little():
    """At beta2 = 0.999 a second moment moves by a thousandth, less than half of bf16's distance."""
    kept = torch.ones(1000, dtype=torch.bfloat16)
    for _ in range(500):
        round_into(kept, kept.float().lerp_(torch.zeros(1000), 1e-3))
    assert float(kept.float().mean()) == pytest.approx(0.999**500, rel=0.03)
