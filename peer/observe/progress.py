"""How far the run is, in one record: for the console's line, `status` and metrics."""

from dataclasses import dataclass


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
    parts = ["step -"]
    if now.step is not None and now.total_steps:
        share = min(1.0, now.step / now.total_steps)
        parts = [f"step {now.step:,} of {now.total_steps:,} ({share:.0%})"]
    if train_loss is not None:
        held_out = "" if validation_loss is None else f" (held out {validation_loss:.2f})"
        parts.append(f"loss {train_loss:.2f}{held_out}")
    if now.tokens_per_s is not None:
        others = now.swarm_tokens_per_s
        swarm = "" if others is None else f" (swarm {others:,.0f})"
        parts.append(f"{now.tokens_per_s:,.0f} tokens/s{swarm}")
    if now.left_s is not None:
        parts.append(f"{duration(now.left_s)} left")
    parts.append("1 peer" if now.peers == 1 else f"{now.peers} peers")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Such as `40 s`, `6 min`, `3.5 h`, `2.1 days`: two of a unit at the least."""
    for unit, length, digits in (("days", 86_400, 1), ("h", 3600, 1), ("min", 60, 0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.{digits}f} {unit}"
    return f"{seconds:.0f} s"
