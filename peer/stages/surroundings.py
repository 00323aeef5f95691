"""What a peer has around the exchange of its stage."""

from dataclasses import dataclass

from peer.network.pacing import Pacing
from peer.observe.events import Events
from peer.observe.facts import Facts
from peer.ports import Network, Work
from peer.process.bell import Bell
from protocol.membership.records import Sign


@dataclass(frozen=True, slots=True)
class Surroundings:
    """See the top of the file.

    Attributes:
        heard: rings when a peer has told anything.
        pacing: is told how fast boundaries go.
    """

    network: Network
    facts: Facts
    events: Events
    heard: Bell
    sign: Sign
    work: Work
    pacing: Pacing | None = None
