"""The services of a daemon, real or simulated."""

from dataclasses import dataclass, field

from peer.network.identity import Identity
from peer.network.pacing import Pacing
from peer.observe.events import EventLog
from peer.rounds.services import Services
from peer.runtime import Directory
from peer.state.checkpoints import CheckpointStore
from peer.state.kept_files import Acquaintances, AdmissionFile, Pins
from protocol.address.peer_id import Sign
from protocol.admission.statements import Token


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that this home may sign with; `founder` where it founded the run."""

    own: Identity
    founder: Identity | None = None


@dataclass(kw_only=True, eq=False)
class DaemonServices(Services):
    pacing: Pacing
    events: EventLog
    sign: Sign = field(init=False)
    directory: Directory
    keys: Keys
    version: str
    admission_file: AdmissionFile
    acquaintances: Acquaintances
    checkpoints: CheckpointStore
    token: Token | None = None
    pins: Pins = field(default_factory=Pins)

    def __post_init__(self) -> None:
        self.sign = self.keys.own.sign
