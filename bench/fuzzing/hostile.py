"""A peer that keeps to no rules: it fires volleys at others, and answers them with more.

It runs on any network, simulated or real. Linked, it has said a proper hello and beats properly, so
that the others take it for a member, and ask it things; the answers are shots as well. What it does
follows from its volleys and a seed, as far as the network is deterministic.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NoReturn

import trio

from peer.network.conversation import Conversation
from peer.network.relay import HOP, STOP
from peer.runtime import Address, Network, PeerId, Stream
from protocol.errors import LocoError
from protocol.gossip.exchange import exchange_id
from protocol.wire.fields import Message
from protocol.wire.messages import Beat, Hello, Propose
from protocol.wire.versions import HELLO

from .shots import CONVERSATIONS, Gunner, Magazine, Shot, Volley, said_in

ENDS: Final = (LocoError, trio.BrokenResourceError, trio.ClosedResourceError)
ANSWER_S: Final = 0.3
"""How long an answer is waited for, between two shots."""
END_S: Final = 1.0
"""How long the end of a stream is waited for."""
BEAT_EVERY_S: Final = 1.0
LINKED_S: Final = 60.0
"""How long links may take."""
SALVO: Final = 6
"""Volleys under way at once, at each victim."""
MAX_KEPT: Final = 24
SHOWN_CHARS: Final = 600


def _no_member() -> NoReturn:
    raise AssertionError("it says no hello and no beats")


class Hostile:
    """See the top of the file.

    Args:
        victims: peer ids and addresses.
        hello, beat: what it says of itself, as a member would.
        pause_s: between two volleys of each of SALVO guns.
        magazine: has what it fires, and what it answers questions with.

    Attributes:
        fired: messages that went out, by type.
        kept: the last volleys, in case that one of them has found a bug.
    """

    def __init__(
        self,
        network: Network,
        victims: Mapping[PeerId, Iterable[Address]],
        *,
        magazine: Magazine,
        gunner: Gunner,
        hello: Callable[[], Hello] = _no_member,
        beat: Callable[[], Beat] = _no_member,
        pause_s: float = 0.0,
    ) -> None:
        self._network = network
        self._victims = victims
        self._hello = hello
        self._beat = beat
        self._answers = {protocol: magazine.answers(protocol) for protocol in CONVERSATIONS}
        self._gunner = gunner
        self._pause_s = pause_s
        self._links: dict[PeerId, Conversation] = {}
        self._all_linked = trio.Event()
        self.fired: Counter[str] = Counter()
        self.kept: deque[tuple[PeerId, Volley]] = deque(maxlen=MAX_KEPT)

    def last_words(self) -> str:
        """The newest volleys, for people."""
        return "\n".join(str(volley)[:SHOWN_CHARS] for _, volley in self.kept)

    async def attack(self, volleys: Iterable[Volley], *, linked: bool, asked: bool) -> None:
        """Fire all volleys, at every victim, and wait until they are through.

        Args:
            linked: say hello to all before, and beat.
            asked: answer what they ask, in every conversation.
        """
        for peer_id, addresses in self._victims.items():
            await self._network.connect(peer_id, list(addresses))
        async with trio.open_nursery() as nursery:
            for protocol in CONVERSATIONS if asked else ():
                await self._network.serve(protocol, partial(self._answer, protocol))
            if linked:
                for peer_id in self._victims:
                    nursery.start_soon(self._keep_link, peer_id)
                with trio.fail_after(LINKED_S):
                    await self._all_linked.wait()
            left = iter(volleys)
            async with trio.open_nursery() as salvos:
                for peer_id in list(self._victims) * SALVO:
                    salvos.start_soon(self._fire_all, peer_id, left)
            nursery.cancel_scope.cancel()

    # --- the link ---------------------------------------------------------------------------------
    async def _keep_link(self, peer_id: PeerId) -> None:
        """Say hello and beat; again, when they have ended it."""
        while True:
            try:
                async with Conversation(await self._network.open_stream(peer_id, HELLO)) as talk:
                    await talk.send(self._hello())
                    await talk.receive(Hello, timeout_s=10.0)
                    self._links[peer_id] = talk
                    if len(self._links) == len(self._victims):
                        self._all_linked.set()
                    await self._beat_on(talk)
            except* ENDS:
                pass
            await trio.sleep(BEAT_EVERY_S)

    async def _beat_on(self, talk: Conversation) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen, talk)
            while True:
                await talk.send(self._beat())
                await trio.sleep(BEAT_EVERY_S)

    async def _listen(self, talk: Conversation) -> None:
        while True:
            await talk.receive()

    # --- volleys ----------------------------------------------------------------------------------
    async def _fire_all(self, peer_id: PeerId, volleys: Iterator[Volley]) -> None:
        for volley in volleys:
            self.kept.append((peer_id, volley))
            try:
                await self._fire(peer_id, volley)
            except* ENDS:
                pass
            await trio.sleep(self._pause_s)

    async def _fire(self, peer_id: PeerId, volley: Volley) -> None:
        greets = isinstance(volley.shots[0].message, Hello)
        if volley.protocol == HELLO and peer_id in self._links and not greets:
            await self._fire_on_link(self._links[peer_id], volley)
            return
        stream = await self._network.open_stream(peer_id, volley.protocol)
        try:
            talk, heard = Conversation(stream), dict[str, Any]()
            if volley.protocol == HELLO:
                await talk.send(self._hello())
            for shot in volley.shots:
                await self._shoot(stream, shot, heard)
                heard |= await self._heard(talk, ANSWER_S)
            while volley.waits and (more := await self._heard(talk, END_S)):
                heard |= more
        finally:
            with trio.CancelScope(shield=True):
                await stream.aclose()

    async def _fire_on_link(self, talk: Conversation, volley: Volley) -> None:
        """Among the beats of a link that lives; it ends where they end it."""
        for shot in volley.shots:
            async with talk._send_lock:
                await self._shoot(talk._stream, shot, {})
            await trio.sleep(ANSWER_S)

    async def _shoot(self, stream: Stream, shot: Shot, heard: Mapping[str, Any]) -> None:
        await stream.send_all(self._gunner.frame(shot, heard))
        self.fired[type(shot.message).__name__] += 1

    async def _heard(self, talk: Conversation, wait_s: float) -> dict[str, Any]:
        """What the victim says within so long, by name; nothing when it says nothing.

        Raises:
            one of ENDS
        """
        with trio.move_on_after(wait_s):
            message, _ = await talk.receive()
            return {**said_in(message), **self._names(talk.remote_peer_id, message)}
        return {}

    def _names(self, peer_id: PeerId, message: Message) -> dict[str, Any]:
        """What follows from a proposal: how it is accepted, and the name of the exchange."""
        if not isinstance(message, Propose):
            return {}
        ends = ((self._network.peer_id, message.round), (peer_id, message.round))
        return {"proposed": message.round, "exchange": exchange_id(message.group, *ends)}

    # --- answers ----------------------------------------------------------------------------------
    async def _answer(self, protocol: str, stream: Stream) -> None:
        """Answer whatever is asked with shots."""
        talk = Conversation(stream)
        heard: dict[str, Any] = {}
        if protocol not in (HOP, STOP):
            message, _ = await talk.receive(timeout_s=10.0)
            heard |= said_in(message) | self._names(stream.remote_peer_id, message)
            if isinstance(message, Hello):
                await talk.send(self._hello())
        for _ in range(3):
            await self._shoot(stream, next(self._answers[protocol]), heard)
            heard |= await self._heard(talk, ANSWER_S)
