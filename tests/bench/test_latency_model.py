"""The models behind the latency claims, against values that can be worked out by hand."""

import numpy as np
import pytest

from bench.latency_model import Transfer, blocking_overhead, pair_time, tree_time


@pytest.mark.parametrize("peers", [2, 4, 64])
def test_without_dispersion_a_tree_takes_its_levels_twice(peers):
    assert tree_time(np.random.default_rng(0), peers, 0.0, 3) == pytest.approx(2 * np.log2(peers))
    assert pair_time(0.0) == 2.0


def test_a_pair_waits_for_the_later_message():
    rng = np.random.default_rng(1)
    sigma = np.sqrt(np.log(2.0))  # cv 1
    messages = rng.lognormal(-(sigma**2) / 2, sigma, (400_000, 2))
    assert pair_time(1.0) == pytest.approx(2 * messages.max(axis=1).mean(), rel=0.01)


def test_two_peers_wait_for_the_same():
    assert blocking_overhead(np.random.default_rng(0), 2, 5) == pytest.approx(1.0)


def test_more_peers_wait_longer_for_all():
    few, many = (blocking_overhead(np.random.default_rng(0), n, 10) for n in (4, 64))
    assert 1.0 < few < many


def test_counting_agrees_with_seconds_worked_out_by_hand():
    transfer = Transfer(peers=8, code_bytes=1e9, latency_s=0.05, bytes_per_s=12.5e6)
    assert transfer.pair_s() == pytest.approx(80.05)
    assert transfer.ring_s() == pytest.approx(2 * 7 * (0.05 + 10.0))
    assert transfer.tree_s() == pytest.approx(6 * 80.05)
    assert transfer.halving_doubling_s() == pytest.approx(6 * 0.05 + 140.0)
