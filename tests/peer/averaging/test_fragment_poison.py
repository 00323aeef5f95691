"""Fragments: no contribution pulls an average far, and no result moves the outer copy far."""

import numpy as np
import pytest
import torch
from owner_worlds import (
    CYCLE,
    FRAGMENT,
    GROUP,
    IDENTITIES,
    IDS,
    arrived,
    codes_of,
    contribution,
    outer_copy,
)

from peer.averaging.diloco.averages import ChunkAverages
from peer.averaging.diloco.outer_fragments import FIRST_OF_CHUNK, FIRST_RESULTS
from peer.codec import LARGEST_MAGNITUDE
from protocol.diloco.commands import Admitted, Average, WriteResults
from protocol.diloco.cycle_machine import short_digest
from protocol.plausible import FIRST
from protocol.wire.fragment_messages import ResultRank


def average_of(values: list[float], codec: str = "fp32") -> float:
    """The average of chunks that hold these values everywhere."""
    outer = outer_copy(codec)
    base = outer.first_stamps()[FRAGMENT][0]
    sent = {
        IDS[peer]: contribution(outer, {0: value}, peer=peer) for peer, value in enumerate(values)
    }
    codes = {peer_id: memoryview(bytearray(each)) for peer_id, (_, each) in sent.items()}
    order = Average(
        FRAGMENT,
        CYCLE,
        {0: Admitted(base, tuple(sorted(codes)))},
        {0: codes},
        {peer_id: message for peer_id, (message, _) in sent.items()},
    )
    averages = ChunkAverages(GROUP, IDS[0], 1, outer, IDENTITIES[0].sign, trims=False)
    made = averages.averaged(order)
    assert made is not None
    decoded = torch.empty(outer.chunk_values(FRAGMENT, 0))
    outer.codec.decode(torch.frombuffer(made.codes, dtype=torch.uint8), decoded)
    return float(decoded.mean())


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_honest_contributions_are_averaged_as_they_are(codec):
    assert average_of([2.0, 2.4, 1.0], codec) == pytest.approx(1.8, rel=0.01)


@pytest.mark.parametrize("lie", [-1e3, 1e3, 1e18, LARGEST_MAGNITUDE])
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_one_of_three_pulls_an_average_no_further_than_one_and_a_half_others_would(codec, lie):
    assert abs(average_of([1.0, 1.0, lie], codec) - 2 / 3) <= 1.5 / 3 * 1.02


def test_the_longer_of_two_pulls_an_average_as_far_as_four_of_the_other_would():
    """A fast peer's contribution is honestly longer, and of two neither is the middle."""
    assert average_of([1.0, 3.9]) == pytest.approx(4.9 / 2)
    assert average_of([1.0, 1e3]) == pytest.approx(5 / 2)


def write(outer, value: float, cycle: int) -> bool:
    """Apply a result that holds this everywhere. Returns whether it was taken."""
    codes = memoryview(codes_of(outer, 0, value))
    base = outer.first_stamps()[FRAGMENT][0]
    result = arrived(cycle, base, ResultRank(3, short_digest(codes)), codes)
    return 0 in outer.carry_out(WriteResults(FRAGMENT, (result,), frozenset(), 1e9))


def test_first_results_are_held_against_what_we_sent_ourselves():
    outer = outer_copy()
    outer.sends(FRAGMENT, memoryview(codes_of(outer, 0, 0.1) + codes_of(outer, 1, 5.0)))
    before = outer.read(FRAGMENT, 0)
    assert not write(outer, 0.1 * FIRST_RESULTS * 1.01, 0)
    assert outer.read(FRAGMENT, 0) == before
    assert write(outer, 0.1 * FIRST_RESULTS * 0.99, 0)


def test_a_slow_peer_expects_results_of_as_many_steps_as_others_make():
    outer = outer_copy()
    sent = memoryview(codes_of(outer, 0, 0.1) + codes_of(outer, 1, 5.0))
    outer.sends(FRAGMENT, sent, steps_share=0.125)
    assert write(outer, 0.8, 0)
    assert not write(outer, 0.8 * FIRST_RESULTS * 1.01, 1)


def test_a_peer_that_sent_zeros_judges_first_results_by_the_chunk():
    outer = outer_copy()
    outer.sends(FRAGMENT, memoryview(codes_of(outer, 0, 0.0) + codes_of(outer, 1, 0.0)))
    assert write(outer, 1.0, 0)


def test_a_result_of_a_lying_owner_does_not_move_the_outer_copy():
    outer = outer_copy()
    before = outer.read(FRAGMENT, 0)
    assert not write(outer, 2 * FIRST_OF_CHUNK, 0)  # phi is about one
    assert outer.read(FRAGMENT, 0) == before
    for cycle in range(FIRST):
        assert write(outer, 0.01, cycle)
    before = outer.read(FRAGMENT, 0)
    assert not write(outer, 1.0, FIRST)
    assert not write(outer, LARGEST_MAGNITUDE, FIRST)
    assert outer.read(FRAGMENT, 0) == before
    assert write(outer, 0.02, FIRST)
    assert np.isfinite(np.frombuffer(outer.read(FRAGMENT, 0), np.float32)).all()
