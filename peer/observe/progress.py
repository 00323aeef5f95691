"""How far the run is, in one record: for the console's line, `status` and metrics."""

from dataclasses import dataclass
from typing import Final

MINUTE_S: Final = 60
HOUR_S: Final = 3600
DAY_S: Final = 86_400


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far the run is. None is unknown.

    Attributes:
        step, total_steps: nominal.
        learning_rate: in force at this step, without the warm-up of a trainer that began late.
        tokens_per_s: that this peer trains; None where it holds a stage of a pipeline.
        swarm_tokens_per_s: the same of all that train, by what they tell of their speed.
        left_s: seconds to the end of the run, at the pace of the last minutes.
        peers: that train, this one among them.
    """

    step: int | None = None
    total_steps: int | None = None
    learning_rate: float | None = None
    tokens_per_s: float | None = None
    swarm_tokens_per_s: float | None = None
    left_s: float | None = None
    peers: int = 0


def progress_line(now: RunProgress, train_loss: float | None, validation_loss: float | None) -> str:
    """The line for people: `step 110 of 1,200 (9%), loss 2.31, 2,900 tokens/s (swarm 8,400), ...`.

    Args:
        train_loss, validation_loss: nats per token.
    """
    parts = [step_of_total(now)]
    if train_loss is not None:
        held_out = "" if validation_loss is None else f" (held out {validation_loss:.2f})"
        parts.append(f"loss {train_loss:.2f}{held_out}")
    if now.tokens_per_s is not None:
        parts.append(speed(now))
    if now.left_s is not None:
        parts.append(f"{duration(now.left_s)} left")
    parts.append("1 peer" if now.peers == 1 else f"{now.peers} peers")
    return ", ".join(parts)


def step_of_total(now: RunProgress) -> str:
    """Such as `step 110 of 1,200 (9%)`."""
    if now.step is None or not now.total_steps:
        return "step -"
    share = min(1.0, now.step / now.total_steps)
    return f"step {now.step:,} of {now.total_steps:,} ({share:.0%})"


def speed(now: RunProgress) -> str:
    """Such as `2,900 tokens/s (swarm 8,400)`."""
    own = f"{now.tokens_per_s or 0:,.0f} tokens/s"
    return own if now.swarm_tokens_per_s is None else f"{own} (swarm {now.swarm_tokens_per_s:,.0f})"


def duration(seconds: float) -> str:
    """Such as `40 s`, `6 min`, `3.5 h`, `2.1 days`."""
    if seconds < 2 * MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < 2 * HOUR_S:
        return f"{seconds / MINUTE_S:.0f} min"
    if seconds < 2 * DAY_S:
        return f"{seconds / HOUR_S:.1f} h"
    return f"{seconds / DAY_S:.1f} days"
