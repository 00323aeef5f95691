"""How a step is computed changes its numbers little: bf16 autocast, and a compiled forward pass."""

import numpy as np
import pytest
import torch
from training_worlds import VOCABULARY, tiny_corpus, tiny_spec

from peer.training.device import choose_precision
from peer.training.model import FlatModel, initial_module
from peer.training.optimizer import inner_optimizer
from peer.training.step import Stepper

CPU = torch.device("cpu")
BLOCKS = np.arange(4)
STEPS = 40
BF16_SHARE = 0.01
"""bf16 keeps 8 bits: 0.4% of each value; the loss is a mean of many."""


def stepper_of(precision="fp32", *, compile=False):
    torch.set_num_threads(1)
    spec = tiny_spec()
    model = FlatModel(initial_module(spec, VOCABULARY), CPU, compile=compile)
    return Stepper(model, inner_optimizer(model, spec.optimizer, "fp32"), precision, 4), model


def gradient_of(model, precision="fp32"):
    blocks = torch.from_numpy(tiny_corpus(tiny_spec()).blocks(BLOCKS))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        loss = model.loss(blocks)
    loss.backward()
    return model.gradient_P.clone()


def trained(stepper):
    """Losses of steps on the same few blocks."""
    blocks = tiny_corpus(tiny_spec()).blocks(BLOCKS)
    return [stepper.step(blocks, 1e-2).settled()[0] for _ in range(STEPS)]


def test_bf16_is_what_was_asked_for():
    assert choose_precision("bf16", CPU) == "bf16"
    assert choose_precision("fp32", CPU) == "fp32"
    assert choose_precision("auto", CPU) == "fp32"


def test_bf16_computes_coarsely_and_keeps_weights_and_gradients_in_fp32():
    (exact, one), (coarse, other) = stepper_of(), stepper_of("bf16")
    blocks = tiny_corpus(tiny_spec()).blocks(BLOCKS)
    assert torch.equal(one.theta_P, other.theta_P)
    losses = exact.loss_of(blocks), coarse.loss_of(blocks)
    assert losses[0] != losses[1], "it was not computed in bf16"
    assert losses[1] == pytest.approx(losses[0], rel=BF16_SHARE)
    assert (other.theta_P.dtype, other.gradient_P.dtype) == (torch.float32, torch.float32)
    fine_P, coarse_P = gradient_of(one), gradient_of(other, "bf16")
    assert not torch.equal(fine_P, coarse_P)
    alike = torch.nn.functional.cosine_similarity(fine_P, coarse_P, dim=0)
    assert float(alike) > 0.999


@pytest.mark.slow
def test_bf16_learns_as_fp32_does():
    losses = {precision: trained(stepper_of(precision)[0]) for precision in ("fp32", "bf16")}
    assert losses["fp32"][-1] < losses["fp32"][0] - 1.0
    np.testing.assert_allclose(losses["bf16"], losses["fp32"], atol=0.1)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of its compiler, about itself
def test_a_compiled_model_computes_what_the_plain_one_does():
    (plain, one), (compiled, other) = stepper_of(), stepper_of(compile=True)
    assert one.layout == other.layout
    torch.testing.assert_close(gradient_of(other), gradient_of(one), atol=1e-6, rtol=1e-4)
    one.gradient_P.zero_()
    other.gradient_P.zero_()
    np.testing.assert_allclose(trained(compiled), trained(plain), rtol=1e-3)
    # The views into the flat vector hold: what was trained is what everybody else sees.
    torch.testing.assert_close(other.theta_P, one.theta_P, atol=1e-3, rtol=0)
    assert not torch.equal(one.theta_P, stepper_of()[1].theta_P)
