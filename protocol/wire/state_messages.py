"""What a peer asks of another's state, on `/loco/state/1`; the codec stands in messages.py.

Also the run spec and blobs, which a joiner needs before it has a state.
"""

from typing import Annotated

from msgspec import Meta

from protocol.limits import (
    MAX_BLOB_BYTES,
    MAX_CONTROL_PAYLOAD_BYTES,
    MAX_PARAMETERS,
    MAX_SPEC_BYTES,
    STATE_CHUNK_BYTES,
)
from protocol.state_sample import SAMPLE_BYTES, SEED_BYTES

from .fields import Count, Digest, Key, Message, NonNegative, Signature


class GetSpec(Message, frozen=True, tag="get_spec"):
    """Send me the run spec."""


class SpecReply(Message, frozen=True, tag="spec"):
    """The spec's canonical bytes follow; signed by the founder (Ed25519)."""

    max_payload_bytes = MAX_SPEC_BYTES

    founder_public_key: Key
    signature: Signature


class GetBlob(Message, frozen=True, tag="get_blob"):
    """Send me the blob (tokenizer, manifest, corpus file) with this digest."""

    digest: Digest


class BlobReply(Message, frozen=True, tag="blob"):
    """The blob follows."""

    max_payload_bytes = MAX_BLOB_BYTES

    digest: Digest


class GetState(Message, frozen=True, tag="get_state"):
    """Describe your state, if it is of this group, and at the nominal step `minimum_step` or later.

    Attributes:
        minimum_step: an older state is refused as `unavailable`.
    """

    group: Digest
    minimum_step: Count


class StateReply(Message, frozen=True, tag="state"):
    """What the sender can serve; the chunks' 32-byte digests follow.

    Attributes:
        step: the nominal step that the sender was at when this state was its present one.
        root: digest of the whole state, which chunks are asked by.
        epoch, position: where the sender's data stands.
        gradient_norm: of the sender's last inner step, before clipping.
    """

    max_payload_bytes = MAX_CONTROL_PAYLOAD_BYTES

    round: Count
    step: Count
    root: Digest
    total_bytes: Annotated[int, Meta(ge=1, le=8 * MAX_PARAMETERS)]
    chunk_bytes: Annotated[int, Meta(ge=1, le=STATE_CHUNK_BYTES)]
    epoch: Count
    position: Count
    tokens: Count
    layout_digest: Digest
    gradient_norm: NonNegative


class GetSample(Message, frozen=True, tag="get_sample"):
    """Send me the weights of this group at the places that follow from the seed."""

    group: Digest
    seed: Annotated[bytes, Meta(min_length=SEED_BYTES, max_length=SEED_BYTES)]


class SampleReply(Message, frozen=True, tag="sample"):
    """The values follow, fp32, in the order of their places (protocol/state_sample.py)."""

    max_payload_bytes = SAMPLE_BYTES


class GetChunks(Message, frozen=True, tag="get_chunks"):
    """Send me `count` chunks of that state, from `first` on."""

    root: Digest
    first: Count
    count: Annotated[int, Meta(ge=1, le=MAX_CONTROL_PAYLOAD_BYTES // 32)]


class Chunk(Message, frozen=True, tag="chunk"):
    """One chunk of the state follows."""

    max_payload_bytes = STATE_CHUNK_BYTES

    root: Digest
    index: Count
