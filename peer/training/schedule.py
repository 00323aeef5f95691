"""The learning rate, as a function of the nominal step.

Every peer of a run is at some nominal step (protocol/schedule/rounds.py), whatever its speed: two
peers at the same place of the run train with the same rate, and so does a joiner.

Warm-up is linear. A trainer that begins later, or again, warms up as well: AdamW's second moment is
then that of a few gradients, its first steps are as large in every weight, and spoil the average of
all. So its rate rises over its own first steps after each `Load`: as many as the second moment
remembers, 1 / (1 - beta2), and no more than the run's warm-up. Measured with four peers of which
three come at step 30: docs/log.md. (2 / (1 - beta2), as proposed for AdamW's whole runs in
arXiv 1910.04209, was no better.)

After the warm-up `cosine` falls along half a cosine over the rest of the run; `wsd` stays and
falls linearly over the last `decay_fraction` of the run; `constant` stays. The floor is
`min_learning_rate_ratio`.
"""

import math

from protocol.run.run_spec import RunSpec
from protocol.run.sections import OptimizerSection

from .messages import TrainRound


def total_steps_of(spec: RunSpec, order: TrainRound) -> int:
    """Nominal steps of the whole run, in whole rounds, in force in a round."""
    if order.total_steps is not None:
        return order.total_steps
    return spec.total_rounds * spec.sync.round_steps


def learning_rate(
    section: OptimizerSection, nominal_step: float, total_steps: int, own_steps: float = math.inf
) -> float:
    """The rate at `nominal_step` of a run of `total_steps`; past its end, the last one.

    Args:
        own_steps: done since the optimizer was last empty; infinite for one that never was.
    """
    warmup_steps, remembered_steps = section.warmup_steps, round(1 / (1 - section.betas[1]))
    warmth = min(
        _warmth(nominal_step, warmup_steps),
        _warmth(own_steps, min(warmup_steps, remembered_steps)),
    )
    return section.learning_rate * warmth * _decay(section, nominal_step, total_steps)


def _warmth(step: float, warmup_steps: int) -> float:
    """Factor in (0, 1] of the warm-up. The first step trains too: its rate is that of its end."""
    return 1.0 if step >= warmup_steps else min(1.0, (step + 1) / warmup_steps)


def _decay(section: OptimizerSection, step: float, total_steps: int) -> float:
    """Factor in [min_learning_rate_ratio, 1]; 1 during the warm-up."""
    if step < section.warmup_steps:
        return 1.0
    step = min(step, total_steps)
    floor = section.min_learning_rate_ratio
    if section.schedule == "constant":
        return 1.0
    if section.schedule == "cosine":
        span = max(1.0, total_steps - section.warmup_steps)
        part = min(1.0, (step - section.warmup_steps) / span)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * part))
    decay_steps = max(1.0, section.decay_fraction * total_steps)
    part = max(0.0, 1 - (total_steps - step) / decay_steps)
    return 1 - (1 - floor) * part
