"""The distance of two peers' vectors by their codes: of values, and the same by a compiled loop."""

import math

import pytest
import torch

from peer.averaging.gossip import outer_step
from peer.averaging.gossip.outer_step import distances
from peer.codec import (
    BLOCK,
    LARGEST_MAGNITUDE,
    TILE,
    get_codec,
    relative_distance,
    root_mean_square,
)
from peer.codec.compiled import COMPILED_FROM


def coded(name: str, values: torch.Tensor) -> torch.Tensor:
    codec = get_codec(name)
    codes = torch.empty(codec.code_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, codes)
    return codes


def pair(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    ours = torch.randn(size, generator=chance)
    return ours, ours + 0.1 * torch.randn(size, generator=chance)


@pytest.mark.parametrize("name", ["fp32", "int8"])
@pytest.mark.parametrize("size", [128, 128 * 5000])
def test_it_is_that_of_the_values(name, size):
    ours, theirs = pair(size)
    found = distances([coded(name, ours)], [coded(name, theirs)], get_codec(name), size)
    assert found.own == pytest.approx(float(ours.square().mean().sqrt()), rel=0.01)
    assert found.distance == pytest.approx(float((ours - theirs).square().mean().sqrt()), rel=0.02)
    length = root_mean_square(coded(name, ours).numpy(), get_codec(name), size)
    assert length == pytest.approx(found.own, rel=1e-4)


def test_two_vectors_of_one_peer_count_together():
    ours, theirs = pair(256)
    one, other = coded("fp32", ours), coded("fp32", theirs)
    both = distances([one, one], [one, other], get_codec("fp32"), 256)
    alone = distances([one], [other], get_codec("fp32"), 256)
    assert both.distance == pytest.approx(alone.distance / math.sqrt(2))
    assert both.own == pytest.approx(alone.own)


def test_huge_values_are_infinitely_far():
    huge = torch.full((256,), LARGEST_MAGNITUDE)
    codec = get_codec("fp32")
    assert (
        distances([coded("fp32", huge / 1e30)], [coded("fp32", huge)], codec, 256).distance
        == math.inf
    )
    assert root_mean_square(coded("fp32", huge).numpy(), codec, 256) == math.inf


@pytest.mark.parametrize("size", [BLOCK, TILE + BLOCK])
def test_relative_to_their_length_blocks_count_alike(size):
    ours, theirs = pair(size)
    codec = get_codec("fp32")

    def relative(one: torch.Tensor, other: torch.Tensor) -> float:
        return relative_distance(coded("fp32", one), coded("fp32", other), codec, size)

    assert relative(ours, ours) == relative(torch.zeros(size), torch.zeros(size)) == 0.0
    assert relative(ours, theirs) == pytest.approx(0.1, rel=0.2)
    assert relative(ours, -ours) == pytest.approx(2.0)
    assert relative(ours, torch.zeros(size)) == pytest.approx(1.0)
    if size > BLOCK:  # one huge block hides nothing of the others
        huge = ours.clone()
        huge[:BLOCK] *= 1e6
        lie = -huge
        lie[:BLOCK] = huge[:BLOCK]
        assert relative(huge, lie) == pytest.approx(2.0, rel=0.01)


@pytest.mark.slow
def test_the_compiled_loop_finds_the_same(monkeypatch):
    size = max(COMPILED_FROM, 128 * 9000) // 128 * 128
    ours, theirs = pair(size)
    arguments = ([coded("int8", ours)], [coded("int8", theirs)], get_codec("int8"), size)
    assert outer_step._fused_distances(arguments[0][0], arguments[1][0], *arguments[2:]) is not None
    compiled = distances(*arguments)
    monkeypatch.setattr(outer_step, "_fused_distances", lambda *_: None)
    plain = distances(*arguments)
    assert compiled.distance == pytest.approx(plain.distance, rel=1e-4)
    assert compiled.own == pytest.approx(plain.own, rel=1e-4)
