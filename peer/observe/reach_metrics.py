"""Prometheus metrics of how others reach this peer, and of what it relays for them."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from protocol.membership.dial_back import Reach

from .reach_facts import ReachFacts


def reach_metrics(facts: ReachFacts) -> Iterator[Metric]:
    """Those of now."""
    reachable = GaugeMetricFamily(
        "loco_reachable",
        "Whether others can dial this peer: 1 yes, 0 no; absent while unknown.",
        labels=["family"],
    )
    for family, reach in (("ip4", facts.v4), ("ip6", facts.v6)):
        if reach is not Reach.UNKNOWN:
            reachable.add_metric([family], float(reach is Reach.YES))
    yield reachable
    yield GaugeMetricFamily(
        "loco_relays", "Peers that relay for this one.", value=len(facts.relays)
    )
    yield GaugeMetricFamily(
        "loco_relayed_peers",
        "Peers that this one is connected to through relays alone.",
        value=facts.relayed_peers,
    )
    yield GaugeMetricFamily(
        "loco_relay_circuits", "Connections of others that this peer relays.", value=facts.circuits
    )
    yield CounterMetricFamily(
        "loco_relay_carried_bytes",
        "Bytes of others that this peer has relayed.",
        value=facts.carried_bytes,
    )
