"""Running the handlers of incoming streams, alike in every network.

Each stream gets a task, within two bounds: so many streams at once, and so many from one peer. A
stream beyond a bound is closed at once and counted; the peer sees the stream end, and nobody else
notices. What goes wrong on one stream (a `LocoError`, one of trio's resource errors) ends that
stream alone; anything else is a bug here and is not hidden.
"""

from collections import Counter
from typing import Final

import trio

from peer.ports import PeerId, Stream, StreamHandler
from protocol.errors import LocalProtocolError, LocoError

MAX_INBOUND_STREAMS: Final = 512
"""Streams from outside served at once."""
MAX_INBOUND_STREAMS_PER_PEER: Final = 32
MAX_HANDLERS: Final = 32
"""Protocols served."""

STREAM_ERRORS: Final = (
    LocoError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.BusyResourceError,
    trio.EndOfChannel,
)
"""Errors that end one stream and nothing else."""


class Handlers:
    """The protocols that a peer serves, and the streams being served."""

    def __init__(self) -> None:
        self._handlers: dict[str, StreamHandler] = {}
        self._active: Counter[PeerId] = Counter()
        self.refused_streams = 0

    def __repr__(self) -> str:
        return f"<Handlers of {sorted(self._handlers)}, {self._active.total()} streams active>"

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

    def serves(self, protocol: str) -> bool:
        """Whether `protocol` has a handler."""
        return protocol in self._handlers

    def admit(self, peer_id: PeerId) -> bool:
        """Whether one more stream of this peer is within the bounds; False is counted."""
        admitted = (
            self._active.total() < MAX_INBOUND_STREAMS
            and self._active[peer_id] < MAX_INBOUND_STREAMS_PER_PEER
        )
        self.refused_streams += not admitted
        return admitted

    async def run(self, protocol: str, stream: Stream) -> None:
        """Serve an admitted stream to its end, and close it."""
        peer_id = stream.remote_peer_id
        self._active[peer_id] += 1
        try:
            try:
                await self._handlers[protocol](stream)
            except* STREAM_ERRORS:
                pass
        finally:
            self._active[peer_id] -= 1
            if not self._active[peer_id]:
                del self._active[peer_id]
            with trio.CancelScope(shield=True):
                await stream.aclose()
