"""Lasting links to the other peers: hello, then beats for as long as both live.

A link tells each side that the other is alive and how far it is, measures the round-trip time, and
passes on who else is there. At most MAX_LINKS are held; who has none to a peer still finds it
through the directory.

The rules
  1. Either side may open the link; the opener says Hello first, the other answers Hello or a
     Refusal with a sentence.
  2. Refused are: no common version, another run (hello.py), too many links, an identity that is
     alive elsewhere (duplicates.py); a silent old life of it is replaced at once. Links that others
     have opened have a budget for each identity (one that lives, and one that is to replace it
     where it turns out dead) and for each network. A link that beats is never replaced.
  3. Any byte is a sign of life, on whatever stream: on a thin link a beat may be late behind bulk.
     A link whose peer sent nothing at all for SILENCE_S is given up.
  4. A beat says what came from the other so far, and how fast it may go on (network/pacing.py).
  5. Two peers that dial each other at once keep the same one of both links (`hand_over`).
  6. Messages of a link are read at a pace that is enough for all that honest peers say.
  7. Links are the run's: peers of all groups are linked. Hello and beats tell in which group the
     sender is; the roster keeps that, and the view of a group shows its members.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio

from peer.facts import Facts, PeerState
from peer.network.conversation import Conversation, StreamStalled
from peer.network.pacing import Pacing
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.ports import Address, Directory, Network, PeerId, Stream
from peer.process.bell import Bell
from protocol.errors import Declined, LocoError, StreamLost
from protocol.limits import ANSWER_S, MAX_LISTED, PER_PEER_PER_S
from protocol.membership.book import Budget
from protocol.membership.view import Progress, Roster
from protocol.wire.messages import (
    AliveReply,
    AskAlive,
    Beat,
    Hello,
    Leaving,
    PeerList,
    Refusal,
    Statements,
    peer_entry,
)  # fmt: skip
from protocol.wire.versions import HELLO

from .dialler import Dialler
from .duplicates import BEAT_S, Duplicates
from .hello import LINK_PLACES, NO_ROOM, Greeter
from .link import FROM_LINK, FromLink, Link, Outgoing, beat_to, hand_over, progress_in
from .passing_on import PassingOn
from .standing import Standing

SILENCE_S: Final = 10.0
PEER_LIST_EVERY_BEATS: Final = 10
MAX_OUTBOX: Final = 32
"""Messages waiting to be sent on one link; one that falls behind further is closed."""
MAX_QUESTIONS: Final = 4
"""Questions of one link that are looked into at once; more go without an answer."""
LEAVING_S: Final = 1.0
"""How long we try to tell everybody that we leave."""


@dataclass(frozen=True, slots=True)
class LinksStatistics:
    """Links now, and since the start."""

    live: int
    opened: int
    lost: int
    refused: int


class Links:
    """All links of one peer. `run` must be running before `dial`.

    Attributes:
        heard: rung when a peer has told of itself, and when one is gone.
        tell: to be rung when all should be told of us at once, not with the next beat.
        passing_on: tells linked peers who belongs to the run.
        dialler: keeps links to everybody on the roster.
    """

    def __init__(
        self,
        *,
        network: Network,
        pacing: Pacing,
        directory: Directory,
        roster: Roster,
        facts: Facts,
        events: EventLog,
        greeter: Greeter,
        standing: Standing,
    ) -> None:
        self._network = network
        self._pacing = pacing
        self._directory = directory
        self._roster = roster
        self._facts = facts
        self._events = events
        self._links: dict[PeerId, list[Link]] = {}
        self._book = standing.book
        self.dialler = Dialler(
            roster, facts.peer_id, self.dial, self._book, standing.may_be_dialled
        )
        self._places = Budget(LINK_PLACES)
        self._sequence = 0
        self._opened = self._lost = self._refused = 0
        self._nursery: trio.Nursery | None = None
        self._greeter = greeter
        self._standing = standing
        self.passing_on = PassingOn(standing.door, self._all, self._post)
        self._duplicates = Duplicates(self._links, roster, self._ask_alive)
        self.serving = trio.Event()
        self.heard = Bell()
        self.tell = Bell()

    def statistics(self) -> LinksStatistics:
        """Links now, and since the start."""
        return LinksStatistics(len(self._all()), self._opened, self._lost, self._refused)

    def rtt_s(self, peer_id: PeerId) -> float | None:
        """Smoothed round-trip time to a linked peer."""
        times = [link.rtt_s for link in self._links.get(peer_id, ()) if link.rtt_s is not None]
        return min(times, default=None)

    async def run(self) -> None:
        """Answer hellos, beat, and keep links to everybody on the roster, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await self._network.serve(HELLO, self._serve)
            self.serving.set()
            nursery.start_soon(self._tell_at_once)
            nursery.start_soon(self._standing.end_links, self._all)
            while True:
                self._beat()
                self._note_bytes()
                self._expire()
                self._redial()
                await trio.sleep(BEAT_S)

    async def _tell_at_once(self) -> None:
        while True:
            await self.tell.wait()
            for link in self._all():
                self._post(link, self._beat_for(link))

    async def say_leaving(self) -> None:
        """Tell everybody that we go on purpose."""
        with trio.move_on_after(LEAVING_S):
            async with trio.open_nursery() as nursery:
                for link in self._all():
                    nursery.start_soon(self._say_leaving, link)

    async def _say_leaving(self, link: Link) -> None:
        with contextlib.suppress(LocoError):
            await link.talk.send(Leaving())

    # --- hello ------------------------------------------------------------------------------------
    async def dial(self, peer_id: PeerId, addresses: Sequence[Address]) -> Hello:
        """Open a link, which then lives by itself.

        Returns:
            Their hello.

        Raises:
            StreamLost: unreachable; the message names the step that failed.
            Refused: they declined.
        """
        assert self._nursery is not None
        await self._network.connect(peer_id, addresses)
        stream = await self._network.open_stream(peer_id, HELLO)
        talk = Conversation(stream)
        try:
            asked_s = trio.current_time()
            await talk.send(self._greeter.hello(), stall_s=ANSWER_S)
            theirs, _ = await talk.receive(Hello, timeout_s=ANSWER_S)
            self._greeter.compare_clocks(peer_id, theirs, trio.current_time() - asked_s)
            refusal = self._greeter.fault(peer_id, theirs)
            if refusal is not None:
                raise Declined(refusal.reason, refusal.sentence)
        except BaseException:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await stream.aclose()
            raise
        self._nursery.start_soon(self._own, talk, theirs)
        return theirs

    async def _serve(self, stream: Stream) -> None:
        talk, peer_id, address = Conversation(stream), stream.remote_peer_id, stream.remote_address
        theirs, _ = await talk.receive(Hello, timeout_s=ANSWER_S)
        refusal = self._greeter.fault(peer_id, theirs)
        if refusal is None and not self._places.has_room(peer_id, address):
            refusal = NO_ROOM
        if refusal is not None:
            await self._refuse(talk, refusal)
            return
        self._places.take(peer_id, address)
        try:
            await self._take_in(talk, theirs)
        finally:
            self._places.give_back(peer_id, address)

    async def _take_in(self, talk: Conversation, theirs: Hello) -> None:
        peer_id, asked_s = talk.remote_peer_id, trio.current_time()
        refusal = await self._duplicates.fault(peer_id, theirs.incarnation)
        if refusal is not None:
            await self._refuse(talk, refusal)
            return
        self._replace_silent(peer_id, asked_s)
        await talk.send(self._greeter.hello(), stall_s=ANSWER_S)
        await self._live(talk, theirs)

    async def _refuse(self, talk: Conversation, refusal: Refusal) -> None:
        self._refused += 1
        await talk.send(refusal, stall_s=ANSWER_S)

    def _replace_silent(self, peer_id: PeerId, asked_s: float) -> None:
        """End the links of this identity that have been silent since it greeted."""
        for link in self._links.get(peer_id, ()):
            if link.last_heard_s <= asked_s:
                link.scope.cancel()

    def _ask_alive(self, question: AskAlive) -> frozenset[PeerId]:
        asked = [link for link in self._all() if link.peer_id != question.peer_id]
        for link in asked:
            self._post(link, question)
        return frozenset(link.peer_id for link in asked)

    # --- the life of a link -----------------------------------------------------------------------
    async def _own(self, talk: Conversation, theirs: Hello) -> None:
        try:
            with contextlib.suppress(LocoError):  # counted and logged where the link ended
                await self._live(talk, theirs, opened_by_us=True)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await talk.aclose()

    async def _live(self, talk: Conversation, theirs: Hello, *, opened_by_us: bool = False) -> None:
        peer_id, now_s = talk.remote_peer_id, trio.current_time()
        send, receive = trio.open_memory_channel[Outgoing](MAX_OUTBOX)
        link = Link(
            peer_id, theirs.incarnation, talk, send, last_heard_s=now_s, opened_by_us=opened_by_us
        )
        self._links.setdefault(peer_id, []).append(link)
        self._opened += 1
        self.dialler.linked(peer_id)
        self._roster.heard(
            now_s,
            peer_id,
            theirs.incarnation,
            addresses=theirs.addresses,
            progress=Progress(
                state=theirs.state, round=theirs.round, step=theirs.step, group=theirs.group
            ),
        )
        self.heard.ring()
        life, round_, why = theirs.incarnation, theirs.round, "closed"
        self._events.emit(EventName.PEER_LINKED, remote=peer_id, incarnation=life, round=round_)
        try:
            with link.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send_all, link, receive)
                    nursery.start_soon(self.passing_on.begin, link, SILENCE_S)
                    nursery.start_soon(hand_over, link, self._links, self._facts.peer_id)
                    send.send_nowait(self._beat_for(link))
                    send.send_nowait(self._peer_list())
                    await self._receive_all(link, nursery)
        except* LocoError as group:
            why = self._standing.why_ended(peer_id, group)
        finally:
            self._ended(link, why)

    def _ended(self, link: Link, why: str) -> None:
        links = self._links.get(link.peer_id, [])
        links[:] = [other for other in links if other is not link]
        if not links:
            self._links.pop(link.peer_id, None)
            self._lost += 1
            self._roster.gone(trio.current_time(), link.peer_id, link.incarnation)
            self._events.emit(EventName.PEER_LOST, remote=link.peer_id, reason=why)
            self._book.dials.put_off(link.peer_id, trio.current_time())
            self.heard.ring()

    async def _send_all(self, link: Link, outbox: trio.MemoryReceiveChannel[Outgoing]) -> None:
        async for message in outbox:
            await link.talk.send(message, stall_s=SILENCE_S)

    async def _receive_all(self, link: Link, nursery: trio.Nursery) -> None:
        while True:
            await link.wait_turn()
            message = await self._next_message(link)
            now_s = link.last_heard_s = trio.current_time()
            link.messages += 1
            match message:
                case Beat():
                    self._heard_beat(link, message, now_s)
                case PeerList():
                    link.messages += PER_PEER_PER_S
                    self.dialler.told(now_s, link.peer_id, message)
                case Statements():
                    link.messages += len(message.statements)
                    self.passing_on.heard(link, message)
                case AskAlive():
                    if link.questions < MAX_QUESTIONS:
                        nursery.start_soon(self._answer_alive, link, message)
                case AliveReply():
                    self._duplicates.answered(link.peer_id, message)
                case Leaving():
                    self._roster.gone(now_s, link.peer_id, link.incarnation)
                    self._book.dials.put_off(link.peer_id, now_s, long=True)
                    self._events.emit(EventName.PEER_LEFT, remote=link.peer_id)
                    raise StreamLost("left")

    async def _next_message(self, link: Link) -> FromLink:
        while True:
            try:
                message, _ = await link.talk.receive(*FROM_LINK, timeout_s=SILENCE_S)
            except StreamStalled:
                if not self._has_sent_bytes(link, trio.current_time() - SILENCE_S):
                    raise
            else:
                return message  # type: ignore[return-value]  # one of those that we asked for

    def _has_sent_bytes(self, link: Link, since_s: float) -> bool:
        """Whether the peer, in its newest life, has sent anything at all since then."""
        newest = self._links[link.peer_id][-1]
        return link is newest and self._pacing.last_byte_s(link.peer_id) > since_s

    def _heard_beat(self, link: Link, beat: Beat, now_s: float) -> None:
        link.heard_beat(beat, now_s)
        self._pacing.heard(
            link.peer_id, beat.sent_s, beat.received_bytes, beat.may_send_bytes_per_s
        )
        progress = progress_in(beat)
        self._roster.beaten(now_s, link.peer_id, link.incarnation, progress, link.rtt_s)
        self.heard.ring()

    async def _answer_alive(self, link: Link, question: AskAlive) -> None:
        link.questions += 1
        try:
            self._post(link, await self._duplicates.answer(question))
        finally:
            link.questions -= 1

    # --- beats and redials ------------------------------------------------------------------------
    def _beat(self) -> None:
        self._sequence += 1
        peers = self._peer_list() if self._sequence % PEER_LIST_EVERY_BEATS == 0 else None
        for link in self._all():
            self._post(link, self._beat_for(link))
            if peers is not None:
                self._post(link, peers)

    def _beat_for(self, link: Link) -> Beat:
        swarm_time_s = self._directory.swarm_time_s()
        return beat_to(link, self._facts, self._pacing, self._sequence, swarm_time_s)

    def _note_bytes(self) -> None:
        """Rule 3, for the roster."""
        for link in self._all():
            if self._has_sent_bytes(link, link.last_heard_s):
                link.last_heard_s = self._pacing.last_byte_s(link.peer_id)
                self._roster.heard(link.last_heard_s, link.peer_id, link.incarnation)

    def _post(self, link: Link, message: Outgoing) -> None:
        try:
            link.outbox.send_nowait(message)
        except trio.WouldBlock:
            link.scope.cancel()  # it takes nothing any more: as good as silent

    def _peer_list(self) -> PeerList:
        now_s = trio.current_time()
        alive = [m for m in self._roster.alive(now_s) if m.addresses][:MAX_LISTED]
        return PeerList(tuple(peer_entry(m.peer_id, m.incarnation, m.addresses) for m in alive))

    def _all(self) -> list[Link]:
        return [link for links in self._links.values() for link in links]

    def _expire(self) -> None:
        for peer_id in self._roster.expire(trio.current_time()):
            self._events.emit(EventName.PEER_LOST, remote=peer_id, reason="silent")

    def _redial(self) -> None:
        """Link to everybody on the roster (dialler.py)."""
        if self._facts.state in (PeerState.STARTING, PeerState.CONNECTING, PeerState.LEAVING):
            return
        assert self._nursery is not None
        self.dialler.look(self._nursery, trio.current_time(), self._links)
