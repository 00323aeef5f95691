"""Running the handlers of incoming streams, alike in every network.

Each stream gets a task, within three bounds: so many streams at once, so many from one peer, and so
many from one network (protocol/membership/budget.py). A stream beyond a bound is closed at once and
counted; the peer sees the stream end, and nobody else notices. What goes wrong on one stream (a
`LocoError`, one of trio's resource errors) ends that stream alone. Anything else is a bug here. On
a real network, where a stranger may have found it, it ends the stream too, is counted, and is told
once for each peer and kind; in a simulation it is not hidden.
"""

import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from types import MappingProxyType
from typing import Final

import trio

from peer.ports import Address, NetworkStatistics, PeerId, Stream, StreamHandler
from peer.process.exception_groups import leaves
from protocol.errors import LocalProtocolError, LocoError
from protocol.limits import (
    MAX_INBOUND_STREAMS,
    MAX_INBOUND_STREAMS_PER_PEER,
    MAX_INBOUND_STREAMS_PER_PREFIX,
)
from protocol.membership.budget import Budget, Shares
from protocol.outcomes import RefusalReason

from .conversation import Conversation

# --- the places of those that read from us, shared out by peer and network (budget.py) ------------


class Readers:
    """See the top of the file."""

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


# --- what a network keeps count of: bytes by protocol id, and the streams that are open -----------

MAX_PROTOCOLS: Final = 64
"""Protocol ids counted one by one; what comes after that is counted together."""
_OTHERS: Final = "other"


class Traffic:
    """Counters of one network. Protocol ids come from our own code, never from peers."""

    def __init__(self) -> None:
        self._sent_bytes: Counter[str] = Counter()
        self._received_bytes: Counter[str] = Counter()
        self.open_streams = 0

    def count_sent(self, protocol: str, num_bytes: int) -> None:
        """Count bytes that were handed to a stream."""
        self._sent_bytes[self._name(protocol)] += num_bytes

    def count_received(self, protocol: str, num_bytes: int) -> None:
        """Count bytes that were taken from a stream."""
        self._received_bytes[self._name(protocol)] += num_bytes

    def _name(self, protocol: str) -> str:
        known = protocol in self._sent_bytes or protocol in self._received_bytes
        if known or len(self._sent_bytes) + len(self._received_bytes) < MAX_PROTOCOLS:
            return protocol
        return _OTHERS

    def statistics(self) -> NetworkStatistics:
        """Counts so far."""
        return NetworkStatistics(
            sent_bytes=MappingProxyType(dict(self._sent_bytes)),
            received_bytes=MappingProxyType(dict(self._received_bytes)),
            open_streams=self.open_streams,
        )


# --- handlers -------------------------------------------------------------------------------------

INBOUND_STREAMS: Final = Shares(
    MAX_INBOUND_STREAMS, MAX_INBOUND_STREAMS_PER_PEER, MAX_INBOUND_STREAMS_PER_PREFIX
)
MAX_HANDLERS: Final = 32
"""Protocols served."""
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


class Handlers:
    """The protocols that a peer serves, and the streams being served.

    Args:
        tell_bug: is told of bugs; without one they end everything.

    Attributes:
        refused_streams: beyond a bound.
        failed_streams: ended by a bug.
    """

    def __init__(self, tell_bug: TellBug | None = None) -> None:
        self._handlers: dict[str, StreamHandler] = {}
        self._active = Budget(INBOUND_STREAMS)
        self._tellers = [] if tell_bug is None else [tell_bug]
        self._told: set[tuple[PeerId, str, str]] = set()
        self.refused_streams = 0
        self.failed_streams = 0

    @property
    def protocols(self) -> list[str]:
        """Protocol ids served, in the order in which they were added."""
        return list(self._handlers)

    def add(self, protocol: str, handler: StreamHandler) -> None:
        """Serve `protocol` with `handler`.

        Raises:
            LocalProtocolError: it is served already, or there are too many.
        """
        if protocol in self._handlers:
            raise LocalProtocolError(f"{protocol} is served already")
        if len(self._handlers) >= MAX_HANDLERS:
            raise LocalProtocolError(f"more than {MAX_HANDLERS} protocols")
        self._handlers[protocol] = handler

    def also_tell(self, tell_bug: TellBug) -> None:
        """Tell this one of bugs too, from now on."""
        self._tellers.append(tell_bug)

    def serves(self, protocol: str) -> bool:
        """Whether `protocol` has a handler."""
        return protocol in self._handlers

    def admit(self, peer_id: PeerId, address: Address) -> bool:
        """Whether a stream of this peer, from there, is within the bounds; False is counted."""
        admitted = self._active.has_room(peer_id, address)
        self.refused_streams += not admitted
        return admitted

    async def run(self, protocol: str, stream: Stream) -> None:
        """Serve an admitted stream to its end, and close it."""
        peer_id, address = stream.remote_peer_id, stream.remote_address
        self._active.take(peer_id, address)
        try:
            try:
                await self._handlers[protocol](stream)
            except* STREAM_ERRORS:
                pass
        except Exception as bug:  # whatever it is: a stranger may have found it
            if not self._tellers:
                raise
            self._count(protocol, peer_id, bug)
        finally:
            self._active.give_back(peer_id, address)
            with trio.CancelScope(shield=True):
                await stream.aclose()

    def _count(self, protocol: str, peer_id: PeerId, bug: Exception) -> None:
        """Count a stream that a bug has ended, and tell of it if it is new."""
        self.failed_streams += 1
        for error in leaves(bug):
            kind = (peer_id, protocol, type(error).__name__)
            if kind not in self._told and len(self._told) < MAX_TOLD:
                self._told.add(kind)
                for tell in self._tellers:
                    tell(peer_id, protocol, error)


def print_bug(peer_id: PeerId, protocol: str, error: BaseException) -> None:
    """Say on stderr what has ended a stream."""
    sentence = f"a stream of {peer_id} for {protocol} ended"
    error.add_note(f"loco-peer: this is a bug in loco-peer; please report it: {sentence}")
    traceback.print_exception(error)
