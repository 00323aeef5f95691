"""One peer from its first breath to its last, against the ports alone.

    connecting -> downloading -> training -> finished        (one that joins)
                  starting    -> training -> finished        (one that founds)

Whatever happens on the way, the nursery in `run` owns every task, and `request_stop` ends it.

Remembering who was linked, for the time after a restart (peer/state/acquaintances.py).

The other peers of the group, for gossip: what the view knows and the links tell.

Implements `peer.averaging.parts.Company`.

The pieces of the corpus in the daemon: served to others, fetched where they are trained on.

Our record in the directory, and what others' records tell.

The directory is how peers of a group find each other that were never told of each other; who is
alive is judged on links alone. So a record may be half a minute old, and a directory that is down
for a while costs nothing but new acquaintances.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import trio

from peer.averaging.parts import Averaging, AveragingParts
from peer.averaging.ways import averaging_of
from peer.codec import MAIN_MEMORY, get_codec
from peer.content.pieces import PieceFetcher
from peer.content.service import ContentService
from peer.facts import Facts, HeldPart, PeerState
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.ports import Directory, DirectoryUnrecoverable, Network, PeerId, Work
from peer.process.bell import Bell
from peer.process.rejoin import JoinAgain, addresses_of
from peer.rounds.feed import AllHere, DataFeed
from peer.rounds.loop import RoundLoop
from peer.rounds.shares import DataShares
from peer.stages.company import StageCompany, Surroundings, keep_balance
from peer.stages.exchange import StageExchange
from peer.state.acquaintances import Acquaintances
from peer.state.kept_proofs import KeptProofs
from peer.training.ports import Float32Vector, StartTrainer
from peer.training.warm import warmed_up
from protocol.errors import LocoError, RemoteProtocolError
from protocol.gossip.matchmaking_events import RoundSnapshot
from protocol.membership.book import Fault
from protocol.membership.group import Group
from protocol.membership.records import (
    PeerRecord,
    Sign,
    decode_record,
    encode_record,
    record_key,
    record_keys,
)
from protocol.membership.view import Member, Roster, View
from protocol.run.amendments import AmendedSpec
from protocol.run.layout import DATA_STAGE, part_of_stage, stage_of_part
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec
from protocol.schedule.data_plan import DataPlan

from .beginning import Arrival, Beginning
from .checkpointing import Checkpointing, NoCheckpoints, checkpointing_of
from .entry import Entry
from .outer_source import OuterSource
from .peer_parts import PeerParts, PeerSettings
from .provision import Supplies
from .room import check_room
from .sources import fetch_weights
from .witnesses import MeasureLoss, Witnesses, cannot_tell

# --- membership -----------------------------------------------------------------------------------

PUBLISH_EVERY_S: Final = 30.0
RECORD_LIFETIME_S: Final = 120.0
REFRESH_EVERY_S: Final = 15.0
FIRST_REFRESHES_S: Final = 2.0
"""A newcomer looks around sooner."""
NUM_FIRST_REFRESHES: Final = 3


class Membership:
    """Keeps our record fresh and the roster informed; `run` until cancelled.

    Args:
        name: of our group in the directory (Door.directory_name).
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        *,
        network: Network,
        directory: Directory,
        roster: Roster,
        sign: Sign,
    ) -> None:
        self._name = name
        self._incarnation = incarnation
        self._network = network
        self._directory = directory
        self._roster = roster
        self._sign = sign

    async def run(self) -> None:
        """Publish and look around, each at its own pace."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._repeat, self._publish, PUBLISH_EVERY_S)
            nursery.start_soon(self.look_around)

    async def look_around(self) -> None:
        """Find the others of our group, until cancelled."""
        await self._repeat(self._refresh, REFRESH_EVERY_S)

    async def _repeat(self, job: Callable[[], Awaitable[None]], every_s: float) -> None:
        turn = 0
        while True:
            try:
                await job()
            except DirectoryUnrecoverable as error:
                self._give_up(error)
            turn += 1
            await trio.sleep(FIRST_REFRESHES_S if turn <= NUM_FIRST_REFRESHES else every_s)

    def _give_up(self, error: DirectoryUnrecoverable) -> None:
        """Join again those who are alive; alone, there is nobody to find and a state to lose."""
        addresses = addresses_of(self._roster.alive(trio.current_time()))
        if addresses:
            raise JoinAgain(addresses, str(error)) from error

    async def _publish(self) -> None:
        expires_s = self._directory.swarm_time_s() + RECORD_LIFETIME_S
        own = PeerRecord(
            self._network.peer_id, self._incarnation, tuple(self._network.addresses), expires_s
        )
        key = record_key(self._name, own.peer_id)
        await self._directory.store(
            key, own.peer_id, encode_record(own, key, self._sign), expires_s
        )

    async def _refresh(self) -> None:
        for key in record_keys(self._name):
            for peer_id, value in (await self._directory.get(key)).items():
                if peer_id != self._network.peer_id:
                    self._take(key, peer_id, value)

    def _take(self, key: bytes, peer_id: str, value: bytes) -> None:
        try:
            record = decode_record(key, peer_id, value)
        except RemoteProtocolError:
            return
        if record.expires_s > self._directory.swarm_time_s():
            self._roster.record(trio.current_time(), record)


# --- peer -----------------------------------------------------------------------------------------

# --- corpus ---------------------------------------------------------------------------------------

ROUNDS_FIRST: Final = 2
"""Rounds of ours whose blocks are fetched in the order in which they are trained."""
MAX_FIRST_BLOCKS: Final = 1024
"""Beyond so many blocks all pieces of a stratum have begun, and their order means nothing."""


class CorpusPieces:
    """Brings the pieces of one corpus that are needed.

    Args:
        max_bytes: of the disk that pieces may take; None for no limit.
    """

    def __init__(
        self,
        supplies: Supplies,
        spec: RunSpec,
        max_bytes: float | None,
        network: Network,
        work: Work,
        roster: Roster,
        facts: Facts,
        events: EventLog,
    ) -> None:
        self.plan = DataPlan(spec.seed, supplies.num_blocks, supplies.piece_blocks)
        self._fetcher: PieceFetcher | None = None
        if (store := supplies.store) is None:
            return
        if stage_of_part(supplies.part) in (None, DATA_STAGE):  # no other stage reads tokens
            batch_size = spec.training.batch_size
            most = math.inf if max_bytes is None else max_bytes // store.manifest.piece_bytes(0)
            self._fetcher = PieceFetcher(
                store,
                self.plan,
                network=network,
                work=work,
                roster=roster,
                facts=facts,
                events=events,
                first_blocks=min(
                    MAX_FIRST_BLOCKS, ROUNDS_FIRST * spec.sync.round_steps * batch_size
                ),
                max_pieces=max(1, most),
            )

    @property
    def feed(self) -> DataFeed:
        """What the outer loop asks for pieces."""
        return self._fetcher or AllHere()

    async def run(self) -> None:
        """Fetch pieces until cancelled."""
        if self._fetcher is not None:
            await self._fetcher.run()
        await trio.sleep_forever()


# --- peer -----------------------------------------------------------------------------------------

# --- the others of the group ----------------------------------------------------------------------


class LinkedCompany:
    """The other peers of the group, for gossip, from the view and the links.

    Args:
        fragment: the one that partners are looked for; 0 where the whole model is one vector.
        blame: holds a fault against a peer.
        heard: rung when a peer has told anything.
        tell: to be rung when all should be told of us at once.
    """

    def __init__(
        self,
        view: View,
        facts: Facts,
        fragment: int,
        *,
        blame: Callable[[PeerId, Fault], None],
        heard: Bell,
        tell: Bell,
    ) -> None:
        self._view = view
        self._facts = facts
        self._fragment = fragment
        self.blame = blame
        self._heard = heard
        self._tell = tell

    def free(self) -> Sequence[tuple[PeerId, RoundSnapshot]]:
        """The others that say they look for a partner, and what they bring."""
        return [
            (member.peer_id, RoundSnapshot(*found, member.progress.ended))
            for member in self._training()
            if (found := member.progress.free.get(self._fragment)) is not None
        ]

    def present(self, *, ended: bool) -> Sequence[PeerId]:
        """The others that train and have not ended, or those that have ended and not finished."""
        return [m.peer_id for m in self._training() if m.progress.ended == ended]

    def announce(self, snapshot: RoundSnapshot | None) -> None:
        """Tell all that we look for a partner with this snapshot, or that we look for none."""
        free = self._facts.free
        if free.get(self._fragment) == snapshot:
            return
        if snapshot is None:
            del free[self._fragment]
        else:
            free[self._fragment] = snapshot
        self._tell.ring()

    async def changed(self) -> None:
        """Wait until any of this may have changed."""
        await self._heard.wait()

    def _training(self) -> Sequence[Member]:
        training = self._view.members_training(trio.current_time())
        return [member for member in training if member.progress.state == PeerState.TRAINING]


# --- peer -----------------------------------------------------------------------------------------

# --- ties between the parts -----------------------------------------------------------------------

KEEP_EVERY_S: Final = 2.0


class KeepAcquaintances:
    """Writes down who is there, every so often."""

    def __init__(self, acquaintances: Acquaintances, roster: Roster, work: Work) -> None:
        self._acquaintances = acquaintances
        self._roster = roster
        self._work = work

    async def run(self) -> None:
        """Go on until cancelled. A disk that refuses costs what would have been remembered."""
        while True:
            await trio.sleep(KEEP_EVERY_S)
            with suppress(OSError):
                alive = self._roster.alive(trio.current_time())
                await self._work.run(self._acquaintances.keep, alive)


# --- peer -----------------------------------------------------------------------------------------

TRAINER_SHARE: Final = 0.5
"""Part of the grace in which the trainer may write its part of the last checkpoint."""
LEAVING_SHARE: Final = 0.6
"""Part of the grace in which an exchange under way may end."""
COPYING_SHARE: Final = 0.9
"""Part of the grace in which the last checkpoint may be copied elsewhere."""


class Peer:
    """Runs one peer from its first connection to its end."""

    def __init__(self, settings: PeerSettings, parts: PeerParts) -> None:
        self._settings = settings
        self._network = parts.network
        self._pacing = parts.pacing
        self._directory = parts.directory
        self._work = parts.work
        self._sources = parts.sources
        self._facts = parts.facts
        self._roster = parts.roster
        self._links = parts.links
        self._events = parts.events
        self._sign = parts.sign
        self._standing = parts.standing
        self.door = parts.standing.door
        self._stop = settings.stop
        self.service: ContentService | None = None
        self.rounds: RoundLoop | None = None
        self._kept: Checkpointing | NoCheckpoints = NoCheckpoints()
        self._keeping = KeepAcquaintances(parts.acquaintances, parts.roster, parts.work)

    def request_stop(self) -> None:
        """Leave gracefully, soon."""
        self._stop.set()

    @property
    def grace_s(self) -> float:
        """Time to end in, once asked to."""
        return self._settings.grace_s

    @property
    def state_dir(self) -> Path:
        """Where files may be left for a command."""
        return self._settings.state_dir

    @property
    def part(self) -> str | None:
        """The part of the model that we hold."""
        return None if self._facts.held is None else self._facts.held.group.part

    async def fetch_stage(self, stage: int, padded_parameters: int) -> Path:
        """Write the slow weights of a stage that others hold to a file, fp32 values alone.

        Raises:
            LocoError: nobody gives them.
        """
        assert self._facts.run_id is not None
        view = View(self._roster, Group(self._facts.run_id, part_of_stage(stage)).digest)
        if not view.alive(trio.current_time()):
            raise LocoError(f"no peer that we see holds stage {stage}; try again when one does")
        return await fetch_weights(
            self._sources,
            view,
            padded_parameters,
            self._settings.state_dir / f"stage-{stage}.f32",
            self._work,
        )

    async def run(self, entry: Entry) -> None:
        """Come to a run, train it, and serve it until asked to stop.

        Raises:
            Refused, InvalidRunSpec, ConfigError, HomeError, CannotTrain, TrainingImpossible
        """

        async def life() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(entry.keep_looking)
                signed, supplies = await entry.enter(self._settings.check_spec)
                nursery.start_soon(self._keeping.run)
                await self._train(signed, supplies)
                nursery.cancel_scope.cancel()

        await self._live(life)

    async def _live(self, life: Callable[[], Awaitable[None]]) -> None:
        """Run links and `life` until it ends or a stop is requested."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._links.run)
            nursery.start_soon(self._leave_when_banned)
            await self._links.serving.wait()

            async def live() -> None:
                try:
                    await life()
                except* JoinAgain:
                    if not self._stop.is_set():  # else we go anyway
                        raise
                if not self._settings.exit_when_done:
                    await trio.sleep_forever()
                self._stop.set()

            nursery.start_soon(live)
            await self._stop.wait()
            await self._leave()
            nursery.cancel_scope.cancel()
        self.door.check_not_banned()

    async def _leave_when_banned(self) -> None:
        await self.door.expelled.wait()
        self._stop.set()

    async def _leave(self) -> None:
        """Write the last checkpoint, before anything that others can spoil; then take leave."""
        self._facts.now_doing("leaving", PeerState.LEAVING)
        reason = "banned" if self.door.expelled.is_set() else "requested"
        self._events.emit(EventName.LEAVING, reason=reason)
        began_s, grace_s = trio.current_time(), self._settings.grace_s
        if self.rounds is not None:
            await self.rounds.leave(
                began_s + grace_s * TRAINER_SHARE, began_s + grace_s * LEAVING_SHARE
            )
        await self._links.say_leaving()
        await self._kept.wait_copied(began_s + grace_s * COPYING_SHARE)

    # --- training ---------------------------------------------------------------------------------
    def _hold(self, signed: SignedSpec, supplies: Supplies) -> HeldPart:
        """From now on we are in a group."""
        group = Group(signed.run_id, supplies.part)
        view = View(self._roster, group.digest)
        held = HeldPart(group, supplies.shape, signed.spec().sync.codec, view)
        self._facts.held = held
        self._events.emit(
            EventName.GROUP_ENTERED,
            group=group.digest,
            part=group.part,
            padded_parameters=held.shape.padded_parameters,
        )
        return held

    async def _train(self, signed: SignedSpec, supplies: Supplies) -> None:
        """Get a state, then run rounds until the run is over; goes on serving until cancelled."""
        self._settings.bind_run(signed)
        amended, facts = self.door.amended, self._facts
        spec = amended.founding
        facts.run_id = signed.run_id
        facts.inner_steps_per_round = spec.sync.round_steps
        facts.tokens_per_step = spec.tokens_per_step
        held = self._hold(signed, supplies)
        if self._settings.on_run is not None:
            self._settings.on_run(spec, supplies.num_blocks * spec.model.context_length)
        most = self._settings.max_corpus_bytes
        if (plan := self._settings.checkpoints) is not None:
            size = held.shape.padded_parameters
            check_room(plan.store, size, supplies.store, most, self._events)
        service = self.service = ContentService(
            network=self._network,
            work=self._work,
            state_dir=self._settings.state_dir,
            signed=signed,
            blobs=supplies.blobs,
            store=supplies.store,
        )
        service.refused = facts.refused
        await service.start()
        around = (self._network, self._work, self._roster, facts, self._events)
        pieces = CorpusPieces(supplies, spec, most, *around)
        with supplies.engine.memory(held.shape.padded_parameters) as slow:
            start = supplies.engine.starter(slow)
            exchange = self._exchange(amended, held)
            kept = self._kept = checkpointing_of(
                self._settings.checkpoints,
                held,
                facts=facts,
                events=self._events,
                work=self._work,
                wall_time_s=self._directory.swarm_time_s,
            )
            averaging = self._averaging(amended, held, slow.array, pieces, exchange, kept)
            self._pacing.senders = lambda: averaging.senders
            membership, beginning = await self._membership(held), supplies.beginning

            async def begin(measure: MeasureLoss) -> None:
                await self._begin(beginning, amended, held, averaging, membership, kept, measure)
                service.serve_state_of(OuterSource(averaging, facts, self._work))

            if not beginning.ages:
                await begin(cannot_tell)
            facts.now_doing("starting the trainer")
            async with warmed_up(start, slow.array) as warm:
                if beginning.ages:
                    await begin(cannot_tell if exchange else warm.loss)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(kept.run, averaging)
                    await self._run_rounds(
                        spec, membership, averaging, warm.start, held, exchange, pieces
                    )
                    nursery.cancel_scope.cancel()

    def _exchange(self, amended: AmendedSpec, held: HeldPart) -> StageExchange | None:
        """The microbatches of our stage; None where we hold the whole model."""
        stage, spec = stage_of_part(held.group.part), amended.founding
        if stage is None or spec.pipeline.stages == 1:
            return None
        around = Surroundings(
            network=self._network,
            facts=self._facts,
            events=self._events,
            heard=self._links.heard,
            sign=self._sign,
            work=self._work,
            pacing=self._pacing,
        )
        return StageExchange(amended, stage, self._stages(spec, held), around)

    async def _keep_balance(self, spec: RunSpec, held: HeldPart) -> None:
        """Go where another stage needs us more, unless we were told to stay. Raises JoinAgain."""
        stage = stage_of_part(held.group.part)
        if stage is not None and not self._settings.keeps_stage:
            company = self._stages(spec, held)
            await keep_balance(stage, company, self._facts, spec.pipeline.num_visited)

    def _stages(self, spec: RunSpec, held: HeldPart) -> StageCompany:
        return StageCompany(self._roster, held.group.run_id, spec.pipeline.stages)

    def _averaging(
        self,
        spec: AmendedSpec,
        held: HeldPart,
        slow_P: Float32Vector,
        pieces: CorpusPieces,
        exchange: StageExchange | None,
        kept: Checkpointing | NoCheckpoints,
    ) -> Averaging:
        links, facts = self._links, self._facts
        return averaging_of(
            AveragingParts(
                amended=spec,
                held=held,
                slow_P=slow_P,
                facts=facts,
                company_of=partial(
                    LinkedCompany,
                    held.view,
                    facts,
                    blame=self._standing.blame,
                    heard=links.heard,
                    tell=links.tell,
                ),
                shares=DataShares(pieces.plan, facts, pieces.feed),
                network=self._network,
                work=self._work,
                sign=self._sign,
                events=self._events,
                observe_round=self._settings.observe_round,
                checkpoints=kept,
                convict=self._standing.convict,
                proofs=KeptProofs(self._settings.state_dir / "proofs"),
                microbatches=exchange,
            )
        )

    async def _begin(
        self,
        beginning: Beginning,
        spec: AmendedSpec,
        held: HeldPart,
        averaging: Averaging,
        membership: Membership,
        kept: Checkpointing | NoCheckpoints,
        measure: MeasureLoss,
    ) -> None:
        """Take the first state, and go on from where it stands."""
        facts = self._facts
        first = await beginning.take(
            Arrival(
                spec,
                held,
                averaging.slow_P,
                averaging.momentum_P,
                facts=facts,
                events=self._events,
                sources=self._sources,
                roster=self._roster,
                look_around=membership.look_around,
                meet=membership.run,
                witnesses_of=partial(Witnesses, self._network, held.view, self._sign),
                measure=measure,
            )
        )
        averaging.stands_after(first.round)
        facts.round, facts.nominal_step = first.round + 1, float(first.step)
        facts.epoch, facts.position, facts.debt = first.epoch, first.position, first.debt
        facts.over = first.over
        if first.go_on is not None:
            kept.go_on_from(first.go_on)

    async def _membership(self, held: HeldPart) -> Membership:
        return Membership(
            await self.door.directory_name(held.group.digest),
            self._facts.incarnation,
            network=self._network,
            directory=self._directory,
            roster=self._roster,
            sign=self._sign,
        )

    async def _run_rounds(
        self,
        spec: RunSpec,
        membership: Membership,
        averaging: Averaging,
        start_trainer: StartTrainer,
        held: HeldPart,
        exchange: StageExchange | None,
        pieces: CorpusPieces,
    ) -> None:
        rounds = self.rounds = averaging.begin(start_trainer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(averaging.serve)
            nursery.start_soon(membership.run)
            nursery.start_soon(pieces.run)
            nursery.start_soon(self._note_codec, spec, held)
            if exchange is not None:
                nursery.start_soon(exchange.serve)
                nursery.start_soon(self._keep_balance, spec, held)
            self._settings.on_ready()
            await rounds.run()
            if self._settings.on_finished is not None:
                await self._settings.on_finished()
            if self._settings.exit_when_done:
                await self._kept.wait_copied(math.inf)
                nursery.cancel_scope.cancel()
            await self._until_longer(held.view)

    async def _until_longer(self, view: View) -> None:
        """Wait, after the end, until the run goes on: we were told too late. Raises JoinAgain."""
        facts = self._facts
        while True:
            await self._links.heard.wait()
            if self.door.amended.total_steps_at(facts.nominal_step) > facts.step:
                training = view.members_training(trio.current_time())
                if addresses := addresses_of(training):
                    raise JoinAgain(addresses, "the run was made longer while we saw nobody")

    async def _note_codec(self, spec: RunSpec, held: HeldPart) -> None:
        """Say what codes vectors on this side; it is loaded before the first of them waits."""
        num_values, name = held.shape.padded_parameters, spec.sync.codec
        codec = get_codec(name, part_of=num_values)
        loops = await self._work.run(codec.loops_for, num_values, MAIN_MEMORY)
        self._facts.codec, self._facts.loops["daemon"] = name, loops
        self._events.emit(EventName.CODEC_CHOSEN, codec=name, loops=loops)
