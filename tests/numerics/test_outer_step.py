"""The outer step against its equations, said plainly; and the identities it must keep."""

import numpy as np
import pytest
import torch

from peer.averaging.noloco import Factors, group_mean, outer_step
from peer.codec import TILE, Codec, get_codec

P = 384
ALPHA, BETA, GAMMA = 0.5, 0.7, 0.9
TIED, APART = Factors(ALPHA, BETA, BETA), Factors(ALPHA, BETA, GAMMA)


def _vectors(count: int, num_values: int = P, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, num_values, generator=torch.Generator().manual_seed(seed))


def _encoded(codec: Codec, vectors: torch.Tensor) -> torch.Tensor:
    codes = torch.empty(len(vectors), codec.code_bytes(vectors.shape[1]), dtype=torch.uint8)
    for vector, out in zip(vectors, codes, strict=True):
        codec.encode(vector, out)
    return codes


def _plain_step(
    phi: np.ndarray, delta: np.ndarray, theta: np.ndarray, group: list[int], gamma: float
) -> np.ndarray:
    """Equation 2 and 3 as printed, with +beta, for the group's first member: phi and delta."""
    own = group[0]
    outer_gradients = theta[group] - phi[group]
    momentum = ALPHA * delta[own] + BETA * outer_gradients.mean(0)
    momentum -= gamma * (phi[own] - phi[group].mean(0))
    return np.stack([phi[own] + momentum, momentum])


@pytest.mark.parametrize("gamma", [BETA, GAMMA])
@pytest.mark.parametrize("group", [[0], [0, 1], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("num_values", [P, pytest.param(TILE + 256, marks=pytest.mark.slow)])
def test_equals_the_equations(gamma: float, group: list[int], num_values: int) -> None:
    codec = get_codec("fp32")
    phi, theta = _vectors(5, num_values), _vectors(5, num_values, 1)
    delta = _vectors(5, num_values, 2)
    full = [v.double().numpy() for v in (phi, delta, theta)]
    expected = _plain_step(full[0], full[1], full[2], group, gamma)
    theta_codes, phi_codes = _encoded(codec, theta[group]), _encoded(codec, phi[group])
    outer_step(
        phi[0], delta[0], list(theta_codes), codec, Factors(ALPHA, BETA, gamma), list(phi_codes)
    )
    np.testing.assert_allclose(phi[0].numpy(), expected[0], atol=2e-6)
    np.testing.assert_allclose(delta[0].numpy(), expected[1], atol=2e-6)


def test_gamma_equal_to_beta_needs_theta_alone() -> None:
    codec = get_codec("fp32")
    phi, delta = _vectors(2), _vectors(2, seed=3)
    short = phi[0].clone()
    theta = _vectors(2, seed=1)
    codes = _encoded(codec, theta)
    outer_step(short, delta[0].clone(), [codes[0], codes[1]], codec, TIED)
    full = [v.double().numpy() for v in (phi, delta, theta)]
    expected = _plain_step(full[0], full[1], full[2], [0, 1], BETA)[0]
    np.testing.assert_allclose(short.numpy(), expected, atol=1e-6)


def test_a_group_of_all_is_diloco_with_heavy_ball_momentum() -> None:
    codec, replicas = get_codec("fp32"), 6
    phi = _vectors(1).repeat(replicas, 1)
    delta = torch.zeros_like(phi)
    slow, momentum = phi[0].double().numpy().copy(), np.zeros(P)
    for r in range(20):
        theta = phi + 0.1 * _vectors(replicas, seed=10 + r)
        exact = slow + 0.1 * _vectors(replicas, seed=10 + r).double().numpy()
        momentum = ALPHA * momentum + BETA * (exact - slow).mean(0)
        slow = slow + momentum
        codes = list(_encoded(codec, theta))
        for own in range(replicas):
            outer_step(phi[own], delta[own], codes, codec, TIED)
    np.testing.assert_allclose(phi[0].numpy(), slow, atol=1e-6 * float(np.abs(slow).max()))
    assert all(torch.equal(phi[own], phi[0]) for own in range(replicas))


def test_without_momentum_at_unit_rates_a_pair_ends_identical() -> None:
    codec = get_codec("fp32")
    phi, delta, codes = _vectors(2), _vectors(2, seed=1), _encoded(codec, _vectors(2, seed=2))
    delta.zero_()
    outer_step(phi[0], delta[0], [codes[0], codes[1]], codec, Factors(0.0, 1.0, 1.0))
    outer_step(phi[1], delta[1], [codes[1], codes[0]], codec, Factors(0.0, 1.0, 1.0))
    # phi + (mean - phi) rounds differently from each phi: one unit in the last place.
    np.testing.assert_allclose(phi[0].numpy(), phi[1].numpy(), rtol=0, atol=5e-7)
    assert not torch.equal(phi[0], _vectors(2)[0])


def test_both_peers_of_an_int8_pair_compute_one_mean() -> None:
    codec = get_codec("int8")
    codes = _encoded(codec, _vectors(2, TILE) * torch.logspace(-12, 4, TILE))
    means = torch.empty(2, TILE)
    group_mean([codes[0], codes[1]], codec, 0, means[0], torch.empty(TILE), torch.empty(TILE))
    group_mean([codes[1], codes[0]], codec, 0, means[1], torch.empty(TILE), torch.empty(TILE))
    assert torch.equal(means[0].view(torch.int32), means[1].view(torch.int32))


def test_a_lone_peer_moves_by_its_own_theta() -> None:
    codec = get_codec("fp32")
    phi, theta = _vectors(1), _vectors(1, seed=1)
    delta = torch.zeros(1, P)
    measures = outer_step(phi[0], delta[0], [_encoded(codec, theta)[0]], codec, APART)
    torch.testing.assert_close(phi, _vectors(1) + BETA * (theta - _vectors(1)))
    assert measures.replica_distance is None


def test_measures_are_per_parameter() -> None:
    codec = get_codec("fp32")
    phi, delta, theta = _vectors(2), torch.zeros(2, P), _vectors(2, seed=1)
    codes = _encoded(codec, theta)
    measures = outer_step(phi[0], delta[0], [codes[0], codes[1]], codec, TIED)
    assert measures.replica_distance == pytest.approx(
        float((theta[0] - theta[1]).pow(2).mean().sqrt()), rel=1e-5
    )
    assert measures.delta_rms == pytest.approx(float(delta[0].pow(2).mean().sqrt()), rel=1e-5)


@pytest.mark.parametrize("broken", ["short codes", "no codes of phi", "short delta"])
def test_bad_input_writes_nothing(broken: str) -> None:
    codec = get_codec("int8")
    phi, delta, codes = _vectors(1)[0], _vectors(1, seed=1)[0], _encoded(codec, _vectors(2, seed=2))
    partner = codes[1][:-1] if broken == "short codes" else codes[1]
    own_delta = delta[:128] if broken == "short delta" else delta
    factors = APART if broken == "no codes of phi" else TIED
    with pytest.raises(ValueError, match=r"codes|delta"):
        outer_step(phi, own_delta, [codes[0], partner], codec, factors)
    assert torch.equal(phi, _vectors(1)[0])
    assert torch.equal(delta, _vectors(1, seed=1)[0])
