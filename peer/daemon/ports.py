"""What a peer stands on, in one record: a real daemon and a simulated swarm fill it differently."""

from dataclasses import dataclass, field

import trio

from peer.facts import Facts
from peer.network.identity import Identity
from peer.network.pacing import Pacing
from peer.observe.events import EventLog
from peer.ports import Directory, Network, Work
from peer.state.checkpoints import CheckpointStore
from peer.state.kept_files import Acquaintances, AdmissionFile, Pins
from protocol.admission.statements import Token
from protocol.membership.records import Sign
from protocol.membership.view import Roster


@dataclass(frozen=True, slots=True)
class Keys:
    """What this home may sign with.

    Attributes:
        own: the peer's identity.
        founder: the key of the run's founder, where this home founded it.
    """

    own: Identity
    founder: Identity | None = None


@dataclass(kw_only=True, eq=False)
class Ports:
    """What a peer stands on.

    Attributes:
        pacing: of the network's streams.
        version: of loco-peer.
        checkpoints: those of the home.
        token: an invitation that the user has given.
        facts: the record of what this peer is and does.
    """

    network: Network
    pacing: Pacing
    directory: Directory
    work: Work
    roster: Roster
    events: EventLog
    keys: Keys
    incarnation: int
    version: str
    admission_file: AdmissionFile
    acquaintances: Acquaintances
    checkpoints: CheckpointStore
    token: Token | None = None
    pins: Pins = field(default_factory=Pins)

    def __post_init__(self) -> None:
        now_s = trio.current_time()
        self.facts = Facts(self.keys.own.peer_id, self.incarnation, doing_since_s=now_s)

    @property
    def sign(self) -> Sign:
        """Signs as this peer."""
        return self.keys.own.sign
