"""The services that every part of a peer uses, in one record."""

from dataclasses import dataclass, field

from trio.lowlevel import ParkingLot

from peer.facts import Facts
from peer.network.pacing import Pacing
from peer.observe.events import Events
from peer.runtime import Network, Work
from protocol.address.peer_id import Sign
from protocol.membership.view import Roster


@dataclass(kw_only=True, eq=False)
class Services:
    """The ports and records that a part of a peer uses; `DaemonServices` has more.

    Attributes:
        pacing: of the network's streams; None where they keep to none.
        heard: wakes those parked when a peer has told of itself, and when one is gone.
    """

    network: Network
    work: Work
    roster: Roster
    events: Events
    facts: Facts
    sign: Sign
    pacing: Pacing | None = None
    heard: ParkingLot = field(default_factory=ParkingLot)
