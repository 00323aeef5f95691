"""Prometheus metrics of how this peer's outputs differ from those of its partners."""

from collections.abc import Iterator

from prometheus_client.core import SummaryMetricFamily
from prometheus_client.metrics_core import Metric

from .families import gauge
from .output_facts import OutputFacts


def output_metrics(facts: OutputFacts) -> Iterator[Metric]:
    """Those of now."""
    yield gauge(
        "loco_output_divergence",
        "Jensen-Shannon divergence of our outputs and the last partner's, in nats per token.",
        facts.divergence,
    )
    yield SummaryMetricFamily(
        "loco_output_comparison_seconds",
        "Time that comparing outputs with a partner's took, in seconds.",
        count_value=facts.comparisons,
        sum_value=facts.spent_s,
    )
