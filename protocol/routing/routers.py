"""The router that a run spec asks for, and what plans need of the run spec."""

from dataclasses import replace
from math import prod

from protocol.pipeline.problem import PathRules
from protocol.pipeline.question import rules_of
from protocol.run.codecs import CODECS
from protocol.run.run_spec import RunSpec

from .planned_paths import PlannedRouter
from .random_paths import RandomRouter
from .snapshots import Terms


def path_rules(spec: RunSpec, slots: int) -> PathRules:
    """The limits of a run's paths over machines with so many slots.

    A path may have fewer descents than its relays have slots (protocol/microbatch/relay.py, rule
    5), and every descent is a swap.
    """
    rules = rules_of(spec.pipeline)
    return replace(rules, max_swaps=min(rules.max_swaps, slots - 1))


def terms_of(spec: RunSpec, slots: int) -> Terms:
    """What plans need to know of a run."""
    sequences, model = spec.microbatch_sequences, spec.model
    values = prod((sequences, model.context_length, model.hidden_size))
    return Terms(
        stages=spec.pipeline.stages,
        visited=spec.pipeline.num_visited,
        microbatches=-(-spec.training.batch_size // sequences),
        boundary_bytes=CODECS[spec.pipeline.codec].code_bytes(values),
        rules=path_rules(spec, slots),
    )


def router_of(spec: RunSpec, origin: str, rules: PathRules) -> PlannedRouter | RandomRouter:
    """The router of one data peer."""
    pipeline = spec.pipeline
    drawn = RandomRouter(
        origin, spec.seed, pipeline.num_visited, rules, full_every=pipeline.full_every
    )
    return PlannedRouter(origin, drawn) if pipeline.routing == "planned" else drawn
