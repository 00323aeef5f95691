"""Links to everybody on the roster, up to MAX_LINKS, with back-off for each peer.

Dials are bounded: so many at once, and those to peers that were only named by others within the
budget of whoever named them (protocol/membership/book.py). So dials to peers that do not exist
leave room for the streams of the run, which go through the same p2pd.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence

import trio

from peer.ports import Address, PeerId
from protocol.errors import Declined, LocoError, Refused
from protocol.limits import ANSWER_S, MAX_LINKS, MAX_TRIED
from protocol.membership.book import PeerBook
from protocol.membership.view import Member, Roster
from protocol.wire.messages import PeerList

Dial = Callable[[PeerId, Sequence[Address]], Awaitable[object]]
"""Opens a link; raises LocoError."""


class Dialler:
    """Links to all peers on the roster, up to MAX_LINKS, with back-off for each peer.

    Args:
        may_be_dialled: whether a peer may belong to the run.

    Attributes:
        failures: why those could not be reached that were tried last.
        refusals: why those that were reached did not take us in.
    """

    def __init__(
        self,
        roster: Roster,
        own_id: PeerId,
        dial: Dial,
        book: PeerBook,
        may_be_dialled: Callable[[PeerId], bool] = lambda _: True,
    ) -> None:
        self._roster = roster
        self._own_id = own_id
        self._dial = dial
        self._book = book
        self._may_be_dialled = may_be_dialled
        self._dialling: set[PeerId] = set()
        self.failures: dict[PeerId, str] = {}
        self.refusals: dict[PeerId, Refused] = {}

    def told(self, now_s: float, teller: PeerId, message: PeerList) -> None:
        """A linked peer names others. Hearsay introduces a peer, and no more.

        A name never drives anybody out of a full roster, and tells nothing of a peer whose
        addresses are known already; the first that names a peer says where it is.
        """
        for entry in message.peers:
            known = self._roster.get(entry.peer_id)
            if known is not None and known.addresses:
                continue
            if known is None and (
                entry.peer_id == self._own_id
                or not self._roster.has_room
                or not self._book.note_name(entry.peer_id, teller)
            ):
                continue
            self._roster.introduced(now_s, entry.peer_id, entry.addresses)

    def linked(self, peer_id: PeerId) -> None:
        """There is a link to it now, whoever opened it."""
        self._book.linked(peer_id)
        self.failures.pop(peer_id, None)
        self.refusals.pop(peer_id, None)

    def look(self, nursery: trio.Nursery, now_s: float, linked: Collection[PeerId]) -> None:
        """Begin to dial those that are due."""
        room, members = MAX_LINKS - len(linked), self._roster.members()
        known = {member.peer_id for member in members}
        for kept in (self.failures, self.refusals):
            for peer_id in kept.keys() - known:
                del kept[peer_id]
        for member in members:
            if room <= 0 or len(self._dialling) >= MAX_TRIED:
                return
            if member.peer_id not in linked and self._is_due(member, now_s):
                self._dialling.add(member.peer_id)
                teller = self._book.dialled(member.peer_id)
                nursery.start_soon(self._attempt, member.peer_id, member.addresses, teller)
                room -= 1

    def _is_due(self, member: Member, now_s: float) -> bool:
        peer_id = member.peer_id
        return (
            bool(member.addresses)
            and peer_id != self._own_id
            and peer_id not in self._dialling
            and self._book.may_dial(now_s, peer_id)
            and self._may_be_dialled(peer_id)
        )

    async def _attempt(
        self, peer_id: PeerId, addresses: Sequence[Address], teller: PeerId | None
    ) -> None:
        try:
            with trio.fail_after(ANSWER_S):
                await self._dial(peer_id, addresses)
        except (LocoError, trio.TooSlowError) as error:  # the directory drops who stays away
            self._failed(peer_id, error)
        finally:
            self._dialling.discard(peer_id)
            if self._book.ended(peer_id, teller):
                self._roster.forget(peer_id)

    def _failed(self, peer_id: PeerId, error: Exception) -> None:
        self.failures.pop(peer_id, None)
        self.failures[peer_id] = str(error) or f"no answer within {ANSWER_S:.0f} s"  # the last one
        if isinstance(error, Refused) and not isinstance(error, Declined):
            self.refusals[peer_id] = error
        self._book.dials.failed(peer_id, trio.current_time())
