"""Streams of stages that are used again: one for each move that is under way, kept for the next.

A fresh stream begins with a small window (yamux: 256 KiB), and needs some round trips until it
fills a long line; that was most of a boundary's time. So a stream on which a move has ended well is
kept, so many to one peer as moves were under way at once.
"""

from collections import defaultdict
from typing import Final

import trio

from peer.network.conversation import Conversation
from peer.ports import Network, PeerId
from protocol.wire.versions import STAGE

SERVED_IDLE_S: Final = 120.0
"""How long the side that serves waits for the next message on a stream."""
KEPT_IDLE_S: Final = 60.0
"""A stream that was idle for longer is not used again: the other side may just be ending it."""
MAX_KEPT: Final = 8
"""Idle streams to one peer."""


class KeptStreams:
    """See the top of the file."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._idle: defaultdict[PeerId, list[tuple[float, Conversation]]] = defaultdict(list)

    async def take(self, peer_id: PeerId) -> Conversation:
        """A stream to this peer, the newest of those that are kept, or a fresh one.

        Raises:
            LocoError: none is kept, and none can be opened.
        """
        now_s, idle = trio.current_time(), self._idle[peer_id]
        while idle:
            since_s, talk = idle.pop()
            if now_s - since_s < KEPT_IDLE_S:
                return talk
            await talk.aclose()
        return Conversation(await self._network.open_stream(peer_id, STAGE))

    async def forget(self, peer_id: PeerId) -> None:
        """Close all that is kept to this peer: one has failed, as all do when it starts again."""
        for _, talk in self._idle.pop(peer_id, []):
            await talk.aclose()

    async def keep(self, talk: Conversation) -> None:
        """Use it again: what it was used for has ended well."""
        idle = self._idle[talk.remote_peer_id]
        idle.append((trio.current_time(), talk))
        if len(idle) > MAX_KEPT:
            await idle.pop(0)[1].aclose()
