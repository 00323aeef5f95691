"""Compiled loops give the bytes of torch's plain operations, whatever the values and the code."""

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from peer.codec import BLOCK, LARGEST_MAGNITUDE, MAIN_MEMORY, compiled, get_codec
from peer.codec.codecs import BlockCodec, CompiledLoops
from protocol.run.ways import CODECS

pytest.importorskip("numba")
pytestmark = pytest.mark.slow  # the first run on a machine compiles for some seconds

seeds = st.integers(0, 2**32 - 1)
KERNELS = ("int4_kernels", "int8_kernels")


@dataclass(frozen=True)
class Ways:
    """One code, both ways."""

    codec: BlockCodec
    plain: BlockCodec
    loops: CompiledLoops


@pytest.fixture(
    scope="module",
    params=[codec for codec in map(get_codec, CODECS) if isinstance(codec, BlockCodec)],
    ids=lambda codec: codec.name,
)
def ways(request: pytest.FixtureRequest) -> Ways:
    codec = request.param
    kernels = compiled.kernels_of(codec.kernels_module)
    assert kernels is not None
    return Ways(codec, codec, CompiledLoops(kernels))


@pytest.fixture
def long_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "COMPILED_FROM", BLOCK)


def _hard_values(codec: BlockCodec, seed: int, blocks: int) -> torch.Tensor:
    """Blocks where rounding could go wrong, each of another kind."""
    rng = np.random.default_rng(seed)
    smallest = codec.smallest_scale * codec.largest_level
    kinds = [
        lambda: rng.standard_normal(BLOCK) * 10.0 ** rng.uniform(-44, 35),
        lambda: rng.standard_normal(BLOCK) * 10.0 ** rng.uniform(-44, 35, BLOCK),
        lambda: _ties(codec.largest_level, rng),
        lambda: _powers(rng),
        lambda: np.where(rng.random(BLOCK) < 0.5, 0.0, -0.0),
        lambda: np.full(BLOCK, smallest * rng.uniform(0.999, 1.001)),
        lambda: rng.uniform(-1, 1, BLOCK) * LARGEST_MAGNITUDE,
    ]
    drawn = [kinds[rng.integers(len(kinds))]() for _ in range(blocks)]
    return torch.from_numpy(np.concatenate(drawn).astype(np.float32)).clamp(
        -LARGEST_MAGNITUDE, LARGEST_MAGNITUDE
    )


def _ties(largest: float, rng: np.random.Generator) -> npt.NDArray[Any]:
    """Values halfway between two codes: the scale is a bf16 number here."""
    halves = rng.integers(-2 * int(largest), 2 * int(largest) + 1, BLOCK) / 2
    halves[0] = largest
    return halves * 2.0 ** rng.integers(-100, 100)


def _powers(rng: np.random.Generator) -> npt.NDArray[Any]:
    """Powers of two and what lies midway between them, and one step beside."""
    steps = rng.integers(-1, 2, BLOCK).astype(np.int32)
    powers = rng.choice([1.0, -1.0, 1.5, -1.5], BLOCK) * 2.0 ** rng.integers(-9, 1, BLOCK)
    return (powers.astype(np.float32).view(np.int32) + steps).view(np.float32)


def _encoded(codec: BlockCodec, loops: BlockCodec | CompiledLoops, x: torch.Tensor) -> torch.Tensor:
    codes = torch.empty(codec.code_bytes(x.numel()), dtype=torch.uint8)
    loops.encode_blocks(x, *codec.split(codes))
    return codes


@given(seed=seeds, blocks=st.integers(1, 40))
@settings(deadline=None, max_examples=150)
def test_encodes_to_the_same_bytes(ways: Ways, seed: int, blocks: int) -> None:
    x = _hard_values(ways.codec, seed, blocks)
    assert torch.equal(_encoded(ways.codec, ways.loops, x), _encoded(ways.codec, ways.plain, x))


@pytest.mark.parametrize("ulps", [-1, 0, 1])
def test_the_smallest_scale_is_met_at_the_same_value(ways: Ways, ulps: int) -> None:
    x = torch.full((BLOCK,), ways.codec.smallest_scale * ways.codec.largest_level)
    x.view(torch.int32).add_(ulps)
    codes = _encoded(ways.codec, ways.loops, x)
    assert torch.equal(codes, _encoded(ways.codec, ways.plain, x))
    assert bool(codes.any()) == (ulps >= 0)


@given(seed=seeds)
@settings(deadline=None, max_examples=150)
def test_any_bits_are_coded_alike_or_refused_by_both(ways: Ways, seed: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 2**32, BLOCK, dtype=np.uint32)
    bits &= np.uint32(0xFBFFFFFF if seed % 2 else 0xFFFFFFFF)  # half of them hold no huge value
    x = torch.from_numpy(bits.view(np.float32))
    assert _codes_or_refusal(ways.codec, ways.loops, x) == _codes_or_refusal(
        ways.codec, ways.plain, x
    )


