"""The router that a run spec asks for, and the limits of its paths."""

from dataclasses import replace

from protocol.microbatch.paths import Router
from protocol.pipeline.problem import PathRules
from protocol.pipeline.question import rules_of
from protocol.run.run_spec import RunSpec

from .random_paths import RandomRouter


def path_rules(spec: RunSpec, slots: int) -> PathRules:
    """The limits of a run's paths over machines with so many slots.

    A path may have fewer descents than its relays have slots (protocol/microbatch/relay.py, rule
    5), and every descent is a swap.
    """
    rules = rules_of(spec.pipeline)
    return replace(rules, max_swaps=min(rules.max_swaps, slots - 1))


def router_of(spec: RunSpec, origin: str, rules: PathRules) -> Router:
    """The router of one data peer."""
    pipeline = spec.pipeline
    return RandomRouter(
        origin, spec.seed, pipeline.num_visited, rules, full_every=pipeline.full_every
    )
