"""Prometheus metrics of a peer that holds a stage: where the time goes, and what was planned."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from .pipeline_facts import PipelineFacts, Spent


def pipeline_metrics(facts: PipelineFacts) -> Iterator[Metric]:
    """Those of now."""
    spent = CounterMetricFamily(
        "loco_pipeline_seconds",
        "Time that went into the microbatches of a pipeline here, summed over all of them.",
        labels=["into"],
    )
    for what in Spent:
        spent.add_metric([str(what)], facts.spent_s[what])
    yield spent
    iteration = GaugeMetricFamily(
        "loco_pipeline_iteration_seconds",
        "An iteration of a data peer, as planned and as measured.",
        labels=["how"],
    )
    for how, seconds in (("planned", facts.planned_s), ("measured", facts.iteration_s)):
        if seconds is not None:
            iteration.add_metric([how], seconds)
    yield iteration
    other_plans = CounterMetricFamily(
        "loco_pipeline_other_plans",
        "Microbatches that came by another plan than those of other data peers.",
    )
    other_plans.add_metric([], facts.other_plans)
    yield other_plans
    line = GaugeMetricFamily(
        "loco_pipeline_line_seconds",
        "How long a boundary that leaves for a peer occupies the line.",
        labels=["peer"],
    )
    for link in facts.links:
        if link.out_us:
            line.add_metric([link.peer_id], link.out_s)
    yield line
    apart = GaugeMetricFamily(
        "loco_pipeline_replicas_apart_ratio",
        "Distance to the weights of the last partner, a replica of this stage, over their size.",
    )
    if facts.replicas_apart is not None:
        apart.add_metric([], facts.replicas_apart)
    yield apart
