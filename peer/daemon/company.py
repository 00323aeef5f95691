"""The other peers of the group, for gossip: what the view knows and the links tell.

Implements `peer.averaging.gossip.company.Company`.
"""

from collections.abc import Sequence

import trio

from peer.observe.facts import Facts
from peer.observe.status import PeerState
from peer.ports import PeerId
from protocol.gossip.matchmaking_events import Snapshot
from protocol.membership.view import Member, View

from .bell import Bell


class LinkedCompany:
    """See the top of the file.

    Args:
        heard: rung when a peer has told anything.
        tell: to be rung when all should be told of us at once.
    """

    def __init__(self, view: View, facts: Facts, *, heard: Bell, tell: Bell) -> None:
        self._view = view
        self._facts = facts
        self._heard = heard
        self._tell = tell

    def __repr__(self) -> str:
        return f"<LinkedCompany of {self._facts.peer_id}>"

    def free(self) -> Sequence[tuple[PeerId, Snapshot]]:
        """The others that say they look for a partner, and what they bring."""
        return [
            (member.peer_id, Snapshot(told.free_round, told.free_step, told.ended))
            for member in self._training()
            if (told := member.progress).free_round is not None
        ]

    def present(self, *, ended: bool) -> Sequence[PeerId]:
        """The others that train and have not ended, or those that have ended and not finished."""
        return [m.peer_id for m in self._training() if m.progress.ended == ended]

    def announce(self, snapshot: Snapshot | None) -> None:
        """Tell all that we look for a partner with this snapshot, or that we look for none."""
        if self._facts.free != snapshot:
            self._facts.free = snapshot
            self._tell.ring()

    async def changed(self) -> None:
        """Wait until any of this may be another."""
        await self._heard.wait()

    def _training(self) -> Sequence[Member]:
        training = self._view.members_training(trio.current_time())
        return [member for member in training if member.progress.state == PeerState.TRAINING]
