"""Claims of experts, as they travel, and those that no honest expert makes."""

import numpy as np
import pytest

from protocol.errors import RemoteProtocolError
from protocol.experts.claims import claimed_blocks, differs, packed, unpacked
from protocol.limits import MAX_LOG_PROBS_BYTES


def log_probs(count: int) -> np.ndarray:
    return -np.random.default_rng(1).exponential(2.0, count).astype(np.float32)


def test_a_claim_of_few_tokens_travels_as_it_is_and_one_of_many_in_half_the_bytes():
    few, many = log_probs(1000), log_probs(MAX_LOG_PROBS_BYTES // 2)
    assert (unpacked(packed(few), few.size) == few).all()
    data = packed(many)
    assert len(data) == MAX_LOG_PROBS_BYTES
    assert unpacked(data, many.size).mean() == pytest.approx(many.mean(dtype=float), abs=1e-5)


@pytest.mark.parametrize("value", [0.5, np.nan, np.inf, -np.inf])
def test_what_is_no_logarithm_of_a_probability_is_refused(value: float):
    claim = log_probs(8)
    claim[3] = value
    with pytest.raises(RemoteProtocolError, match="above 0, or not finite"):
        unpacked(claim.astype("<f4").tobytes(), claim.size)


def test_a_claim_of_other_tokens_is_refused():
    with pytest.raises(RemoteProtocolError, match="32 bytes of log-probabilities for 9 tokens"):
        unpacked(packed(log_probs(8)), 9)


def test_what_trainers_round_up_or_lose_can_be_sent():
    told = unpacked(packed(np.array([1e-7, -1e9])), 2)
    assert told.tolist() == [0.0, -65504.0]


def test_a_claim_is_of_as_many_blocks_as_fit_and_of_one_at_least():
    assert claimed_blocks(64, 1024) == 64
    assert claimed_blocks(100, 1024) == 64
    assert claimed_blocks(3, 1 << 20) == 1


def test_a_claim_that_weights_do_not_bear_out_differs():
    true = log_probs(1024)
    assert not differs(true + 0.001, true)
    assert differs(true * 0.9, true)
