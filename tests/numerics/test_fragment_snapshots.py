"""What is sent of a fragment and what comes back, against straight-line code."""

from typing import Any

import blake3
import numpy as np
import numpy.typing as npt
import pytest
from fragment_worlds import Replica, random_replica

from peer.training.ports import NonFinite

FRAGMENTS = (0, 1, 2)


def outer_step(world: Replica, fragment: int, chunks: tuple[int, ...], seed: int = 9) -> None:
    """Write new values to these chunks of phi."""
    random = np.random.default_rng(seed)
    for chunk in chunks:
        before = world.values(world.phi, fragment, chunk)
        move = random.normal(0, 0.1, before.size).astype("f4")
        world.write(world.phi, fragment, chunk, before + move)


def all_chunks(world: Replica, fragment: int) -> tuple[int, ...]:
    return tuple(range(len(world.snapshots.fragments[fragment].chunks)))


def way(world: Replica, fragment: int) -> npt.NDArray[Any]:
    return world.values(world.phi, fragment) - world.values(world.theta, fragment)


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_a_send_is_the_way_from_the_outer_copy(fragment):
    world = random_replica(codec_name="fp32")
    digest = world.snapshots.send(fragment, 7)
    np.testing.assert_array_equal(world.decoded(fragment), way(world, fragment))
    assert digest == blake3.blake3(world.snapshots.codes(fragment)).hexdigest(length=16)
    assert not world.gradient.any()


def test_a_merge_mixes_the_chunks_that_were_stepped_and_leaves_the_others():
    world = random_replica(merge=0.25)
    world.snapshots.send(1, 1)
    before = world.theta.copy()
    outer_step(world, 1, (1,))
    world.snapshots.merge(1, (1,))
    mixed = 0.25 * world.values(before, 1, 1) + 0.75 * world.values(world.phi, 1, 1)
    np.testing.assert_allclose(world.values(world.theta, 1, 1), mixed, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(world.values(world.theta, 1, 0), world.values(before, 1, 0))
    for other in (0, 2):
        np.testing.assert_array_equal(world.values(world.theta, other), world.values(before, other))


@pytest.mark.parametrize(("merge", "source"), [(0.0, "phi"), (1.0, "theta")])
def test_the_ends_of_the_mix_are_exact(merge, source):
    world = random_replica(merge=merge)
    before = world.theta.copy()
    world.snapshots.send(2, 1)
    outer_step(world, 2, all_chunks(world, 2))
    world.snapshots.merge(2, all_chunks(world, 2))
    expected = world.phi if source == "phi" else before
    np.testing.assert_array_equal(world.values(world.theta, 2), world.values(expected, 2))


# Merging A and then moving by (1 - a) (B - A) rounds four times more than merging B: each time by
# at most half a unit in the last place of the largest number that takes part.
ULPS = 4 * np.finfo("f4").eps


@pytest.mark.parametrize("merge", [0.0, 0.3, 0.5])
def test_redoing_gives_what_merging_the_second_result_would_have_given(merge):
    late, direct = random_replica(merge=merge), random_replica(merge=merge)
    chunks = all_chunks(late, 1)
    for world in (late, direct):
        world.snapshots.send(1, 1)
    start = late.phi.copy()
    outer_step(late, 1, chunks, seed=1)
    late.snapshots.merge(1, chunks)
    late.snapshots.hold(1)
    first = late.phi.copy()
    late.phi[:] = start
    outer_step(late, 1, chunks, seed=2)
    late.snapshots.merge(1, redone=chunks)
    outer_step(direct, 1, chunks, seed=2)
    direct.snapshots.merge(1, chunks)
    np.testing.assert_array_equal(late.phi, direct.phi)
    largest = np.max(np.abs([start, first, late.phi, direct.theta]), axis=0)
    assert np.all(np.abs(late.theta - direct.theta) <= ULPS * largest)
    assert np.abs(first - late.phi).max() > 0.1


def test_an_amendment_merges_redoes_and_heals_each_chunk_as_told():
    world = random_replica(merge=0.5)
    world.snapshots.send(0, 1)
    world.snapshots.merge(0, (0,))
    world.snapshots.hold(0)
    theta, held = world.theta.copy(), world.phi.copy()
    outer_step(world, 0, (0, 1))
    world.snapshots.merge(0, (1,), redone=(0,))
    moved = world.values(world.phi - held, 0, 0)
    redone = world.values(theta, 0, 0) + np.float32(0.5) * moved
    np.testing.assert_allclose(world.values(world.theta, 0, 0), redone, atol=1e-6)
    merged = (world.values(theta, 0, 1) + world.values(world.phi, 0, 1)) / 2
    np.testing.assert_allclose(world.values(world.theta, 0, 1), merged, atol=1e-6)


@pytest.mark.parametrize("sent", [True, False])
def test_what_is_moved_keeps_its_way_from_the_outer_copy(sent):
    world = random_replica()
    before = way(world, 1)
    if sent:
        world.snapshots.send(1, 1)
    else:
        world.snapshots.hold(1)
    outer_step(world, 1, (0, 1))
    world.snapshots.merge(1, moved=(0, 1))
    np.testing.assert_allclose(way(world, 1), before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_never_sent(value):
    world = random_replica()
    world.snapshots.send(2, 1)
    start, _ = world.snapshots.fragments[2].chunk_spans(1)[0]
    world.theta[start] = value
    with pytest.raises(NonFinite, match="send 2 of fragment 2"):
        world.snapshots.send(2, 2)
