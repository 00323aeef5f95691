"""A root over the codes of a chunk: a digest of all, any leaf of which can be shown by itself.

Idea. To check a little of an average one needs a little of all that went into it. So the codes of a
chunk are named by the root of a tree over *leaves*: those of some blocks of values each, in order.
A leaf is shown with the digests beside its way to the root: its *path*.

Rules
  1. Leaf: digest of 0 and the leaf's codes. Node: digest of 1, left and right. An odd node moves up
     unchanged. So no leaf can be made that reads as a node.
  2. A leaf has a MOST_LEAVES-th of the chunk's blocks, but LEAST_BLOCKS to MOST_BLOCKS: it is small
     beside the chunk, and hashing small leaves takes long. The number of leaves follows from the
     length of the chunk, which all know; a path of another length fits none.

Digest: blake3, 16 bytes.
"""

from collections.abc import Sequence
from typing import Final

import blake3

LEAST_BLOCKS: Final = 8
MOST_BLOCKS: Final = 32
MOST_LEAVES: Final = 64
LEAF_PREFIX: Final = b"\0"
_BYTES: Final = 16


def blocks_of_leaf(num_blocks: int) -> int:
    """Blocks of each leaf of a chunk; the last may have fewer (rule 2)."""
    return min(MOST_BLOCKS, max(LEAST_BLOCKS, num_blocks // MOST_LEAVES))


def num_leaves(num_blocks: int) -> int:
    return -(-num_blocks // blocks_of_leaf(num_blocks))


def digest_of(data: bytes | memoryview) -> bytes:
    """A digest of data that has its prefix."""
    return blake3.blake3(data).digest(length=_BYTES)


def leaf_digest(codes: bytes) -> bytes:
    return digest_of(LEAF_PREFIX + codes)


def root_of(leaves: Sequence[bytes]) -> bytes:
    """The root over the digests of all leaves, in order."""
    level = list(leaves)
    while len(level) > 1:
        level = _above(level)
    return level[0]


def path_of(leaves: Sequence[bytes], index: int) -> bytes:
    """The digests beside a leaf's way to the root, from below, joined."""
    path, level = [], list(leaves)
    while len(level) > 1:
        if (beside := index ^ 1) < len(level):
            path.append(level[beside])
        level, index = _above(level), index // 2
    return b"".join(path)


def is_leaf(codes: bytes, index: int, count: int, path: bytes, root: bytes) -> bool:
    """Whether these are the codes of leaf `index` of `count` under a root."""
    if not 0 <= index < count:
        return False
    digest, at = leaf_digest(codes), 0
    while count > 1:
        if (index ^ 1) < count:
            beside, at = path[at : at + _BYTES], at + _BYTES
            digest = _node(beside, digest) if index & 1 else _node(digest, beside)
        index, count = index // 2, (count + 1) // 2
    return at == len(path) and digest == root


def _above(level: Sequence[bytes]) -> list[bytes]:
    pairs = [_node(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
    return [*pairs, level[-1]] if len(level) % 2 else pairs


def _node(left: bytes, right: bytes) -> bytes:
    return digest_of(b"\1" + left + right)
