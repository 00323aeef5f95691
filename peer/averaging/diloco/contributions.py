"""Our own contributions: an owner's part of the codes, copied, with what we sign of it."""

from dataclasses import replace

from peer.codec import Codec, codes_as_tensor
from peer.codec.leaves import code_digest
from peer.codec.length import root_mean_square
from protocol.diloco.fragment_events import Contribute, Parts
from protocol.membership.records import Sign
from protocol.plausible import told_length
from protocol.wire.fragment_messages import Contribution, signed_contribution

from .outer_fragments import OuterFragments

NOT_SIGNED = bytes(64)


def length_of(codec: Codec, codes: memoryview, num_values: int) -> float:
    """The length of a contribution to a chunk, as it tells it; codes are valid ones."""
    return told_length(root_mean_square(codes_as_tensor(codes), codec, num_values))


def contribution_of(
    order: Contribute, group: str, outer: OuterFragments, sign: Sign
) -> tuple[Contribution, memoryview, Parts]:
    """What an owner, perhaps we, is sent: with its codes, all together and by chunk.

    Blocking work.
    """
    sent, chunks = order.sent, [stamp.chunk for stamp in order.stamps]
    fragment = sent.fragment
    parts = outer.split_codes(fragment, range(len(outer.fragments[fragment].chunks)), sent.codes)
    codes = outer.spare.take(sum(len(parts[chunk]) for chunk in chunks))
    own = outer.split_codes(fragment, chunks, codes)
    for chunk, part in own.items():
        part[:] = parts[chunk]
    unsigned = Contribution(
        group=group,
        fragment=fragment,
        cycle=sent.cycle,
        weight=order.weight,
        steps=sent.steps,
        tokens=sent.tokens,
        stamps=order.stamps,
        digests=(),
        lengths=(),
        signature=NOT_SIGNED,
    )
    return signed_with(unsigned, own, outer, sign), codes, own


def signed_with(
    unsigned: Contribution, parts: Parts, outer: OuterFragments, sign: Sign
) -> Contribution:
    """A contribution with what its sender says and signs of its codes."""
    codec, chunks = outer.codec, [stamp.chunk for stamp in unsigned.stamps]
    sizes = [outer.chunk_values(unsigned.fragment, chunk) for chunk in chunks]
    told = replace(
        unsigned,
        digests=tuple(code_digest(codec, parts[chunk]) for chunk in chunks),
        lengths=tuple(
            length_of(codec, parts[chunk], size) for chunk, size in zip(chunks, sizes, strict=True)
        ),
    )
    return signed_contribution(told, sign)
