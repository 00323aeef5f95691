"""Listens to the fragment streams and trainers of a simulated swarm, and loses what it is told to.

`watch` puts a tap on every peer of a swarm: what trainers sent, what went over which stream, and
the outer copies themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
import trio

from peer.averaging.diloco.fragment_exchange import FragmentExchange
from peer.averaging.diloco.outer_fragments import OuterFragments
from peer.codec import codes_as_tensor
from peer.network.conversation import Conversation
from peer.training.messages import TrainerEvent
from protocol.content.samples import Float32Vector
from protocol.diloco.chunk_ledger import ChunkLedger
from protocol.diloco.commands import Sent
from protocol.wire.fields import Message
from protocol.wire.fragment_messages import ChunkStateReply, Contribution, Result, Stamp
from protocol.wire.versions import FRAGMENT
from simulation.machine import _GatedTrainer
from simulation.swarm import SimulatedSwarm

Kind = TypeVar("Kind", bound=Message)


@dataclass(frozen=True)
class Post(Generic[Kind]):
    """One message, and its codes, from one peer to another."""

    at_s: float
    sender: str
    receiver: str
    message: Kind
    payload: bytes

    @property
    def bytes_(self) -> int:
        return len(self.payload)


@dataclass(frozen=True)
class Send:
    """What a trainer sent of a fragment, and what the outer copy was then."""

    at_s: float
    peer: str
    fragment: int
    cycle: int
    codes: bytes
    stamps: tuple[Stamp, ...]
    phi: tuple[Float32Vector, ...]


@dataclass
class Tap:
    """What was seen.

    Attributes:
        loses: asked about each message before it is sent; True loses it.
        delay_s: for how long a message is held up before it is sent.
        told: each trainer's events, by peer.
    """

    swarm: SimulatedSwarm
    loses: Callable[[str, str, Message], bool | None] = lambda _sender, _receiver, _message: None
    delay_s: Callable[[Message], float] = lambda _message: 0.0
    posts: list[Post[Message]] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    told: list[tuple[str, float, TrainerEvent]] = field(default_factory=list)
    exchanges: dict[str, FragmentExchange] = field(default_factory=dict)

    # --- what is there now ------------------------------------------------------------------------
    def outer(self, name: str) -> OuterFragments:
        """A peer's outer copy."""
        return self.exchanges[name]._outer

    def stamps(self, name: str, fragment: int) -> tuple[Stamp, ...]:
        """The states of a fragment's chunks, at a peer."""
        return tuple(self.ledger(name, fragment).stamps)

    def ledger(self, name: str, fragment: int) -> ChunkLedger:
        """What a peer knows of a fragment's chunks."""
        return self.exchanges[name]._core.ledger(fragment)

    def state(self, name: str, fragment: int) -> list[bytes]:
        """phi and v of each chunk, at a peer."""
        outer = self.outer(name)
        return [
            outer.read(fragment, chunk) for chunk in range(len(outer.fragments[fragment].chunks))
        ]

    def phi(self, name: str, fragment: int) -> list[Float32Vector]:
        """phi of each chunk, at a peer."""
        return [
            np.frombuffer(both, np.float32)[: len(both) // 8] for both in self.state(name, fragment)
        ]

    # --- what was there ---------------------------------------------------------------------------
    def name_of(self, peer_id: str) -> str:
        names = (name for name, peer in self.swarm.peers.items() if peer.peer_id == peer_id)
        return next(names, "stranger")

    def sent(self, fragment: int, cycle: int) -> dict[str, Send]:
        """By peer, what the trainers sent of a fragment in a cycle."""
        return {s.peer: s for s in self.sends if (s.fragment, s.cycle) == (fragment, cycle)}

    def messages(self, kind: type[Kind], **fields: Any) -> list[Post[Kind]]:
        """Posts of messages of a kind with these values."""
        return [
            cast("Post[Kind]", post)
            for post in self.posts
            if isinstance(post.message, kind)
            and all(getattr(post.message, name) == value for name, value in fields.items())
        ]

    def values(self, send: Send) -> list[npt.NDArray[Any]]:
        """What the codes of a send stand for, by chunk."""
        outer = self.outer(send.peer)
        chunks = range(len(outer.fragments[send.fragment].chunks))
        parts = outer.split_codes(send.fragment, chunks, memoryview(bytearray(send.codes)))
        return [
            _decoded(outer, outer.chunk_values(send.fragment, chunk), codes)
            for chunk, codes in parts.items()
        ]


def _decoded(outer: OuterFragments, size: int, codes: memoryview) -> npt.NDArray[Any]:
    values = torch.empty(size)
    outer.codec.decode(codes_as_tensor(codes), values)
    return values.numpy()


def watch(swarm: SimulatedSwarm, monkeypatch: pytest.MonkeyPatch) -> Tap:
    """Put a tap on every peer of the swarm, those that come later too."""
    tap = Tap(swarm)
    send, sent, receive = Conversation.send, FragmentExchange.sent, _GatedTrainer.receive
    init = FragmentExchange.__init__

    async def tapped_send(
        talk: Conversation, message: Message, payload: Any = None, **options: Any
    ) -> None:
        stream: Any = talk._stream
        if stream._protocol == FRAGMENT:
            network = stream._network
            theirs = (n for n, p in swarm.peers.items() if p.network is network)
            sender = next(theirs, "stranger")
            receiver = tap.name_of(stream.remote_peer_id)
            if tap.loses(sender, receiver, message):
                return
            await trio.sleep(tap.delay_s(message))
            codes = b"" if payload is None else bytes(payload)
            tap.posts.append(Post(trio.current_time(), sender, receiver, message, codes))
        await send(talk, message, payload, **options)

    def tapped_init(exchange: FragmentExchange, *arguments: Any, **options: Any) -> None:
        init(exchange, *arguments, **options)
        tap.exchanges[tap.name_of(exchange._own_id)] = exchange

    def tapped_sent(exchange: FragmentExchange, what: Sent) -> None:
        name = tap.name_of(exchange._own_id)
        tap.sends.append(
            Send(
                trio.current_time(),
                name,
                what.fragment,
                what.cycle,
                bytes(what.codes),
                tap.stamps(name, what.fragment),
                tuple(tap.phi(name, what.fragment)),
            )
        )
        sent(exchange, what)

    async def tapped_receive(trainer: Any) -> TrainerEvent:
        event = await receive(trainer)
        name = tap.name_of(trainer._trainer._machine.peer_id)
        tap.told.append((name, trio.current_time(), event))
        return event

    monkeypatch.setattr(Conversation, "send", tapped_send)
    monkeypatch.setattr(FragmentExchange, "__init__", tapped_init)
    monkeypatch.setattr(FragmentExchange, "sent", tapped_sent)
    monkeypatch.setattr(_GatedTrainer, "receive", tapped_receive)
    return tap


def contributes(message: Message, fragment: int, cycle: int) -> bool:
    """Whether it is a contribution to this."""
    return isinstance(message, Contribution) and (message.fragment, message.cycle) == (
        fragment,
        cycle,
    )


def brings(message: Message, fragment: int, cycle: int) -> bool:
    """Whether it is a result of this."""
    return isinstance(message, Result) and (message.fragment, message.cycle) == (fragment, cycle)


def healing_bytes(tap: Tap) -> int:
    """Bytes of chunks that were fetched from other peers."""
    return sum(post.bytes_ for post in tap.messages(ChunkStateReply))
