"""Experts together: the rules against sums written out, and what they promise of any text."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.experts.ensemble import (
    RULES,
    Combination,
    Posterior,
    compare,
    ensemble_log_probs,
    loss_of,
)

EXPERTS = 3


def by_hand(told, rule):
    """The ensemble on one text, in plain probabilities, token by token: no logarithm but the last.

    Args:
        told: told[expert][token], log-probabilities.
    """
    experts = len(told)
    weights = [1 / experts] * experts
    found = []
    for token in range(len(told[0])):
        order = sorted(range(experts), key=lambda j: (-weights[j], j))
        kept = order[: rule.top or experts]
        mass = sum(weights[j] for j in kept)
        said = [math.exp(told[j][token]) for j in range(experts)]
        found.append(math.log(sum(weights[j] / mass * said[j] for j in kept)))
        raised = [weights[j] ** rule.discount * said[j] for j in range(experts)]
        share = rule.fixed_share
        weights = [(1 - share) * each / sum(raised) + share / experts for each in raised]
    return found


numbers = st.floats(-12, 0)
texts = st.integers(1, 12).flatmap(
    lambda length: st.lists(
        st.lists(numbers, min_size=length, max_size=length), min_size=EXPERTS, max_size=EXPERTS
    )
)
combinations = st.builds(
    Combination,
    discount=st.floats(0.05, 1),
    fixed_share=st.floats(0.001, 1),  # without one, weights leave what plain numbers hold
    top=st.none() | st.integers(1, EXPERTS + 1),
)


@settings(max_examples=30)
@given(texts, combinations)
def test_the_ensemble_is_the_sum_written_out(told, rule):
    found = ensemble_log_probs(np.array(told), rule)
    if rule.top is None or rule.top >= EXPERTS:
        assert found == pytest.approx(by_hand(told, rule), abs=1e-9)
    else:  # weights may be equal but for rounding, so that either expert may be kept
        assert (found >= np.min(told, axis=0) - 1e-9).all()
        assert (found <= np.max(told, axis=0) + 1e-9).all()


def drawn(blocks=4, tokens=40, seed=3):
    random = np.random.default_rng(seed)
    return -random.gamma(2.0, 1.0, (EXPERTS, blocks, tokens))


@pytest.mark.parametrize("name", RULES)
def test_each_rule_on_blocks_is_the_sum_written_out_on_each_of_them(name):
    told = drawn()
    found = ensemble_log_probs(told, RULES[name])
    for block in range(told.shape[1]):
        assert found[block] == pytest.approx(by_hand(told[:, block].tolist(), RULES[name]))


def test_the_posterior_is_the_mean_of_whole_texts():
    """Bayes' rule telescopes: the ensemble's probability of a text is the mean of the experts'."""
    told = drawn(blocks=1)[:, 0]
    whole = ensemble_log_probs(told, RULES["posterior"]).sum()
    assert whole == pytest.approx(np.logaddexp.reduce(told.sum(axis=1)) - math.log(EXPERTS))


def test_the_mean_has_no_memory():
    told = drawn()
    mean = np.log(np.exp(told).mean(axis=0))
    np.testing.assert_allclose(ensemble_log_probs(told, RULES["mean"]), mean)


def test_one_expert_alone_is_itself():
    told = drawn()[:1]
    for rule in RULES.values():
        np.testing.assert_allclose(ensemble_log_probs(told, rule), told[0])


def test_a_fixed_share_comes_back_from_any_certainty():
    """The text changes its domain after two hundred tokens; the posterior never notices."""
    told = np.full((2, 300), -8.0)
    told[0, :200] = told[1, 200:] = -1.0
    late = {name: loss_of(ensemble_log_probs(told, RULES[name])[210:]) for name in RULES}
    assert late["posterior"] == pytest.approx(8.0)
    assert late["fixed share"] == pytest.approx(1.0, abs=0.02)
    assert late["discounted"] < 1.5


def test_weights_stay_finite_on_long_texts_and_sum_to_one():
    posterior = Posterior(2, Combination())
    for _ in range(2000):
        posterior.saw(np.array([-0.1, -9.0]))
    assert np.exp(posterior.log_weights).tolist() == [1.0, 0.0]
    assert np.isfinite(posterior.log_weights).all()


def test_only_the_best_weigh_in_and_the_first_among_equals():
    posterior = Posterior(EXPERTS, Combination(top=2))
    assert np.exp(posterior.log_weights) == pytest.approx([0.5, 0.5, 0.0])
    posterior.saw(np.array([-5.0, -1.0, -2.0]))
    first, second, third = np.exp(posterior.log_weights)
    assert (first, second + third) == (0.0, pytest.approx(1.0))
    assert second / third == pytest.approx(math.e)


def test_experts_that_are_left_out_come_back():
    told = np.full((3, 60), -6.0)
    told[0, :20] = told[1, :20] = told[2, 20:] = -1.0
    assert loss_of(ensemble_log_probs(told, RULES["best two"])[40:]) == pytest.approx(1.0, abs=0.02)


def test_half_precision_is_enough():
    """What travels: the loss of 2,048 tokens moves by less than a thousandth."""
    told = drawn(blocks=64, tokens=32)
    for rule in RULES.values():
        exact, coarse = (loss_of(ensemble_log_probs(t, rule)) for t in (told, told.astype(np.half)))
        assert coarse == pytest.approx(exact, abs=1e-3)


def test_rules_are_compared_with_each_expert_alone():
    told = drawn()
    together, alone = compare(told), [loss_of(told[j]) for j in range(EXPERTS)]
    assert alone == pytest.approx([-told[j].mean() for j in range(EXPERTS)])
    assert list(together) == list(RULES)
    assert together["posterior"] <= min(alone) + math.log(EXPERTS) / 40
