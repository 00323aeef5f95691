"""What a peer asks of another's content, on `/loco/content/1`; the codec stands in messages.py.

Content is named by digests. The run spec and blobs are whole. A state and a corpus are cut into
parts, under one name each: of a state, that of the list of its parts' digests; of a corpus, that of
its manifest. One who asks for parts holds the list, and so knows what each has to be.
"""

from dataclasses import dataclass
from typing import Annotated

from protocol.content.samples import SEED_BYTES
from protocol.limits import MAX_PARTS_PER_REQUEST, STATE_CHUNK_BYTES

from .fields import MAX_STATE_BYTES, Binary, Count, Digest, Flag, Integer, Many, NonNegative


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
    """What the sender can serve; the parts' 32-byte digests follow.

    Attributes:
        step: the nominal step that the sender was at when this state was its present one.
        root: digest of the whole state, which parts are asked by.
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
    """The values follow, fp32, in the order of their places (protocol/content/samples.py)."""


@dataclass(frozen=True, slots=True)
class GetHoldings:
    """Which pieces of this corpus do you have?

    Attributes:
        corpus: the manifest's digest.
        known: `version` of the newest answer that the asker has; 0 before the first.
    """

    corpus: Digest
    known: Count


@dataclass(frozen=True, slots=True)
class Holdings:
    """Those whose bits follow, the lowest first; none where the asker knows them.

    Attributes:
        version: grows with each change; above 0.
        whole: all of them; no bits follow.
    """

    version: Count
    whole: Annotated[bool, Flag()]


@dataclass(frozen=True, slots=True)
class GetParts:
    """Send me these parts, in this order; a Refusal ends the answer.

    Attributes:
        content: the root of a state, or the digest of a corpus's manifest.
    """

    content: Digest
    parts: Annotated[tuple[int, ...], Many(Integer(0, (1 << 31) - 1), MAX_PARTS_PER_REQUEST)]


@dataclass(frozen=True, slots=True)
class Part:
    """One of them follows."""

    index: Annotated[int, Integer(0, (1 << 31) - 1)]
