"""The parts of one peer, put together: the same in a real daemon and in a simulated swarm.

What differs between the two comes in as ports; what does not is written here once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from peer.network.pacing import NO_LIMITS, BandwidthLimits, Pacing
from peer.network.wrapped import AdmittedNetwork, PacedNetwork
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.observe.facts import Facts
from peer.ports import Directory, Network, Work
from peer.state.acquaintances import Acquaintances
from peer.state.admission_file import AdmissionFile
from peer.state.checkpoints import CheckpointStore
from peer.state.pins import PassingPins, Pins
from protocol.admission.statements import Token
from protocol.membership.view import Roster
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec

from .door import Door, Keys
from .entry import Entry, Founding, Joining
from .hello import Greeter
from .joining import CALM_REPORT_S, REPORT_EVERY_S, Bootstrap
from .links import Links
from .neighbours import Neighbours
from .peer import Peer
from .peer_parts import PeerParts, PeerSettings
from .provision import Provision
from .report import Report
from .resolve import resolve_bootstrap
from .returning import OwnCheckpoints, Returning
from .sources import Sources
from .stage_choice import StageChoice
from .standing import Standing


@dataclass(frozen=True, slots=True)
class Ports:
    """What a peer stands on.

    Attributes:
        token: an invitation that the user has given.
        checkpoints: those of the home.
    """

    network: Network
    directory: Directory
    work: Work
    provision: Provision
    roster: Roster
    events: EventLog
    admission_file: AdmissionFile
    acquaintances: Acquaintances
    limits: BandwidthLimits = NO_LIMITS
    token: Token | None = None
    pins: Pins = field(default_factory=PassingPins)
    checkpoints: CheckpointStore | None = None


class Assembly:
    """One peer, ready to found or to join.

    Attributes:
        parts: what it is put together from.
        report: `status` and metrics.
    """

    def __init__(self, ports: Ports, keys: Keys, incarnation: int, version: str) -> None:
        self._ports = ports
        self._keys = keys
        self._version = version
        pacing = Pacing(ports.limits)
        facts = Facts(keys.own.peer_id, incarnation, doing_since_s=trio.current_time())
        door = Door(
            keys,
            ports.token,
            ports.admission_file,
            directory=ports.directory,
            facts=facts,
            events=ports.events,
        )
        standing = Standing(door, facts, ports.events)
        network = AdmittedNetwork(PacedNetwork(ports.network, pacing), standing)
        self._greeter = Greeter(
            network=network,
            directory=ports.directory,
            facts=facts,
            software=f"loco-peer {version}",
            door=door,
        )
        links = Links(
            network=network,
            pacing=pacing,
            directory=ports.directory,
            roster=ports.roster,
            facts=facts,
            events=ports.events,
            greeter=self._greeter,
            standing=standing,
        )
        self.parts = PeerParts(
            network=network,
            pacing=pacing,
            directory=ports.directory,
            work=ports.work,
            sources=Sources(network, facts),
            facts=facts,
            roster=ports.roster,
            links=links,
            events=ports.events,
            sign=keys.own.sign,
            standing=standing,
            acquaintances=ports.acquaintances,
        )
        self.report = Report(facts=facts, roster=ports.roster, network=network, version=version)

    def start(self, settings: PeerSettings, home: str) -> Peer:
        """The peer; says that it is there. `home` is named to people only."""
        parts = self.parts
        parts.events.emit(
            EventName.DAEMON_STARTED,
            version=self._version,
            incarnation=parts.facts.incarnation,
            addresses=list(parts.network.addresses),
            home=home,
        )
        return Peer(settings, parts)

    def founding(self, spec: RunSpec) -> Entry:
        """Found the run of `spec`."""
        provision, facts = self._ports.provision, self.parts.facts
        founder = self._keys.founder
        assert founder is not None, "a home that founds a run has a founder's key"
        door = self.parts.standing.door
        return Founding(spec, founder, door=door, provision=provision, facts=facts)

    def joining(self, bootstrap: Sequence[str], stage: int | None = None) -> Entry:
        """Join the run that these addresses lead to.

        Args:
            stage: of a pipeline, that a joiner shall hold; None lets it choose.
        """
        parts = self.parts
        return Joining(
            self._bootstrap(bootstrap),
            directory=parts.directory,
            roster=parts.roster,
            greeter=self._greeter,
            sources=parts.sources,
            provision=self._ports.provision,
            facts=parts.facts,
            events=parts.events,
            stages=StageChoice(parts.facts, parts.roster, stage),
            door=parts.standing.door,
        )

    def returning(
        self,
        signed: SignedSpec,
        bootstrap: Sequence[str],
        stage: int | None = None,
        *,
        alone: bool = False,
    ) -> Entry:
        """Go on with the run that the home belongs to.

        Args:
            bootstrap, stage: as for `joining`.
            alone: whether or not the others of the run can be reached.
        """
        parts, ports, founder = self.parts, self._ports, self._keys.founder
        assert ports.checkpoints is not None
        return Returning(
            signed,
            OwnCheckpoints(ports.checkpoints, ports.work, ports.events),
            self._bootstrap(bootstrap, report_every_s=CALM_REPORT_S) if bootstrap else None,
            parts=parts,
            greeter=self._greeter,
            provision=ports.provision,
            stages=StageChoice(parts.facts, parts.roster, stage),
            neighbours=Neighbours(
                parts.roster,
                parts.facts,
                parts.events,
                alone=alone,
                refusals=parts.links.dialler.refusals,
                failures=parts.links.dialler.failures,
            ),
            is_founder=founder is not None and founder.public_key == signed.founder_public_key,
        )

    def _bootstrap(
        self, addresses: Sequence[str], report_every_s: float = REPORT_EVERY_S
    ) -> Bootstrap:
        parts = self.parts
        return Bootstrap(
            addresses,
            resolve=resolve_bootstrap,
            links=parts.links,
            facts=parts.facts,
            events=parts.events,
            pins=self._ports.pins,
            probe=parts.network.probe,
            report_every_s=report_every_s,
        )
