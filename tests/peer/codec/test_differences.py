"""int8 codes as differences: what is read is what was sent, or is known not to be."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.codec import BLOCK, TILE, get_codec
from peer.codec import differences as diff

seeds = st.integers(0, 2**32 - 1)
scales = st.floats(-40, 30).map(lambda exponent: 10.0**exponent)


def coded(x: torch.Tensor) -> bytes:
    codec = get_codec("int8")
    codes = torch.empty(codec.code_bytes(x.numel()), dtype=torch.uint8)
    codec.encode(x, codes)
    return codes.numpy().tobytes()


def pair(seed: int, blocks: int, apart: float, size: float = 1.0) -> tuple[bytes, bytes]:
    generator = torch.manual_seed(seed)
    one = torch.randn(blocks * BLOCK, generator=generator)
    other = one + apart * torch.randn(blocks * BLOCK, generator=generator)
    return coded(one * size), coded(other * size)


def in_bits(width: int, codes: bytes, vectors: int = 1) -> bytearray:
    widths = np.full(diff.blocks_of(len(codes)), width, np.uint8)
    return diff.pack(codes, widths, vectors)


def read(packed: Any, own: bytes, vectors: int = 1) -> tuple[bytearray, npt.NDArray[np.bool_]]:
    into = bytearray(len(own))
    return into, diff.unpack(packed, own, into, vectors)


def wrong_blocks(found: bytes | bytearray, codes: bytes) -> npt.NDArray[np.bool_]:
    values = len(codes) // 130 * BLOCK
    one, other = (np.frombuffer(c, np.int8)[:values].reshape(-1, BLOCK) for c in (found, codes))
    marks: npt.NDArray[np.bool_] = (one != other).any(axis=1)
    return marks


@given(seed=seeds, size=scales, vectors=st.sampled_from([1, 2]))
@settings(deadline=None, max_examples=60)
def test_what_is_near_enough_is_read_to_the_byte(seed: int, size: float, vectors: int) -> None:
    pairs = [pair(seed + n, 3, 0.01, size) for n in range(vectors)]
    one, other = (b"".join(sides) for sides in zip(*pairs, strict=True))
    widths = diff.widths_for(one, diff.apart_per_block(one, other, vectors), vectors)
    packed = diff.pack(one, widths, vectors)
    assert len(packed) == diff.packed_bytes(widths)
    found, bad = read(packed, other, vectors)
    assert not bad.any()
    assert bytes(found) == one


@given(seed=seeds, width=st.integers(1, 8), apart=st.floats(0, 3))
@settings(deadline=None, max_examples=150)
def test_every_block_that_is_read_wrongly_is_bad(seed: int, width: int, apart: float) -> None:
    one, other = pair(seed, 8, apart)
    found, bad = read(in_bits(width, one), other)
    assert not (wrong_blocks(found, one) & ~bad).any()
    diff.put_blocks(found, bad, diff.codes_of_blocks(one, bad))
    assert bytes(found) == one


@given(seed=seeds, width=st.integers(1, 7), places=st.sets(st.integers(0, 127), min_size=1))
@settings(deadline=None, max_examples=200)
def test_one_or_two_wrong_wraps_never_pass(seed: int, width: int, places: set[int]) -> None:
    """Whatever the wraps are: a code of distance 3."""
    rng = np.random.default_rng(seed)
    true = rng.integers(-127, 128, (1, BLOCK)).astype(np.int16)
    wrapped = true.copy()
    for place in sorted(places)[:2]:
        wrapped[0, place] += int(rng.choice([-3, -2, -1, 1, 2, 3])) * 2**width
    widths = np.array([width], np.uint8)
    assert (diff._sums(wrapped, widths) != diff._sums(true, widths)).any()


@pytest.mark.long
@pytest.mark.slow
def test_of_many_wrong_wraps_as_many_pass_as_are_promised() -> None:
    """One block in 251 squared; of 2 million some 32."""
    rng = np.random.default_rng(1)
    trials, passed = 1 << 21, 0
    for _ in range(32):
        wraps = rng.integers(-3, 4, (trials // 32, BLOCK)).astype(np.int16)
        passed += int((diff._sums(wraps, np.zeros(len(wraps), np.uint8)) == 0).all(axis=1).sum())
    assert 15 <= passed <= 55


def test_a_block_in_eight_bits_needs_nobody_near() -> None:
    one, other = pair(1, 4, 50.0)
    found, bad = read(in_bits(8, one), other)
    assert not bad.any()
    assert bytes(found) == one


def test_zeros_take_no_bits() -> None:
    one, other = coded(torch.zeros(2 * BLOCK)), pair(1, 2, 1.0)[0]
    widths = diff.widths_for(one, diff.apart_per_block(one, other))
    assert widths.tolist() == [0, 0]
    found, bad = read(diff.pack(one, widths), other)
    assert not bad.any()
    assert bytes(found) == one


def test_a_far_partner_costs_bits_and_a_near_one_few() -> None:
    sizes = []
    for apart in (0.0003, 0.003, 0.03, 0.3):
        one, other = pair(3, 50, apart)
        sizes.append(diff.packed_bytes(diff.widths_for(one, diff.apart_per_block(one, other))))
    assert sizes == sorted(sizes)
    assert sizes[0] < 0.4 * len(one)
    assert sizes[-1] <= 50 * 133


@pytest.mark.parametrize("expected", [np.nan, np.inf, 0.0, 1e38])
def test_widths_are_bounded_whatever_was_expected(expected: float) -> None:
    one, _ = pair(1, 3, 0.1)
    widths = diff.widths_for(one, np.full(3, expected, np.float32))
    assert int(widths.max()) <= 8


@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_no_bytes_do_more_than_be_malformed_or_give_codes_in_range(data: st.DataObject) -> None:
    one, other = pair(1, 3, 0.1)
    packed = bytearray(in_bits(4, one))
    for _ in range(data.draw(st.integers(1, 8))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(packed)))
    into = bytearray(len(other))
    try:
        diff.unpack(packed[:cut], other, into)
    except diff.MalformedPack:
        return
    assert int(np.frombuffer(into, np.int8)[: 3 * BLOCK].min()) >= -127


@pytest.mark.parametrize("change", ["short", "long", "wide", "none"])
def test_what_nobody_packed_is_refused(change: str) -> None:
    one, other = pair(1, 3, 0.1)
    packed = in_bits(4, one)
    packed = {
        "short": packed[:-1],
        "long": packed + b"\0",
        "wide": bytearray(b"\x09") + packed[1:],
        "none": bytearray(),
    }[change]
    with pytest.raises(diff.MalformedPack):
        read(packed, other)


@pytest.mark.slow
def test_tiles_change_nothing() -> None:
    blocks = TILE // BLOCK + 3
    one, other = pair(5, blocks, 0.02)
    widths = diff.widths_for(one, diff.apart_per_block(one, other))
    widths[::7] = 2
    found, bad = read(diff.pack(one, widths), other)
    assert bad.any()
    assert not bad[np.arange(blocks) % 7 != 0].any()
    diff.put_blocks(found, bad, diff.codes_of_blocks(one, bad))
    assert bytes(found) == one
