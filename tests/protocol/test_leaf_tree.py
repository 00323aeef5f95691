"""A root over the leaves of a chunk, each of which can be shown by itself."""

import pytest

from protocol.fragment.leaf_tree import (
    LEAST_BLOCKS,
    MOST_BLOCKS,
    blocks_of_leaf,
    is_leaf,
    leaf_digest,
    num_leaves,
    path_of,
    root_of,
)

COUNTS = [1, 2, 3, 4, 5, 7, 8, 13]


def leaves(count: int) -> list[bytes]:
    return [bytes([number]) * 20 for number in range(count)]


@pytest.mark.parametrize("count", COUNTS)
def test_each_leaf_is_shown_with_its_path(count):
    digests = [leaf_digest(leaf) for leaf in leaves(count)]
    root = root_of(digests)
    for index, leaf in enumerate(leaves(count)):
        assert is_leaf(leaf, index, count, path_of(digests, index), root)


@pytest.mark.parametrize("count", COUNTS)
def test_nothing_else_passes_for_a_leaf(count):
    digests = [leaf_digest(leaf) for leaf in leaves(count)]
    root = root_of(digests)
    for index, leaf in enumerate(leaves(count)):
        path = path_of(digests, index)
        assert not is_leaf(leaf + b"x", index, count, path, root)
        assert not is_leaf(leaf, index, count, path + bytes(16), root)
        assert not is_leaf(leaf, index, count, path, bytes(16))
        assert not is_leaf(leaf, count, count, path, root)
        for other in set(range(count)) - {index}:
            assert not is_leaf(leaf, other, count, path_of(digests, other), root)


def test_a_node_is_no_leaf():
    first, second = (leaf_digest(leaf) for leaf in leaves(2))
    assert root_of([first, second]) != leaf_digest(first + second)


@pytest.mark.parametrize(
    ("blocks", "size", "count"),
    [(1, LEAST_BLOCKS, 1), (8, 8, 1), (64, 8, 8), (65, 8, 9), (1024, 16, 64), (9000, 32, 282)],
)
def test_leaves_grow_with_the_chunk_within_bounds(blocks, size, count):
    assert blocks_of_leaf(blocks) == size <= MOST_BLOCKS
    assert num_leaves(blocks) == count
