"""The learning rate, as a function of the nominal step.

Every peer of a run is at some nominal step (round * H + H * part of the round done), whatever its
speed; so two peers in the same round train with the same rate, and a joiner takes up the schedule
where the swarm is.

Warm-up is linear. Then `cosine` falls along half a cosine over the rest of the run; `wsd` stays and
falls linearly over the last `decay_fraction` of the run; `constant` stays. The floor is
`min_learning_rate_ratio`.
"""

import math

from protocol.run_spec import OptimizerSection


def learning_rate(section: OptimizerSection, nominal_step: float, total_steps: int) -> float:
    """The rate at `nominal_step` of a run of `total_steps`; past its end, the last one."""
    if nominal_step < section.warmup_steps:
        # The first step trains too: its rate is that of the end of the step.
        return section.learning_rate * min(1.0, (nominal_step + 1) / section.warmup_steps)
    return section.learning_rate * _decay(section, min(nominal_step, total_steps), total_steps)


def _decay(section: OptimizerSection, step: float, total_steps: int) -> float:
    """Factor in [min_learning_rate_ratio, 1] after the warm-up."""
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


def nominal_step(round_: int, inner_steps: int, steps_done: int, quota: int) -> float:
    """Nominal step after `steps_done` own steps of a round; past the quota it stands still."""
    return round_ * inner_steps + inner_steps * min(steps_done, quota) / quota


def nominal_count(round_: int, inner_steps: int, steps_done: int, quota: int) -> int:
    """Whole nominal steps behind a peer after `steps_done` own steps of a round."""
    return round_ * inner_steps + inner_steps * min(steps_done, quota) // quota
