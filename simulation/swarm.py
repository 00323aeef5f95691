"""A whole swarm in one process, in virtual time, from a seed.

The daemon's own code (peer/daemon/peer.py and all below it) runs on simulated ports: streams with
latency and bandwidth, a directory, toy models, work without threads. Faults come from outside: kill
a peer, cut it off, put its machine to sleep, slow it down, set its clock wrong, hide peers from
each other.

    def body():
        async with open_swarm(seed, spec, folder) as swarm:
            swarm.found("a")
            swarm.join("b")
            await swarm.finished()
    run_in_virtual_time(seed, body)

Promise: the same seed, spec and calls make the same event log, byte for byte (`event_log`), on the
same machine with the same versions.
"""

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import blake3
import trio

from peer.daemon.checkpointing import CheckpointPlan
from peer.daemon.entry import Entry, expert_to_go_on_with, found, join
from peer.daemon.links import SILENCE_S, Links
from peer.daemon.parts import PeerParts, PeerSettings
from peer.daemon.peer import Peer
from peer.daemon.report import Report
from peer.daemon.returning import come_back
from peer.daemon.services import Keys
from peer.facts import Facts, PeerState, RoundTiming
from peer.network.identity import SEED_BYTES, Identity
from peer.network.pacing import Pacing
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.observe.status import Status
from peer.options.config import ConfigError, overlap_fault
from peer.process.rejoin import JoinAgain
from peer.rounds.loop import TrainingImpossible
from peer.runtime import PeerId
from peer.state.checkpoints import CheckpointStore
from peer.state.kept_files import Acquaintances, AdmissionFile
from protocol.content.samples import Float32Vector
from protocol.errors import LocoError, leaves
from protocol.membership.view import Roster, View
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec
from simulation.network import (
    LinkModel,
    SimulatedDhtWorld,
    SimulatedDirectory,
    SimulatedInternet,
    SimulatedNetwork,
)
from simulation.trainer import ToyProblem, simulated_layout
from simulation.work import SimulatedWork

from .machine import Gate, Machine, SimulatedProvision

# --- one peer -------------------------------------------------------------------------------------

VERSION: Final = "simulated"
GRACE_S: Final = 8.0
CHECKPOINTS_KEPT: Final = 3
ENDS: Final = (LocoError, TrainingImpossible)
"""Errors that end one peer, as they end a daemon; any other is a bug."""

LoggedEvent = dict[str, Any]


