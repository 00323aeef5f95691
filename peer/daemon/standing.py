"""Which peers this peer serves now: those that are admitted and behave. Links to others end.

Admission is what the run says of a peer (door.py); conduct is what we have seen of it ourselves
(protocol/membership/book.py). Faults are not told to other peers. But if an owner was proved to
have lied (protocol/diloco/audits.py), all peers get the proof, and it is banned.
"""

from collections.abc import Callable, Iterable

import trio

from peer.facts import Facts
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.ports import PeerId
from peer.process.bell import Bell
from protocol.errors import LocoError, RemoteProtocolError
from protocol.membership.book import Fault, PeerBook
from protocol.outcomes import RefusalReason
from protocol.wire.messages import Refusal

from .door import Door
from .link import Link

IGNORED = Refusal(
    RefusalReason.IGNORED,
    "I am ignoring you for a few minutes: you have broken the protocol too often;"
    " install the version of loco-peer that the others run",
)


CONVICTED = Refusal(
    RefusalReason.NOT_ADMITTED,
    "it is proved that you signed an average that does not follow from what you were sent;"
    " check this machine's memory, and join with a new identity",
)


class Standing:
    """Which peers this peer serves: those that are admitted and behave.

    Attributes:
        door: admission.
        book: conduct, and what else we keep of peers.
    """

    def __init__(self, door: Door, facts: Facts, events: EventLog) -> None:
        self.door = door
        self._facts = facts
        self._events = events
        self.book = PeerBook()
        self._one_more_ignored = Bell()

    def judge(self, peer_id: PeerId) -> Refusal | None:
        """Why a peer is not served; None when it is."""
        return self.door.judge(peer_id) or self.judge_conduct(peer_id)

    def judge_conduct(self, peer_id: PeerId) -> Refusal | None:
        """Why a peer is not even greeted; None when it is."""
        if self.book.is_convicted(peer_id):
            return CONVICTED
        return IGNORED if self.book.is_ignored(trio.current_time(), peer_id) else None

    def wait_s(self, peer_id: PeerId) -> float:
        """For how long a stream of this peer waits before it is served."""
        return self.book.wait_s(trio.current_time(), peer_id)

    def may_be_dialled(self, peer_id: PeerId) -> bool:
        """Whether a peer that we have heard of is worth a dial."""
        return self.judge_conduct(peer_id) is None and self.door.may_be_dialled(peer_id)

    def blame(self, peer_id: PeerId, fault: Fault) -> None:
        """Hold a fault against a peer."""
        self._facts.faults[fault] += 1
        if self.book.note(trio.current_time(), peer_id, fault):
            self._events.emit(EventName.PEER_IGNORED, remote=peer_id, fault=str(fault))
            self._one_more_ignored.ring()

    def convict(self, peer_id: PeerId) -> None:
        """Have nothing to do with a peer any more that was proved to have lied."""
        self._facts.convicted += 1
        self.book.convict(peer_id)
        self._events.emit(EventName.PEER_CONVICTED, remote=peer_id)
        self._one_more_ignored.ring()

    def why_ended(self, peer_id: PeerId, errors: BaseExceptionGroup[LocoError]) -> str:
        """What ended a link; a broken rule is held against the peer."""
        if errors.subgroup(RemoteProtocolError) is not None:
            self.blame(peer_id, Fault.BROKEN_RULE)
        return str(errors.exceptions[0]).removeprefix(f"{peer_id} ")

    async def end_links(self, links: Callable[[], Iterable[Link]]) -> None:
        """End links with peers that are ignored, whenever it comes to that, until cancelled."""
        while True:
            await self._one_more_ignored.wait()
            for link in list(links()):
                if self.judge_conduct(link.peer_id) is not None:
                    link.scope.cancel()
