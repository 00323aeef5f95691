"""Lasting streams to the other peers: what we have to send, in order, one stream per peer.

A stream that lasts costs no round trip to open and keeps the window that it has grown. Posting
never waits: a peer that takes nothing must not hold up the others. What is posted to a peer whose
box is full, or whose stream breaks while it is sent, is lost, and counted; the cycle's deadline and
the stamps of the next one deal with that, as with every other loss.
"""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import trio

from peer.network.conversation import Conversation, Payload
from peer.ports import Network, PeerId
from protocol.errors import LocoError
from protocol.wire.messages import Message
from protocol.wire.versions import FRAGMENT

STALL_S: Final = 30.0
"""A peer that takes no byte for so long has lost its stream."""
MAX_POSTED: Final = 256
"""Messages that wait for one peer."""


@dataclass(frozen=True, slots=True)
class PostStatistics:
    """Counts since the start."""

    posted: int
    lost: int


@dataclass(frozen=True, slots=True)
class _Box:
    put: trio.MemorySendChannel[tuple[Message, Payload]]
    scope: trio.CancelScope


class Posts:
    """All that is sent. `run` must be running."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._boxes: dict[PeerId, _Box] = {}
        self._nursery: trio.Nursery | None = None
        self._posted = self._lost = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry what is posted, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    def post(self, peer_id: PeerId, message: Message, payload: Payload = b"") -> None:
        """Send this to a peer, some time soon; the payload must lie still until then."""
        assert self._nursery is not None
        box = self._boxes.get(peer_id)
        if box is None:
            put, take = trio.open_memory_channel[tuple[Message, Payload]](MAX_POSTED)
            box = self._boxes[peer_id] = _Box(put, trio.CancelScope())
            self._nursery.start_soon(self._carry, peer_id, box, take)
        self._posted += 1
        try:
            box.put.send_nowait((message, payload))
        except trio.WouldBlock:
            self._lost += 1

    def keep_only(self, peer_ids: Collection[PeerId]) -> None:
        """The others are gone; so is what was for them."""
        for peer_id in [peer_id for peer_id in self._boxes if peer_id not in peer_ids]:
            self._boxes.pop(peer_id).scope.cancel()

    def statistics(self) -> PostStatistics:
        """Counts since the start."""
        return PostStatistics(self._posted, self._lost)

    async def _carry(
        self, peer_id: PeerId, box: _Box, take: trio.MemoryReceiveChannel[tuple[Message, Payload]]
    ) -> None:
        talk: Conversation | None = None
        with box.scope:
            try:
                async for message, payload in take:
                    try:
                        talk = talk or await self._open(peer_id)
                        await talk.send(message, payload, stall_s=STALL_S)
                    except LocoError:
                        self._lost += 1
                        await _closed(talk)
                        talk = None
            finally:
                await _closed(talk)

    async def _open(self, peer_id: PeerId) -> Conversation:
        with trio.move_on_after(STALL_S):
            return Conversation(await self._network.open_stream(peer_id, FRAGMENT))
        raise LocoError(f"{peer_id} did not answer within {STALL_S:.0f} s")


async def _closed(talk: Conversation | None) -> None:
    if talk is not None:
        with suppress(LocoError), trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
            await talk.aclose()
