"""The parts of one peer, put together: the same in a real daemon and in a simulated swarm.

What differs between the two comes in as ports; what does not is written here once.

How a peer comes back to the run of its home: with the others, or from its own checkpoint.

    Returning    the entry: run spec and data are here, and nobody need be there
    Returned     the beginning: the state of others that train, or our newest good checkpoint; or,
                 where the founder has none, the seed once more

A checkpoint is let go of for nothing but a state that is verified, and set aside where that is far
behind it. Where those that say they train give none within REPLACEMENT_S, the peer goes on from its
own: they may be liars that claim to be far ahead. For STAYS_S it then does not mind who is
(peer/rounds/loop.py).

Which one leads where all come back at once stands in protocol/membership/returning.py. A run that
is over is over: its last checkpoint is gone on from without looking around.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import trio

from peer.content.fetching import BlobSource
from peer.content.gathering import own_digests
from peer.facts import Facts, PeerState
from peer.network.pacing import NO_LIMITS, BandwidthLimits, PacedNetwork, Pacing
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.ports import Directory, Network, Work
from peer.state.acquaintances import Acquaintances
from peer.state.admission_file import AdmissionFile
from peer.state.checkpoints import Checkpoint, CheckpointStore
from peer.state.home import OtherRun
from peer.state.pins import PassingPins, Pins
from peer.training.tensor_file import FileUnusable
from protocol.admission.statements import Token
from protocol.errors import LocoError, Refused
from protocol.membership.group import WHOLE_MODEL, Group
from protocol.membership.returning import Course, choose_course
from protocol.membership.view import Roster
from protocol.outcomes import RefusalReason
from protocol.run.layout import stage_of_part
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec
from protocol.schedule.rounds import is_lost, lost_lag

from .beginning import Arrival, Beginning, Fetched, FirstState
from .checkpointing import GoOn
from .door import Door, Keys
from .entry import CheckSpec, Entry, Founding, Joining
from .hello import Greeter
from .joining import CALM_REPORT_S, REPORT_EVERY_S, Bootstrap
from .links import Links
from .neighbours import LOOK_S, Neighbours
from .peer import Peer
from .peer_parts import PeerParts, PeerSettings
from .provision import ChosenStage, Provision, Supplies
from .report import Report
from .resolve import resolve_bootstrap
from .sources import NobodyHelped, Sources
from .stage_choice import StageChoice
from .standing import Standing

# --- returning ------------------------------------------------------------------------------------

REPLACEMENT_S: Final = 1800.0
"""How long others that train are asked for their state before we go on from our own."""
STAYS_S: Final = 4 * 3600.0
"""How long a peer then stays with its own, whoever says to be far ahead."""


class OwnCheckpoints:
    """The checkpoints of this home that fit the run, and what is wrong with the others."""

    def __init__(self, store: CheckpointStore, work: Work, events: EventLog) -> None:
        self._store = store
        self._work = work
        self._events = events

    async def newest(self, run_id: str) -> Checkpoint | None:
        """The newest of this run whose files are what its manifest says; each other is told."""
        refused = list[tuple[Path, str]]()

        def refuse(path: Path, why: str) -> None:
            refused.append((path, why))

        found = await self._work.run(self._store.newest_whole, run_id, refuse)
        for path, why in refused:
            self._events.emit(EventName.CHECKPOINT_REFUSED, path=str(path), detail=why)
        return found

    async def set_aside(self, checkpoint: Checkpoint, step: float) -> None:
        """Keep it, though others go on from one that is far behind it, at `step`.

        Those that follow would take its place otherwise. Where the disk refuses, it stays.
        """
        with suppress(OSError):
            path = await self._work.run(self._store.set_aside, checkpoint, step)
            manifest = checkpoint.manifest
            self._events.emit(
                EventName.CHECKPOINT_SET_ASIDE,
                path=str(path),
                round=manifest.round,
                step=int(manifest.step),
                followed_step=int(step),
            )


class NoSource:
    """Nobody to fetch from: what is not here is not to be had. Implements `BlobSource`."""

    async def blob(self, digest: str) -> bytes:
        """Always raises Refused: there is no peer to fetch from."""
        await trio.lowlevel.checkpoint()
        raise Refused(RefusalReason.UNAVAILABLE, f"blob {digest} is not in this home")


class Returning:
    """The run that this home belongs to.

    Args:
        signed: the run spec, as the home has kept it.
        bootstrap: tries the addresses that the user gave; None when there are none.
        is_founder: this home has founded the run, and can begin it anew.
        neighbours: those that it remembers.
        stages: says which stage of a pipeline is to be held where no checkpoint does.
    """

    def __init__(
        self,
        signed: SignedSpec,
        own: OwnCheckpoints,
        bootstrap: Bootstrap | None,
        *,
        parts: PeerParts,
        greeter: Greeter,
        provision: Provision,
        stages: StageChoice,
        neighbours: Neighbours,
        is_founder: bool,
    ) -> None:
        self._signed = signed
        self._own = own
        self._bootstrap = bootstrap
        self._parts = parts
        self._greeter = greeter
        self._provision = provision
        self._stages = stages
        self._neighbours = neighbours
        self._is_founder = is_founder

    async def enter(self, check_spec: CheckSpec) -> tuple[SignedSpec, Supplies]:
        """Say how far our checkpoint is, and get data and model ready, from here if they are."""
        signed, facts = self._signed, self._parts.facts
        spec, facts.run_id = signed.spec(), signed.run_id
        self._parts.standing.door.entered(signed)
        check_spec(spec)
        facts.now_doing("looking for the others of the run", PeerState.RETURNING)
        own = await self._own.newest(signed.run_id)
        if own is not None and self._stages.given in (None, stage_of_part(own.manifest.part)):
            facts.chosen = Group(signed.run_id, own.manifest.part)
            facts.nominal_step = own.manifest.step
            facts.earlier_tokens = own.manifest.tokens
        else:
            own = None
        known = await self._parts.work.run(self._parts.acquaintances.read)
        for peer_id, addresses in known.items():
            self._parts.roster.introduced(trio.current_time(), peer_id, addresses)
        self._neighbours.remember(known)
        supplies = await self._supplies(spec, own)
        remake = supplies.remake if self._is_founder else None
        if own is not None or remake is not None:
            back = Returned(own, self._own, self._parts.work, self._neighbours, remake)
            supplies = replace(supplies, beginning=back)
        return signed, supplies

    async def keep_looking(self) -> None:
        """Enter the swarm by the addresses that the user gave, however long that takes.

        Raises:
            OtherRun: the addresses lead to another run than this home's.
            Refused: it does not want us, and trying again cannot change that.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._neighbours.watch)
            if self._bootstrap is not None:
                await self._enter(self._bootstrap)

    async def _enter(self, bootstrap: Bootstrap) -> None:
        try:
            _, hello = await bootstrap.enter()
        except Refused as refused:
            if refused.reason is not RefusalReason.OTHER_RUN:
                raise
            raise OtherRun(
                f"the home belongs to run {self._signed.run_id}, and a peer at the addresses given"
                f" says: {refused.sentence}"
            ) from refused
        self._greeter.correct_clock()
        await self._parts.directory.add_peers(hello.addresses)

    async def _supplies(self, spec: RunSpec, own: Checkpoint | None) -> Supplies:
        async def choose_stage() -> ChosenStage:
            stage = None if own is None else stage_of_part(own.manifest.part)
            if stage is None:
                return await self._stages.choose(spec, self._signed.run_id)
            return ChosenStage(stage, has_holders=True, is_trained=True)

        async def obtain(source: BlobSource) -> Supplies:
            return await self._provision.obtain(spec, source, choose_stage)

        try:
            return await obtain(NoSource())
        except Refused:
            self._parts.facts.now_doing("fetching the data")
            return await self._parts.sources.fetch(obtain, self._parts.roster)


