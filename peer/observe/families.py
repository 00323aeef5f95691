"""Families of metrics with one value, or with one for each kind."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

Kind = TypeVar("Kind", bound=StrEnum)


def counter(name: str, help_text: str, value: float) -> Metric:
    """A counter with one value."""
    return CounterMetricFamily(name, help_text, value=value)


def counter_by(
    label: str, name: str, help_text: str, kinds: Iterable[Kind], counts: Mapping[Kind, int]
) -> Metric:
    """A counter with a value for each kind."""
    family = CounterMetricFamily(name, help_text, labels=[label])
    for kind in kinds:
        family.add_metric([str(kind)], counts.get(kind, 0))
    return family


def gauge(name: str, help_text: str, value: float | None) -> Metric:
    """What goes up and down; absent while it is unknown."""
    family = GaugeMetricFamily(name, help_text)
    if value is not None:
        family.add_metric([], value)
    return family
