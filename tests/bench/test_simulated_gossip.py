"""The round of the real exchange code that bench/latency.py times."""

import pytest

from bench.simulated_gossip import average_all


def test_all_are_matched_and_nobody_is_faster_than_the_link():
    latency_s, bytes_per_s = 0.05, 12.5e6
    seen = average_all(4, seed=0, latency_s=latency_s, bytes_per_s=bytes_per_s)
    assert len(seen.exchange_s) == 4
    least_s = latency_s + seen.payload_bytes / bytes_per_s
    assert all(least_s < exchange_s < 4 * least_s for exchange_s in seen.exchange_s)
    again = average_all(4, seed=0, latency_s=latency_s, bytes_per_s=bytes_per_s)
    assert again.exchange_s == pytest.approx(seen.exchange_s, rel=1e-9)
