"""Listens to the gossip streams of one simulated peer, and does harm at an exact moment."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from peer.network.conversation import Conversation
from peer.network.simulated_stream import SimulatedStream
from peer.simulation.peer import SimulatedPeer
from protocol.messages import Message
from protocol.versions import GOSSIP


@dataclass
class Tap:
    """Counts what one peer does on its gossip streams, from `armed` on.

    Attributes:
        strike: called once, in the task of the peer, right before its operation number `at`.
        on_message: called with each message before the peer sends it; True swallows the message.
    """

    peer: Callable[[], SimulatedPeer]
    strike: Callable[[], None] = lambda: None
    on_message: Callable[[SimulatedStream, Message], bool | None] = lambda _stream, _message: None
    at: int = -1
    armed: bool = False
    operations: int = 0
    struck: bool = field(default=False)

    def hears(self, stream: Any) -> bool:
        return (
            self.armed
            and stream._protocol == GOSSIP
            and stream._traffic is self.peer().network._traffic
        )

    def operation(self, stream: SimulatedStream) -> None:
        if not self.hears(stream):
            return
        self.operations += 1
        if self.operations == self.at and not self.struck:
            self.struck = True
            self.strike()


def install(tap: Tap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put `tap` on every simulated stream."""
    receive, send_segment = SimulatedStream._receive, SimulatedStream._send_segment
    send = Conversation.send

    async def tapped_receive(stream: SimulatedStream, max_bytes: int) -> memoryview:
        tap.operation(stream)
        return await receive(stream, max_bytes)

    async def tapped_send_segment(stream: SimulatedStream, segment: memoryview) -> None:
        tap.operation(stream)
        await send_segment(stream, segment)

    async def tapped_send(
        talk: Conversation, message: Message, *arguments: Any, **options: Any
    ) -> None:
        paced: Any = talk._stream
        within = paced._stream
        if tap.hears(within) and tap.on_message(within, message):
            return
        await send(talk, message, *arguments, **options)

    monkeypatch.setattr(SimulatedStream, "_receive", tapped_receive)
    monkeypatch.setattr(SimulatedStream, "_send_segment", tapped_send_segment)
    monkeypatch.setattr(Conversation, "send", tapped_send)
