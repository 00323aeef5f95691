"""The outer state: never half-applied, never twice, errors by blame."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from peer.averaging.gossip.outer_step import NolocoFactors, OuterState
from peer.codec import get_codec
from protocol.errors import LocalProtocolError, RemoteProtocolError

P = 256


def _vector(seed: int) -> npt.NDArray[Any]:
    return np.random.default_rng(seed).normal(size=P).astype(np.float32)


def _codes(seed: int) -> npt.NDArray[Any]:
    codec = get_codec("int8")
    codes = np.empty(codec.code_bytes(P), dtype=np.uint8)
    codec.encode(torch.from_numpy(_vector(seed)), torch.from_numpy(codes))
    return codes


def _state(gamma: float = 0.7) -> OuterState:
    return OuterState(
        _vector(0), np.zeros(P, np.float32), get_codec("int8"), NolocoFactors(0.5, 0.7, gamma)
    )


def _both(theta: int, phi: int) -> bytes:
    return bytes(_codes(theta)) + bytes(_codes(phi))


def test_a_step_changes_the_callers_memory_and_counts() -> None:
    phi, delta = _vector(0), np.zeros(P, np.float32)
    state = OuterState(phi, delta, get_codec("int8"), NolocoFactors(0.5, 0.7, 0.7))
    distance = state.step(0, _codes(1), bytes(_codes(2)))
    np.testing.assert_array_equal(phi, _vector(0) + delta)
    np.testing.assert_allclose(delta, 0.7 * ((_vector(1) + _vector(2)) / 2 - _vector(0)), atol=0.02)
    state.step(1, _codes(3).data)
    assert state.round == 1
    assert distance == pytest.approx(
        float(np.sqrt(((_vector(1) - _vector(2)) ** 2).mean())), rel=0.01
    )


def test_how_far_replicas_are_apart_is_told_in_the_size_of_the_weights() -> None:
    state = OuterState(
        _vector(0), np.zeros(P, np.float32), get_codec("int8"), NolocoFactors(0, 1, 1)
    )
    state.step(0, _codes(1))
    assert state.replicas_apart is None
    state.step(1, _codes(1), _codes(2))
    expected = np.linalg.norm(_vector(1) - _vector(2)) / np.linalg.norm(state.phi_P)
    assert state.replicas_apart == pytest.approx(float(expected), rel=0.01)


@pytest.mark.parametrize("own_share", [0.0, 0.25, 0.5, 1.0])
def test_a_step_weighs_the_own_weights_by_their_share(own_share: float) -> None:
    state = _state()
    state.step(0, _codes(1), _codes(2), plain=True, own_share=own_share)
    mean = own_share * _vector(1) + (1 - own_share) * _vector(2)
    np.testing.assert_allclose(state.phi_P, mean, atol=0.03)


@pytest.mark.parametrize("own_share", [0.0, 0.25, 1.0])
def test_without_a_partner_a_share_means_nothing(own_share: float) -> None:
    one, other = _state(), _state()
    assert one.step(0, _codes(1), own_share=own_share) is None
    other.step(0, _codes(1))
    np.testing.assert_array_equal(one.phi_P, other.phi_P)


def test_a_part_is_stepped_as_one_and_the_rest_lies_still() -> None:
    spans = [(0, 128), (384, 512)]
    phi, delta = np.tile(_vector(0), 2), np.tile(_vector(1), 2)
    inside = np.concatenate([np.arange(*span) for span in spans])
    whole = OuterState(phi[inside], delta[inside], get_codec("int8"), NolocoFactors(0.5, 0.7, 0.7))
    before, momentum = phi.copy(), delta.copy()
    part = OuterState(phi, delta, get_codec("int8"), NolocoFactors(0.5, 0.7, 0.7), spans)
    for state in (whole, part):
        state.step(0, _codes(2), _codes(3))
        state.step(1, _codes(4))
    np.testing.assert_array_equal(phi[inside], whole.phi_P)
    np.testing.assert_array_equal(delta[inside], whole.delta_P)
    np.testing.assert_array_equal(phi[128:384], before[128:384])
    np.testing.assert_array_equal(delta[128:384], momentum[128:384])
    assert not np.array_equal(phi, before)
    with pytest.raises(RemoteProtocolError):
        part.step(2, _codes(1), _codes(1)[:-1])


def test_a_round_is_never_stepped_twice() -> None:
    state = _state()
    state.step(4, _codes(1))
    before = state.phi_P.copy()
    with pytest.raises(LocalProtocolError, match="round 4 after"):
        state.step(4, _codes(1))
    np.testing.assert_array_equal(state.phi_P, before)


@pytest.mark.parametrize("break_at", ["scale", "code", "length", "empty"])
@pytest.mark.parametrize("whose", ["own", "partner"])
def test_bad_codes_write_nothing_and_blame_the_right_side(break_at: str, whose: str) -> None:
    codes = {"own": _codes(1), "partner": _codes(2)}
    bad = codes[whose]
    if break_at == "scale":
        bad[-1] = 0x7F
        bad[-2] = 0x80
    elif break_at == "code":
        bad[7] = 0x80
    else:
        codes[whose] = bad[: -1 if break_at == "length" else 0]
    state = _state()
    with pytest.raises(LocalProtocolError if whose == "own" else RemoteProtocolError):
        state.step(0, codes["own"], codes["partner"])
    np.testing.assert_array_equal(state.phi_P, _vector(0))
    assert not state.delta_P.any()
    assert state.round == -1


def test_gamma_apart_from_beta_needs_the_codes_of_phi() -> None:
    state = _state(gamma=1.0)
    assert state.needs_phi_codes
    with pytest.raises(LocalProtocolError):
        state.step(0, _codes(1), _codes(2))
    with pytest.raises(RemoteProtocolError):
        state.step(0, state.with_phi(_codes(1).data), _codes(2))
    state.step(0, state.with_phi(_codes(1).data), _both(2, 5))
    expected = 0.7 * ((_vector(1) + _vector(2)) / 2 - _vector(0))
    expected += 0.3 * ((_vector(0) + _vector(5)) / 2 - _vector(0))
    np.testing.assert_allclose(state.delta_P, expected, atol=0.03)


def test_a_first_state_goes_on_from_the_round_that_it_stands_after() -> None:
    state = _state()
    state.phi_P[:], state.delta_P[:] = _vector(1), _vector(2)
    state.set_first_round(9)
    assert state.round == 9
    with pytest.raises(LocalProtocolError, match="round 9 after"):
        state.step(9, _codes(1))
    state.step(10, _codes(1))
    np.testing.assert_allclose(state.delta_P, 0.5 * _vector(2), atol=0.03)


def test_momentum_that_nobody_uses_is_dropped_with_the_first_state() -> None:
    """A run without it may go on from what was written when each step still wrote it."""
    spans = [(0, 128), (192, P)]
    for alpha, left in ((0.5, P), (0.0, 64)):
        delta = np.ones(P, np.float32)
        rule = NolocoFactors(alpha, 1.0, 1.0)
        OuterState(_vector(0), delta, get_codec("int8"), rule, spans).set_first_round(3)
        assert np.count_nonzero(delta) == left


@pytest.mark.parametrize("spans", [None, [(0, 128), (128, P)]], ids=["whole", "spans"])
def test_without_momentum_a_step_does_not_touch_it(spans: list[tuple[int, int]] | None) -> None:
    delta = np.full(P, np.nan, np.float32)
    rule = NolocoFactors(0.0, 1.0, 1.0)
    OuterState(_vector(0), delta, get_codec("int8"), rule, spans).step(0, _codes(1), _codes(2))
    assert np.isnan(delta).all()


def test_the_final_averaging_leaves_no_momentum() -> None:
    delta = np.ones(P, np.float32)
    state = OuterState(_vector(0), delta, get_codec("int8"), NolocoFactors(0.5, 0.7, 0.7))
    state.step(0, _codes(1), _codes(2), plain=True)
    assert not delta.any()


@pytest.mark.parametrize("spans", [None, [(0, 128), (P - 128, P)]])
@pytest.mark.parametrize("own_share", [0.5, 0.8])
@pytest.mark.parametrize("factors", [NolocoFactors(0.5, 0.7, 0.7), NolocoFactors(0.0, 1.0, 1.0)])
def test_a_partner_is_taken_out_of_a_step_that_is_then_one_alone(factors, own_share, spans) -> None:
    size = sum(stop - start for start, stop in spans) if spans else P
    codec = get_codec("int8")
    own, theirs = (bytes(_codes(seed))[: codec.code_bytes(size)] for seed in (1, 2))
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for partner in (theirs, None):
        phi, delta = _vector(0), _vector(3) if factors.remembers else np.zeros(P, np.float32)
        state = OuterState(phi, delta, codec, factors, spans)
        state.step(0, own, partner, own_share=own_share)
        if partner is not None:
            state.without_partner(own, partner, own_share)
        found.append((phi, delta))
    for taken_out, alone in zip(*found, strict=True):
        np.testing.assert_allclose(taken_out, alone, atol=1e-6)
