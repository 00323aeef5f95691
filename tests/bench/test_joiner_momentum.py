"""What bench/joiner_momentum.py compares: a peer with all it had, and one without its moments."""

import math

import pytest
import torch

from bench.joiner_momentum import ARM_OF, Learner, losses_of
from bench.quality.arms import ARMS


@pytest.mark.slow
@pytest.mark.parametrize("name", ARM_OF)
def test_with_the_moments_training_goes_on_as_if_nothing_had_been(world, name):
    spec = ARMS[ARM_OF[name]].spec(world.spec)
    swarm, kept, fresh = (Learner(world, spec) for _ in range(3))
    for step in range(4):
        swarm.step(step, 1, step, math.inf)
    kept.take_over(swarm, with_moments=True)
    fresh.take_over(swarm, with_moments=False)
    for peer in (swarm, kept, fresh):
        peer.step(4, 1, 4, math.inf)
    assert torch.equal(swarm.model.theta_P, kept.model.theta_P)
    assert not torch.equal(swarm.model.theta_P, fresh.model.theta_P)


@pytest.mark.slow
def test_a_row_for_each_number_of_steps(world):
    rows = losses_of(world, world.spec, 2, (1, 3))
    assert [(row["optimizer"], row["steps"]) for row in rows] == [("adamw", 1), ("adamw", 3)]
    assert all(row["at once less kept"] != 0 for row in rows)
