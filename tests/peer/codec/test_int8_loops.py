"""Compiled loops give the bytes of torch's plain operations, whatever the values."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from peer.codec import BLOCK, compiled, get_codec
from peer.codec.base import LARGEST_MAGNITUDE
from peer.codec.int8 import Int8Codec, split
from peer.codec.int8_compiled import CompiledLoops
from peer.codec.int8_plain import SMALLEST_SCALE, PlainLoops

pytest.importorskip("numba")
pytestmark = pytest.mark.slow  # the first run on a machine compiles for two seconds

seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def loops() -> CompiledLoops:
    kernels = compiled.kernels_of("peer.codec.int8_kernels")
    assert kernels is not None
    return CompiledLoops(kernels)


@pytest.fixture
def long_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "COMPILED_FROM", BLOCK)


def _hard_values(seed: int, blocks: int) -> torch.Tensor:
    """Blocks where rounding could go wrong, each of another kind."""
    rng = np.random.default_rng(seed)
    kinds = [
        lambda: rng.standard_normal(BLOCK) * 10.0 ** rng.uniform(-44, 35),
        lambda: rng.standard_normal(BLOCK) * 10.0 ** rng.uniform(-44, 35, BLOCK),
        lambda: _ties(rng),
        lambda: np.where(rng.random(BLOCK) < 0.5, 0.0, -0.0),
        lambda: np.full(BLOCK, SMALLEST_SCALE * 127 * rng.uniform(0.999, 1.001)),
        lambda: rng.uniform(-1, 1, BLOCK) * LARGEST_MAGNITUDE,
    ]
    drawn = [kinds[rng.integers(len(kinds))]() for _ in range(blocks)]
    return torch.from_numpy(np.concatenate(drawn).astype(np.float32)).clamp(
        -LARGEST_MAGNITUDE, LARGEST_MAGNITUDE
    )


def _ties(rng: np.random.Generator) -> np.ndarray:
    """Values halfway between two codes: m / 127 is a bf16 number here."""
    halves = rng.integers(-253, 254, BLOCK) / 2
    halves[0] = 127
    return halves * 2.0 ** rng.integers(-100, 100)


def _encoded(loops: CompiledLoops | PlainLoops, x: torch.Tensor) -> torch.Tensor:
    codes = torch.empty(Int8Codec().code_bytes(x.numel()), dtype=torch.uint8)
    loops.encode(x, *split(codes))
    return codes


@given(seed=seeds, blocks=st.integers(1, 40))
@settings(deadline=None, max_examples=150)
def test_encodes_to_the_same_bytes(loops: CompiledLoops, seed: int, blocks: int) -> None:
    x = _hard_values(seed, blocks)
    assert torch.equal(_encoded(loops, x), _encoded(PlainLoops(), x))


@pytest.mark.parametrize("ulps", [-1, 0, 1])
def test_the_smallest_scale_is_met_at_the_same_value(loops: CompiledLoops, ulps: int) -> None:
    x = torch.full((BLOCK,), SMALLEST_SCALE * 127)
    x.view(torch.int32).add_(ulps)
    codes = _encoded(loops, x)
    assert torch.equal(codes, _encoded(PlainLoops(), x))
    assert bool(codes.any()) == (ulps >= 0)


@given(seed=seeds)
@settings(deadline=None, max_examples=150)
def test_any_bits_are_coded_alike_or_refused_by_both(loops: CompiledLoops, seed: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 2**32, BLOCK, dtype=np.uint32)
    bits &= np.uint32(0xFBFFFFFF if seed % 2 else 0xFFFFFFFF)  # half of them hold no huge value
    x = torch.from_numpy(bits.view(np.float32))
    assert _codes_or_refusal(loops, x) == _codes_or_refusal(PlainLoops(), x)


@given(bits=st.integers(0, 2**32 - 1), place=st.integers(0, 2 * BLOCK - 1), quiet=st.booleans())
@example(bits=0x7BFFFFFF, place=0, quiet=True)
@example(bits=0x7B800000, place=200, quiet=True)  # the largest magnitude
@example(bits=0x7B800001, place=200, quiet=True)
@example(bits=0xFFC00000, place=255, quiet=True)
@example(bits=0x7F800000, place=128, quiet=False)
@settings(deadline=None, max_examples=100)
def test_one_odd_value_is_judged_alike(
    loops: CompiledLoops, bits: int, place: int, quiet: bool
) -> None:
    x = torch.zeros(2 * BLOCK) if quiet else _hard_values(bits, 2)
    x.view(torch.int32)[place] = int(np.uint32(bits).view(np.int32))
    assert _codes_or_refusal(loops, x) == _codes_or_refusal(PlainLoops(), x)


def _codes_or_refusal(loops: CompiledLoops | PlainLoops, x: torch.Tensor) -> bytes | str:
    try:
        return _encoded(loops, x).numpy().tobytes()
    except ValueError as error:
        return str(error)


@given(seed=seeds, data=st.data())
@settings(deadline=None, max_examples=100)
def test_decodes_ranges_to_the_same_values(
    loops: CompiledLoops, seed: int, data: st.DataObject
) -> None:
    blocks = data.draw(st.integers(1, 20))
    start = data.draw(st.integers(0, blocks - 1))
    out = torch.empty((data.draw(st.integers(start, blocks)) - start) * BLOCK)
    codes = _encoded(PlainLoops(), _hard_values(seed, blocks))
    expected = torch.empty_like(out)
    loops.decode(*split(codes), start * BLOCK, out)
    PlainLoops().decode(*split(codes), start * BLOCK, expected)
    assert torch.equal(out.view(torch.int32), expected.view(torch.int32))


@given(scale=st.integers(0, 2**16 - 1), code=st.integers(-128, 127))
@example(scale=0x7802, code=0)  # the largest scale
@example(scale=0x7803, code=0)
@example(scale=0x0080, code=0)  # the smallest
@example(scale=0x007F, code=0)
@example(scale=0x8000, code=0)
@example(scale=0, code=-128)
@settings(deadline=None, max_examples=200)
def test_judges_codes_and_scales_alike(loops: CompiledLoops, scale: int, code: int) -> None:
    codes = _encoded(PlainLoops(), _hard_values(scale, 3))
    codes.view(torch.int8)[BLOCK + 5] = code
    codes[-4:-2] = torch.tensor([scale & 255, scale >> 8], dtype=torch.uint8)
    assert loops.are_valid(*split(codes)) == PlainLoops().are_valid(*split(codes))


@pytest.mark.parametrize("threads", [1, 3])
def test_chunks_and_threads_change_nothing(
    loops: CompiledLoops, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "CHUNK_BLOCKS", 7)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x = _hard_values(0, 100)
    codes = _encoded(loops, x)
    assert torch.equal(codes, _encoded(PlainLoops(), x))
    out, expected = torch.empty(2, x.numel())
    loops.decode(*split(codes), 0, out)
    PlainLoops().decode(*split(codes), 0, expected)
    assert torch.equal(out, expected)
    codes.view(torch.int8)[60 * BLOCK] = -128
    assert not loops.are_valid(*split(codes))


def test_results_of_chunks_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "CHUNK_BLOCKS", 10)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert compiled.in_chunks(lambda *chunk: chunk, 25) == [(0, 10), (10, 20), (20, 25)]
    assert compiled.in_chunks(lambda *chunk: chunk, 0) == []


def test_what_fails_in_a_thread_fails_for_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "CHUNK_BLOCKS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    with pytest.raises(ZeroDivisionError):
        compiled.in_chunks(lambda first, last: 1 // (first - 5), 8)


@pytest.mark.usefixtures("long_is_short")
def test_the_codec_takes_compiled_loops_for_long_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainLoops, "encode", _must_not_run)
    monkeypatch.setattr(PlainLoops, "decode", _must_not_run)
    x, codec = _hard_values(1, 8), get_codec("int8")
    codes = torch.empty(codec.code_bytes(x.numel()), dtype=torch.uint8)
    codec.encode(x, codes)
    codec.decode(codes, x)
    assert codec.validate(codes)


def _must_not_run(*_: object) -> None:
    raise AssertionError("the wrong loops were taken")


@pytest.mark.usefixtures("long_is_short")
def test_a_payload_that_begins_at_an_odd_byte_takes_the_plain_loops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CompiledLoops, "encode", _must_not_run)
    x = _hard_values(2, 8)
    codes = _encoded(PlainLoops(), x)
    odd = torch.from_numpy(np.empty(codes.numel() + 1, np.uint8)[1:])
    get_codec("int8").encode(x, odd)
    assert odd.data_ptr() % 2
    assert torch.equal(odd, codes)
    assert get_codec("int8").validate(odd)


@pytest.mark.usefixtures("long_is_short")
def test_without_numba_the_plain_loops_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, codec = _hard_values(3, 8), get_codec("int8")
    with_numba, without = torch.empty(2, codec.code_bytes(x.numel()), dtype=torch.uint8)
    codec.encode(x, with_numba)
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "peer.codec.int8_kernels")
    compiled.kernels_of.cache_clear()
    try:
        assert compiled.kernels_of("peer.codec.int8_kernels") is None
        codec.encode(x, without)
    finally:
        compiled.kernels_of.cache_clear()
    assert torch.equal(without, with_numba)


def test_where_nothing_can_be_kept_kernels_are_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import numba

    whole = numba.njit

    def njit(*args: object, **settings: object) -> object:
        if settings.get("cache"):
            raise RuntimeError("no locator available")
        return whole(*args, **settings)

    monkeypatch.setattr(numba, "njit", njit)

    @compiled.kernel("int64(int64)")
    def double(number: int) -> int:
        return 2 * number

    assert double(21) == 42
