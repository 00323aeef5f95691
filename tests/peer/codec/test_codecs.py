"""The codecs: error bounds, sizes, determinism, and what they refuse."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.codec import BLOCK, LARGEST_MAGNITUDE, TILE, codes_as_tensor, get_codec
from peer.codec.codecs import Int8Codec
from protocol.run.layout import ALIGNMENT
from protocol.run.ways import CODECS, WAYS

NAMES = tuple(CODECS)
magnitudes = st.floats(-12, 4).map(lambda exponent: 10.0**exponent)
seeds = st.integers(0, 2**32 - 1)


def _codes(name: str, x: torch.Tensor) -> torch.Tensor:
    codec = get_codec(name)
    codes = torch.empty(codec.code_bytes(x.numel()), dtype=torch.uint8)
    codec.encode(x, codes)
    return codes


def _decoded(name: str, codes: torch.Tensor, num_values: int) -> torch.Tensor:
    out = torch.empty(num_values)
    get_codec(name).decode(codes, out)
    return out


def _random(seed: int, blocks: int, magnitude: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(blocks, BLOCK, generator=generator)
    return (x / x.abs().amax(1, keepdim=True) * magnitude).reshape(-1)


def _reference_int8(x: npt.NDArray[Any]) -> bytes:
    """The int8 code as plainly as it can be said, block by block."""
    codes, scales = [], []
    for block in x.reshape(-1, BLOCK):
        exact = np.float32(np.abs(block).max()) / np.float32(127)
        bits = int(np.float32(exact).view(np.uint32))
        bits = 0 if exact < Int8Codec.smallest_scale else -(-bits // 65536)
        scale = np.uint32(bits << 16).view(np.float32)
        codes.append(np.rint(block / (scale or np.float32(1))).astype(np.int8))
        scales.append(bits)
    return np.concatenate(codes).tobytes() + np.array(scales, dtype="<u2").tobytes()


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=", ".join(CODECS)):
        get_codec("int5")


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("int8", 1.0, 1.03),
        ("int8-diff", 1.0, 1.03),
        ("int4", 0.5, 0.516),
        ("bf16", 2, 2),
        ("fp32", 4, 4),
    ],
)
def test_bytes_per_value(name: str, low: float, high: float) -> None:
    assert low <= get_codec(name).code_bytes(1280) / 1280 <= high


@pytest.mark.parametrize("name", NAMES)
def test_a_codec_is_what_its_row_says(name: str) -> None:
    codec, row = get_codec(name), CODECS[name]
    assert codec.name == name
    for values in (ALIGNMENT, 5 * ALIGNMENT):
        assert codec.code_bytes(values) == row.code_bytes(values) == values * row.bytes_per_value
    assert set(row.fused) <= set(WAYS)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_coded_apart_from_each_other(name: str) -> None:
    x = _random(2, 2)
    whole = _decoded(name, _codes(name, x), x.numel())
    for start in range(0, x.numel(), BLOCK):
        spoilt = torch.full_like(x, 3.0)
        kept = slice(start, start + BLOCK)
        spoilt[kept] = x[kept]
        assert torch.equal(_decoded(name, _codes(name, spoilt), x.numel())[kept], whole[kept])


@given(seed=seeds, magnitude=magnitudes)
@settings(deadline=None, max_examples=100)
def test_int8_error_is_at_most_one_part_in_127_of_the_block_maximum(
    seed: int, magnitude: float
) -> None:
    x = _random(seed, 4, magnitude)
    error = (_decoded("int8", _codes("int8", x), x.numel()) - x).abs().view(-1, BLOCK).amax(1)
    assert bool((error <= x.abs().view(-1, BLOCK).amax(1) / 127).all())


@given(seed=seeds, magnitude=magnitudes)
@settings(deadline=None, max_examples=100)
def test_int8_scale_is_rounded_up_by_less_than_one_bf16_step(seed: int, magnitude: float) -> None:
    x = _random(seed, 4, magnitude)
    scales = _codes("int8", x)[x.numel() :].view(torch.bfloat16).double()
    exact = x.abs().view(-1, BLOCK).amax(1).double() / 127
    assert bool(((scales >= exact * (1 - 2.0**-24)) & (scales < exact * (1 + 2.0**-7))).all())


@given(seed=seeds, magnitude=magnitudes, name=st.sampled_from(NAMES))
@settings(deadline=None, max_examples=60)
def test_decoded_values_are_coded_to_themselves_where_the_scale_stays(
    seed: int, magnitude: float, name: str
) -> None:
    x = _random(seed, 6, magnitude)
    codes = _codes(name, x)
    decoded = _decoded(name, codes, x.numel())
    again = _codes(name, decoded)
    if not name.startswith("int8"):
        assert torch.equal(again, codes)
        return
    values = codes[: x.numel()].view(torch.int8).view(-1, BLOCK)
    full = values.abs().amax(1) == 127
    assert torch.equal(again[: x.numel()].view(torch.int8).view(-1, BLOCK)[full], values[full])
    twice = _decoded(name, again, x.numel()).view(-1, BLOCK)
    assert torch.equal(twice[full], decoded.view(-1, BLOCK)[full])


@given(seed=seeds, magnitude=magnitudes)
@settings(deadline=None, max_examples=60)
def test_int8_coding_settles_after_a_few_codings(seed: int, magnitude: float) -> None:
    x = _random(seed, 6, magnitude)
    for _ in range(4):
        codes = _codes("int8", x)
        x = _decoded("int8", codes, x.numel())
    assert torch.equal(_codes("int8", x), codes)


@given(seed=seeds, blocks=st.integers(1, 40), magnitude=magnitudes)
@settings(deadline=None, max_examples=40)
def test_int8_equals_the_plain_reference(seed: int, blocks: int, magnitude: float) -> None:
    x = _random(seed, blocks, magnitude)
    x[:BLOCK] = 0
    assert _codes("int8", x).numpy().tobytes() == _reference_int8(x.numpy())


@pytest.mark.slow
def test_tiles_change_nothing() -> None:
    x = _random(3, 2 * TILE // BLOCK + 5)
    x *= torch.logspace(-9, 3, x.numel())
    codes = _codes("int8", x)
    assert codes.numpy().tobytes() == _reference_int8(x.numpy())
    assert torch.equal(_codes("int8", x), codes)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name: str) -> None:
    codes = _codes(name, torch.zeros(2 * BLOCK))
    assert not bool(codes.any())
    assert not bool(_decoded(name, codes, 2 * BLOCK).any())


@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1.4e-36])
def test_int8_blocks_below_the_normal_scales_become_zeros(magnitude: float) -> None:
    x = torch.full((BLOCK,), magnitude)
    assert not bool(_codes("int8", x).any())


def test_int8_keeps_a_small_block_beside_a_large_one() -> None:
    x = torch.cat([_random(1, 1, 1e4), _random(2, 1, 1e-12)])
    error = (_decoded("int8", _codes("int8", x), x.numel()) - x)[BLOCK:].abs().max()
    assert float(error) <= 1e-12 / 127


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("place", [0, 130, 3 * BLOCK - 1])
def test_values_that_are_not_finite_or_huge_are_refused(name: str, bad: float, place: int) -> None:
    x = _random(0, 3)
    x[place] = bad
    with pytest.raises(ValueError, match="not finite"):
        _codes(name, x)


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_magnitude_survives(name: str) -> None:
    codes = _codes(name, torch.full((BLOCK,), LARGEST_MAGNITUDE))
    assert get_codec(name).validate(codes)
    assert bool(torch.isfinite(_decoded(name, codes, BLOCK)).all())


@pytest.mark.parametrize("name", NAMES)
def test_validate_takes_what_encode_writes(name: str) -> None:
    x = _random(5, 40) * torch.logspace(-40, 30, 40 * BLOCK)
    assert get_codec(name).validate(_codes(name, x))


@pytest.mark.parametrize("bits", [0x7F80, 0x7FC0, 0xFF80, 0xBF80, 0x8000, 0x0001, 0x7E00])
def test_validate_refuses_bad_scales(bits: int) -> None:
    codes = _codes("int8", _random(0, 3))
    codes[-2:] = torch.tensor([bits & 255, bits >> 8], dtype=torch.uint8)
    assert not get_codec("int8").validate(codes)


def test_validate_refuses_code_minus_128() -> None:
    codes = _codes("int8", _random(0, 3))
    codes[200] = 128
    assert not get_codec("int8").validate(codes)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
def test_validate_refuses_values_that_are_not_finite(
    name: str, dtype: torch.dtype, bad: float
) -> None:
    codes = _codes(name, _random(0, 3))
    codes.view(dtype)[7] = bad
    assert not get_codec(name).validate(codes)


@pytest.mark.parametrize("name", NAMES)
def test_validate_refuses_wrong_lengths_and_types(name: str) -> None:
    codes = _codes(name, _random(0, 3))
    assert not get_codec(name).validate(codes[:-1])
    assert not get_codec(name).validate(codes.view(torch.int8))
    assert not get_codec(name).validate(torch.stack([codes, codes]))


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(deadline=None, max_examples=20)
def test_a_range_decodes_as_in_the_whole(name: str, data: st.DataObject) -> None:
    blocks = 12
    start = data.draw(st.integers(0, blocks))
    stop = data.draw(st.integers(start, blocks))
    x = _random(9, blocks)
    codes = _codes(name, x)
    out = torch.empty((stop - start) * BLOCK)
    get_codec(name).decode(codes, out, start * BLOCK)
    assert torch.equal(out, _decoded(name, codes, x.numel())[start * BLOCK : stop * BLOCK])


@pytest.mark.parametrize("name", NAMES)
def test_wrong_shapes_are_refused(name: str) -> None:
    codec, x = get_codec(name), _random(0, 2)
    codes = _codes(name, x)
    with pytest.raises(ValueError, match="fp32"):
        codec.encode(x.double(), codes)
    with pytest.raises(ValueError, match="multiple"):
        codec.encode(x[:-1], codes)
    with pytest.raises(ValueError, match="bytes"):
        codec.encode(x, codes[:-1])
    with pytest.raises(ValueError, match="whole blocks"):
        codec.decode(codes, torch.empty(BLOCK), 1)
    with pytest.raises(ValueError, match="whole blocks"):
        codec.decode(codes, torch.empty(2 * BLOCK), BLOCK)


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_codes_as_tensor_reads_any_buffer(wrap: type) -> None:
    codes = _codes("int8", _random(0, 2))
    assert torch.equal(codes_as_tensor(wrap(codes.numpy().tobytes())), codes)
    assert codes_as_tensor(wrap(b"")).numel() == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_cuda_gives_the_bytes_of_the_cpu(name: str) -> None:
    x = _random(4, 4000) * torch.logspace(-30, 20, 4000 * BLOCK)
    codes, codec = _codes(name, x), get_codec(name)
    on_device = torch.empty_like(codes, device="cuda")
    codec.encode(x.cuda(), on_device)
    assert torch.equal(on_device.cpu(), codes)
    decoded = torch.empty(x.numel(), device="cuda")
    codec.decode(on_device, decoded)
    assert torch.equal(decoded.cpu(), _decoded(name, codes, x.numel()))
    assert codec.validate(on_device)
