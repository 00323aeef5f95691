"""One microbatch's gradient, however long, leaves those of the others their step."""

import math

import pytest
import torch
from test_stages import Stage, blocks, relay, run_spec

from peer.training.stages.steppers import FIRST_CLIP, GradientSum, length_of
from protocol.microbatch.sizes import CLIP
from protocol.microbatch.trainer_messages import (
    Filled,
    Finish,
    Freed,
    Stepped,
)
from protocol.wire.stage_messages import Direction

CLIP_NORM = 0.5
HONEST = 4
USUAL = 1e-3


def boundary(seed, size=1.0):
    values = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(seed))
    return size * values


def coherent(size):
    """The same for each token: what tokens add to the weights is all in one direction."""
    return boundary(99, size)[:1, :1].expand(2, 16, 32).contiguous()


def stepped(gradients, warm=True):
    """What a relay's step with these gradients moves; and the step's result, and how it was told.

    Before it the stage has seen a step of honest ones, if it is warm.
    """
    stage = Stage(run_spec(), 1, clip_norm=CLIP_NORM)
    stepper, script = relay(stage, [])
    if warm:
        run(stage, stepper, script, [boundary(100 + i, USUAL) for i in range(HONEST)])
    stage.optimizer.reset()
    before = stage.model.theta_P.clone()
    result = run(stage, stepper, script, gradients)
    told = [event for event in script.events if isinstance(event, Stepped)][-1]
    return stage.model.theta_P - before, result, told


def run(stage, stepper, script, gradients):
    made = [event.slot for event in script.events if isinstance(event, Filled)]
    script.commands.extend(Freed(slot) for slot in made)
    for number, gradient in enumerate(gradients):
        stage.compute.forward(number, boundary(number))
        stage.coder.write(gradient, stage.ring.slot(number))
        script.commands.append(Filled(Direction.BACKWARD, number, number, 2.5))
    script.commands.append(Finish())
    return stepper.step(blocks(), 1e-3)


def honest():
    return [boundary(200 + i, USUAL) for i in range(HONEST - 1)]


@pytest.mark.parametrize("size", [1e6, 1e15, 1e30])
def test_a_huge_gradient_counts_as_a_few_and_the_step_is_taken(size):
    """1e15 here gives a norm whose square is beyond fp32, 1e30 gradients that are."""
    _, result, told = stepped([*honest(), boundary(9, size)])
    loss, norm = result.settled()
    assert (loss, told) == (2.5, Stepped(HONEST, clipped=1))
    _, usual, _ = stepped(honest())
    assert 0 < norm < 2 * CLIP * usual.settled()[1]


@pytest.mark.parametrize(
    "lie", [boundary(9, 1e15), coherent(200 * USUAL)], ids=["huge", "coherent"]
)
def test_the_others_keep_their_direction(lie):
    alone, _, _ = stepped(honest())
    spoilt, _, _ = stepped([*honest(), lie])
    assert float(torch.cosine_similarity(alone, spoilt, dim=0)) > 0.15


def test_the_first_gradient_of_a_life_is_bounded_by_what_a_step_is_clipped_at():
    _, result, told = stepped([boundary(9, 1e15)], warm=False)
    assert told.clipped == 1
    assert result.settled()[1] == pytest.approx(FIRST_CLIP * CLIP_NORM, rel=1e-3)


def test_what_is_no_number_is_left_out_and_the_next_step_knows_nothing_of_it():
    gradient_P = torch.zeros(8)
    gradients = GradientSum(gradient_P, 1.0)
    for values in (torch.ones(8), torch.full((8,), math.nan), torch.full((8,), math.inf)):
        gradient_P.copy_(values)
        gradients.add("kind")
        assert not gradient_P.any()
    assert gradients.take() == 2
    assert torch.equal(gradient_P, torch.ones(8))
    gradient_P.zero_()
    assert gradients.take() == 0
    assert not gradient_P.any()


def test_kinds_have_lengths_of_their_own():
    gradient_P = torch.zeros(8)
    gradients = GradientSum(gradient_P, 1.0)
    for kind, size in (("head", 1.0), ("layers", 10.0), ("head", 1.0), ("layers", 10.0)):
        gradient_P.fill_(size)
        gradients.add(kind)
    assert gradients.take() == 0
    assert torch.equal(gradient_P, torch.full((8,), 22.0))


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 1e18, 1e25, 3e38])
def test_lengths_are_right_where_squares_are_beyond_fp32(size):
    values = torch.full((1000,), size)
    assert length_of(values) == pytest.approx(math.sqrt(1000) * size, rel=1e-5)


def test_the_length_of_what_is_no_number_is_none():
    assert not math.isfinite(length_of(torch.tensor([1.0, math.nan])))
    assert length_of(torch.tensor([1.0, math.inf])) == math.inf
