"""What a peer asks of another's state, on `/loco/state/1`; the codec stands in messages.py.

Also the run spec and blobs, which a joiner needs before it has a state.
"""

from dataclasses import dataclass
from typing import Annotated

from protocol.limits import MAX_CONTROL_PAYLOAD_BYTES, STATE_CHUNK_BYTES
from protocol.state_sample import SEED_BYTES

from .fields import MAX_STATE_BYTES, Binary, Count, Digest, Integer, NonNegative


@dataclass(frozen=True, slots=True)
class GetSpec:
    """Send me the run spec."""


@dataclass(frozen=True, slots=True)
class SpecReply:
    """The spec's canonical bytes follow; signed by the founder (Ed25519)."""

    founder_public_key: Annotated[bytes, Binary(32)]
    signature: Annotated[bytes, Binary(64)]


@dataclass(frozen=True, slots=True)
class GetBlob:
    """Send me the blob (tokenizer, manifest, corpus file) with this digest."""

    digest: Digest


@dataclass(frozen=True, slots=True)
class BlobReply:
    """The blob follows."""

    digest: Digest


@dataclass(frozen=True, slots=True)
class GetState:
    """Describe your state, if it is of this group, and at the nominal step `minimum_step` or later.

    Attributes:
        minimum_step: an older state is refused as `unavailable`.
    """

    group: Digest
    minimum_step: Count


@dataclass(frozen=True, slots=True)
class StateReply:
    """What the sender can serve; the chunks' 32-byte digests follow.

    Attributes:
        step: the nominal step that the sender was at when this state was its present one.
        root: digest of the whole state, which chunks are asked by.
        epoch, position: where the sender's data stands.
        gradient_norm: of the sender's last inner step, before clipping.
    """

    round: Count
    step: Count
    root: Digest
    total_bytes: Annotated[int, Integer(1, MAX_STATE_BYTES)]
    chunk_bytes: Annotated[int, Integer(1, STATE_CHUNK_BYTES)]
    epoch: Count
    position: Count
    tokens: Count
    layout_digest: Digest
    gradient_norm: NonNegative


@dataclass(frozen=True, slots=True)
class GetSample:
    """Send me the weights of this group at the places that follow from the seed."""

    group: Digest
    seed: Annotated[bytes, Binary(SEED_BYTES)]


@dataclass(frozen=True, slots=True)
class SampleReply:
    """The values follow, fp32, in the order of their places (protocol/state_sample.py)."""


@dataclass(frozen=True, slots=True)
class GetChunks:
    """Send me `count` chunks of that state, from `first` on."""

    root: Digest
    first: Count
    count: Annotated[int, Integer(1, MAX_CONTROL_PAYLOAD_BYTES // 32)]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of the state follows."""

    root: Digest
    index: Count