@given(bits=st.integers(0, 2**32 - 1), place=st.integers(0, 2 * BLOCK - 1), quiet=st.booleans())
@example(bits=0x7BFFFFFF, place=0, quiet=True)
@example(bits=0x7B800000, place=200, quiet=True)  # the largest magnitude
@example(bits=0x7B800001, place=200, quiet=True)
@example(bits=0xFFC00000, place=255, quiet=True)
@example(bits=0x7F800000, place=128, quiet=False)
@settings(deadline=None, max_examples=100)
def test_one_odd_value_is_judged_alike(ways: Ways, bits: int, place: int, quiet: bool) -> None:
    x = torch.zeros(2 * BLOCK) if quiet else _hard_values(ways.codec, bits, 2)
    x.view(torch.int32)[place] = int(np.uint32(bits).view(np.int32))
    assert _codes_or_refusal(ways.codec, ways.loops, x) == _codes_or_refusal(
        ways.codec, ways.plain, x
    )


def _codes_or_refusal(
    codec: BlockCodec, loops: BlockCodec | CompiledLoops, x: torch.Tensor
) -> bytes | str:
    try:
        return _encoded(codec, loops, x).numpy().tobytes()
    except ValueError as error:
        return str(error)


@given(seed=seeds, data=st.data())
@settings(deadline=None, max_examples=100)
def test_decodes_ranges_to_the_same_values(ways: Ways, seed: int, data: st.DataObject) -> None:
    blocks = data.draw(st.integers(1, 20))
    start = data.draw(st.integers(0, blocks - 1))
    out = torch.empty((data.draw(st.integers(start, blocks)) - start) * BLOCK)
    codes = _encoded(ways.codec, ways.plain, _hard_values(ways.codec, seed, blocks))
    expected = torch.empty_like(out)
    ways.loops.decode_blocks(*ways.codec.split(codes), start * BLOCK, out)
    ways.plain.decode_blocks(*ways.codec.split(codes), start * BLOCK, expected)
    assert torch.equal(out.view(torch.int32), expected.view(torch.int32))


@given(scale=st.integers(0, 2**16 - 1), code=st.integers(0, 255))
@example(scale=0x8000, code=0)
@example(scale=0, code=0x80)
@example(scale=0, code=0x08)
@example(scale=0, code=0x88)
@settings(deadline=None, max_examples=200)
def test_judges_codes_and_scales_alike(ways: Ways, scale: int, code: int) -> None:
    codes = _encoded(ways.codec, ways.plain, _hard_values(ways.codec, scale, 3))
    codes[ways.codec.block_bytes + 5] = code
    codes[-4:-2] = torch.tensor([scale & 255, scale >> 8], dtype=torch.uint8)
    assert ways.loops.are_blocks_valid(*ways.codec.split(codes)) == ways.plain.are_blocks_valid(
        *ways.codec.split(codes)
    )


@pytest.mark.parametrize("beside", [-1, 0, 1])
@pytest.mark.parametrize("bound", ["smallest_scale", "largest_scale"])
def test_the_bounds_of_scales_are_the_same(ways: Ways, bound: str, beside: int) -> None:
    codes = torch.zeros(ways.codec.code_bytes(BLOCK), dtype=torch.uint8)
    number = np.float32(getattr(ways.codec, bound))
    bits = int(number.view(np.uint32) >> 16) + beside
    codes[-2:] = torch.tensor([bits & 255, bits >> 8], dtype=torch.uint8)
    expected = beside >= 0 if bound == "smallest_scale" else beside <= 0
    assert ways.loops.are_blocks_valid(*ways.codec.split(codes)) == expected
    assert ways.plain.are_blocks_valid(*ways.codec.split(codes)) == expected


@pytest.mark.parametrize("threads", [1, 3])
def test_chunks_and_threads_change_nothing(
    ways: Ways, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "CHUNK_BLOCKS", 7)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x = _hard_values(ways.codec, 0, 100)
    codes = _encoded(ways.codec, ways.loops, x)
    assert torch.equal(codes, _encoded(ways.codec, ways.plain, x))
    out, expected = torch.empty(2, x.numel())
    ways.loops.decode_blocks(*ways.codec.split(codes), 0, out)
    ways.plain.decode_blocks(*ways.codec.split(codes), 0, expected)
    assert torch.equal(out, expected)
    codes[60 * ways.codec.block_bytes] = 0x80
    assert not ways.loops.are_blocks_valid(*ways.codec.split(codes))


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
def test_the_codec_takes_compiled_loops_for_long_vectors(
    ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockCodec, "encode_blocks", _must_not_run)
    monkeypatch.setattr(BlockCodec, "decode_blocks", _must_not_run)
    x, codec = _hard_values(ways.codec, 1, 8), get_codec(ways.codec.name)
    codes = torch.empty(codec.code_bytes(x.numel()), dtype=torch.uint8)
    codec.encode(x, codes)
    codec.decode(codes, x)
    assert codec.validate(codes)


