"""The router that a run spec asks for, and what plans need of the run spec."""

from math import prod

from protocol.pipeline.question import rules_of
from protocol.run.codecs import CODECS
from protocol.run.run_spec import RunSpec

from .planned_paths import PlannedRouter
from .random_paths import RandomRouter
from .snapshots import Terms, within_slots


def terms_of(spec: RunSpec) -> Terms:
    """What plans need to know of a run."""
    sequences, model = spec.microbatch_sequences, spec.model
    values = prod((sequences, model.context_length, model.hidden_size))
    return Terms(
        stages=spec.pipeline.stages,
        visited=spec.pipeline.num_visited,
        microbatches=-(-spec.training.batch_size // sequences),
        boundary_bytes=CODECS[spec.pipeline.codec].code_bytes(values),
        rules=rules_of(spec.pipeline),
    )


def router_of(spec: RunSpec, origin: str, slots: int) -> PlannedRouter | RandomRouter:
    """The router of one data peer.

    Args:
        slots: that every relay has at least.
    """
    pipeline, rules = spec.pipeline, within_slots(rules_of(spec.pipeline), slots)
    drawn = RandomRouter(
        origin, spec.seed, pipeline.num_visited, rules, full_every=pipeline.full_every
    )
    return PlannedRouter(origin, drawn) if pipeline.routing == "planned" else drawn
