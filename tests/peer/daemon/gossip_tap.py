"""Listens to the gossip streams of one simulated peer, and does harm at an exact moment."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from swarm_worlds import exchanges

from peer.averaging.gossip.exchange_session import Averaged, ExchangeSession, RoundOutcome
from peer.network.conversation import Conversation
from peer.runtime import PeerId
from protocol.outcomes import SkipReason
from protocol.wire.fields import Message
from protocol.wire.versions import GOSSIP
from simulation.network import SimulatedStream
from simulation.swarm import SimulatedPeer


@dataclass
class Tap:
    """Counts what one peer does on its gossip streams, from `armed` on.

    Attributes:
        strike: called once, in the task of the peer, right before its operation number `at`.
        struck_at: the stream of that operation; None before.
        on_message: called with each message before the peer sends it; True swallows the message.
        ended: how each exchange of anybody ended for either side: why it was not applied, if so.
    """

    peer: Callable[[], SimulatedPeer]
    strike: Callable[[], None] = lambda: None
    on_message: Callable[[SimulatedStream, Message], bool | None] = lambda _stream, _message: None
    at: int = -1
    armed: bool = False
    operations: int = 0
    struck_at: SimulatedStream | None = None
    ended: dict[str, dict[PeerId, SkipReason | None]] = field(default_factory=dict)

    @property
    def struck(self) -> bool:
        """Whether the harm is done."""
        return self.struck_at is not None

    def hears(self, stream: Any) -> bool:
        return self.armed and stream._protocol == GOSSIP and stream._network is self.peer().network

    def operation(self, stream: SimulatedStream) -> None:
        if not self.hears(stream):
            return
        self.operations += 1
        if self.operations == self.at and not self.struck:
            self.struck_at = stream
            self.strike()


def install(tap: Tap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put `tap` on every simulated stream."""
    receive, send_segment = SimulatedStream._receive, SimulatedStream._send_segment
    send, run = Conversation.send, ExchangeSession.run

    async def tapped_receive(stream: SimulatedStream, max_bytes: int) -> bytes:
        tap.operation(stream)
        return await receive(stream, max_bytes)

    async def tapped_send_segment(stream: SimulatedStream, segment: memoryview) -> None:
        tap.operation(stream)
        await send_segment(stream, segment)

    async def tapped_send(
        talk: Conversation, message: Message, *arguments: Any, **options: Any
    ) -> None:
        stream: Any = talk._stream
        if tap.hears(stream) and tap.on_message(stream, message):
            return
        await send(talk, message, *arguments, **options)

    async def tapped_run(exchange: ExchangeSession, deadline_s: float) -> RoundOutcome:
        outcome = await run(exchange, deadline_s)
        sides = tap.ended.setdefault(exchange.name, {})
        reason = None if isinstance(outcome, Averaged) else outcome.reason
        sides[exchange._network.peer_id] = reason
        return outcome

    monkeypatch.setattr(ExchangeSession, "run", tapped_run)
    monkeypatch.setattr(SimulatedStream, "_receive", tapped_receive)
    monkeypatch.setattr(SimulatedStream, "_send_segment", tapped_send_segment)
    monkeypatch.setattr(Conversation, "send", tapped_send)


def assert_both_or_neither(tap: Tap, *peers: SimulatedPeer) -> None:
    """Whoever of these applied an exchange, so did the other one, or it got no receipt."""
    ids = {peer.peer_id for peer in peers}
    for name, sides in tap.ended.items():
        if sides.keys() <= ids:
            assert len(sides) == 2 or None not in sides.values(), (name, sides)
            if None in sides.values():
                assert set(sides.values()) <= {None, SkipReason.UNSETTLED}, (name, sides)
    assert len(list(exchanges(*peers))) > 0
