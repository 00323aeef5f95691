"""Messages that ask for content, on `/loco/content/2`; the codec stands in messages.py.

Content is named by digests. A state and a corpus are cut into parts, under one name each: of a
state, the digest of the list of its parts' digests; of a corpus, that of its manifest. One who asks
for parts holds the list, and so knows what each has to be.
"""

from typing import Annotated

from msgspec import Meta

from protocol import limits
from protocol.content.samples import SAMPLE_BYTES, SEED_BYTES

from .fields import Count, Digest, Key, Message, NonNegative, Signature

PartIndex = Annotated[int, Meta(ge=0, lt=1 << 31)]


class GetSpec(Message, frozen=True, tag="get_spec"): ...


class SpecReply(Message, frozen=True, tag="spec"):
    """The spec's canonical bytes follow; signed by the founder (Ed25519)."""

    max_payload_bytes = limits.MAX_SPEC_BYTES

    founder_public_key: Key
    signature: Signature


class GetBlob(Message, frozen=True, tag="get_blob"):
    """A blob is a tokenizer, a manifest, or a file of a corpus."""

    digest: Digest


class BlobReply(Message, frozen=True, tag="blob"):
    """The blob follows."""

    max_payload_bytes = limits.MAX_BLOB_BYTES

    digest: Digest


class GetState(Message, frozen=True, tag="get_state"):
    """Describe your state; one before the nominal step `minimum_step` is `unavailable`."""

    group: Digest
    minimum_step: Count


class StateScalars(Message, frozen=True, tag="state"):
    """The place of a state in the run; as an answer, the 32-byte digests of its parts follow.

    Attributes:
        group: digest of the one whose state it is.
        round: of the writer's last outer step; -1 before the first.
        step: the nominal step that the writer was at.
        epoch, position: where the data stands (protocol/schedule/data_plan.py).
        tokens: that the writer has trained.
        gradient_norm: of the part's last inner step, before clipping; 0 before the first.
    """

    max_payload_bytes = limits.MAX_CONTROL_PAYLOAD_BYTES

    group: Digest
    round: Annotated[int, Meta(ge=-1, le=limits.MAX_COUNT)]
    step: Count
    layout_digest: Digest
    epoch: Count
    position: Count
    tokens: Count
    gradient_norm: NonNegative


class GetSample(Message, frozen=True, tag="get_sample"):
    """Send me the weights of this group at the places that follow from the seed."""

    group: Digest
    seed: Annotated[bytes, Meta(min_length=SEED_BYTES, max_length=SEED_BYTES)]


class SampleReply(Message, frozen=True, tag="sample"):
    """The values follow, fp32, in the order of their places (protocol/content/samples.py)."""

    max_payload_bytes = SAMPLE_BYTES


class GetHoldings(Message, frozen=True, tag="get_holdings"):
    """Which pieces of this corpus do you have?

    Attributes:
        known: `version` of the newest answer that the asker has; 0 before the first.
    """

    corpus: Digest
    known: Count


class Holdings(Message, frozen=True, tag="holdings"):
    """The pieces whose bits follow, the lowest first; none where the asker knows them.

    Attributes:
        version: grows with each change; above 0.
        whole: all of them; no bits follow.
    """

    max_payload_bytes = limits.MAX_CONTROL_PAYLOAD_BYTES

    version: Count
    whole: bool


class GetParts(Message, frozen=True, tag="get_parts"):
    """Send me these parts, in this order; a Refusal ends the answer."""

    content: Digest
    parts: Annotated[tuple[PartIndex, ...], Meta(max_length=limits.MAX_PARTS_PER_REQUEST)]


class Part(Message, frozen=True, tag="part"):
    max_payload_bytes = limits.MAX_PIECE_BYTES

    index: PartIndex
