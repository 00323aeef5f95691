"""A Merkle root over the chunks of a state.

Idea: one root of 32 bytes names a whole state. A joiner asks several peers for the root, fetches
the list of chunk digests from any one of them, checks the list against the root, and then takes
each chunk from whoever has it.

Rules:
    1. Leaf: digest of a chunk's bytes. Node: digest of left || right. An odd node moves up
       unchanged.
    2. Root: digest of (number of chunks as 8 bytes, big-endian) || top node.
    3. Leaf, node and root are derived under three different contexts, so that none can pass for
       another: no chunk can be made that reads as a node, and no list of nodes reads as a shorter
       list of chunks.

Digest: blake3, 32 bytes. Source of the hazards: RFC 6962, section 2.1 (domain separation),
CVE-2012-2459 (duplicated leaves).
"""

from collections.abc import Sequence
from typing import Final

import blake3

DIGEST_BYTES: Final = 32
_LEAF: Final = "loco-peer v1 state chunk"
_NODE: Final = "loco-peer v1 state merkle node"
_ROOT: Final = "loco-peer v1 state merkle root"


def chunk_digest(chunk: bytes | bytearray | memoryview) -> bytes:
    """Leaf digest of one chunk: 32 bytes."""
    return blake3.blake3(chunk, derive_key_context=_LEAF).digest()


def merkle_root(digests: Sequence[bytes]) -> bytes:
    """Root over the chunk digests in order: 32 bytes.

    Raises:
        ValueError: no digest, or one of another length than 32 bytes.
    """
    if not digests or any(len(digest) != DIGEST_BYTES for digest in digests):
        raise ValueError(f"a root needs at least one digest, each of {DIGEST_BYTES} bytes")
    level = list(digests)
    while len(level) > 1:
        level = [_node(level[i : i + 2]) for i in range(0, len(level), 2)]
    return _derive(_ROOT, len(digests).to_bytes(8, "big") + level[0])


def list_matches_root(digests: Sequence[bytes], root: bytes) -> bool:
    """Whether this list of chunk digests, as somebody sent it, is the one that `root` names."""
    well_formed = bool(digests) and all(len(digest) == DIGEST_BYTES for digest in digests)
    return well_formed and merkle_root(digests) == root


def _node(pair: list[bytes]) -> bytes:
    return pair[0] if len(pair) == 1 else _derive(_NODE, pair[0] + pair[1])


def _derive(context: str, data: bytes) -> bytes:
    return blake3.blake3(data, derive_key_context=context).digest()