def _must_not_run(*_: object) -> None:
    raise AssertionError("the wrong loops were taken")


@pytest.mark.usefixtures("long_is_short")
def test_a_payload_that_begins_at_an_odd_byte_takes_the_plain_loops(
    ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompiledLoops, "encode_blocks", _must_not_run)
    x = _hard_values(ways.codec, 2, 8)
    codes = _encoded(ways.codec, ways.plain, x)
    odd = torch.from_numpy(np.empty(codes.numel() + 1, np.uint8)[1:])
    get_codec(ways.codec.name).encode(x, odd)
    assert odd.data_ptr() % 2
    assert torch.equal(odd, codes)
    assert get_codec(ways.codec.name).validate(odd)


@pytest.mark.usefixtures("long_is_short")
def test_without_numba_the_plain_loops_give_the_same(
    ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, codec = _hard_values(ways.codec, 3, 8), get_codec(ways.codec.name)
    with_numba, without = torch.empty(2, codec.code_bytes(x.numel()), dtype=torch.uint8)
    codec.encode(x, with_numba)
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in KERNELS:
        monkeypatch.delitem(sys.modules, f"peer.codec.{name}", raising=False)
    compiled.kernels_of.cache_clear()
    try:
        assert isinstance(codec, BlockCodec)
        assert compiled.kernels_of(codec.kernels_module) is None
        said = codec.loops_for(x.numel(), MAIN_MEMORY)
        assert said.startswith("plain: ModuleNotFoundError: import of numba halted")
        assert "\n" not in said
        codec.encode(x, without)
    finally:
        compiled.kernels_of.cache_clear()
    assert torch.equal(without, with_numba)


def test_it_says_which_loops_run(ways: Ways) -> None:
    long, short = compiled.COMPILED_FROM, compiled.COMPILED_FROM - BLOCK
    name = ways.codec.name
    assert get_codec(name).loops_for(long, MAIN_MEMORY) == "compiled"
    assert get_codec(name).loops_for(short, MAIN_MEMORY) == "plain"
    assert get_codec(name, part_of=long).loops_for(short, MAIN_MEMORY) == "compiled"
    for num_values, kind in ((long, CompiledLoops), (short, type(ways.plain))):
        x = torch.zeros(num_values)
        codes = torch.empty(ways.codec.code_bytes(num_values), dtype=torch.uint8)
        assert type(ways.codec._loops(ways.codec.split(codes)[1], x)) is kind
    assert get_codec("bf16").loops_for(long, MAIN_MEMORY) == "plain"


def test_a_codec_that_has_gone_over_many_short_vectors_gets_compiled_loops(
    ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "COMPILED_AFTER", 3 * BLOCK)
    codec, x = get_codec(ways.codec.name), torch.linspace(-1, 1, BLOCK)
    assert isinstance(codec, BlockCodec)
    codes = torch.empty(codec.code_bytes(BLOCK), dtype=torch.uint8)
    kinds, coded = [], []
    for _ in range(4):
        kinds.append(codec.loops_for(BLOCK, MAIN_MEMORY))
        codec.encode(x, codes)
        coded.append(bytes(codes.numpy()))
    assert kinds == ["plain", "plain", "plain", "compiled"]
    assert len(set(coded)) == 1


def test_a_codec_counts_what_it_has_gone_over_and_not_the_vector_that_this_is_of(
    ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "COMPILED_AFTER", 3 * BLOCK)
    codec, x = get_codec(ways.codec.name), torch.linspace(-1, 1, 8 * BLOCK)
    codes = _encoded(ways.codec, ways.plain, x)
    kinds = []
    for start in range(0, 4 * BLOCK, BLOCK):
        kinds.append(codec.loops_for(BLOCK, MAIN_MEMORY))
        codec.decode(codes, x[:BLOCK], start)
    assert kinds == ["plain", "plain", "plain", "compiled"]


def test_where_nothing_can_be_kept_kernels_are_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import numba

    whole = numba.njit

    def njit(*args: Any, **settings: Any) -> object:
        if settings.get("cache"):
            raise RuntimeError("no locator available")
        return whole(*args, **settings)

    monkeypatch.setattr(numba, "njit", njit)

    @compiled.kernel("int64(int64)")
    def double(number: int) -> int:
        return 2 * number

    assert double(21) == 42
