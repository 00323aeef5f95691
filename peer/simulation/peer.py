"""One peer of a simulated swarm: the daemon's own parts on simulated ports.

As peer/daemon/run.py, with nothing of the outside in it.
"""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio

from peer.daemon.assembly import Assembly, Ports
from peer.daemon.checkpointing import CheckpointPlan
from peer.daemon.door import Keys
from peer.daemon.entry import Entry
from peer.daemon.links import Links
from peer.daemon.peer import Peer
from peer.daemon.peer_parts import PeerParts, PeerSettings
from peer.daemon.report import Report
from peer.network.identity import Identity
from peer.network.simulated import SimulatedNetwork
from peer.network.simulated_directory import SimulatedDirectory
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.observe.facts import Facts
from peer.observe.status import Status
from peer.observe.timing import RoundTiming
from peer.options.config import Origin
from peer.options.run_options import check_overlap_steps
from peer.ports import PeerId
from peer.ports.simulated import SimulatedWork
from peer.rounds.loop import TrainingImpossible
from peer.state.acquaintances import Acquaintances
from peer.state.admission_file import AdmissionFile
from peer.state.checkpoints import CheckpointStore
from peer.training.ports import Float32Vector
from protocol.errors import LocoError
from protocol.membership.view import Roster, View
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec

from .machine import Gate, Machine, SimulatedProvision

VERSION: Final = "simulated"
GRACE_S: Final = 8.0
CHECKPOINTS_KEPT: Final = 3
ENDS: Final = (LocoError, TrainingImpossible)
"""Errors that end one peer, as they would end its daemon; anything else is a bug."""

LoggedEvent = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a peer stands in its world."""

    network: SimulatedNetwork
    directory: SimulatedDirectory
    roster: Roster
    folder: Path
    write_line: Callable[[bytes], None]


@dataclass(slots=True, eq=False, repr=False)
class SimulatedPeer:
    """A running peer, and what can be seen of it from outside.

    Attributes:
        known: set when it knows its run; a founder then serves it to joiners.
        signed: the spec of that run, as its home would keep it.
        ended: set when its daemon is no more.
        failure: what ended it, as its user would be told; None when it ended well or was killed.
        timings: phases of its rounds.
        told: its run and the tokens of the corpus, and whether a state was there by then.
        parts: what it is put together from.
    """

    name: str
    identity: Identity
    incarnation: int
    machine: Machine
    gate: Gate = field(default_factory=Gate)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    known: trio.Event = field(default_factory=trio.Event)
    ready: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)
    failure: Exception | None = None
    lines: list[bytes] = field(default_factory=list)
    timings: list[RoundTiming] = field(default_factory=list)
    signed: SignedSpec | None = None
    told: list[tuple[RunSpec, int, bool]] = field(default_factory=list)
    facts: Facts = field(init=False)
    network: SimulatedNetwork = field(init=False)
    directory: SimulatedDirectory = field(init=False)
    roster: Roster = field(init=False)
    links: Links = field(init=False)
    parts: PeerParts = field(init=False)
    peer: Peer = field(init=False)
    provision: SimulatedProvision = field(init=False)
    report: Report = field(init=False)

    @property
    def peer_id(self) -> PeerId:
        """Its peer id."""
        return self.identity.peer_id

    @property
    def view(self) -> View:
        """The view of its group; there is one as soon as it has the run spec."""
        assert self.facts.held is not None
        return self.facts.held.view

    def status(self) -> Status:
        """What `loco-peer status` would show."""
        return self.report.status()

    def slow_weights(self) -> Float32Vector:
        """A copy of its slow weights, fp32 [P]."""
        engine = self.provision.engine
        assert engine is not None
        assert engine.slow_P is not None
        return engine.slow_P.copy()

    def events(self, *names: EventName) -> list[LoggedEvent]:
        """Its event log, or what of it has one of these names."""
        parsed = [json.loads(line) for line in self.lines]
        return [event for event in parsed if not names or event["event"] in names]

    async def run(
        self,
        place: Place,
        provision: SimulatedProvision,
        entry_of: Callable[[Assembly], Entry],
        *,
        exit_when_done: bool,
    ) -> None:
        """Live as a daemon does.

        Args:
            entry_of: how it comes to the run.
        """
        self.provision = provision
        self.network, self.directory, self.roster = place.network, place.directory, place.roster
        assembly = self._assemble(place, provision)
        settings = PeerSettings(
            state_dir=place.folder,
            exit_when_done=exit_when_done,
            grace_s=GRACE_S,
            on_ready=self.ready.set,
            check_spec=self._check_spec,
            bind_run=self._bind,
            observe_round=self.timings.append,
            checkpoints=self._checkpoint_plan(place),
            on_run=self._tell,
        )
        self.peer = assembly.start(settings, self.name)
        await self._until_ended(lambda: self.peer.run(entry_of(assembly)))

    def _bind(self, signed: SignedSpec) -> None:
        self.signed = signed
        self.known.set()

    def _tell(self, spec: RunSpec, corpus_tokens: int) -> None:
        has_state = bool(self.events(EventName.STATE_RECEIVED))
        self.told.append((spec, corpus_tokens, has_state))

    def _checkpoint_plan(self, place: Place) -> CheckpointPlan | None:
        every_s = self.machine.checkpoint_every_s
        if every_s is None:
            return None
        return CheckpointPlan(checkpoints_in(place.folder), every_s, VERSION)

    def _check_spec(self, spec: RunSpec) -> None:
        check_overlap_steps(self.machine.overlap_steps, Origin.COMMAND_LINE, spec)

    def _assemble(self, place: Place, provision: SimulatedProvision) -> Assembly:
        events = EventLog(
            place.write_line,
            peer=self.peer_id,
            wall_time_s=place.directory.swarm_time_s,
            stream=None,
        )
        ports = Ports(
            place.network,
            place.directory,
            SimulatedWork(self.machine.work_s),
            provision,
            place.roster,
            events,
            AdmissionFile(place.folder / "admission"),
            Acquaintances(place.folder / "neighbours.json"),
            self.machine.limits,
            self.machine.token,
            checkpoints=checkpoints_in(place.folder),
        )
        keys = Keys(self.identity, founder=self.identity)
        assembly = Assembly(ports, keys, self.incarnation, VERSION)
        self.parts = assembly.parts
        self.facts, self.links = self.parts.facts, self.parts.links
        self.report = assembly.report
        return assembly

    async def _until_ended(self, life: Callable[[], Awaitable[None]]) -> None:
        """Keep what would end a daemon with a sentence; let a bug through."""
        try:
            await life()
        except* ENDS as group:
            self.failure = _first_leaf(group)


def checkpoints_in(folder: Path) -> CheckpointStore:
    """The checkpoints of the peer of this folder."""
    return CheckpointStore(folder / "checkpoints", keep=CHECKPOINTS_KEPT)


def _first_leaf(error: BaseException) -> Exception:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error
