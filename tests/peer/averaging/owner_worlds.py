"""A small model in fragments, and codes of it."""

import numpy as np
import torch

from peer.averaging.diloco.fragment_messages import NOT_SIGNED, signed_with
from peer.averaging.diloco.nesterov import NesterovFactors
from peer.averaging.diloco.outer_fragments import OuterFragments
from peer.codec import codes_as_tensor, get_codec
from peer.network.identity import Identity
from protocol.diloco.commands import ResultArrived
from protocol.fragment.fragments import cut_fragments
from protocol.run.layout import Layout
from protocol.wire.fragment_messages import (
    ChunkResult,
    Contribution,
    Result,
    ResultRank,
    Stamp,
    mask_of,
)

GROUP = "ab" * 16
IDENTITIES = [Identity(bytes([n]) * 32) for n in (1, 2, 3)]
IDS = [identity.peer_id for identity in IDENTITIES]
FRAGMENT, CYCLE = 0, 7


def outer_copy(codec: str = "fp32", seed: int = 1) -> OuterFragments:
    """One fragment of two chunks."""
    layout = Layout.from_shapes({"weight": (2 * 8192,)})
    phi = np.random.default_rng(seed).standard_normal(layout.padded_parameters, np.float32)
    fragments = cut_fragments(layout, "whole", 1)
    return OuterFragments(
        fragments,
        phi,
        np.zeros_like(phi),
        get_codec(codec),
        NesterovFactors(1.0, 0.0),
        lambda _: False,
    )


def codes_of(outer: OuterFragments, chunk: int, value: float) -> bytes:
    """A chunk that holds this value everywhere."""
    room = memoryview(bytearray(outer.chunk_code_bytes(FRAGMENT, chunk)))
    values = torch.full((outer.chunk_values(FRAGMENT, chunk),), value)
    outer.codec.encode(values, codes_as_tensor(room))
    return bytes(room)


def arrived(cycle: int, base: Stamp, rank: ResultRank, codes: memoryview) -> ResultArrived:
    """A result for a chunk in this state, of so many peers."""
    mask = mask_of(range(rank.weight))
    of_chunk = ChunkResult(base.chunk, base.steps, base.weight, base.digest, mask, rank.digest)
    result = Result(
        GROUP, FRAGMENT, cycle, IDS[0], 1, (), (), (), (of_chunk,), (base.chunk,), bytes(64)
    )
    return ResultArrived(result, of_chunk, codes, IDS[0])


def contribution(
    outer: OuterFragments,
    values: dict[int, float],
    weight: int = 1,
    cycle: int = CYCLE,
    peer: int = 0,
) -> tuple[Contribution, bytes]:
    """To these chunks as they are at the start, signed by this peer, and its codes."""
    codes = b"".join(codes_of(outer, chunk, value) for chunk, value in values.items())
    first = outer.first_stamps()[FRAGMENT]
    stamps = tuple(first[chunk] for chunk in values)
    message = Contribution(GROUP, FRAGMENT, cycle, weight, 1, 1, stamps, (), (), NOT_SIGNED)
    parts = outer.split_codes(FRAGMENT, list(values), memoryview(codes))
    return signed_with(message, parts, outer, IDENTITIES[peer].sign), codes
