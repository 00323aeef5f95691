"""The 4-bit codes: what they are, how far they err, and what they refuse."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from peer.codec import BLOCK, get_codec
from peer.codec.four_bit import E3m0Codec, FourBitCodec, Int4Codec
from peer.codec.four_bit_grid import E3M0_GRID, INT4_GRID

HALF = BLOCK // 2
codecs = pytest.mark.parametrize("codec", [E3m0Codec(), Int4Codec()], ids=lambda codec: codec.name)
magnitudes = st.floats(-12, 4).map(lambda exponent: 10.0**exponent)
seeds = st.integers(0, 2**32 - 1)


def _codes(codec: FourBitCodec, x: torch.Tensor) -> torch.Tensor:
    codes = torch.empty(codec.code_bytes(x.numel()), dtype=torch.uint8)
    codec.encode(x, codes)
    return codes


def _decoded(codec: FourBitCodec, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    codec.decode(_codes(codec, x), out)
    return out


def _random(seed: int, blocks: int, magnitude: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(blocks, BLOCK, generator=generator) ** 3
    return (x / x.abs().amax(1, keepdim=True) * magnitude).reshape(-1)


def _block(*values: float) -> torch.Tensor:
    """One block that begins with `values`, the rest zeros."""
    return torch.tensor([*values, *[0.0] * (BLOCK - len(values))])


def _reference(codec: FourBitCodec, x: npt.NDArray[Any]) -> bytes:
    """The code as plainly as it can be said: the nearest level in double precision."""
    levels, codes, scales = np.array(codec.grid.magnitudes), [], []
    for block in x.reshape(-1, BLOCK):
        exact = np.abs(block).max() / np.float32(levels[-1])
        bits = int(exact.view(np.uint32))
        bits = 0 if exact < codec.format.smallest_scale else -(-bits // 65536)
        scale = float(np.uint32(bits << 16).view(np.float32))
        distances = np.abs(np.abs(block.astype(np.float64))[:, None] - levels * scale)
        places = distances.argmin(1) if bits else np.zeros(BLOCK, np.int64)  # the first of equals
        nibbles = places + 8 * ((block < 0) & (places > 0))
        codes.append((nibbles[:HALF] | nibbles[HALF:] << 4).astype(np.uint8))
        scales.append(bits)
    return np.concatenate(codes).tobytes() + np.array(scales, dtype="<u2").tobytes()


def test_the_grids_are_those_of_the_papers_of_their_names() -> None:
    assert INT4_GRID.midpoints == (0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5)
    assert E3M0_GRID.magnitudes == (0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
    assert E3M0_GRID.midpoints == (1 / 128, *(1.5 * 2.0**power for power in range(-6, 0)))


@codecs
def test_a_value_takes_33_bits_per_8_values(codec: FourBitCodec) -> None:
    assert codec.code_bytes(1280) * 8 / 1280 == 4.125


@codecs
def test_bytes_of_a_block_are_these(codec: FourBitCodec) -> None:
    x = _block(codec.format.largest_level, -codec.grid.magnitudes[3])
    x[HALF] = -codec.grid.magnitudes[1]
    x[HALF + 1] = codec.grid.magnitudes[5]
    one = [0x80, 0x3F]
    expected = [7 | 9 << 4, 11 | 5 << 4, *[0] * (HALF - 2), *one]
    assert _codes(codec, x).tolist() == expected


@codecs
@given(seed=seeds, blocks=st.integers(1, 30), magnitude=magnitudes)
@settings(deadline=None, max_examples=60)
def test_equals_the_plain_reference(
    codec: FourBitCodec, seed: int, blocks: int, magnitude: float
) -> None:
    x = _random(seed, blocks, magnitude)
    x[:BLOCK] = 0
    assert _codes(codec, x).numpy().tobytes() == _reference(codec, x.numpy())


@codecs
def test_a_value_midway_goes_to_the_smaller_level(codec: FourBitCodec) -> None:
    midpoints = torch.tensor(codec.grid.midpoints)
    x = _block(codec.format.largest_level, *midpoints.tolist(), *(-midpoints).tolist())
    decoded = _decoded(codec, x)
    lower = list(codec.grid.magnitudes[:7])
    assert decoded[1:8].tolist() == lower
    assert decoded[8:15].tolist() == [-level for level in lower]
    beyond = torch.nextafter(midpoints, torch.tensor(math.inf))
    decoded = _decoded(codec, _block(codec.format.largest_level, *beyond.tolist()))
    assert decoded[1:8].tolist() == list(codec.grid.magnitudes[1:])


@codecs
def test_a_negative_value_near_zero_is_plain_zero(codec: FourBitCodec) -> None:
    codes = _codes(codec, _block(1.0, -1e-6, -0.0))
    assert codes[1:HALF].tolist() == [0] * (HALF - 1)


@given(seed=seeds, magnitude=magnitudes)
@example(seed=0, magnitude=1e-12)
@example(seed=0, magnitude=1e4)
@settings(deadline=None, max_examples=100)
def test_int4_errs_by_half_a_scale_at_most(seed: int, magnitude: float) -> None:
    codec, x = Int4Codec(), _random(seed, 4, magnitude)
    error = (_decoded(codec, x) - x).abs().view(-1, BLOCK).amax(1)
    assert bool((error <= x.abs().view(-1, BLOCK).amax(1) / 14 * (1 + 2.0**-7)).all())


@given(seed=seeds, magnitude=magnitudes)
@example(seed=0, magnitude=1e-12)
@example(seed=0, magnitude=1e4)
@settings(deadline=None, max_examples=100)
def test_e3m0_errs_by_a_third_of_the_value_or_one_part_in_128(seed: int, magnitude: float) -> None:
    codec, x = E3m0Codec(), _random(seed, 4, magnitude)
    error = (_decoded(codec, x) - x).abs().view(-1, BLOCK)
    near_zero = x.abs().view(-1, BLOCK).amax(1, keepdim=True) / 128 * (1 + 2.0**-7)
    bound = torch.maximum(x.abs().view(-1, BLOCK) / 3 * (1 + 2.0**-20), near_zero)
    assert bool((error <= bound).all())


@pytest.mark.parametrize(
    ("name", "spread", "expected"),
    [
        ("e3m0", "gauss", 0.20),
        ("e3m0", "laplace", 0.19),
        ("e3m0", "student", 0.17),
        ("int4", "gauss", 0.12),
        ("int4", "laplace", 0.16),
        ("int4", "student", 0.22),
        ("int8", "gauss", 0.0065),
        ("int8", "laplace", 0.009),
        ("int8", "student", 0.014),
    ],
)
def test_relative_error_on_known_spreads(name: str, spread: str, expected: float) -> None:
    rng = np.random.default_rng(0)
    drawn = {
        "gauss": lambda: rng.standard_normal(1 << 17),
        "laplace": lambda: rng.laplace(size=1 << 17),
        "student": lambda: rng.standard_t(3, 1 << 17),
    }[spread]()
    x = torch.from_numpy(drawn.astype(np.float32))
    codec, out = get_codec(name), torch.empty_like(x)
    codes = torch.empty(codec.code_bytes(x.numel()), dtype=torch.uint8)
    codec.encode(x, codes)
    codec.decode(codes, out)
    assert float((out - x).norm() / x.norm()) == pytest.approx(expected, rel=0.05)


@codecs
def test_too_small_a_block_becomes_zeros_and_the_next_larger_does_not(codec: FourBitCodec) -> None:
    smallest = codec.format.smallest_scale * codec.format.largest_level
    below = float(np.nextafter(np.float32(smallest), np.float32(0)))
    assert not bool(_codes(codec, _block(below)).any())
    x = _block(smallest, smallest * codec.grid.midpoints[0] / codec.format.largest_level * 1.01)
    decoded = _decoded(codec, x)
    assert float(decoded[0]) == smallest
    assert float(decoded[1]) == codec.format.smallest_scale * codec.grid.magnitudes[1]
    assert float(decoded[1]) >= torch.finfo(torch.float32).tiny


@codecs
@pytest.mark.parametrize("nibble", [0x08, 0x80, 0x88, 0x78, 0x8F])
def test_validate_refuses_negative_zeros(codec: FourBitCodec, nibble: int) -> None:
    codes = _codes(codec, _random(0, 3))
    codes[100] = nibble
    assert not codec.validate(codes)


@codecs
@pytest.mark.parametrize("bits", [0x7F80, 0x7FC0, 0xFF80, 0xBF80, 0x8000, 0x0001, 0x7C00])
def test_validate_refuses_bad_scales(codec: FourBitCodec, bits: int) -> None:
    codes = _codes(codec, _random(0, 3))
    codes[-2:] = torch.tensor([bits & 255, bits >> 8], dtype=torch.uint8)
    assert not codec.validate(codes)
