"""The parts of one peer, put together: the same in a real daemon and in a simulated swarm.

What differs between the two comes in as ports; what does not is written here once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import trio

from peer.network.identity import Identity
from peer.network.paced import PacedNetwork
from peer.network.pacing import NO_LIMITS, BandwidthLimits, Pacing
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.observe.facts import Facts
from peer.ports import Directory, Network, Work
from protocol.membership.view import Roster
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec

from .entry import Entry, Founding, Joining
from .hello import Greeter
from .joining import Bootstrap
from .links import Links
from .peer import Peer, PeerParts, PeerSettings
from .provision import Provision
from .report import Report, Restarts
from .resolve import resolve_bootstrap
from .sources import Sources


@dataclass(frozen=True, slots=True)
class Ports:
    """What a peer stands on."""

    network: Network
    directory: Directory
    work: Work
    provision: Provision
    roster: Roster
    events: EventLog
    limits: BandwidthLimits = NO_LIMITS


class Assembly:
    """One peer, ready to found or to join.

    Attributes:
        parts: what it is put together from.
        restarts: to be counted by whoever supervises p2pd and the directory.
        report: `status` and metrics.
    """

    def __init__(self, ports: Ports, identity: Identity, incarnation: int, version: str) -> None:
        self._ports = ports
        self._identity = identity
        self._version = version
        pacing = Pacing(ports.limits)
        network = PacedNetwork(ports.network, pacing)
        facts = Facts(identity.peer_id, incarnation, doing_since_s=trio.current_time())
        self._greeter = Greeter(
            network=network,
            directory=ports.directory,
            facts=facts,
            software=f"loco-peer {version}",
        )
        links = Links(
            network=network,
            pacing=pacing,
            directory=ports.directory,
            roster=ports.roster,
            facts=facts,
            events=ports.events,
            greeter=self._greeter,
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
            sign=identity.sign,
        )
        self.restarts = Restarts()
        self.report = Report(
            facts=facts,
            roster=ports.roster,
            links=links,
            network=network,
            restarts=self.restarts,
            version=version,
        )

    def __repr__(self) -> str:
        return f"<Assembly of {self._identity.peer_id}>"

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

    async def run(
        self,
        peer: Peer,
        spec: RunSpec | None,
        bootstrap: Sequence[str],
        stage: int | None = None,
    ) -> None:
        """Found the run of `spec`, or join one through the bootstrap addresses, until it ends.

        Args:
            stage: of a pipeline, that a joiner shall hold; None lets it choose.

        Raises:
            LocoError: as `Peer.run` does.
        """
        await peer.run(self._joining(bootstrap, stage) if spec is None else self._founding(spec))

    def _founding(self, spec: RunSpec) -> Entry:
        provision, facts = self._ports.provision, self.parts.facts
        return Founding(spec, sign_spec=self._sign, provision=provision, facts=facts)

    def _joining(self, bootstrap: Sequence[str], stage: int | None) -> Entry:
        parts = self.parts
        return Joining(
            Bootstrap(
                bootstrap,
                resolve=resolve_bootstrap,
                links=parts.links,
                facts=parts.facts,
                events=parts.events,
            ),
            directory=parts.directory,
            roster=parts.roster,
            greeter=self._greeter,
            sources=parts.sources,
            provision=self._ports.provision,
            facts=parts.facts,
            events=parts.events,
            stage=stage,
        )

    def _sign(self, spec: RunSpec) -> SignedSpec:
        return SignedSpec.signed_by(spec, self._identity.public_key, self._identity.sign)
