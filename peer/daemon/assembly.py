"""The parts of one peer, put together: the same in a real daemon and in a simulated swarm.

What differs between the two comes in as ports; what does not is written here once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from peer.facts import Facts
from peer.network.pacing import NO_LIMITS, BandwidthLimits, PacedNetwork, Pacing
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
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
from .entry import Entry, Founding, Joining, Returning
from .hello import Greeter
from .joining import CALM_REPORT_S, REPORT_EVERY_S, Bootstrap, resolve_bootstrap
from .links import Links
from .peer import Peer
from .peer_parts import PeerParts, PeerSettings
from .provision import Provision
from .report import Report
from .sources import Sources
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
        self._version = version
        directory, events = ports.directory, ports.events
        pacing = Pacing(ports.limits)
        facts = Facts(keys.own.peer_id, incarnation, doing_since_s=trio.current_time())
        door = Door(
            keys,
            ports.token,
            ports.admission_file,
            directory=directory,
            facts=facts,
            events=events,
        )
        standing = Standing(door, facts, events)
        ports.network.admit_by(standing)
        network = PacedNetwork(ports.network, pacing)
        greeter = Greeter(
            network=network,
            directory=directory,
            facts=facts,
            software=f"loco-peer {version}",
            door=door,
        )
        self.parts = PeerParts(
            network=network,
            pacing=pacing,
            directory=directory,
            work=ports.work,
            provision=ports.provision,
            facts=facts,
            roster=ports.roster,
            events=events,
            acquaintances=ports.acquaintances,
            pins=ports.pins,
            checkpoints=ports.checkpoints,
            keys=keys,
            standing=standing,
            greeter=greeter,
            links=Links(
                network=network,
                pacing=pacing,
                directory=directory,
                roster=ports.roster,
                facts=facts,
                events=events,
                greeter=greeter,
                standing=standing,
            ),
            sources=Sources(network, facts),
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
        return Founding(self.parts, spec)

    def joining(self, bootstrap: Sequence[str], stage: int | None = None) -> Entry:
        """Join the run that these addresses lead to.

        Args:
            stage: of a pipeline, that a joiner shall hold; None lets it choose.
        """
        return Joining(self.parts, self._bootstrap(bootstrap, REPORT_EVERY_S), stage)

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
        tries = self._bootstrap(bootstrap, CALM_REPORT_S) if bootstrap else None
        return Returning(self.parts, signed, tries, stage, alone=alone)

    def _bootstrap(self, addresses: Sequence[str], report_every_s: float) -> Bootstrap:
        parts = self.parts
        return Bootstrap(
            addresses,
            resolve=resolve_bootstrap,
            links=parts.links,
            facts=parts.facts,
            events=parts.events,
            pins=parts.pins,
            probe=parts.network.probe,
            report_every_s=report_every_s,
        )