class Returned:
    """The state of others that train, or that of our own checkpoint. Implements `Beginning`.

    Args:
        own: its files are what its manifest says; None where there is none.
        checkpoints: all that are in the home.
        remake: makes the first weights of the run again, where that is ours to do.
    """

    ages = True

    def __init__(
        self,
        own: Checkpoint | None,
        checkpoints: OwnCheckpoints,
        work: Work,
        neighbours: Neighbours,
        remake: Callable[[], Awaitable[Beginning]] | None = None,
    ) -> None:
        self._own = own
        self._checkpoints = checkpoints
        self._work = work
        self._neighbours = neighbours
        self._remake = remake
        self._since_s = trio.current_time()

    async def take(self, arrival: Arrival) -> FirstState:
        """Look who else is back until it is clear who leads, and follow, or lead."""
        if await self._course(arrival) is Course.FOLLOW:
            try:
                return await self._follow(arrival)
            except* NobodyHelped:
                arrival.facts.stays_until_s = trio.current_time() + STAYS_S
        if self._own is None:
            return await self._begin_anew(arrival)
        return await self._lead(arrival, self._own)

    async def _course(self, arrival: Arrival) -> Course:
        facts, step = arrival.facts, 0
        if self._own is not None:
            if _is_over(self._own, arrival):
                return Course.LEAD
            step = int(self._own.manifest.step)
        facts.now_doing("looking for other peers that are back")
        lag, course = _lag_to_lead(arrival), Course.WAIT
        async with trio.open_nursery() as nursery:
            nursery.start_soon(arrival.meet)
            while course is Course.WAIT:
                await trio.sleep(LOOK_S)
                if self._neighbours.refused() is None:
                    now_s = trio.current_time()
                    course = choose_course(
                        (step, facts.peer_id),
                        arrival.held.view.alive(now_s),
                        now_s - self._since_s,
                        now_s,
                        lag,
                        unreached=self._neighbours.unreached(),
                    )
            nursery.cancel_scope.cancel()
        return course

    async def _follow(self, arrival: Arrival) -> FirstState:
        """Take the state of others; what our checkpoint has of it need not come."""
        if self._own is None:
            return await Fetched(patience_s=REPLACEMENT_S).take(arrival)
        arrival.facts.now_doing("reading our checkpoint")
        vectors, own = (arrival.slow_P, arrival.momentum_P), None
        with suppress(FileUnusable):
            await self._work.run(self._own.fill, *vectors)
            own = await self._work.run(own_digests, *vectors)
        state = await Fetched(own, patience_s=REPLACEMENT_S).take(arrival)
        if is_lost(state.step, [self._own.manifest.step], arrival.spec.founding.sync.round_steps):
            await self._checkpoints.set_aside(self._own, state.step)
        return state

    async def _begin_anew(self, arrival: Arrival) -> FirstState:
        """Nothing of the run was saved: the founder makes its first weights again."""
        assert self._remake is not None
        why = "this home has no checkpoint of the run it founded, and no peer has a state to give"
        arrival.facts.now_doing(f"starting the run again from its seed: {why}")
        arrival.events.emit(EventName.RUN_BEGUN_ANEW, detail=why)
        return await (await self._remake()).take(arrival)

    async def _lead(self, arrival: Arrival, own: Checkpoint) -> FirstState:
        facts, manifest = arrival.facts, own.manifest
        over = _is_over(own, arrival)
        facts.now_doing(f"continuing from the checkpoint of {manifest}")
        try:
            await self._work.run(own.fill, arrival.slow_P, arrival.momentum_P)
        except FileUnusable as error:
            raise LocoError(f"{own.path}: {error}; start again: the one before is tried") from error
        arrival.events.emit(
            EventName.RUN_RESUMED,
            path=str(own.path),
            round=manifest.round,
            step=int(manifest.step),
            over=manifest.over,
            tokens=manifest.tokens,
        )
        return FirstState(
            manifest.round,
            manifest.step,
            manifest.epoch,
            manifest.position,
            debt=manifest.debt,
            over=over,
            go_on=GoOn(own.trainer_file, with_weights=True, over=over),
        )


def _is_over(own: Checkpoint, arrival: Arrival) -> bool:
    """Whether the run had ended, and has not been made longer since."""
    manifest = own.manifest
    return manifest.over and manifest.step >= arrival.spec.total_steps_at(manifest.step)


def _lag_to_lead(arrival: Arrival) -> float:
    """Steps behind which a peer takes the state of others, where it may begin by its own."""
    if arrival.held.group.part != WHOLE_MODEL:
        return math.inf
    return lost_lag(arrival.spec.founding.sync.round_steps)


# --- assembly -------------------------------------------------------------------------------------


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
        ports.network.admit_by(standing)
        network = PacedNetwork(ports.network, pacing)
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
