"""Rounding of int8 in the fast weights: who takes it back out, and how much of it.

After an outer step the trainer moves theta by phi' - theta_s, where phi' was built from the decoded
snapshot, so theta takes in a part of the rounding error e = decoded - theta_s. Nothing in the outer
loop pulls the swarm's common position back to where it was, so an error that stays in adds up like
a random walk. The outer loop is linear, and its projection on that common position says how much
stays per round, in a group of n: beta e / n in each phi and delta, less k e in the own theta,
leaves beta (e - k e) in all. Only k = 1 leaves nothing: theta <- theta + phi' - decoded.

The bounds below are of a random walk of theta (rms, per parameter) away from a run without coding,
same training.
"""

from itertools import pairwise

import pytest
import torch

from peer.averaging.gossip.outer_step import NolocoFactors, outer_step
from peer.codec import get_codec

P = 2048
ROUNDS = 300
BETA = 0.7
FACTORS = NolocoFactors(0.5, BETA, BETA)
BOUND_IN_ROUNDINGS = 2.0
"""rms distance to the exact run, in rms rounding errors of one coding, at any round."""

pytestmark = pytest.mark.slow


def _train(peers: int, codec_name: str, taken_back: float) -> tuple[torch.Tensor, float]:
    """theta of peer 0 after each round [ROUNDS, P], and the rms rounding of the last coding."""
    training, pairing = (torch.Generator().manual_seed(seed) for seed in (0, 1))
    phi = (0.02 * torch.randn(P, generator=training)).repeat(peers, 1)
    theta, delta, codec = phi.clone(), torch.zeros(peers, P), get_codec(codec_name)
    codes = torch.empty(peers, codec.code_bytes(P), dtype=torch.uint8)
    decoded = torch.empty(peers, P)
    history = []
    for _ in range(ROUNDS):
        theta += 0.001 * torch.randn(peers, P, generator=training)
        for i in range(peers):
            codec.encode(theta[i], codes[i])
            codec.decode(codes[i], decoded[i])
        rounding = decoded - theta
        order = torch.randperm(peers, generator=pairing).tolist()
        for k, own in enumerate(order):
            partners = [] if peers == 1 else [codes[order[k ^ 1]]]
            outer_step(phi[own], delta[own], [codes[own], *partners], codec, FACTORS)
        theta = theta + (phi - theta) - taken_back * rounding
        history.append(theta[0])
    return torch.stack(history), float(rounding.pow(2).mean().sqrt())


def _distances(peers: int, taken_back: float) -> tuple[torch.Tensor, float]:
    """rms distance to the exact run after each round, in rms roundings of one coding."""
    exact, _ = _train(peers, "fp32", 0.0)
    coded, rounding = _train(peers, "int8", taken_back)
    return (coded - exact).pow(2).mean(1).sqrt() / rounding, rounding


@pytest.mark.parametrize("peers", [1, 4])
def test_noise_does_not_accumulate_when_theta_takes_back_the_whole_rounding(peers: int) -> None:
    distances, _ = _distances(peers, 1.0)
    assert float(distances.max()) < BOUND_IN_ROUNDINGS


@pytest.mark.parametrize("peers", [1, 4])
def test_noise_grows_when_none_is_taken_back(peers: int) -> None:
    distances, _ = _distances(peers, 0.0)
    assert float(distances[-1]) > 5 * BOUND_IN_ROUNDINGS
    marks = [float(distances[t]) for t in (9, 29, 99, 299)]
    assert all(later > 1.3 * earlier for earlier, later in pairwise(marks))


@pytest.mark.parametrize("peers", [1, 4])
def test_taking_back_only_the_own_share_slows_the_growth_but_does_not_stop_it(peers: int) -> None:
    own_share = BETA * (1.0 if peers == 1 else 0.5)
    partly, _ = _distances(peers, own_share)
    none, _ = _distances(peers, 0.0)
    assert BOUND_IN_ROUNDINGS < float(partly[-1]) < float(none[-1])
    assert float(partly[-1]) > 1.3 * float(partly[99]) > 1.3 * 1.3 * float(partly[29])
