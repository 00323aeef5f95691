"""The one gate for streams from outside, alike in every network; and what runs behind it.

Every conversation that another peer opens in one of our protocols passes it; libp2p's own protocols
do not, nor do streams that we open.

  1. A stream takes a place: there are so many in all, for one peer, and for one network
     (protocol/membership/book.py). A stream beyond a bound is closed at once and counted; the peer
     sees the stream end, and nobody else notices.
  2. Where a judge was given (`admit_by`): a peer that opens streams faster than any needs to waits
     for its turn, and meanwhile fills its own places.
  3. The judge refuses peers that are not admitted, or misbehave. In the hello a peer shows that it
     may join, and is told why it may not (peer/daemon/links.py), so there only its conduct counts.
     One with a few faults waits.
  4. What a peer sends against the rules is held against it here, whatever the conversation.

What goes wrong on one stream (a `LocoError`, one of trio's resource errors) ends that stream alone.
Anything else is a bug here. On a real network, where a stranger may have found it, it ends the
stream too, is counted, and is told once for each peer and kind; in a simulation it is not hidden.
"""

import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final

import trio

from peer.ports import Address, Judge, NetworkStatistics, PeerId, Stream, StreamHandler
from protocol.errors import LocalProtocolError, LocoError, RemoteProtocolError, leaves
from protocol.limits import (
    INBOUND_STREAMS_BURST_S,
    INBOUND_STREAMS_PER_S,
    INBOUND_STREAMS_PER_S_OF_PREFIX,
    MAX_INBOUND_STREAMS,
    MAX_INBOUND_STREAMS_PER_PEER,
    MAX_INBOUND_STREAMS_PER_PREFIX,
)
from protocol.membership.book import Budget, Fault, Paces, Shares
from protocol.outcomes import RefusalReason
from protocol.wire.versions import HELLO

from .conversation import Conversation
from .pacing import Pacing
from .stream import PeerStream

# --- the places of those that read from us, shared out by peer and network (book.py) --------------


class Readers:
    """Places of those that read from us, shared out by peer and network (book.py)."""

    def __init__(self, shares: Shares) -> None:
        self._places = Budget(shares)

    @property
    def taken(self) -> int:
        """Places that are held."""
        return self._places.taken

    async def serve(
        self, stream: Stream, answer: Callable[[Conversation], Awaitable[None]]
    ) -> None:
        """Have a stream answered in a place of its own, or refuse it."""
        talk, peer_id, address = Conversation(stream), stream.remote_peer_id, stream.remote_address
        if not self._places.has_room(peer_id, address):
            sentence = f"I serve {self.taken} readers already; ask another, or later"
            await talk.refuse(RefusalReason.TOO_MANY, sentence)
            return
        self._places.take(peer_id, address)
        try:
            await answer(talk)
        finally:
            self._places.give_back(peer_id, address)


# --- what both networks are -----------------------------------------------------------------------

INBOUND_STREAMS: Final = Shares(
    MAX_INBOUND_STREAMS, MAX_INBOUND_STREAMS_PER_PEER, MAX_INBOUND_STREAMS_PER_PREFIX
)
MAX_TOLD: Final = 256
"""Bugs told of, for all peers and kinds together."""

STREAM_ERRORS: Final = (
    LocoError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.BusyResourceError,
    trio.EndOfChannel,
)
"""Errors that end one stream and nothing else."""


TellBug = Callable[[PeerId, str, BaseException], None]
"""Told of a bug that has ended a stream: whose, of which protocol, and the error."""


