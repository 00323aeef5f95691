"""A peer's options against its run: what one machine may choose, the run may still rule out.

The founder knows its run before anything starts, a joiner when it has received the run spec.
"""

from protocol.run.run_spec import RunSpec

from .config import ConfigError, Origin, PeerConfig


def check_options(config: PeerConfig, spec: RunSpec) -> None:
    """Refuse options that mean nothing in this run.

    Raises:
        ConfigError
    """
    check_overlap_steps(config.overlap_steps, config.origins["overlap-steps"], spec)


def check_overlap_steps(overlap_steps: int | None, origin: Origin, spec: RunSpec) -> None:
    """Refuse a tau where no fragment has one, and one that outlasts the way to the next send.

    Raises:
        ConfigError: says where it was given, and what to do.
    """
    if overlap_steps is None:
        return
    given = f"overlap-steps = {overlap_steps} ({origin})"
    if spec.sync.diloco is None:
        raise ConfigError(
            f"{given}: this run waits for no fragments (sync.method = '{spec.sync.method}');"
            " leave it out"
        )
    if overlap_steps >= spec.sync.inner_steps:
        raise ConfigError(
            f"{given}: must be below the run's inner_steps ({spec.sync.inner_steps});"
            " lower it, or leave it out"
        )
