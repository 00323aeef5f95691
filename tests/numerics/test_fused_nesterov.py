"""The fused step and sum of fragments leave the bits of the plain ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.averaging.diloco import nesterov
from peer.averaging.diloco.nesterov import (
    ChunkValues,
    NesterovFactors,
    WeightedCodes,
    average_codes,
    step_pieces,
)
from peer.codec import BLOCK, TILE, compiled, get_codec

pytest.importorskip("numba")
pytestmark = pytest.mark.slow  # the first run on a machine compiles for a second

PART_OF = compiled.COMPILED_FROM
"""Values of a whole vector for whose parts compiled loops are worth it."""


def _vectors(seed: int, count: int, blocks: int) -> torch.Tensor:
    """Vectors of all magnitudes, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(count, blocks * BLOCK, generator=generator)
    exponents = torch.randint(-30, 10, (count, blocks), generator=generator)
    vectors *= (10.0**exponents).repeat_interleave(BLOCK, 1)
    return vectors * (torch.rand(vectors.shape, generator=generator) > 0.1)


def _codes(vectors: torch.Tensor) -> list[torch.Tensor]:
    codec = get_codec("int8")
    coded = []
    for vector in vectors:
        codes = torch.empty(codec.code_bytes(len(vector)), dtype=torch.uint8)
        codec.encode(vector, codes)
        coded.append(codes)
    return coded


def _stepped(phi_v: torch.Tensor, codes: torch.Tensor, part_of: int) -> torch.Tensor:
    before, after = phi_v.clone(), torch.empty_like(phi_v)
    factors = NesterovFactors(0.4, 0.9)
    codec = get_codec("int8", part_of=part_of)
    step_pieces([(ChunkValues(*before), ChunkValues(*after))], codes, codec, factors)
    step_pieces([(ChunkValues(*before), ChunkValues(*before))], codes, codec, factors)
    assert torch.equal(before.view(torch.int32), after.view(torch.int32))
    return after


def _averaged(all_codes: list[torch.Tensor], shares: list[float], part_of: int) -> torch.Tensor:
    codec, out = get_codec("int8", part_of=part_of), torch.empty_like(all_codes[0])
    contributions = [WeightedCodes(*each) for each in zip(all_codes, shares, strict=True)]
    num_values = len(out) // codec.code_bytes(BLOCK) * BLOCK
    average_codes(contributions, codec, num_values, out)
    return out


@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 24))
@settings(deadline=None, max_examples=100)
def test_phi_and_v_are_the_same_to_the_last_bit(seed: int, blocks: int) -> None:
    phi, v, u = _vectors(seed, 3, blocks)
    (codes,) = _codes(u[None])
    state = torch.stack([phi, v])
    fused, plain = (_stepped(state, codes, part_of) for part_of in (PART_OF, 0))
    assert torch.equal(fused.view(torch.int32), plain.view(torch.int32))


@pytest.mark.parametrize("part_of", [PART_OF, 0])
def test_a_chunk_in_pieces_is_stepped_where_it_lies_and_what_it_was_is_kept(part_of: int) -> None:
    phi, v, u = _vectors(3, 3, 9)
    (codes,) = _codes(u[None])
    state, factors = torch.stack([phi, v]), NesterovFactors(0.4, 0.9)
    codec = get_codec("int8", part_of=part_of)
    after, before = state.clone(), torch.zeros_like(state)
    cuts = [slice(0, 4 * BLOCK), slice(4 * BLOCK, 5 * BLOCK), slice(5 * BLOCK, 9 * BLOCK)]
    pieces = [(ChunkValues(*before[:, cut]), ChunkValues(*after[:, cut])) for cut in cuts]
    step_pieces(pieces, codes, codec, factors, keep=True)
    assert torch.equal(before, state)
    whole = _stepped(state, codes, 0)
    assert torch.equal(after.view(torch.int32), whole.view(torch.int32))
    after.zero_()
    step_pieces(pieces, codes, codec, factors)
    assert torch.equal(before, state)
    assert torch.equal(after.view(torch.int32), whole.view(torch.int32))


@given(
    seed=st.integers(0, 2**32 - 1),
    blocks=st.integers(1, 24),
    shares=st.lists(st.floats(0, 1), min_size=2, max_size=5),
)
@settings(deadline=None, max_examples=100)
def test_the_average_is_the_same_to_the_last_bit(
    seed: int, blocks: int, shares: list[float]
) -> None:
    codes = _codes(_vectors(seed, len(shares), blocks))
    assert torch.equal(_averaged(codes, shares, PART_OF), _averaged(codes, shares, 0))


def test_an_average_of_several_tiles_is_the_same() -> None:
    codes = _codes(_vectors(0, 3, 2 * TILE // BLOCK + 3))
    assert torch.equal(_averaged(codes, [1, 0.5, 0.3], PART_OF), _averaged(codes, [1, 0.5, 0.3], 0))


def test_parts_of_a_long_vector_take_the_compiled_way(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    monkeypatch.setattr(nesterov, "fused_step", _noting(taken, nesterov.fused_step))
    monkeypatch.setattr(nesterov, "fused_add", _noting(taken, nesterov.fused_add))
    phi, v, *u = _vectors(0, 4, 3)
    codes = _codes(torch.stack(u))
    for part_of in (PART_OF, 0):
        _stepped(torch.stack([phi, v]), codes[0], part_of)
        _averaged(codes, [1, 1], part_of)
    assert taken == [True] * 4 + [False] * 4


@pytest.mark.parametrize("name", ["int8", "int4", "fp32", "bf16"])
def test_loops_can_be_loaded_before_they_are_needed(name: str) -> None:
    nesterov.load_loops(get_codec(name, part_of=PART_OF))


def _noting(taken: list[bool], function):
    def noting(*args: object, **options: bool) -> bool:
        taken.append(function(*args, **options))
        return taken[-1]

    return noting
