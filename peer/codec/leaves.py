"""Leaves of a chunk's codes, and the digest of all (the tree of protocol/fragment/code_tree.py).

The codes of a leaf are what the codec would have made of its values alone, so they can be decoded
and averaged by themselves.
"""

import numpy as np

from protocol.fragment.code_tree import (
    LEAF_PREFIX,
    blocks_of_leaf,
    digest_of,
    leaf_digest,
    num_leaves,
    root_of,
)

from .base import BLOCK, Codec


def leaves_of_chunk(num_values: int) -> int:
    return num_leaves(num_values // BLOCK)


def values_of_leaf(num_values: int, index: int) -> int:
    """The last leaf may be shorter than others."""
    size = blocks_of_leaf(num_values // BLOCK) * BLOCK
    return min(size, num_values - index * size)


def leaf_of(codec: Codec, codes: memoryview, index: int) -> bytes:
    blocks = len(codes) // sum(codec.planes)
    first, start, parts = index * blocks_of_leaf(blocks), 0, []
    last = min(blocks, first + blocks_of_leaf(blocks))
    for block_bytes in codec.planes:
        parts.append(codes[start + first * block_bytes : start + last * block_bytes])
        start += blocks * block_bytes
    return b"".join(parts)


def leaf_digests(codec: Codec, codes: memoryview) -> list[bytes]:
    blocks = len(codes) // sum(codec.planes)
    each = blocks_of_leaf(blocks)
    rows, start, parts = blocks // each, 0, []
    if not rows:
        return [leaf_digest(leaf_of(codec, codes, 0))]
    flat = np.frombuffer(codes, np.uint8)
    parts.append(np.full((rows, len(LEAF_PREFIX)), LEAF_PREFIX[0], np.uint8))
    for block_bytes in codec.planes:
        parts.append(flat[start : start + rows * each * block_bytes].reshape(rows, -1))
        start += blocks * block_bytes
    whole = np.concatenate(parts, axis=1).reshape(-1).data
    size = len(whole) // rows
    digests = [digest_of(whole[at : at + size]) for at in range(0, len(whole), size)]
    if rows * each < blocks:
        digests.append(leaf_digest(leaf_of(codec, codes, rows)))
    return digests


def code_digest(codec: Codec, codes: memoryview) -> bytes:
    return root_of(leaf_digests(codec, codes))
