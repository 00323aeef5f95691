"""A peer's options against its run: what one machine may choose, the run may still rule out.

The founder knows its run before anything starts, a joiner when it has received the run spec.
"""

from protocol.errors import InvalidRunSpec
from protocol.run.run_spec import RunSpec

from .config import ConfigError, PeerConfig


def check_options(config: PeerConfig, spec: RunSpec) -> None:
    """Refuse a run that this version cannot train, and options that mean nothing in it.

    Raises:
        InvalidRunSpec, ConfigError
    """
    check_stages(spec)
    check_overlap_steps(config.overlap_steps, config.told("overlap-steps"), spec)
    stages = spec.pipeline.stages
    if config.stage is not None and not (stages > 1 and config.stage < stages):
        why = "this run has no stages; leave it out"
        if stages > 1:
            why = f"must be from 0 to {stages - 1}, the run's stages; or leave it out"
        raise ConfigError(f"{config.told('stage')}: {why}")


def check_stages(spec: RunSpec) -> None:
    """Refuse a pipeline that begins or averages as stages cannot. Raises InvalidRunSpec."""
    if spec.pipeline.stages == 1:
        return
    given = f"the run has pipeline.stages = {spec.pipeline.stages}"
    if spec.sync.noloco is None:
        raise InvalidRunSpec(
            f"{given} and sync.method = '{spec.sync.method}': stages average by noloco so far"
        )
    if not spec.sync.noloco.is_whole:
        raise InvalidRunSpec(
            f"{given} and sync.noloco.fragments = '{spec.sync.noloco.fragments}':"
            " stages average by noloco so far, and whole parts"
        )
    if spec.model.init_from is not None:
        raise InvalidRunSpec(
            f"{given} and model.init_from = '{spec.model.init_from}':"
            " stages begin with weights of their own so far; leave init_from out"
        )
    sequences = spec.microbatch_sequences
    for key, count in (
        ("training.batch_size", spec.training.batch_size),
        ("data.validation_blocks", spec.data.validation_blocks),
    ):
        if count % sequences:
            raise InvalidRunSpec(
                f"{given} and {key} = {count}: all microbatches of stages are equally long, so it"
                f" must be a multiple of training.micro_batch ({sequences})"
            )


def check_overlap_steps(overlap_steps: int | None, told: str, spec: RunSpec) -> None:
    """Refuse a tau where no fragment has one, and one that outlasts the way to the next send.

    Args:
        told: how it was given.

    Raises:
        ConfigError: says where it was given, and what to do.
    """
    if overlap_steps is None:
        return
    if spec.sync.diloco is None:
        raise ConfigError(
            f"{told}: this run waits for no fragments (sync.method = '{spec.sync.method}');"
            " leave it out"
        )
    if overlap_steps >= spec.sync.round_steps:
        raise ConfigError(
            f"{told}: must be below the run's inner_steps ({spec.sync.round_steps});"
            " lower it, or leave it out"
        )
