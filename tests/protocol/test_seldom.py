"""How often something may be measured that costs time."""

import random

import pytest

from protocol.schedule.seldom import Seldom

SHARE = 0.005


def test_the_first_one_waits_for_what_it_is_expected_to_cost():
    seldom = Seldom(SHARE, since_s=100.0)
    assert not seldom.is_due(100.0, expected_s=0.25)
    assert not seldom.is_due(149.9, expected_s=0.25)
    assert seldom.is_due(150.0, expected_s=0.25)
    assert not seldom.is_due(150.0, expected_s=0.5)


def test_after_one_its_own_cost_counts_and_not_what_was_expected():
    seldom = Seldom(SHARE, since_s=0.0)
    seldom.made(60.0, cost_s=0.1)
    assert not seldom.is_due(79.9, expected_s=0.0)
    assert seldom.is_due(80.0, expected_s=1e9)


def test_nothing_is_saved_up():
    seldom = Seldom(SHARE, since_s=0.0)
    assert seldom.is_due(1e6, expected_s=0.1)
    seldom.made(1e6, cost_s=0.1)
    assert not seldom.is_due(1e6 + 19.9, expected_s=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_all_together_take_their_share_however_costs_and_moments_vary(seed):
    """Each with the wait after it; so the last one alone may not have been paid for yet."""
    rng = random.Random(seed)
    seldom, now_s, spent_s, last_s = Seldom(SHARE, since_s=0.0), 0.0, 0.0, 0.0
    for _ in range(3000):
        now_s += rng.expovariate(0.2)
        if seldom.is_due(now_s, expected_s=1.0):
            assert spent_s <= SHARE * now_s
            last_s = 10 ** rng.uniform(-4, 1)
            now_s += last_s
            seldom.made(now_s, last_s)
            spent_s += last_s
    assert spent_s > 0
    assert spent_s - last_s <= SHARE * now_s
