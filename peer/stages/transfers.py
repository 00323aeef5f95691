"""Boundaries on streams: one stream for each move of a microbatch, offered before it is sent.

sender      Offer            what it is; the answer is the credit, and may take a while
            Boundary         the codes, straight from shared memory into shared memory
receiver    Credit, Kept     from then on the receiver answers for it
"""

from dataclasses import dataclass
from typing import Final, TypeVar

import trio

from peer.network.conversation import Conversation
from peer.ports import Network, PeerId
from protocol.errors import LocoError, RemoteProtocolError
from protocol.microbatch.trip import Leg, Microbatch, Trip
from protocol.wire.messages import Boundary, Credit, Halted, Kept, Noted, Offer
from protocol.wire.versions import STAGE

from .notices import Notice

A = TypeVar("A", Noted, Halted)
ANSWER_S: Final = 10.0
"""Patience for small answers, and for the next part of a boundary."""
KEPT_S: Final = 60.0
"""Patience for the receipt: what we have sent may still be under way on a thin line."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A boundary to be sent.

    Attributes:
        group: digest of the receiver's.
    """

    trip: Trip
    group: str
    codes: memoryview
    loss: float | None


class Transfers:
    """The sender's side.

    Args:
        credit_s: longest wait for an answer to an offer.
    """

    def __init__(self, network: Network, credit_s: float) -> None:
        self._network = network
        self._credit_s = credit_s

    def __repr__(self) -> str:
        return f"<Transfers from {self._network.peer_id}>"

    async def send(self, outgoing: Outgoing) -> bool:
        """Send a boundary. Returns whether the receiver has it."""
        trip = outgoing.trip
        try:
            stream = await self._network.open_stream(trip.receiver, STAGE)
            async with Conversation(stream) as talk:
                await talk.send(offer_of(trip, outgoing.group), stall_s=ANSWER_S)
                await talk.receive(Credit, timeout_s=self._credit_s)
                await talk.send(Boundary(outgoing.loss), outgoing.codes, stall_s=ANSWER_S)
                await talk.receive(Kept, timeout_s=KEPT_S)
        except (LocoError, trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return True

    async def ask(self, peer_id: PeerId, question: Notice, answer: type[A]) -> A | None:
        """Say a small thing. Returns the answer; None when there is none."""
        try:
            stream = await self._network.open_stream(peer_id, STAGE)
            async with Conversation(stream) as talk:
                await talk.send(question, stall_s=ANSWER_S)
                found, _ = await talk.receive(answer, timeout_s=ANSWER_S)
        except (LocoError, trio.BrokenResourceError, trio.ClosedResourceError):
            return None
        return found


def offer_of(trip: Trip, group: str) -> Offer:
    """A trip as its receiver is asked for it."""
    microbatch = trip.microbatch
    return Offer(
        group,
        microbatch.origin,
        microbatch.iteration,
        microbatch.index,
        trip.leg,
        trip.path,
        trip.place,
        trip.stages,
        trip.plan,
        trip.attempt,
        trip.until,
    )


def trip_of(offer: Offer, sender: PeerId, receiver: PeerId, stage: int) -> Trip:
    """The trip of an offer, checked against the ends of its stream.

    Args:
        stage: the receiver's.

    Raises:
        RemoteProtocolError: this sender has no business with it, or it is not for us.
    """
    microbatch = Microbatch(offer.origin, offer.iteration, offer.index)
    leg = Leg(offer.leg)
    trip = Trip(
        microbatch,
        leg,
        offer.path,
        offer.place,
        offer.stages,
        offer.plan,
        offer.attempt,
        offer.until,
    )
    if len(set(trip.path)) != len(trip.path) or not trip.path or offer.origin in trip.path:
        raise RemoteProtocolError("a path visits every peer once, its data peer never")
    if trip.place > len(trip.path) + 1 or (trip.sender, trip.receiver) != (sender, receiver):
        raise RemoteProtocolError("a boundary goes from one peer of its path to the next")
    if len(trip.stages) != len(trip.path):
        raise RemoteProtocolError("a path says the stage of each of its relays")
    if 1 <= trip.place <= len(trip.path) and trip.stages[trip.place - 1] != stage:
        raise RemoteProtocolError(f"a path says that stage {stage} is another one")
    return trip
