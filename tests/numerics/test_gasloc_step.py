"""GASLoC's outer step against the equations in plain numpy."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from peer.averaging.gasloc.outer_step import LookAhead
from peer.averaging.gossip.outer_state import OuterState
from peer.codec import TILE, get_codec

P = TILE + 3 * 128
GAMMA = 0.25


def codes_of(values: npt.NDArray[Any]) -> memoryview:
    codec = get_codec("fp32")
    codes = torch.empty(codec.code_bytes(P), dtype=torch.uint8)
    codec.encode(torch.from_numpy(values), codes)
    return codes.numpy().data


def vectors(count: int) -> list[npt.NDArray[Any]]:
    rng = np.random.default_rng(3)
    return [rng.standard_normal(P, dtype=np.float32) for _ in range(count)]


def state(phi: npt.NDArray[Any]) -> OuterState:
    return OuterState(phi.copy(), np.zeros(P, np.float32), get_codec("fp32"), LookAhead(GAMMA))


def test_pairs_follow_the_equations_round_after_round() -> None:
    start, *thetas = vectors(7)
    ours, theirs = state(start), state(start)
    before: dict[int, npt.NDArray[Any]] = {}
    for round_ in range(3):
        a, b = thetas[2 * round_], thetas[2 * round_ + 1]
        measures = ours.step(round_, codes_of(a), codes_of(b))
        theirs.step(round_, codes_of(b), codes_of(a))
        mean = (a + b) / 2
        for each, own, number in ((ours, a, 0), (theirs, b, 1)):
            momentum = GAMMA * (own - before[number]) if round_ else 0.0
            np.testing.assert_allclose(each.phi_P, mean + momentum, rtol=1e-6, atol=1e-6)
            before[number] = own
        distance = np.sqrt(np.mean(np.square(a - b)))
        assert measures.replica_distance == pytest.approx(distance, rel=1e-5)


def test_a_partner_that_weighs_less_is_as_far_away() -> None:
    start, a, b = vectors(3)
    weighed = state(start)
    measures = weighed.step(0, codes_of(a), codes_of(b), own_share=0.75)
    np.testing.assert_allclose(weighed.phi_P, 0.75 * a + 0.25 * b, rtol=1e-6, atol=1e-6)
    assert measures.replica_distance == pytest.approx(np.sqrt(np.mean(np.square(a - b))), rel=1e-5)


def test_alone_the_own_iterate_is_the_mean() -> None:
    start, first, second = vectors(3)
    alone = state(start)
    alone.step(0, codes_of(first), own_share=0.75)  # of nobody
    np.testing.assert_array_equal(alone.phi_P, first)
    measures = alone.step(1, codes_of(second))
    np.testing.assert_allclose(alone.phi_P, second + GAMMA * (second - first), rtol=1e-6, atol=1e-6)
    assert measures.replica_distance is None


def test_the_final_averaging_has_no_momentum_and_unequal_shares() -> None:
    start, first, ours, theirs = vectors(4)
    final = state(start)
    final.step(0, codes_of(first))
    final.step(1, codes_of(ours), codes_of(theirs), plain=True, own_share=0.75)
    np.testing.assert_allclose(final.phi_P, 0.75 * ours + 0.25 * theirs, rtol=1e-6, atol=1e-6)


def test_without_momentum_it_is_plain_averaging() -> None:
    start, a, b = vectors(3)
    plain = OuterState(start, np.zeros(P, np.float32), get_codec("fp32"), LookAhead(0.0))
    for round_ in range(2):
        plain.step(round_, codes_of(a), codes_of(b))
        np.testing.assert_array_equal(plain.phi_P, a * np.float32(0.5) + b * np.float32(0.5))
