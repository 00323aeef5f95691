"""The other peers of the group, as gossip sees them: a small port to the view and the links."""

from collections.abc import Sequence
from typing import Protocol

from peer.ports import PeerId
from protocol.gossip.matchmaking_events import RoundSnapshot
from protocol.membership.conduct import Fault


class Company(Protocol):
    """Implemented by `peer.daemon.company.LinkedCompany`."""

    def free(self) -> Sequence[tuple[PeerId, RoundSnapshot]]:
        """The others that say they look for a partner, and what they bring."""

    def present(self, *, ended: bool) -> Sequence[PeerId]:
        """The others that train and have not ended, or those that have ended and not finished."""

    def announce(self, snapshot: RoundSnapshot | None) -> None:
        """Tell all that we look for a partner with this snapshot, or that we look for none."""

    def blame(self, peer_id: PeerId, fault: Fault) -> None:
        """Hold a fault against a peer."""

    async def changed(self) -> None:
        """Wait until any of this may have changed."""
