"""Leaves of a chunk's codes, and the digest of all (the tree of protocol/fragment/code_tree.py).

The codes of a leaf are what the codec would have made of its values alone, so they can be decoded
and averaged by themselves.
"""

from collections.abc import Iterable

from protocol.fragment.code_tree import blocks_of_leaf, leaf_digest, num_leaves, root_of

from . import BLOCK, Codec


def leaves_of_chunk(num_values: int) -> int:
    return num_leaves(num_values // BLOCK)


def values_of_leaf(num_values: int, index: int) -> int:
    """The last leaf may be shorter than others."""
    size = blocks_of_leaf(num_values // BLOCK) * BLOCK
    return min(size, num_values - index * size)


def _leaves(codec: Codec, codes: memoryview, wanted: Iterable[int]) -> list[bytes]:
    blocks, start, planes = len(codes) // sum(codec.planes), 0, []
    for block_bytes in codec.planes:
        stop = start + blocks * block_bytes
        planes.append((codes[start:stop], blocks_of_leaf(blocks) * block_bytes))
        start = stop
    return [b"".join([plane[i * n : (i + 1) * n] for plane, n in planes]) for i in wanted]


def leaf_of(codec: Codec, codes: memoryview, index: int) -> bytes:
    (leaf,) = _leaves(codec, codes, (index,))
    return leaf


def leaf_digests(codec: Codec, codes: memoryview) -> list[bytes]:
    count = leaves_of_chunk(codec.num_values(len(codes)))
    return [leaf_digest(leaf) for leaf in _leaves(codec, codes, range(count))]


def code_digest(codec: Codec, codes: memoryview) -> bytes:
    return root_of(leaf_digests(codec, codes))
