"""The int4 code: what it is, how far it errs, and what it refuses."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from peer.codec import BLOCK, LARGEST_MAGNITUDE, get_codec
from peer.codec.codecs import Int4Codec

HALF = BLOCK // 2
CODEC = Int4Codec()
MIDPOINTS = torch.arange(7) + 0.5
magnitudes = st.floats(-12, 4).map(lambda exponent: 10.0**exponent)
seeds = st.integers(0, 2**32 - 1)


def _codes(x: torch.Tensor) -> torch.Tensor:
    codes = torch.empty(CODEC.code_bytes(x.numel()), dtype=torch.uint8)
    CODEC.encode(x, codes)
    return codes


def _decoded(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    CODEC.decode(_codes(x), out)
    return out


def _random(seed: int, blocks: int, magnitude: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(blocks, BLOCK, generator=generator) ** 3
    return (x / x.abs().amax(1, keepdim=True) * magnitude).reshape(-1)


def _block(*values: float) -> torch.Tensor:
    """One block that begins with `values`, the rest zeros."""
    return torch.tensor([*values, *[0.0] * (BLOCK - len(values))])


def _reference(x: npt.NDArray[Any]) -> bytes:
    """The code as plainly as it can be said: the nearest level in double precision."""
    levels, codes, scales = np.arange(8.0), [], []
    for block in x.reshape(-1, BLOCK):
        exact = np.abs(block).max() / np.float32(levels[-1])
        bits = int(exact.view(np.uint32))
        bits = 0 if exact < CODEC.smallest_scale else -(-bits // 65536)
        scale = float(np.uint32(bits << 16).view(np.float32))
        distances = np.abs(np.abs(block.astype(np.float64))[:, None] - levels * scale)
        places = distances.argmin(1) if bits else np.zeros(BLOCK, np.int64)  # the first of equals
        nibbles = places + 8 * ((block < 0) & (places > 0))
        codes.append((nibbles[:HALF] | nibbles[HALF:] << 4).astype(np.uint8))
        scales.append(bits)
    return np.concatenate(codes).tobytes() + np.array(scales, dtype="<u2").tobytes()


def test_a_value_takes_33_bits_per_8_values() -> None:
    assert CODEC.code_bytes(1280) * 8 / 1280 == 4.125


def test_bytes_of_a_block_are_these() -> None:
    x = _block(7.0, -3.0)
    x[HALF] = -1.0
    x[HALF + 1] = 5.0
    one = [0x80, 0x3F]
    expected = [7 | 9 << 4, 11 | 5 << 4, *[0] * (HALF - 2), *one]
    assert _codes(x).tolist() == expected


@given(seed=seeds, blocks=st.integers(1, 30), magnitude=magnitudes)
@settings(deadline=None, max_examples=60)
def test_equals_the_plain_reference(seed: int, blocks: int, magnitude: float) -> None:
    x = _random(seed, blocks, magnitude)
    x[:BLOCK] = 0
    assert _codes(x).numpy().tobytes() == _reference(x.numpy())


def test_a_value_midway_goes_to_the_smaller_level() -> None:
    decoded = _decoded(_block(7.0, *MIDPOINTS.tolist(), *(-MIDPOINTS).tolist()))
    assert decoded[1:8].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert decoded[8:15].tolist() == [0, -1, -2, -3, -4, -5, -6]
    beyond = torch.nextafter(MIDPOINTS, torch.tensor(math.inf))
    decoded = _decoded(_block(7.0, *beyond.tolist()))
    assert decoded[1:8].tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_a_negative_value_near_zero_is_plain_zero() -> None:
    codes = _codes(_block(1.0, -1e-6, -0.0))
    assert codes[1:HALF].tolist() == [0] * (HALF - 1)


@given(seed=seeds, magnitude=magnitudes)
@example(seed=0, magnitude=1e-12)
@example(seed=0, magnitude=1e4)
@settings(deadline=None, max_examples=100)
def test_it_errs_by_half_a_scale_at_most(seed: int, magnitude: float) -> None:
    x = _random(seed, 4, magnitude)
    error = (_decoded(x) - x).abs().view(-1, BLOCK).amax(1)
    assert bool((error <= x.abs().view(-1, BLOCK).amax(1) / 14 * (1 + 2.0**-7)).all())


@pytest.mark.parametrize(
    ("name", "spread", "expected"),
    [
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


def test_too_small_a_block_becomes_zeros_and_the_next_larger_does_not() -> None:
    scale = CODEC.smallest_scale
    smallest = 7 * scale
    below = float(np.nextafter(np.float32(smallest), np.float32(0)))
    assert not bool(_codes(_block(below)).any())
    decoded = _decoded(_block(smallest, 0.505 * scale))
    assert float(decoded[0]) == smallest
    assert float(decoded[1]) == scale
    assert 0.5 * scale >= torch.finfo(torch.float32).tiny


def test_the_largest_value_has_the_largest_scale() -> None:
    codes = _codes(_block(LARGEST_MAGNITUDE))
    scale = codes[-2:].view(torch.bfloat16)
    assert float(scale) == CODEC.largest_scale >= LARGEST_MAGNITUDE / 7
    assert CODEC.validate(codes)


@pytest.mark.parametrize("nibble", [0x08, 0x80, 0x88, 0x78, 0x8F])
def test_validate_refuses_negative_zeros(nibble: int) -> None:
    codes = _codes(_random(0, 3))
    codes[100] = nibble
    assert not CODEC.validate(codes)


@pytest.mark.parametrize("bits", [0x7F80, 0x7FC0, 0xFF80, 0xBF80, 0x8000, 0x0001, 0x7C00])
def test_validate_refuses_bad_scales(bits: int) -> None:
    codes = _codes(_random(0, 3))
    codes[-2:] = torch.tensor([bits & 255, bits >> 8], dtype=torch.uint8)
    assert not CODEC.validate(codes)