class BaseNetwork:
    """What is the same in every network: the protocols that it serves, its gate, and its counts.

    Attributes:
        tellers: are told of bugs; without one they end everything.
        pacing: of our own conversations; None for no pace. Streams that are open keep theirs.
        carried: as `statistics`, counted on.
        streams: those that are open, in the order in which they were opened.
    """

    def __init__(self) -> None:
        self._handlers: dict[str, StreamHandler] = {}
        self._active = Budget(INBOUND_STREAMS)
        self._paces = Paces(
            INBOUND_STREAMS_PER_S, INBOUND_STREAMS_PER_S_OF_PREFIX, INBOUND_STREAMS_BURST_S
        )
        self._judge: Judge | None = None
        self._told: set[tuple[PeerId, str, str]] = set()
        self._announced: tuple[Address, ...] = ()
        self.tellers: list[TellBug] = []
        self.pacing: Pacing | None = None
        self.carried = NetworkStatistics(Counter(), Counter())
        self.streams: dict[PeerStream, None] = {}

    def statistics(self) -> NetworkStatistics:
        """What was carried until now."""
        sent, received = dict(self.carried.sent_bytes), dict(self.carried.received_bytes)
        return replace(self.carried, sent_bytes=sent, received_bytes=received)

    def announce(self, addresses: Sequence[Address]) -> None:
        """Tell others these addresses too, in place of those announced before."""
        self._announced = tuple(addresses)

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Serve `protocol` with `handler`; raises LocalProtocolError: it is served already."""
        if protocol in self._handlers:
            raise LocalProtocolError(f"{protocol} is served already")
        self._handlers[protocol] = handler
        await trio.lowlevel.checkpoint()

    def admit_by(self, judge: Judge) -> None:
        """Serve only whom this one lets pass, from now on."""
        self._judge = judge

    def has_room(self, protocol: str, peer_id: PeerId, address: Address) -> bool:
        """Whether to take in a stream of this peer, from there; one beyond a bound is counted."""
        if protocol not in self._handlers:
            return False
        has_room = self._active.has_room(peer_id, address)
        self.carried.refused_streams += not has_room
        return has_room

    async def run(self, protocol: str, stream: Stream) -> None:
        """Let a stream that there is room for through the gate, serve it to its end, close it."""
        peer_id, address = stream.remote_peer_id, stream.remote_address
        self._active.take(peer_id, address)
        try:
            try:
                if self._judge is None:
                    await self._handlers[protocol](stream)
                else:
                    await self._judged(self._judge, protocol, stream)
            except* STREAM_ERRORS:
                pass
        except Exception as bug:  # whatever it is: a stranger may have found it
            if not self.tellers:
                raise
            self._count(protocol, peer_id, bug)
        finally:
            self._active.give_back(peer_id, address)
            with trio.CancelScope(shield=True):
                await stream.aclose()

    async def _judged(self, judge: Judge, protocol: str, stream: Stream) -> None:
        """Serve a stream when its turn has come, if its peer may have it served."""
        peer_id = stream.remote_peer_id
        if wait_s := self._paces.begin(trio.current_time(), peer_id, stream.remote_address):
            await trio.sleep(wait_s)
        decide = judge.judge_conduct if protocol == HELLO else judge.judge
        refusal = decide(peer_id)
        if refusal is not None:
            await Conversation(stream).refuse(refusal.reason, refusal.sentence)
            return
        if wait_s := judge.wait_s(peer_id):
            await trio.sleep(wait_s)
        try:
            await self._handlers[protocol](stream)
        except* RemoteProtocolError:
            judge.blame(peer_id, Fault.BROKEN_RULE)
            raise

    def _count(self, protocol: str, peer_id: PeerId, bug: Exception) -> None:
        """Count a stream that a bug has ended, and tell of it if it is new."""
        self.carried.failed_streams += 1
        for error in leaves(bug):
            kind = (peer_id, protocol, type(error).__name__)
            if kind not in self._told and len(self._told) < MAX_TOLD:
                self._told.add(kind)
                for tell in self.tellers:
                    tell(peer_id, protocol, error)


def print_bug(peer_id: PeerId, protocol: str, error: BaseException) -> None:
    """Say on stderr what has ended a stream."""
    sentence = f"a stream of {peer_id} for {protocol} ended"
    error.add_note(f"loco-peer: this is a bug in loco-peer; please report it: {sentence}")
    traceback.print_exception(error)