@dataclass(slots=True, eq=False, repr=False)
class SimulatedPeer:
    """A running peer, and what can be seen of it from outside.

    Attributes:
        folder: its home.
        known: set when it knows its run; a founder then serves it to joiners.
        ended: set when its daemon has ended.
        failure: the error that ended it; None when it ended well or was killed.
        lines: of its event log.
        parsed: those that have been asked for.
        timings: phases of its rounds.
        told: its run and the tokens of the corpus, and whether a state was there by then.
    """

    name: str
    identity: Identity
    incarnation: int
    machine: Machine
    folder: Path
    roster: Roster
    gate: Gate = field(default_factory=Gate)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    known: trio.Event = field(default_factory=trio.Event)
    ready: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)
    failure: Exception | None = None
    lines: list[bytes] = field(default_factory=list)
    parsed: list[LoggedEvent] = field(default_factory=list)
    timings: list[RoundTiming] = field(default_factory=list)
    signed: SignedSpec | None = None
    told: list[tuple[RunSpec, int, bool]] = field(default_factory=list)
    facts: Facts = field(init=False)
    network: SimulatedNetwork = field(init=False)
    directory: SimulatedDirectory = field(init=False)
    links: Links = field(init=False)
    parts: PeerParts = field(init=False)
    peer: Peer = field(init=False)
    provision: SimulatedProvision = field(init=False)
    report: Report = field(init=False)

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def view(self) -> View:
        """The view of its group, once it has the run spec."""
        assert self.facts.held is not None
        return self.facts.held.view

    def status(self) -> Status:
        return self.report.status()

    def slow_weights(self) -> Float32Vector:
        assert self.provision.slow_P is not None
        return self.provision.slow_P.copy()

    def events(self, *names: EventName) -> list[LoggedEvent]:
        new = self.lines[len(self.parsed) :]  # tests ask again and again, of long logs
        self.parsed.extend(json.loads(line) for line in new)
        return [event for event in self.parsed if not names or event["event"] in names]

    async def run(self, entry: Entry, write_line: Callable[[bytes], None]) -> None:
        """Live as a daemon does; provision, network and directory are set before."""
        parts = self.parts = self._parts(write_line)
        self.facts, self.links, self.report = parts.facts, parts.links, parts.report
        settings = PeerSettings(
            home=self.name,
            state_dir=self.folder,
            exit_when_done=self.machine.exit_when_done,
            grace_s=GRACE_S,
            on_ready=self.ready.set,
            check_spec=self._check_spec,
            bind_run=self._bind,
            observe_round=self.timings.append,
            checkpoints=self._checkpoint_plan(),
            expert=self.machine.expert,
            follows=lambda _: self.machine.follows,
            on_run=self._tell,
        )
        self.peer = Peer(settings, parts)
        try:
            await self.peer.run(entry)
        except* ENDS as group:  # what would end a daemon with a sentence; a bug comes through
            self.failure = next(error for error in leaves(group) if isinstance(error, Exception))

    def _bind(self, signed: SignedSpec) -> None:
        self.signed = signed
        self.known.set()

    def _tell(self, spec: RunSpec, corpus_tokens: int) -> None:
        has_state = bool(self.events(EventName.STATE_RECEIVED))
        self.told.append((spec, corpus_tokens, has_state))

    def _checkpoint_plan(self) -> CheckpointPlan:
        return CheckpointPlan(self.machine.checkpoint_every_s)

    def _check_spec(self, spec: RunSpec, _: int | None) -> None:
        steps = self.machine.overlap_steps
        if steps is not None and (fault := overlap_fault(steps, spec)):
            raise ConfigError(f"overlap-steps = {steps}: {fault}")

    def _parts(self, write_line: Callable[[bytes], None]) -> PeerParts:
        wall_time_s = self.directory.swarm_time_s
        events = EventLog(write_line, peer=self.peer_id, wall_time_s=wall_time_s, stream=None)
        self.network.pacing = pacing = Pacing(self.machine.limits)
        return PeerParts(
            network=self.network,
            pacing=pacing,
            directory=self.directory,
            work=SimulatedWork(self.machine.work_s),
            roster=self.roster,
            events=events,
            keys=Keys(self.identity, founder=self.identity),
            facts=Facts(self.peer_id, self.incarnation, doing_since_s=trio.current_time()),
            version=VERSION,
            admission_file=AdmissionFile(self.folder / "admission"),
            acquaintances=Acquaintances(self.folder / "neighbours.json"),
            checkpoints=CheckpointStore(self.folder / "checkpoints", keep=CHECKPOINTS_KEPT),
            token=self.machine.token,
            provision=self.provision,
        )


# --- swarm ----------------------------------------------------------------------------------------
POLL_S: Final = 0.1
"""How often `until` looks, in virtual time."""
DEFAULT_MACHINE: Final = Machine()
DEFAULT_LINK: Final = LinkModel(latency_s=0.02, jitter_s=0.005)


@dataclass(frozen=True, slots=True)
class SwarmOptions:
    """The world of a simulated swarm.

    Attributes:
        link: model of every link, unless `link_of` is given.
        shared_directory: whether anybody finds records of others there.
        padded_parameters: of the part of the model that a peer holds, unless `parts` names it.
        parts: padded parameters of parts of the model, by name (protocol/membership/group.py).
    """

    link: LinkModel = DEFAULT_LINK
    link_of: Callable[[PeerId, PeerId], LinkModel] | None = None
    roster_of: Callable[[PeerId], Roster] = lambda _: Roster(SILENCE_S)
    shared_directory: bool = True
    padded_parameters: int = 256
    parts: Mapping[str, int] = field(default_factory=dict)
    problem: ToyProblem = field(default_factory=ToyProblem)


DEFAULT_OPTIONS: Final = SwarmOptions()


