"""Messages between peers of a pipeline, on `/loco/stage/3`, and the things that they name.

Their meaning stands in protocol/microbatch, and in protocol/routing for links and snapshots; the
dialogues and the codec stand in messages.py.

A microbatch starts at its data peer, which holds stage 0, visits relays, comes back for the loss,
and its gradient walks the same way back:

    place      0            1 .. n         n + 1
    peer       data peer    relays         the same data peer, for head and loss
    forward    -------------------------->
    backward   <--------------------------

A *hop* takes a microbatch to a place: with each, its activations (or their gradient) go from one
peer to the next. A `score` is a forward that no gradient follows.

A *path* is the relays in the order of the forward, with the stage of each. Stages may be left out;
those that are visited rise (CC3, protocol/pipeline/problem.py).

A microbatch that is lost sets out again under its name, in the next *attempt*.
"""

from enum import StrEnum
from itertools import pairwise
from typing import Annotated

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from protocol import limits
from protocol.errors import RemoteProtocolError

from .fields import Count, Digest, Message, NonNegative, PeerIdText

Iteration = Annotated[int, Meta(ge=0, le=limits.MAX_ITERATION)]
Place = Annotated[int, Meta(ge=0, le=limits.MAX_STAGES)]
RelayPath = Annotated[tuple[PeerIdText, ...], Meta(max_length=limits.MAX_STAGES - 1)]
RelayStages = Annotated[
    tuple[Annotated[int, Meta(ge=1, lt=limits.MAX_STAGES)], ...],
    Meta(max_length=limits.MAX_STAGES - 1),
]


# --- a microbatch on its way ----------------------------------------------------------------------
class Direction(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    SCORE = "score"


class Microbatch(Struct, frozen=True, order=True):
    """The name of one microbatch, in its run.

    Attributes:
        origin: its data peer.
        iteration: of the swarm, in which its gradient counts (protocol/microbatch/relay.py).
        index: its number among those of its data peer, which never repeats.
    """

    origin: PeerIdText
    iteration: Iteration
    index: Count


class Path(Struct, frozen=True):
    """The relays that a microbatch visits, in order, and the stage of each.

    Attributes:
        plan: digest of the plan that it was taken from, which relays only compare; None where there
            was none.
    """

    relays: RelayPath
    stages: RelayStages
    plan: Digest | None = None

    @property
    def rises(self) -> bool:
        return all(before < after for before, after in pairwise(self.stages))


RelaysByStage = tuple[tuple[str, ...], ...]
"""The peers of each stage from the second on, sorted."""


class Hop(Message, frozen=True, tag="trip"):
    """One hop of a microbatch; said to another peer, it is an offer of its boundary.

    Attributes:
        place: where it goes to; see the top of the file.
        attempt: how often the microbatch has been lost.
    """

    microbatch: Microbatch
    direction: Direction = field(name="leg")
    path: Path
    place: Place
    attempt: Count = 0

    @property
    def receiver(self) -> str:
        return self._at(self.place)

    @property
    def sender(self) -> str:
        return self._at(self.place + (1 if self.direction is Direction.BACKWARD else -1))

    def _at(self, place: int) -> str:
        relays = self.path.relays
        return relays[place - 1] if 1 <= place <= len(relays) else self.microbatch.origin

    @property
    def stage(self) -> int | None:
        """That of the receiver, as the path says; None for the data peer."""
        at_relay = 1 <= self.place <= len(self.path.stages)
        return self.path.stages[self.place - 1] if at_relay else None

    def check(self, sender: str, receiver: str) -> None:
        """Raise RemoteProtocolError where this is no hop from one peer to the other."""
        relays = self.path.relays
        if len(set(relays)) != len(relays) or not relays or self.microbatch.origin in relays:
            raise RemoteProtocolError("a path visits every peer once, its data peer never")
        if len(self.path.stages) != len(relays):
            raise RemoteProtocolError("a path says the stage of each of its relays")
        if self.place > len(relays) + 1 or (self.sender, self.receiver) != (sender, receiver):
            raise RemoteProtocolError("a boundary goes from one peer of its path to the next")

    def next_hop(self) -> "Hop | None":
        """The hop that follows once this one has been worked on; None at the end of the path."""
        if self.receiver != self.microbatch.origin:
            return self.onward()
        return self.back() if self.direction is Direction.FORWARD else None

    def onward(self) -> "Hop":
        return replace(self, place=self.place + (-1 if self.direction is Direction.BACKWARD else 1))

    def back(self) -> "Hop":
        """The gradient's hop from the receiver of this forward to the place before."""
        return replace(self, direction=Direction.BACKWARD, place=self.place - 1)


# --- what is said ---------------------------------------------------------------------------------
class Credit(Message, frozen=True, tag="credit"):
    """The boundary may be sent; the answer to a hop, which may take a while.

    Attributes:
        waited_s: how long the hop waited for it, by the receiver's clock.
    """

    waited_s: NonNegative


class Boundary(Message, frozen=True, tag="boundary"):
    """The codes follow.

    Attributes:
        loss: of the microbatch, nats per token, where its gradient travels.
    """

    max_payload_bytes = limits.MAX_PAYLOAD_BYTES

    loss: NonNegative | None


class BoundaryKept(Message, frozen=True, tag="kept"):
    """They have come whole, and the receiver answers for them."""


class Announcement(Message, frozen=True, tag="announcement"):
    """Nothing of the sender's before this iteration is under way."""

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

    microbatch: Microbatch
    attempt: Count = 0
    failed: PeerIdText | None = None
    refused: bool = False


Notice = Announcement | Lost
"""Small things that are said, each with an answer."""


# --- what is planned from -------------------------------------------------------------------------
class GetLinks(Message, frozen=True, tag="get_links"):
    """Asks for the links that the other has measured."""


class LinksReply(Message, frozen=True, tag="links"):
    """The sender's newest link vector follows (protocol/routing/measures.py)."""

    max_payload_bytes = limits.MAX_LINK_VECTOR_BYTES


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

    max_payload_bytes = limits.MAX_SNAPSHOT_BYTES

    digest: Digest | None
