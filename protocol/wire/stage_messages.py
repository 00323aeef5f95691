"""What peers of a pipeline say to each other on `/loco/stage/1`; the codec stands in messages.py.

    > Offer         < Credit or Refusal       the answer may take a while: it is the credit
    > Boundary + codes    < Kept
    > Announcement  < Noted
    > Lost, Passed  < Noted
    > Halt          < Halted or Refusal       of a data peer, where a relay of a path is gone
    > Resume        < Noted
    > GetLinks      < LinksReply + the peer's link vector, empty before the first
    > GetSnapshot   < SnapshotReply + snapshot, empty where the asker has it

What is meant by them stands in protocol/microbatch, and in protocol/routing for the last two.
"""

from typing import Annotated

from msgspec import Meta

from protocol.limits import (
    MAX_ITERATION,
    MAX_LINK_VECTOR_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_RELAYS_OF_PATH,
    MAX_SNAPSHOT_BYTES,
)
from protocol.microbatch.mending import Standing
from protocol.microbatch.trip import Leg

from .fields import Count, Digest, Message, NonNegative, PeerIdText

Iteration = Annotated[int, Meta(ge=0, le=MAX_ITERATION)]
Place = Annotated[int, Meta(ge=0, le=MAX_RELAYS_OF_PATH + 1)]
RelayPath = Annotated[tuple[PeerIdText, ...], Meta(max_length=MAX_RELAYS_OF_PATH)]
RelayStages = Annotated[
    tuple[Annotated[int, Meta(ge=1, le=MAX_RELAYS_OF_PATH)], ...],
    Meta(max_length=MAX_RELAYS_OF_PATH),
]


class Offer(Message, frozen=True, tag="offer"):
    """May this microbatch come? Fields as in `Trip` and `Microbatch` (trip.py).

    Attributes:
        group: digest of the stage's group that is meant.
        stages: of each relay of the path.
        plan: digest of the plan that the path was taken from; relays only compare it.
    """

    group: Digest
    origin: PeerIdText
    iteration: Iteration
    index: Count
    leg: Leg
    path: RelayPath
    place: Place
    stages: RelayStages
    plan: Digest | None
    attempt: Count
    until: Place


class Credit(Message, frozen=True, tag="credit"):
    """The boundary may be sent.

    Attributes:
        waited_s: how long the offer waited for it, by the receiver's clock.
    """

    waited_s: NonNegative


class Boundary(Message, frozen=True, tag="boundary"):
    """The codes follow.

    Attributes:
        loss: of the microbatch, nats per token, where its gradient travels.
    """

    max_payload_bytes = MAX_PAYLOAD_BYTES

    loss: NonNegative | None


class Kept(Message, frozen=True, tag="kept"):
    """They have come whole, and the receiver answers for them."""


class Announcement(Message, frozen=True, tag="announcement"):
    """Nothing of the sender's before this iteration is under way."""

    group: Digest
    iteration: Iteration


class Noted(Message, frozen=True, tag="noted"):
    """The newest iteration that the sender has heard of."""

    iteration: Iteration


class Lost(Message, frozen=True, tag="lost"):
    """This microbatch will not come again: from a relay to its data peer, or the other way.

    Attributes:
        attempt: the one in which it was lost.
        failed: who could not be sent it, or has sent what cannot be right, if anybody.
        refused: whether it is the latter.
    """

    group: Digest
    iteration: Iteration
    index: Count
    attempt: Count
    failed: PeerIdText | None
    refused: bool


class Passed(Message, frozen=True, tag="passed"):
    """The gradient that we made of yours has been taken: you need not keep yours."""

    group: Digest
    origin: PeerIdText
    iteration: Iteration
    index: Count
    attempt: Count


class Halt(Message, frozen=True, tag="halt"):
    """Do nothing more for this microbatch of ours; where do you stand with it (mending.py)?"""

    group: Digest
    iteration: Iteration
    index: Count
    attempt: Count


class Halted(Message, frozen=True, tag="halted"):
    """Where the relay stands."""

    standing: Standing


class Resume(Message, frozen=True, tag="resume"):
    """It goes on like this. Fields as in `Trip` and `commands.Resume`."""

    group: Digest
    iteration: Iteration
    index: Count
    path: RelayPath
    place: Place
    stages: RelayStages
    plan: Digest | None
    attempt: Count
    until: Place
    returns: bool


class GetLinks(Message, frozen=True, tag="get_links"):
    """What have you measured?"""


class LinksReply(Message, frozen=True, tag="links"):
    """The sender's newest link vector follows (protocol/routing/vectors.py)."""

    max_payload_bytes = MAX_LINK_VECTOR_BYTES


class GetSnapshot(Message, frozen=True, tag="get_snapshot"):
    """From which snapshot do you plan?

    Attributes:
        known: digest of the asker's own.
    """

    known: Digest | None


class SnapshotReply(Message, frozen=True, tag="snapshot"):
    """The snapshot follows, unless the asker has it (protocol/routing/snapshots.py).

    Attributes:
        digest: of the sender's snapshot; None before the first.
    """

    max_payload_bytes = MAX_SNAPSHOT_BYTES

    digest: Digest | None
