"""Prometheus metrics of a corpus that comes in pieces."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from .corpus_facts import CorpusFacts


def corpus_metrics(facts: CorpusFacts) -> Iterator[Metric]:
    """Those of now."""
    pieces = GaugeMetricFamily(
        "loco_corpus_pieces",
        "Pieces of the corpus, by where they are.",
        labels=["where"],
    )
    elsewhere = facts.pieces - facts.here
    counts = {"here": facts.here, "elsewhere": elsewhere, "only_here": facts.only_here}
    for where, count in counts.items():
        pieces.add_metric([where], count)
    yield pieces
    fetched = CounterMetricFamily(
        "loco_corpus_fetched_bytes", "Bytes of pieces that have come from other peers."
    )
    fetched.add_metric([], facts.fetched_bytes)
    yield fetched
    waited = CounterMetricFamily(
        "loco_corpus_wait_seconds",
        "Time for which training stood still for pieces of the corpus, in seconds.",
    )
    waited.add_metric([], facts.waited_s)
    yield waited
