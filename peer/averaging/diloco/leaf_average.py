"""The average of one leaf, worked out again: the same arithmetic as the owner's, bit for bit.

All is blocking work, for any thread. The codec is one's own: it holds scratch memory.
"""

from collections.abc import Sequence

import torch

from peer.codec import Codec, codes_as_tensor
from peer.codec.leaves import leaf_digests, leaf_of, leaves_of_chunk, values_of_leaf
from protocol.diloco.evidence import Checked, Evidence, Input, Leaf, check_opening, pack_opening
from protocol.errors import RemoteProtocolError
from protocol.fragment.code_tree import path_of
from protocol.outcomes import AuditOutcome
from protocol.wire.fragment_messages import Contribution

from . import nesterov


def leaf_average(codec: Codec, num_values: int, checked: Checked, *, trims: bool) -> bytes | None:
    """The codes of a leaf of so many values; None if what went in has no average that codes take.

    Args:
        trims: whether owners take the trimmed mean.

    Raises:
        RemoteProtocolError: codes that are malformed: no owner may take them.
    """
    tensors = [codes_as_tensor(memoryview(bytearray(codes))) for codes in checked.codes]
    size = codec.code_bytes(num_values)
    if any(len(codes) != size or not codec.validate(codes) for codes in tensors):
        raise RemoteProtocolError("a contribution whose codes are malformed")
    out = torch.empty(size, dtype=torch.uint8)
    parts = zip(tensors, checked.weights, checked.shares, strict=True)
    weighted = [nesterov.WeightedCodes(*each) for each in parts]
    try:
        nesterov.average_codes(weighted, codec, num_values, out, trims=trims)
    except ValueError:
        return None
    return out.numpy().tobytes()


def opening_of(
    codec: Codec, index: int, inputs: Sequence[tuple[Contribution, memoryview]]
) -> bytes:
    """What an owner answers: this leaf of each contribution to a chunk, given with its codes."""
    return pack_opening(
        [
            Input(message, leaf_of(codec, codes, index), path_of(leaf_digests(codec, codes), index))
            for message, codes in inputs
        ]
    )


def audit(
    codec: Codec,
    num_values: int,
    leaf: Leaf,
    codes: memoryview,
    opening: bytes,
    *,
    trims: bool,
) -> tuple[AuditOutcome, bytes]:
    """What comes of an audit, and what proves it if it is a lie.

    Args:
        num_values: of the chunk.
        codes: of the result that is here, which are those that its owner has signed.
        trims: whether owners take the trimmed mean.
    """
    ours, size = leaf_of(codec, codes, leaf.index), values_of_leaf(num_values, leaf.index)
    try:
        average = leaf_average(codec, size, check_opening(leaf, opening), trims=trims)
    except RemoteProtocolError:
        return AuditOutcome.UNOPENED, b""
    if average == ours:
        return AuditOutcome.TRUE, b""
    path = path_of(leaf_digests(codec, codes), leaf.index)
    found = Evidence(leaf.result, leaf.chunk, leaf.index, ours, path, opening)
    return AuditOutcome.LIE, found.packed()


def check_evidence(codec: Codec, num_values: int, found: Evidence, *, trims: bool) -> None:
    """Raises RemoteProtocolError: this does not show that the owner has lied."""
    checked = found.checked(leaves_of_chunk(num_values))
    size = values_of_leaf(num_values, found.index)
    if leaf_average(codec, size, checked, trims=trims) == found.codes:
        raise RemoteProtocolError("evidence against an owner whose average follows")
