"""Lasting links to the other peers: hello, then beats for as long as both live.

A link tells each side that the other is alive and how far it is, measures the round-trip time, and
passes on who else is there. We open no further ones once there are MAX_LINKS, of which those that
others have opened take half at the most; other peers are found through the directory.

The rules
  1. Either side may open the link; the opener says Hello first, the other answers Hello or a
     Refusal with a sentence.
  2. Refused are: no common version, another run, too many links, an identity that is alive
     elsewhere (greeting.py). Links that others have opened have a budget for each identity (one
     that lives, and one that is to replace it where it turns out dead) and for each network.
  3. Any byte is a sign of life, on whatever stream: on a thin link a beat may be late behind bulk.
     A link whose peer sent nothing at all for SILENCE_S is given up.
  4. A beat says what came from the other so far, and how fast it may go on (network/pacing.py).
  5. Two peers that dial each other at once keep the same one of both links (`_hand_over`).
  6. Messages of a link are read at a pace that is enough for all that honest peers say.
  7. Links are the run's: peers of all groups are linked. Hello and beats tell the sender's group;
     the roster keeps that, and the view of a group shows its members.
  8. Statements of who belongs to the run (admission.py) pass over links: all that are known with a
     new link, then each new one, once, to all but the sender. They may end links.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import trio
from msgspec.structs import astuple
from trio.lowlevel import ParkingLot

from peer.facts import PeerState
from peer.network.conversation import Conversation, StreamStalled
from peer.observe.event_names import EventName
from peer.runtime import Address, PeerId, Stream
from protocol.address.multiaddr import is_relayed
from protocol.errors import Declined, LocoError, Refused, RemoteProtocolError, StreamLost
from protocol.limits import (
    ANSWER_S,
    LINK_MESSAGES_PER_S,
    LINK_PLACES,
    MAX_DIALS,
    MAX_LINKS,
    MAX_PEERS_PER_EXCHANGE,
)
from protocol.membership.book import Budget, Fault, PeerBook, prefix_of
from protocol.membership.view import Member, Progress, Roster
from protocol.outcomes import RefusalReason
from protocol.wire.messages import Beat, Hello, Leaving, PeerList, Statements, peer_entry
from protocol.wire.versions import HELLO

from .admission import Reputation
from .greeting import BEAT_S, NO_ROOM, Greeter, duplicate_refusal
from .link import FROM_LINK, FromLink, Link, Outgoing, beat_to
from .services import DaemonServices

SILENCE_S: Final = 10.0
DIALS_NONE: Final = (PeerState.STARTING, PeerState.CONNECTING, PeerState.LEAVING)
PEER_LIST_EVERY_BEATS: Final = 10
MAX_OUTBOX: Final = 32
"""Messages waiting to be sent on one link; one that falls behind further is closed."""
HANDOVER_S: Final = 2 * BEAT_S
"""For how long a peer may have two links to us."""


class Links:
    """All links of one peer. `run` must be running before `dial`.

    Attributes:
        tell: to be woken when all should be told of us at once, not with the next beat.
        dialler: keeps links to everybody on the roster.
    """

    def __init__(self, services: DaemonServices, greeter: Greeter, reputation: Reputation) -> None:
        self._network = services.network
        self._pacing = services.pacing
        self._directory = services.directory
        self._roster = services.roster
        self._facts = services.facts
        self._events = services.events
        self._greeter = greeter
        self._reputation = reputation
        self._admission = reputation.admission
        self._book = reputation.book
        self._links: dict[PeerId, list[Link]] = {}
        own_id, may_be_dialled = self._facts.peer_id, reputation.may_be_dialled
        self.dialler = Dialler(self._roster, own_id, self.dial, self._book, may_be_dialled)
        self._places = Budget(LINK_PLACES)
        direct = (address for address in self._network.addresses if not is_relayed(address))
        self._own_networks = frozenset(map(prefix_of, direct))
        self._sequence = 0
        self._nursery: trio.Nursery | None = None
        self.serving = trio.Event()
        self._heard = services.heard
        self.tell = ParkingLot()

    @property
    def num_live(self) -> int:
        return len(self._all())

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await self._network.serve(HELLO, self._serve)
            self.serving.set()
            nursery.start_soon(self._tell_at_once)
            nursery.start_soon(self._end_ignored)
            while True:
                self._beat()
                self._note_bytes()
                for peer_id in self._roster.expire(trio.current_time()):
                    self._events.emit(EventName.PEER_LOST, remote=peer_id, reason="silent")
                if self._facts.state not in DIALS_NONE:
                    now_s, room = trio.current_time(), self._room_to_dial()
                    self.dialler.dial_due(nursery, now_s, self._links, room)
                await trio.sleep(BEAT_S)

    def _room_to_dial(self) -> int:
        """Links that we may still open; however many others have opened, they leave us some."""
        ours = sum(links[-1].opened_by_us for links in self._links.values())
        return MAX_LINKS - ours - min(len(self._links) - ours, MAX_LINKS // 2)

    async def _tell_at_once(self) -> None:
        while True:
            await self.tell.park()
            for link in self._all():
                self._post(link, self._beat_for(link))

    async def _end_ignored(self) -> None:
        while True:
            await self._reputation.one_more_ignored.park()
            for link in self._all():
                if self._reputation.conduct_refusal_of(link.peer_id) is not None:
                    link.scope.cancel()

    async def say_leaving(self) -> None:
        async def tell(link: Link) -> None:
            with suppress(LocoError):
                await link.talk.send(Leaving())

        with trio.move_on_after(BEAT_S):
            async with trio.open_nursery() as nursery:
                for link in self._all():
                    nursery.start_soon(tell, link)

    # --- hello ------------------------------------------------------------------------------------
    async def dial(self, peer_id: PeerId, addresses: Sequence[Address]) -> Hello:
        """Open a link, which then lives by itself; returns their hello.

        Raises:
            StreamLost: unreachable; the message names the step that failed.
            Refused: they declined; Declined: we did.
            LocoError: our clocks are too far apart.
        """
        assert self._nursery is not None
        await self._network.connect(peer_id, addresses)
        talk = Conversation(await self._network.open_stream(peer_id, HELLO))
        try:
            asked_s = trio.current_time()
            await talk.send(self._greeter.hello(), stall_s=ANSWER_S)
            theirs, _ = await talk.receive(Hello, timeout_s=ANSWER_S)
            round_trip_s = trio.current_time() - asked_s
            refusal = self._greeter.refusal_of(peer_id, theirs)
            if refusal is not None:
                raise Declined(refusal.reason, self._greeter.told_here(refusal, theirs))
            self._greeter.compare_clocks(peer_id, theirs, round_trip_s)
        except BaseException:
            await talk.aclose()
            raise
        self._nursery.start_soon(self._own, talk, theirs)
        return theirs

    async def _serve(self, stream: Stream) -> None:
        talk, peer_id, address = Conversation(stream), stream.remote_peer_id, stream.remote_address
        theirs, _ = await talk.receive(Hello, timeout_s=ANSWER_S)
        refusal = self._greeter.refusal_of(peer_id, theirs)
        if refusal is not None:
            why = self._greeter.told_here(refusal, theirs)
            self._facts.unlinked.turned_away = trio.current_time(), peer_id, why
        if refusal is None and not self._places.has_room(peer_id, address):
            refusal = NO_ROOM
        if refusal is not None:
            await talk.send(refusal, stall_s=ANSWER_S)
            return
        with self._places.held(peer_id, address):
            await self._take_in(talk, theirs)

    async def _take_in(self, talk: Conversation, theirs: Hello) -> None:
        peer_id, asked_s = talk.remote_peer_id, trio.current_time()
        refusal = await duplicate_refusal(self._links, peer_id, theirs.incarnation)
        if refusal is not None:
            await talk.send(refusal, stall_s=ANSWER_S)
            return
        for link in self._links.get(peer_id, ()):
            if link.last_heard_s <= asked_s:  # silent since the newcomer's hello
                link.scope.cancel()
        await talk.send(self._greeter.hello(), stall_s=ANSWER_S)
        await self._live(talk, theirs)

    # --- the life of a link -----------------------------------------------------------------------
    async def _own(self, talk: Conversation, theirs: Hello) -> None:
        with suppress(LocoError):  # counted and logged where the link ended
            async with talk:
                await self._live(talk, theirs, opened_by_us=True)

    async def _live(self, talk: Conversation, theirs: Hello, *, opened_by_us: bool = False) -> None:
        send, receive = trio.open_memory_channel[Outgoing](MAX_OUTBOX)
        link, why = self._register(talk, send, theirs, opened_by_us=opened_by_us), "closed"
        try:
            with link.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send_all, link, receive)
                    nursery.start_soon(self._tell_all_statements, link)
                    nursery.start_soon(self._hand_over, link)
                    send.send_nowait(self._beat_for(link))
                    send.send_nowait(self._peer_list())
                    await self._receive_all(link)
        except* LocoError as group:
            if group.subgroup(RemoteProtocolError) is not None:
                self._reputation.blame(link.peer_id, Fault.BROKEN_RULE)
            why = str(group.exceptions[0]).removeprefix(f"{link.peer_id} ")
        finally:
            self._ended(link, why)

    def _register(
        self,
        talk: Conversation,
        outbox: trio.MemorySendChannel[Outgoing],
        theirs: Hello,
        *,
        opened_by_us: bool,
    ) -> Link:
        """Make the link, and tell all that know the peers of the run; `_ended` takes it back."""
        peer_id, now_s = talk.remote_peer_id, trio.current_time()
        network = prefix_of(talk.remote_address)
        link = Link(
            peer_id,
            theirs.incarnation,
            talk,
            outbox,
            last_heard_s=now_s,
            opened_by_us=opened_by_us,
            told_pair_averages=self._facts.num_pair_averages,
        )
        self._links.setdefault(peer_id, []).append(link)
        self.dialler.linked(peer_id)
        self._network.note_addresses(peer_id, theirs.addresses)
        self._roster.heard(
            now_s,
            peer_id,
            theirs.incarnation,
            addresses=theirs.addresses,
            progress=Progress(
                state=theirs.state, round=theirs.round, step=theirs.step, group=theirs.group
            ),
            network=None if network in self._own_networks else network,
        )
        self._heard.unpark_all()
        life, round_ = theirs.incarnation, theirs.round
        self._events.emit(EventName.PEER_LINKED, remote=peer_id, incarnation=life, round=round_)
        return link

    async def _hand_over(self, link: Link) -> None:
        """End one of two links that two peers have opened by dialling each other at once (rule 5).

        Both ends keep the one that the peer with the lower id has opened; of several, the newest.
        """
        await trio.sleep(HANDOVER_S)
        links = self._links.get(link.peer_id, ())
        same = [one for one in links if one.incarnation == link.incarnation]
        lower_is_us = self._facts.peer_id < link.peer_id
        opened = [one for one in same if one.opened_by_us == lower_is_us]
        for one in same:
            if one is not (opened or same)[-1]:
                one.scope.cancel()

    def _ended(self, link: Link, why: str) -> None:
        links = self._links.get(link.peer_id, [])
        links[:] = [other for other in links if other is not link]
        if not links:
            self._links.pop(link.peer_id, None)
            self._facts.forget_others_partners(link.peer_id)
            self._roster.gone(link.peer_id, link.incarnation)
            self._events.emit(EventName.PEER_LOST, remote=link.peer_id, reason=why)
            self._book.dials.put_off(link.peer_id, trio.current_time())
            self._heard.unpark_all()

    async def _send_all(self, link: Link, outbox: trio.MemoryReceiveChannel[Outgoing]) -> None:
        async for message in outbox:
            await link.talk.send(message, stall_s=SILENCE_S)

    async def _receive_all(self, link: Link) -> None:
        while True:
            await link.wait_turn()
            message = await self._next_message(link)
            now_s = link.last_heard_s = trio.current_time()
            link.messages += 1
            match message:
                case Beat():
                    self._pacing.heard(
                        link.peer_id,
                        message.sent_s,
                        message.received_bytes,
                        message.may_send_bytes_per_s,
                    )
                    told = link.heard_beat(message, now_s)
                    self._facts.count_others_partners(link.peer_id, map(astuple, message.met))
                    self._roster.heartbeat(now_s, link.peer_id, link.incarnation, told, link.rtt_s)
                    self._heard.unpark_all()
                case PeerList():
                    link.messages += LINK_MESSAGES_PER_S
                    link.named = frozenset(entry.peer_id for entry in message.peers)
                    self.dialler.on_peer_list(now_s, link.peer_id, message)
                case Statements():
                    link.messages += len(message.statements)
                    if new := self._admission.heard(message):
                        self.tell_statements(new, but=link)
                case Leaving():
                    self._roster.gone(link.peer_id, link.incarnation)
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
        newest = self._links[link.peer_id][-1]
        return link is newest and self._pacing.last_byte_s(link.peer_id) > since_s

    # --- beats and redials ------------------------------------------------------------------------
    def _beat(self) -> None:
        self._sequence += 1
        peers = self._peer_list() if self._sequence % PEER_LIST_EVERY_BEATS == 0 else None
        if peers is not None:
            self._note_unlinked()
        for link in self._all():
            self._post(link, self._beat_for(link))
            if peers is not None:
                self._post(link, peers)

    def _note_unlinked(self) -> None:
        """Note the peers that others can link with and we cannot, and those that refuse us."""
        unlinked, failures, now_s = self._facts.unlinked, self.dialler.failures, trio.current_time()
        if self._facts.run_over and self._facts.successor is not None:
            self.dialler.forget_those_in_another_run()  # as it is meant to be
        refusals = self.dialler.refusals
        unlinked.refusing = {peer_id: each.sentence for peer_id, each in refusals.items()}
        links = self._all()
        named = Counter(peer_id for link in links for peer_id in link.named)
        most = (peer_id for peer_id, count in named.items() if 2 * count >= len(links))
        known = {peer_id: (now_s, why) for peer_id, why in failures.items()} | unlinked.unreached
        unlinked.unreached = {
            peer_id: (known[peer_id][0], failures.get(peer_id, known[peer_id][1]))
            for peer_id in most
            if peer_id in known and peer_id not in self._links and peer_id not in refusals
        }

    def _beat_for(self, link: Link) -> Beat:
        swarm_time_s = self._directory.swarm_time_s()
        return beat_to(link, self._facts, self._pacing, self._sequence, swarm_time_s)

    def _note_bytes(self) -> None:
        for link in self._all():
            if self._has_sent_bytes(link, link.last_heard_s):
                link.last_heard_s = self._pacing.last_byte_s(link.peer_id)
                self._roster.heard(link.last_heard_s, link.peer_id, link.incarnation)

    # --- statements -------------------------------------------------------------------------------
    async def _tell_all_statements(self, link: Link) -> None:
        """Send all known statements directly, so that they do not fill the outbox of beats."""
        for message in self._admission.all_told():
            await link.talk.send(message, stall_s=SILENCE_S)

    def tell_statements(self, messages: Sequence[Statements], but: Link | None = None) -> None:
        """Tell all what is new, then end the links of peers that are no longer admitted."""
        for link in self._all():
            for message in messages:
                if link is not but:
                    self._post(link, message)
        for link in self._all():
            if self._admission.refusal_of(link.peer_id) is not None:
                link.scope.deadline = min(link.scope.deadline, trio.current_time() + BEAT_S)

    # --- all links --------------------------------------------------------------------------------
    def _post(self, link: Link, message: Outgoing) -> None:
        try:
            link.outbox.send_nowait(message)
        except trio.WouldBlock:
            link.scope.cancel()  # it takes nothing: as good as silent

    def _peer_list(self) -> PeerList:
        now_s = trio.current_time()
        alive = [m for m in self._roster.alive(now_s) if m.addresses][:MAX_PEERS_PER_EXCHANGE]
        return PeerList(tuple(peer_entry(m.peer_id, m.incarnation, m.addresses) for m in alive))

    def _all(self) -> list[Link]:
        return [link for links in self._links.values() for link in links]


# --- dialling -------------------------------------------------------------------------------------

Dial = Callable[[PeerId, Sequence[Address]], Awaitable[object]]
"""Raises LocoError."""


@dataclass(eq=False)
class Dialler:
    """Links to all peers on the roster, as far as there is room, with back-off for each peer.

    MAX_DIALS are dialled at once; those that only others have named, within the budget of the namer
    (protocol/membership/book.py). So dials to peers that do not exist leave room for the streams of
    the run, which go through the same p2pd.

    Attributes:
        failures: why peers could not be reached at the last try.
        refusals: why peers that were reached did not take us in.
    """

    roster: Roster
    own_id: PeerId
    dial: Dial
    book: PeerBook
    may_be_dialled: Callable[[PeerId], bool]

    def __post_init__(self) -> None:
        self._dialling: set[PeerId] = set()
        self.failures: dict[PeerId, str] = {}
        self.refusals: dict[PeerId, Refused] = {}

    def on_peer_list(self, now_s: float, teller: PeerId, message: PeerList) -> None:
        """A linked peer names others. Hearsay introduces a peer, and no more.

        A name never drives anybody out of a full roster, and tells nothing of a peer whose
        addresses are known already; the first that names a peer says where it is.
        """
        for entry in message.peers:
            known = self.roster.get(entry.peer_id)
            if known is not None and known.addresses:
                continue
            if known is None and (
                entry.peer_id == self.own_id
                or not self.roster.has_room
                or not self.book.note_name(entry.peer_id, teller)
            ):
                continue
            self.roster.introduced(entry.peer_id, entry.addresses)

    def linked(self, peer_id: PeerId) -> None:
        self.book.linked(peer_id)
        self.failures.pop(peer_id, None)
        self.refusals.pop(peer_id, None)

    def forget_those_in_another_run(self) -> None:
        for peer_id, refused in list(self.refusals.items()):
            if refused.reason is RefusalReason.OTHER_RUN:
                del self.refusals[peer_id]
                self.roster.forget(peer_id)

    def dial_due(
        self, nursery: trio.Nursery, now_s: float, linked: Collection[PeerId], room: int
    ) -> None:
        """Dial peers that are not linked and due, `room` of them at the most."""
        members = self.roster.members()
        known = {member.peer_id for member in members}
        for kept in (self.failures, self.refusals):
            for peer_id in kept.keys() - known:
                del kept[peer_id]
        for member in members:
            if room <= 0 or len(self._dialling) >= MAX_DIALS:
                return
            if member.peer_id not in linked and self._is_due(member, now_s):
                self._dialling.add(member.peer_id)
                teller = self.book.dialled(member.peer_id)
                nursery.start_soon(self._attempt, member.peer_id, member.addresses, teller, linked)
                room -= 1

    def _is_due(self, member: Member, now_s: float) -> bool:
        peer_id = member.peer_id
        return (
            bool(member.addresses)
            and peer_id != self.own_id
            and peer_id not in self._dialling
            and self.book.may_dial(now_s, peer_id)
            and self.may_be_dialled(peer_id)
        )

    async def _attempt(
        self,
        peer_id: PeerId,
        addresses: Sequence[Address],
        teller: PeerId | None,
        linked: Collection[PeerId],
    ) -> None:
        try:
            with trio.fail_after(ANSWER_S):
                await self.dial(peer_id, addresses)
        except (LocoError, trio.TooSlowError) as error:  # the directory drops who stays away
            if peer_id not in linked:  # else its own dial was quicker, and one link is enough
                self._failed(peer_id, error)
        finally:
            self._dialling.discard(peer_id)
            if self.book.ended(peer_id, teller):
                self.roster.forget(peer_id)

    def _failed(self, peer_id: PeerId, error: Exception) -> None:
        self.failures.pop(peer_id, None)
        self.failures[peer_id] = str(error) or f"no answer within {ANSWER_S:.0f} s"  # the last one
        if isinstance(error, Refused) and not isinstance(error, Declined):
            self.refusals[peer_id] = error
        self.book.dials.failed(peer_id, trio.current_time())
