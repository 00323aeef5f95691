"""Honest training: no boundary is refused from the first step on, few gradients are clipped."""

from collections import Counter

import numpy as np
import pytest
import torch
from test_stages import STAGES, VOCABULARY, Stage, run_spec

from peer.codec import root_mean_square
from peer.training.schedule import learning_rate
from peer.training.stages.steppers import GradientSum, stage_clip_norm
from protocol.microbatch.sizes import BoundarySizes, SizeVerdict
from protocol.wire.stage_messages import Direction

STEPS, MICROBATCHES, WARMUP = 30, 4, 5
PEERS = 2
"""Of each stage: microbatches take them in turn, so each is one of two senders."""


class HonestPipeline:
    """A pipeline in one process: each stage judges what comes to it, and adds up as trainers do."""

    def __init__(self, codec, seed):
        spec = run_spec()
        self.spec = spec.model_copy(update={"seed": seed})
        clip_norm = stage_clip_norm(spec.optimizer.clip_norm, STAGES)
        self.stages = [Stage(self.spec, number, codec, clip_norm) for number in range(STAGES)]
        self.sums = [GradientSum(each.model.gradient_P, clip_norm) for each in self.stages]
        self.judges = [BoundarySizes() for _ in self.stages]
        self.verdicts: Counter[SizeVerdict] = Counter()
        self.clipped = 0
        self.random = np.random.default_rng(seed)

    def step(self, rate):
        losses = [self._microbatch(number) for number in range(MICROBATCHES)]
        for stage, gradients in zip(self.stages, self.sums, strict=True):
            self.clipped += gradients.take()
            stage.model.gradient_P.div_(MICROBATCHES)
            stage.optimizer.step(rate)
        return sum(losses) / MICROBATCHES

    def _microbatch(self, number):
        home, *relays = self.stages
        boundary = home.compute.embed(number, self._tokens())
        for place, relay in enumerate(relays, 1):
            given = self._carried(boundary, number, place - 1, place, Direction.FORWARD)
            boundary = relay.compute.forward(number, given)
        given = self._carried(boundary, number, len(relays), 0, Direction.FORWARD)
        loss, boundary = home.compute.finish(number, given)
        self.sums[0].add(Direction.FORWARD)
        for place in range(len(relays), -1, -1):
            given = self._carried(boundary, number, (place + 1) % STAGES, place, Direction.BACKWARD)
            passed = self.stages[place].compute.backward(number, given)
            self.stages[place].compute.add_weights()
            self.sums[place].add(Direction.BACKWARD)
            if passed is not None:
                boundary = passed
        return loss

    def _carried(self, boundary, number, giver, taker, direction):
        """The boundary as the next stage reads it, which judges it first."""
        stage = self.stages[taker]
        codes = stage.ring.slot(0)
        stage.coder.write(boundary, codes)
        size = root_mean_square(codes, stage.coder._codec, boundary.numel())
        sender = f"{giver}/{number % PEERS}"
        is_gradient = direction == Direction.BACKWARD
        verdict = self.judges[taker].judge(sender, size, stage=giver, is_gradient=is_gradient)
        self.verdicts[verdict] += 1
        return stage.coder.read(codes)

    def _tokens(self):
        """Sequences of few tokens, each of which says the next: there is something to learn."""
        first = self.random.integers(0, VOCABULARY // 8, (2, 1))
        return torch.from_numpy((first + np.arange(17)) % (VOCABULARY // 8))


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))]
)
def test_no_honest_boundary_is_refused(codec, seed):
    pipeline = HonestPipeline(codec, seed)
    section = pipeline.spec.optimizer.model_copy(
        update={"learning_rate": 1e-2, "warmup_steps": WARMUP}
    )
    losses = [pipeline.step(learning_rate(section, step, STEPS)) for step in range(STEPS)]
    assert losses[-1] < 0.5 * losses[0]  # it learns: the scale moves
    boundaries = 2 * STAGES * MICROBATCHES * STEPS
    assert pipeline.verdicts == {SizeVerdict.USUAL: boundaries}
    gradients = (STAGES + 1) * MICROBATCHES * STEPS
    assert pipeline.clipped <= 0.05 * gradients  # 2.5% seen, where they grew within two steps
