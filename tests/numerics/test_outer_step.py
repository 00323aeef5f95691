"""The outer step against its equations, said plainly; and the identities it must keep."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from peer.averaging.gossip.outer_step import NolocoFactors, group_mean, outer_step
from peer.codec import TILE, Codec, get_codec

P = 384
ALPHA, BETA, GAMMA = 0.5, 0.7, 0.9
TIED, APART = NolocoFactors(ALPHA, BETA, BETA), NolocoFactors(ALPHA, BETA, GAMMA)


def _vectors(count: int, num_values: int = P, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, num_values, generator=torch.Generator().manual_seed(seed))


def _encoded(codec: Codec, vectors: torch.Tensor) -> torch.Tensor:
    codes = torch.empty(len(vectors), codec.code_bytes(vectors.shape[1]), dtype=torch.uint8)
    for vector, out in zip(vectors, codes, strict=True):
        codec.encode(vector, out)
    return codes


def _plain_step(
    phi: npt.NDArray[Any],
    delta: npt.NDArray[Any],
    theta: npt.NDArray[Any],
    group: list[int],
    gamma: float,
) -> npt.NDArray[Any]:
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
        phi[0],
        delta[0],
        list(theta_codes),
        codec,
        NolocoFactors(ALPHA, BETA, gamma),
        list(phi_codes),
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
    outer_step(phi[0], delta[0], [codes[0], codes[1]], codec, NolocoFactors(0.0, 1.0, 1.0))
    outer_step(phi[1], delta[1], [codes[1], codes[0]], codec, NolocoFactors(0.0, 1.0, 1.0))
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


# --- unequal shares -------------------------------------------------------------------------------
PLAIN = NolocoFactors(0.0, 1.0, 1.0)
SHARES = [1.0, 0.0, 0.25, 1 / 3, 2 / 3, 3 / 5, 4 / 7]


def _decoded(codec: Codec, codes: torch.Tensor, num_values: int) -> npt.NDArray[Any]:
    values = torch.empty(num_values)
    codec.decode(codes, values)
    return values.numpy()


@pytest.mark.parametrize("codec_name", ["fp32", "int8"])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("factors", [PLAIN, TIED])
@pytest.mark.parametrize("num_values", [P, pytest.param(TILE + 256, marks=pytest.mark.slow)])
def test_a_pair_of_unequal_shares_takes_the_weighted_mean_bit_for_bit(
    codec_name: str, share: float, factors: NolocoFactors, num_values: int
) -> None:
    """The reference rounds each operation to fp32, in the order of the equations."""
    codec = get_codec(codec_name)
    phi, delta = _vectors(1, num_values)[0], _vectors(1, num_values, 3)[0]
    codes = _encoded(codec, _vectors(2, num_values, 1))
    own, theirs = (_decoded(codec, each, num_values) for each in codes)
    mean = own * np.float32(share) + theirs * np.float32(1 - share)
    before = delta.numpy().copy()
    momentum = before * np.float32(factors.alpha)
    momentum = momentum + (mean - phi.numpy()) * np.float32(factors.beta)
    moved = phi.numpy() + momentum
    distance_found = outer_step(phi, delta, list(codes), codec, factors, (), (share, 1 - share))
    np.testing.assert_array_equal(delta.numpy(), momentum if factors.alpha else before)
    np.testing.assert_array_equal(phi.numpy(), moved)
    distance = float(np.sqrt(((own - theirs).astype(np.float64) ** 2).mean()))
    if share == 1:
        assert distance_found is None
    else:
        assert distance_found == pytest.approx(distance, rel=1e-5)


@pytest.mark.parametrize("share", SHARES)
def test_both_peers_of_an_unequal_pair_compute_one_mean(share: float) -> None:
    codec = get_codec("int8")
    codes = _encoded(codec, _vectors(2, TILE) * torch.logspace(-12, 4, TILE))
    means, (own, spare) = torch.empty(2, TILE), torch.empty(2, TILE)
    group_mean([codes[0], codes[1]], codec, 0, means[0], own, spare, (share, 1 - share))
    group_mean([codes[1], codes[0]], codec, 0, means[1], own, spare, (1 - share, share))
    assert torch.equal(means[0].view(torch.int32), means[1].view(torch.int32))


@pytest.mark.parametrize(("share", "whose"), [(1.0, 0), (0.0, 1)])
def test_a_share_of_all_or_nothing_is_the_weights_of_one(share: float, whose: int) -> None:
    """The last meeting of the final averaging hands the result on."""
    codec = get_codec("int8")
    phi, delta = _vectors(1)[0], _vectors(1, seed=3)[0]
    codes = _encoded(codec, _vectors(2, seed=1))
    mean, own, spare = torch.empty(3, P)
    group_mean(list(codes), codec, 0, mean, own, spare, (share, 1 - share))
    np.testing.assert_array_equal(mean.numpy(), _decoded(codec, codes[whose], P))
    outer_step(phi, delta, list(codes), codec, PLAIN, (), (share, 1 - share))
    # phi + (theta - phi) is theta but for one unit in the last place.
    np.testing.assert_allclose(phi.numpy(), mean.numpy(), rtol=0, atol=5e-7)


def test_shares_weigh_the_codes_of_phi_too_and_a_lone_peer_has_no_use_for_them() -> None:
    codec = get_codec("fp32")
    phi, delta = _vectors(1)[0], torch.zeros(P)
    theta, slow = _vectors(2, seed=1), _vectors(2, seed=2)
    outer_step(
        *(phi, delta, list(_encoded(codec, theta)), codec, APART),
        *(list(_encoded(codec, slow)), (0.25, 0.75)),
    )
    start = _vectors(1)[0]
    expected = BETA * (0.25 * theta[0] + 0.75 * theta[1] - start)
    expected += (GAMMA - BETA) * (0.25 * slow[0] + 0.75 * slow[1] - start)
    torch.testing.assert_close(delta, expected)
    alone, same = _vectors(1)[0], _vectors(1)[0]
    codes = list(_encoded(codec, theta[:1]))
    outer_step(alone, torch.zeros(P), codes, codec, TIED, (), (0.25,))
    outer_step(same, torch.zeros(P), codes, codec, TIED)
    assert torch.equal(alone, same)


def test_a_lone_peer_moves_by_its_own_theta() -> None:
    codec = get_codec("fp32")
    phi, theta = _vectors(1), _vectors(1, seed=1)
    delta = torch.zeros(1, P)
    distance = outer_step(phi[0], delta[0], [_encoded(codec, theta)[0]], codec, APART)
    torch.testing.assert_close(phi, _vectors(1) + BETA * (theta - _vectors(1)))
    assert distance is None


def test_the_distance_is_per_parameter() -> None:
    codec = get_codec("fp32")
    phi, delta, theta = _vectors(2), torch.zeros(2, P), _vectors(2, seed=1)
    codes = _encoded(codec, theta)
    distance = outer_step(phi[0], delta[0], [codes[0], codes[1]], codec, TIED)
    assert distance == pytest.approx(float((theta[0] - theta[1]).pow(2).mean().sqrt()), rel=1e-5)
