"""Moments in bf16: half of the memory, and nearly the same steps."""

import math

import pytest
import torch
from training_worlds import VOCABULARY, tiny_spec

from peer.training import optimizer as optimizer_module
from peer.training.model import FlatModel, initial_module
from peer.training.optimizer import inner_optimizer
from protocol.run.sections import MOST_BF16_BETA

CPU = torch.device("cpu")
STEPS = 12


def stepped(name, moments):
    """The model and its optimizer after steps by gradients that have a direction, and noise."""
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


def test_no_beta_that_is_allowed_leaves_a_moment_where_it_was():
    """A second moment falls to a hundredth where gradients have ended; above the bound it stays."""
    left = {}
    for beta in (MOST_BF16_BETA, 0.999):
        kept = torch.linspace(1, 2, 1000).bfloat16()
        for _ in range(round(math.log(100) / -math.log(beta))):
            kept.copy_(kept.float().mul_(beta))
        left[beta] = float(kept.float().mean())
    assert left[MOST_BF16_BETA] == pytest.approx(0.015, rel=0.4)
    assert left[0.999] > 1
