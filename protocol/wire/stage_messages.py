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

from dataclasses import dataclass
from typing import Annotated

from protocol.limits import MAX_RELAYS_OF_PATH
from protocol.microbatch.mending import Standing
from protocol.microbatch.trip import Leg

from .fields import (
    Choice,
    Count,
    Digest,
    Flag,
    Integer,
    Iteration,
    MaybeDigest,
    MaybeNonNegative,
    MaybePeerId,
    NonNegative,
    PeerIdText,
    RelayPath,
    RelayStages,
)

Place = Annotated[int, Integer(0, MAX_RELAYS_OF_PATH + 1)]


@dataclass(frozen=True, slots=True)
class Offer:
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
    leg: Annotated[Leg, Choice(Leg)]
    path: RelayPath
    place: Place
    stages: RelayStages
    plan: MaybeDigest
    attempt: Count
    until: Place


@dataclass(frozen=True, slots=True)
class Credit:
    """The boundary may be sent.

    Attributes:
        waited_s: how long the offer waited for it, by the receiver's clock.
    """

    waited_s: NonNegative


@dataclass(frozen=True, slots=True)
class Boundary:
    """The codes follow.

    Attributes:
        loss: of the microbatch, nats per token, where its gradient travels.
    """

    loss: MaybeNonNegative


@dataclass(frozen=True, slots=True)
class Kept:
    """They have come whole, and the receiver answers for them."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """Nothing of the sender's before this iteration is under way."""

    group: Digest
    iteration: Iteration


@dataclass(frozen=True, slots=True)
class Noted:
    """The newest iteration that the sender has heard of."""

    iteration: Iteration


@dataclass(frozen=True, slots=True)
class Lost:
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
    failed: MaybePeerId
    refused: Annotated[bool, Flag()]


@dataclass(frozen=True, slots=True)
class Passed:
    """The gradient that we made of yours has been taken: you need not keep yours."""

    group: Digest
    origin: PeerIdText
    iteration: Iteration
    index: Count
    attempt: Count


@dataclass(frozen=True, slots=True)
class Halt:
    """Do nothing more for this microbatch of ours; where do you stand with it (mending.py)?"""

    group: Digest
    iteration: Iteration
    index: Count
    attempt: Count


@dataclass(frozen=True, slots=True)
class Halted:
    """Where the relay stands."""

    standing: Annotated[Standing, Choice(Standing)]


@dataclass(frozen=True, slots=True)
class Resume:
    """It goes on like this. Fields as in `Trip` and `commands.Resume`."""

    group: Digest
    iteration: Iteration
    index: Count
    path: RelayPath
    place: Place
    stages: RelayStages
    plan: MaybeDigest
    attempt: Count
    until: Place
    returns: Annotated[bool, Flag()]


@dataclass(frozen=True, slots=True)
class GetLinks:
    """What have you measured?"""


@dataclass(frozen=True, slots=True)
class LinksReply:
    """The sender's newest link vector follows (protocol/routing/vectors.py)."""


@dataclass(frozen=True, slots=True)
class GetSnapshot:
    """From which snapshot do you plan?

    Attributes:
        known: digest of the asker's own.
    """

    known: MaybeDigest


@dataclass(frozen=True, slots=True)
class SnapshotReply:
    """The snapshot follows, unless the asker has it (protocol/routing/snapshots.py).

    Attributes:
        digest: of the sender's snapshot; None before the first.
    """

    digest: MaybeDigest
