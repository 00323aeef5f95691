"""The fused outer step leaves the bits of the plain one."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.averaging.gossip import outer_step
from peer.averaging.gossip import outer_step as noloco
from peer.averaging.gossip.outer_step import NolocoFactors
from peer.codec import BLOCK, compiled, get_codec
from protocol.run import ways as codecs
from protocol.run.ways import CODECS

pytest.importorskip("numba")
pytestmark = pytest.mark.slow  # the first run on a machine compiles for a second


@pytest.fixture(scope="module", autouse=True)
def small_vectors_are_long() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "COMPILED_FROM", BLOCK)
        patch.setattr(compiled, "CHUNK_BLOCKS", 5)
        yield


def _world(seed: int, members: int, blocks: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """phi and delta, stacked, and the codes of each member's theta."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(2 + members, blocks * BLOCK, generator=generator)
    vectors *= 10.0 ** torch.randint(-30, 10, (1, blocks), generator=generator).repeat_interleave(
        BLOCK, 1
    )
    codec = get_codec("int8")
    codes = torch.empty(members, codec.code_bytes(blocks * BLOCK), dtype=torch.uint8)
    for theta, code in zip(vectors[2:], codes, strict=True):
        codec.encode(theta, code)
    return vectors[:2], list(codes)


def _step(
    state: torch.Tensor, codes: list[torch.Tensor], factors: NolocoFactors
) -> tuple[torch.Tensor, float | None]:
    state = state.clone()
    distance = noloco.outer_step(state[0], state[1], codes, get_codec("int8"), factors)
    return state, distance


@pytest.mark.parametrize("members", [1, 2])
@given(
    seed=st.integers(0, 2**32 - 1),
    blocks=st.integers(1, 24),
    alpha=st.floats(0, 1),
    beta=st.floats(0.01, 1.5),
)
@settings(deadline=None, max_examples=100)
def test_phi_and_delta_are_the_same_to_the_last_bit(
    members: int, seed: int, blocks: int, alpha: float, beta: float
) -> None:
    state, codes = _world(seed, members, blocks)
    factors = NolocoFactors(alpha, beta, beta)
    fused, distance = _step(state, codes, factors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noloco, "fused_step", lambda *_: None)
        plain, expected = _step(state, codes, factors)
    assert torch.equal(fused.view(torch.int32), plain.view(torch.int32))
    assert (distance is None) == (members == 1)
    assert (distance or 0) == pytest.approx(expected or 0, rel=1e-5)


@pytest.mark.parametrize("way", ["fused", "plain"])
@pytest.mark.parametrize("members", [1, 2])
def test_without_momentum_delta_is_neither_read_nor_written(
    monkeypatch: pytest.MonkeyPatch, members: int, way: str
) -> None:
    state, codes = _world(2, members, 12)
    state[1] = torch.nan
    if way == "plain":
        monkeypatch.setattr(noloco, "fused_step", lambda *_: None)
    moved, _ = _step(state, codes, NolocoFactors(0.0, 1.0, 1.0))
    assert moved[0].isfinite().all()
    assert moved[1].isnan().all()


def test_a_pair_takes_the_fused_step(monkeypatch: pytest.MonkeyPatch) -> None:
    state, codes = _world(0, 2, 12)
    monkeypatch.setattr(noloco, "_plain_step", None)
    moved, _ = _step(state, codes, NolocoFactors(0.5, 0.7, 0.7))
    assert not torch.equal(moved, state)


def test_the_number_of_threads_changes_no_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    state, codes = _world(1, 2, 64)
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        found.append(_step(state, codes, NolocoFactors(0.5, 0.7, 0.7)))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_a_codec_without_loops_of_its_own_takes_the_plain_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, codes = _world(3, 2, 4)
    with monkeypatch.context() as patch:
        patch.setitem(codecs.CODECS, "int8", replace(CODECS["int8"], fused={}))
        assert outer_step.fused_step(state[0], state[1], codes, get_codec("int8"), 0.5, 0.7) is None
    assert outer_step.fused_step(state[0], state[1], codes, get_codec("int8"), 0.5, 0.7)


@pytest.mark.parametrize("members", [2, 3])
def test_other_groups_and_other_codes_take_the_plain_step(members: int) -> None:
    state, codes = _world(2, members, 4)
    name = "int8" if members == 3 else "fp32"
    if name == "fp32":
        codes = [state[0].clone().view(torch.uint8) for _ in range(2)]
    assert outer_step.fused_step(state[0], state[1], codes, get_codec(name), 0.5, 0.7) is None


def test_a_value_that_is_not_finite_stays_where_it_is() -> None:
    state, codes = _world(1, 2, 3)
    state[0, 1] = float("inf")
    after, _ = _step(state, codes, NolocoFactors(0.0, 1.0, 1.0))
    assert (~torch.isfinite(after[0])).nonzero().tolist() == [[1]]
