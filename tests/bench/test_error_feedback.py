"""Error feedback: what codes leave out is not lost."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.quality.error_feedback import ErrorFeedback
from peer.codec import get_codec

P = 1024
CODES = ("e3m0", "int4", "int8")


def _delta(seed: int) -> torch.Tensor:
    return torch.randn(P, generator=torch.Generator().manual_seed(seed))


def _sent(feedback: ErrorFeedback, name: str, delta_P: torch.Tensor) -> torch.Tensor:
    """What the others read; `delta_P` is left alone."""
    codec, read_P = get_codec(name), torch.empty(P)
    codes = torch.empty(codec.code_bytes(P), dtype=torch.uint8)
    feedback.encode(delta_P.clone(), codes)
    codec.decode(codes, read_P)
    return read_P


@pytest.mark.parametrize("name", CODES)
@given(seed=st.integers(0, 2**31), rounds=st.integers(1, 12))
@settings(deadline=None, max_examples=30)
def test_the_sum_of_what_is_read_is_the_sum_of_deltas_less_what_is_owed(
    name: str, seed: int, rounds: int
) -> None:
    feedback = ErrorFeedback(get_codec(name), P)
    deltas = [_delta(seed + round_) for round_ in range(rounds)]
    read = torch.stack([_sent(feedback, name, delta_P) for delta_P in deltas])
    whole = torch.stack(deltas).double().sum(0)
    torch.testing.assert_close(
        read.double().sum(0) + feedback.error_P, whole, atol=1e-4, rtol=0, check_dtype=False
    )


@pytest.mark.parametrize("name", CODES)
def test_what_is_owed_does_not_grow_and_without_feedback_the_error_does(name: str) -> None:
    feedback, codec = ErrorFeedback(get_codec(name), P), get_codec(name)
    delta_P, with_P, without_P = _delta(3), torch.zeros(P), torch.zeros(P)
    codes, read_P = torch.empty(codec.code_bytes(P), dtype=torch.uint8), torch.empty(P)
    codec.encode(delta_P, codes)
    codec.decode(codes, read_P)
    once = float((read_P - delta_P).norm())
    for _ in range(50):
        with_P += _sent(feedback, name, delta_P)
        without_P += read_P
    assert float((with_P - 50 * delta_P).norm()) < 3 * once
    assert float((without_P - 50 * delta_P).norm()) > 45 * once


def test_errors_fade_with_beta() -> None:
    owed = {}
    for beta in (1.0, 0.5, 0.0):
        feedback = ErrorFeedback(get_codec("int4"), P, beta)
        _sent(feedback, "int4", _delta(0))
        first_P = feedback.error_P.clone()
        u_P = torch.zeros(P)
        feedback.encode(u_P, torch.empty(get_codec("int4").code_bytes(P), dtype=torch.uint8))
        assert torch.equal(u_P, beta * first_P)
        owed[beta] = float(feedback.error_P.norm())
    assert owed[0.0] == 0 < owed[0.5] < owed[1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
def test_a_refused_vector_leaves_what_is_owed(bad: float) -> None:
    feedback = ErrorFeedback(get_codec("e3m0"), P)
    _sent(feedback, "e3m0", _delta(0))
    before_P, spoilt_P = feedback.error_P.clone(), _delta(1)
    spoilt_P[700] = bad
    with pytest.raises(ValueError, match="not finite"):
        _sent(feedback, "e3m0", spoilt_P)
    assert torch.equal(feedback.error_P, before_P)
    assert bool(before_P.any())


def test_other_lengths_and_betas_are_refused() -> None:
    with pytest.raises(ValueError, match="beta"):
        ErrorFeedback(get_codec("e3m0"), P, 1.5)
    feedback = ErrorFeedback(get_codec("e3m0"), P)
    with pytest.raises(ValueError, match="values"):
        feedback.encode(torch.zeros(P - 128), torch.empty(0, dtype=torch.uint8))
