"""The other peers of the group, for gossip: what the view knows and the links tell.

Implements `peer.averaging.parts.Company`.
"""

from collections.abc import Callable, Sequence

import trio

from peer.observe.facts import Facts
from peer.observe.status import PeerState
from peer.ports import PeerId
from peer.process.bell import Bell
from protocol.gossip.matchmaking_events import RoundSnapshot
from protocol.membership.conduct import Fault
from protocol.membership.view import Member, View


class LinkedCompany:
    """The other peers of the group, for gossip, from the view and the links.

    Args:
        fragment: the one that partners are looked for; 0 where the whole model is one vector.
        blame: holds a fault against a peer.
        heard: rung when a peer has told anything.
        tell: to be rung when all should be told of us at once.
    """

    def __init__(
        self,
        view: View,
        facts: Facts,
        fragment: int,
        *,
        blame: Callable[[PeerId, Fault], None],
        heard: Bell,
        tell: Bell,
    ) -> None:
        self._view = view
        self._facts = facts
        self._fragment = fragment
        self.blame = blame
        self._heard = heard
        self._tell = tell

    def free(self) -> Sequence[tuple[PeerId, RoundSnapshot]]:
        """The others that say they look for a partner, and what they bring."""
        return [
            (member.peer_id, RoundSnapshot(*found, member.progress.ended))
            for member in self._training()
            if (found := member.progress.free.get(self._fragment)) is not None
        ]

    def present(self, *, ended: bool) -> Sequence[PeerId]:
        """The others that train and have not ended, or those that have ended and not finished."""
        return [m.peer_id for m in self._training() if m.progress.ended == ended]

    def announce(self, snapshot: RoundSnapshot | None) -> None:
        """Tell all that we look for a partner with this snapshot, or that we look for none."""
        free = self._facts.free
        if free.get(self._fragment) == snapshot:
            return
        if snapshot is None:
            del free[self._fragment]
        else:
            free[self._fragment] = snapshot
        self._tell.ring()

    async def changed(self) -> None:
        """Wait until any of this may have changed."""
        await self._heard.wait()

    def _training(self) -> Sequence[Member]:
        training = self._view.members_training(trio.current_time())
        return [member for member in training if member.progress.state == PeerState.TRAINING]