@dataclass(eq=False)
class SimulatedSwarm:
    """Peers, the world between them, and the means to harm them. Made by `open_swarm`."""

    _seed: int
    _spec: RunSpec
    _folder: Path
    _options: SwarmOptions
    _nursery: trio.Nursery

    def __post_init__(self) -> None:
        seed, options = self._seed, self._options
        self._lines: list[bytes] = []
        self._incarnations: dict[str, int] = {}
        self.internet = SimulatedInternet(seed, link=options.link, link_of=options.link_of)
        self.directory = SimulatedDhtWorld(seed, shared=options.shared_directory)
        self.peers: dict[str, SimulatedPeer] = {}

    def __getitem__(self, name: str) -> SimulatedPeer:
        return self.peers[name]

    # --- peers ------------------------------------------------------------------------------------
    def found(self, name: str, machine: Machine = DEFAULT_MACHINE) -> SimulatedPeer:
        return self._start(name, machine, partial(found, self._spec, machine.expert))

    def join(
        self, name: str, machine: Machine = DEFAULT_MACHINE, *, through: Sequence[str] = ()
    ) -> SimulatedPeer:
        """Start a peer that joins through the named peers, or the founder."""
        through = through or [next(iter(self.peers))]
        bootstrap = [at for each in through for at in self.peers[each].network.addresses]
        return self._start(name, machine, partial(join, bootstrap, None, machine.expert))

    def resume(self, name: str, *, alone: bool = False) -> SimulatedPeer:
        """Start a peer again, as its daemon does by itself when it is to join again."""
        before = self.peers[name]
        assert before.ended.is_set(), "an identity lives once"
        assert before.signed is not None
        machine, expert = before.machine, before.facts.expert
        if isinstance(again := before.failure, JoinAgain) and again.part is not None:
            expert = before.signed.spec().name_of(again.part)
        expert = expert_to_go_on_with(before.signed.spec(), expert, machine.expert)
        entry = partial(come_back, before.signed, (), None, expert, alone)
        return self._start(name, machine, entry)

    def _start(self, name: str, machine: Machine, entry: Entry) -> SimulatedPeer:
        number = self._incarnations[name] = self._incarnations.get(name, 0) + 1
        identity, folder = identity_of(self._seed, name), self._folder / name
        roster = self._options.roster_of(identity.peer_id)
        peer = SimulatedPeer(name, identity, number, machine, folder, roster)
        self.peers[name] = peer
        self._nursery.start_soon(self._run, peer, entry)
        return peer

    async def _run(self, peer: SimulatedPeer, entry: Entry) -> None:
        def write_line(line: bytes) -> None:
            peer.lines.append(line)
            self._lines.append(line)

        machine, options = peer.machine, self._options
        peer.folder.mkdir(parents=True, exist_ok=True)
        peer.provision = SimulatedProvision(
            peer.peer_id,
            peer.folder / "corpus",
            machine,
            options.problem,
            simulated_layout(options.parts.get(machine.part, options.padded_parameters)),
            peer.gate,
        )
        with peer.scope:
            async with self.internet.open_network(peer.peer_id) as peer.network:
                world, skew_s = self.directory, machine.clock_skew_s
                peer.directory = SimulatedDirectory(world, peer.peer_id, skew_s)
                await peer.run(entry, write_line)
        peer.ended.set()

    # --- harm -------------------------------------------------------------------------------------
    def kill(self, name: str) -> None:
        """End a peer at once, as kill -9 of all its processes does."""
        peer = self.peers[name]
        self.internet.kill(peer.peer_id)
        peer.scope.cancel()

    def isolate(self, name: str) -> None:
        """Cut a peer off from all others, until `internet.heal`."""
        own = self.peers[name].peer_id
        others = [peer.peer_id for peer in self.peers.values() if peer.peer_id != own]
        self.internet.partition([own], others)

    def freeze(self, name: str) -> None:
        """Put a machine to sleep: nothing comes from it, and its trainer stands still."""
        self.peers[name].gate.close()
        self.isolate(name)

    def thaw(self, name: str) -> None:
        """Wake it up; heals all cuts."""
        self.internet.heal()
        self.peers[name].gate.open()

    # --- watching ---------------------------------------------------------------------------------
    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - looking costs nothing in virtual time
            await trio.sleep(POLL_S)

    async def finished(self, *names: str) -> None:
        """Wait until these peers, or all, have finished the run or ended."""
        watched = [self.peers[name] for name in names or self.peers]

        def is_over(peer: SimulatedPeer) -> bool:
            return peer.ended.is_set() or (
                peer.ready.is_set() and peer.facts.state is PeerState.FINISHED
            )

        await self.until(lambda: all(map(is_over, watched)))

    def event_log(self) -> bytes:
        """The log of all peers, in the order of time."""
        return b"\n".join(self._lines)


def identity_of(seed: int, name: str) -> Identity:
    number = int.from_bytes(name.encode(), "big") * 1_000_003 + seed
    return Identity(blake3.blake3(f"loco-entropy {number}".encode()).digest(SEED_BYTES))


@asynccontextmanager
async def open_swarm(
    seed: int, spec: RunSpec, folder: Path, options: SwarmOptions = DEFAULT_OPTIONS
) -> AsyncIterator[SimulatedSwarm]:
    """A world without peers; those started in it end with the context.

    `seed` is for the world's randomness; the scheduler has that of `run_in_virtual_time`.
    """
    async with trio.open_nursery() as nursery:
        yield SimulatedSwarm(seed, spec, folder, options, nursery)
        nursery.cancel_scope.cancel()
