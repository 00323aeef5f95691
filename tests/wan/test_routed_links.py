"""Links of the router (bench/router) have their delay and their rate, all at the same time.

The bounds are those of bench/routed_network.py.
"""

import pytest

from bench.routed_network import Case, goals_of, rows_of, six_links
from bench.router.network import missing, routed_network

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

SECONDS = 10.0
RING = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0)]
BUFFERS = "4096 131072 67108864"


def test_one_stream_on_each_of_six_links_and_several_on_one():
    with routed_network(six_links()) as network:
        for host in range(network.num_hosts):
            network.set(host, "net/ipv4/tcp_rmem", BUFFERS)
            network.set(host, "net/ipv4/tcp_wmem", BUFFERS)
        rows = rows_of(network, Case("one on each", RING), SECONDS)
        rows += rows_of(network, Case("eight on one", [(0, 1)] * 8), SECONDS)
        rows += rows_of(network, Case("thin uplink", [(5, 0), (5, 1)]), SECONDS)
    assert [goal.describe() for goal in goals_of(rows) if not goal.met] == []
