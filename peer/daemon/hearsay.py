"""Peers that others have named, and that this peer has not been linked with yet.

Naming a peer costs nothing. So what it costs us is limited by a budget for the peer that named it:

  1. The number of names noted at once is limited per peer and in total; further ones are ignored.
     A name leaves the budget when the peer is linked, or forgotten.
  2. Names never drive anybody out of a full roster, and tell nothing of a peer whose addresses are
     known already; the first that names a peer says where it is.
  3. Dials to names go through a budget of their own, by the peer that named them, so that they
     leave room for the others; after MAX_HEARSAY_TRIES of them a name is forgotten.
"""

from dataclasses import dataclass
from typing import Final

from peer.ports import PeerId
from protocol.limits import (
    MAX_AT_ONCE,
    MAX_HEARSAY_TRIES,
    MAX_HELD,
    MAX_LISTED,
    MAX_NAMED,
)
from protocol.membership.budget import Budget, Shares
from protocol.membership.view import Roster
from protocol.wire.messages import PeerList

NAMES: Final = Shares(MAX_NAMED, MAX_LISTED, MAX_NAMED)
DIALS: Final = Shares(MAX_HELD, MAX_AT_ONCE, MAX_HELD)
NOWHERE: Final = ""
"""Budgets here go by the peer that said it, wherever that is."""


@dataclass(slots=True)
class _Name:
    """A peer that was named, by whom, and how often it was dialled in vain."""

    teller: PeerId
    tries: int = 0


class Hearsay:
    """Names of peers that others have told and that are not linked yet, within budgets."""

    def __init__(self, roster: Roster, own_id: PeerId) -> None:
        self._roster = roster
        self._own_id = own_id
        self._names: dict[PeerId, _Name] = {}
        self._noted = Budget(NAMES)
        self._dials = Budget(DIALS)

    def told(self, now_s: float, teller: PeerId, message: PeerList) -> None:
        """A linked peer names others: hearsay introduces a peer, and no more."""
        for entry in message.peers:
            known = self._roster.get(entry.peer_id)
            if known is not None and not known.addresses:
                self._roster.introduced(now_s, entry.peer_id, entry.addresses)
            elif (
                known is None
                and entry.peer_id != self._own_id
                and self._roster.has_room
                and self._noted.has_room(teller, NOWHERE)
            ):
                self._noted.take(teller, NOWHERE)
                self._names[entry.peer_id] = _Name(teller)
                self._roster.introduced(now_s, entry.peer_id, entry.addresses)

    def linked(self, peer_id: PeerId) -> None:
        """It is there: more than a name from now on."""
        name = self._names.pop(peer_id, None)
        if name is not None:
            self._noted.give_back(name.teller, NOWHERE)

    def may_dial(self, peer_id: PeerId) -> bool:
        """Whether the budget of the peer that named it lets it be dialled now."""
        name = self._names.get(peer_id)
        return name is None or self._dials.has_room(name.teller, NOWHERE)

    def dialled(self, peer_id: PeerId) -> PeerId | None:
        """An attempt begins; what `ended` is to be told then."""
        name = self._names.get(peer_id)
        if name is None:
            return None
        name.tries += 1
        self._dials.take(name.teller, NOWHERE)
        return name.teller

    def ended(self, peer_id: PeerId, teller: PeerId | None) -> None:
        """The attempt is over; a peer that never answers is forgotten."""
        if teller is None:
            return
        self._dials.give_back(teller, NOWHERE)
        name = self._names.get(peer_id)
        if name is not None and name.tries >= MAX_HEARSAY_TRIES:
            self.linked(peer_id)
            self._roster.forget(peer_id)
