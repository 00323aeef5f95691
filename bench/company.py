"""Peers that gossip in a measurement, without a daemon: what links would tell, and the parts."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import trio
from trio.lowlevel import ParkingLot

from peer.averaging.gossip.exchanges import Agreement
from peer.averaging.gossip.gossip import Gossip
from peer.observe.events import EventLog
from peer.rounds.way import Candidates
from peer.runtime import Network, PeerId, Work
from protocol.gossip.matchmaking import RoundSnapshot
from protocol.membership.book import Fault

INNER_STEPS: Final = 1
"""H, where nothing is trained: rounds follow each other by one nominal step."""


def gossip_of(
    agreement: Agreement, *, candidates: Candidates, network: Network, work: Work, events: EventLog
) -> Gossip:
    """The gossip of one peer, put together as the daemon does it."""
    return Gossip(agreement, network, work, candidates=candidates, events=events, refused=Counter())


class OneOther:
    """A single other peer, which comes to the same rounds as we do. Implements `Candidates`.

    Attributes:
        other: its id; to be set before the first round.
    """

    def __init__(self) -> None:
        self.other: PeerId = ""
        self._own: RoundSnapshot | None = None

    def free(self) -> Sequence[tuple[PeerId, RoundSnapshot]]:
        """The other one, with what we bring ourselves."""
        return [] if self._own is None else [(self.other, self._own)]

    def present(self, *, ended: bool) -> Sequence[PeerId]:
        """The other one trains."""
        return [] if ended else [self.other]

    def announce(self, snapshot: RoundSnapshot | None) -> None:
        """It comes to this round, too."""
        self._own = snapshot

    def blame(self, peer_id: PeerId, fault: Fault) -> None:
        """Nothing here is at fault."""

    async def changed(self) -> None:
        """It never does."""
        await trio.sleep_forever()


class Neighbour:
    """One of many peers, each of which hears from some. Implements `Candidates`.

    Args:
        tell: takes what this peer announces, and sees to it that the others hear it.
    """

    def __init__(
        self, others: Sequence[PeerId], tell: Callable[[RoundSnapshot | None], None]
    ) -> None:
        self._others = others
        self._tell = tell
        self._free: dict[PeerId, RoundSnapshot] = {}
        self._heard = ParkingLot()

    def hear(self, peer_id: PeerId, snapshot: RoundSnapshot | None) -> None:
        """That peer looks for a partner with this, or for none."""
        if snapshot is None:
            self._free.pop(peer_id, None)
        else:
            self._free[peer_id] = snapshot
        self._heard.unpark_all()

    def free(self) -> Sequence[tuple[PeerId, RoundSnapshot]]:
        """Those that have said so."""
        return list(self._free.items())

    def present(self, *, ended: bool) -> Sequence[PeerId]:
        """All train."""
        return [] if ended else self._others

    def announce(self, snapshot: RoundSnapshot | None) -> None:
        """Tell all that hear us."""
        self._tell(snapshot)

    def blame(self, peer_id: PeerId, fault: Fault) -> None:
        """Nothing here is at fault."""

    async def changed(self) -> None:
        """Wait until something is heard."""
        await self._heard.park()
