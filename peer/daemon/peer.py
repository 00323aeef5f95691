"""One peer from its start to its end, against the ports alone.

    connecting -> downloading -> training -> finished        (one that joins)
                  starting    -> training -> finished        (one that founds)

The nursery in `Peer.run` owns every task, and `request_stop` ends it.
"""

import math
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy.typing as npt
import trio

from peer.averaging.parts import Averaging, averaging_of
from peer.codec import MAIN_MEMORY, get_codec
from peer.content.pieces import PieceFetcher
from peer.content.service import ContentService
from peer.content.state_file import StateManifest, copy_state, seal_state
from peer.experts.conversation import ExpertService, Score
from peer.facts import Facts, HeldPart, PeerState
from peer.observe.event_names import EventName
from peer.process.rejoin import JoinAgain, can_be_joined
from peer.rounds.domains import MeasuredDomains, ToldLogProbs
from peer.rounds.loop import RoundLoop
from peer.rounds.shares import DataShares
from peer.rounds.way import AveragingParts
from peer.runtime import Work
from peer.stages.exchange import StageExchange
from peer.stages.peers import StagePeers, keep_balance
from peer.stages.roles import exchange_of
from peer.state.kept_files import ProofFile
from peer.training.ports import StartTrainer
from peer.training.warm import warmed_up
from protocol.content.samples import Float32Vector, sample_of
from protocol.errors import Refused
from protocol.membership.group import Group
from protocol.membership.view import View
from protocol.outcomes import RefusalReason
from protocol.run.layout import DATA_STAGE, expert_of_part, stage_of_part
from protocol.run.signed_spec import SignedSpec
from protocol.schedule.data_plan import DataPlan
from protocol.wire.content_messages import StateScalars

from .beginning import MeasureLoss, StartContext, cannot_tell
from .checkpointing import Checkpointing, check_room
from .entry import Entry
from .experts import ExpertWatch, expert_watch
from .kept_experts import KeptExperts
from .membership import LinkedCandidates, Membership
from .parts import PeerParts, PeerSettings
from .provision import Supplies

KEEP_EVERY_S: Final = 2.0
ROUNDS_FIRST: Final = 2
"""Rounds of ours whose blocks are fetched in the order in which they are trained."""
MAX_FIRST_BLOCKS: Final = 1024
"""After this many blocks all pieces of a stratum have begun, and order means nothing."""


class LeaveDeadlines(NamedTuple):
    """Deadlines of a peer that leaves, in trio's time.

    The trainer writes its part of the last checkpoint, an exchange under way ends, and that
    checkpoint is copied elsewhere.
    """

    trainer_s: float
    exchange_s: float
    copy_s: float

    @classmethod
    def begun(cls, grace_s: float) -> "LeaveDeadlines":
        return cls(*(trio.current_time() + share * grace_s for share in (0.5, 0.6, 0.9)))


class Peer:
    """One peer, from its start to its end.

    Attributes:
        training: None before the run is known.
    """

    def __init__(self, settings: PeerSettings, parts: PeerParts) -> None:
        self.settings = settings
        self.parts = parts
        self.training: Training | None = None

    def request_stop(self) -> None:
        """Leave gracefully, soon."""
        self.settings.stop.set()

    async def run(self, entry: Entry) -> None:
        """Come to a run, train it, and serve it until asked to stop.

        Raises:
            Refused, InvalidRunSpec, ConfigError, HomeError, CannotTrain, TrainingImpossible
            JoinAgain: a new process should join.
        """
        stop, parts = self.settings.stop, self.parts
        links, admission = parts.links, parts.admission
        parts.events.emit(
            EventName.DAEMON_STARTED,
            version=parts.version,
            incarnation=parts.facts.incarnation,
            addresses=list(parts.network.addresses),
            home=self.settings.home,
        )

        async def leave_when_banned() -> None:
            await admission.expelled.wait()
            stop.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(links.run)
            nursery.start_soon(leave_when_banned)
            await links.serving.wait()
            nursery.start_soon(self._come_and_train, entry)
            await stop.wait()
            await self._leave()
            nursery.cancel_scope.cancel()
        if admission.expelled.is_set():
            raise Refused(RefusalReason.NOT_ADMITTED, "this peer has been banned from the run")

    async def _come_and_train(self, entry: Entry) -> None:
        """Come to the run and train it; then go, if that is wanted, or serve until cancelled."""
        stop = self.settings.stop
        try:
            async with trio.open_nursery() as nursery:
                signed, supplies = await entry(self.parts, self.settings.check_spec, nursery)
                nursery.start_soon(self._keep_acquaintances)
                if supplies.domains is not None:
                    nursery.start_soon(supplies.domains.run, self.parts, self.parts.sources)
                self.training = Training(self.settings, self.parts, signed, supplies)
                await self.training.run()
                nursery.cancel_scope.cancel()
        except* JoinAgain:
            if not stop.is_set():  # else we go anyway
                await self._remember()
                raise
        if not self.settings.exit_when_done:
            await trio.sleep_forever()
        stop.set()

    async def _keep_acquaintances(self) -> None:
        while True:
            await trio.sleep(KEEP_EVERY_S)
            await self._remember()

    async def _remember(self) -> None:
        """Write down who is there, for the time after a restart.

        Those that a signer has admitted, or invited, come first, then those that have beaten for
        the longest time: so a crowd of strangers drives out none of them.
        """
        parts = self.parts
        admitted = parts.admission.known_peers
        alive = sorted(
            parts.roster.alive(trio.current_time()),
            key=lambda member: (member.peer_id not in admitted, member.first_beat_s),
        )
        with suppress(OSError):
            await parts.work.run(parts.acquaintances.keep, alive)

    async def _leave(self) -> None:
        """Write the last checkpoint, before anything that others can spoil; then take leave."""
        self.parts.facts.now_doing("leaving", PeerState.LEAVING)
        reason = "banned" if self.parts.admission.expelled.is_set() else "requested"
        self.parts.events.emit(EventName.LEAVING, reason=reason)
        until = LeaveDeadlines.begun(self.settings.grace_s)
        if self.training is not None and self.training.rounds is not None:
            await self.training.rounds.leave(until.trainer_s, until.exchange_s)
        await self.parts.links.say_leaving()
        if self.training is not None:
            await self.training.checkpoints.wait_copied(until.copy_s)


class Training:
    """A peer's work in its group, from its first state on; its home is bound to the run.

    Raises HomeError: the home is another run's.
    """

    def __init__(
        self, settings: PeerSettings, parts: PeerParts, signed: SignedSpec, supplies: Supplies
    ) -> None:
        settings.bind_run(signed)
        self._settings = settings
        self._parts = parts
        self._supplies = supplies
        self._amended = parts.admission.amended
        spec = self._spec = self._amended.founding
        facts = self._facts = parts.facts
        facts.inner_steps_per_round = spec.sync.round_steps
        facts.tokens_per_step = spec.tokens_per_step
        held = self._held = facts.held = self._entered(signed.run_id)
        self._stage = stage_of_part(held.group.part)
        self._experts = expert_watch(parts, settings.expert)
        self._stage_peers = StagePeers(parts.roster, held.group.run_id, spec.pipeline.stages)
        plan = DataPlan(spec.seed, supplies.num_blocks, supplies.piece_blocks)
        store = supplies.store
        self._most_corpus_bytes = settings.most_corpus_bytes(store.held_bytes if store else 0)
        self._fetcher = self._piece_fetcher(plan)
        self._shares = DataShares(plan, facts, self._fetcher)
        self.checkpoints = Checkpointing(settings.checkpoints, self._held, parts)
        self.service = ContentService(
            network=parts.network,
            work=parts.work,
            state_dir=settings.state_dir,
            signed=signed,
            blobs=supplies.blobs,
            stores=supplies.stores,
            other=KeptExperts(parts.checkpoints, facts, parts.work, supplies.firsts).of,
        )
        self.service.refused = facts.refused
        self.domains: MeasuredDomains | None = None
        self.rounds: RoundLoop | None = None
        self.score: Score | None = None

    def _entered(self, run_id: str) -> HeldPart:
        group, shape = Group(run_id, self._supplies.part), self._supplies.shape
        self._parts.events.emit(
            EventName.GROUP_ENTERED,
            group=group.digest,
            part=group.part,
            padded_parameters=shape.padded_parameters,
        )
        view = View(self._parts.roster, group.digest)
        return HeldPart(group, shape, self._spec.sync.codec, view)

    async def run(self) -> None:
        """Get a state, then run rounds until the run is over; goes on serving until cancelled."""
        settings, parts, supplies = self._settings, self._parts, self._supplies
        size = supplies.shape.padded_parameters
        if settings.on_run is not None:
            settings.on_run(self._spec, supplies.num_blocks * self._spec.model.context_length)
        if settings.checkpoints.every_s is not None:
            most = self._most_corpus_bytes
            check_room(parts.checkpoints, size, supplies.store, most, parts.events)
        await self.service.start()
        with supplies.engine(size) as (slow_P, start):
            exchange = self._exchange()
            self.domains = self._domains_of(slow_P)
            averaging = self._averaging(slow_P, exchange)
            parts.pacing.senders = lambda: averaging.senders
            name = await parts.admission.directory_name(self._held.group.digest)
            membership, beginning = Membership(parts, name), supplies.beginning
            if not beginning.goes_stale:
                await self._begin(averaging, membership, cannot_tell)
            self._facts.starts_trainer()
            async with warmed_up(start, slow_P) as warm:
                if beginning.goes_stale:
                    measure = cannot_tell if exchange else warm.loss
                    await self._begin(averaging, membership, measure)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.checkpoints.run, averaging)
                    await self._run_rounds(averaging, membership, warm.start, exchange)
                    nursery.cancel_scope.cancel()

    def _domains_of(self, slow_P: Float32Vector) -> MeasuredDomains | None:
        own, held_out = expert_of_part(self._held.group.part), self._supplies.held_out
        if own is None or held_out is None:
            return None
        return MeasuredDomains(own, held_out, slow_P)

    async def _serve_expert(self, averaging: Averaging, rounds: RoundLoop) -> None:
        """Tell others what our expert says of texts."""

        async def score(tokens: npt.NDArray[Any]) -> ToldLogProbs | None:
            async with averaging.lock:  # the weights lie still
                return await rounds.score(tokens)

        if self.domains is not None:
            longest, words = self._spec.model.context_length + 1, self._supplies.vocabulary_size
            self.score = score
            service = ExpertService(
                self._parts.network,
                self._held.group.digest,
                self.domains.told,
                score,
                longest=longest,
                vocabulary_size=words,
                trains=lambda: not self._parts.facts.run_over,
            )
            await service.start()

    def _piece_fetcher(self, plan: DataPlan) -> PieceFetcher | None:
        """Brings the pieces that are needed; None where all are here, or none is needed."""
        parts, store, spec = self._parts, self._supplies.store, self._spec
        if store is None or self._stage not in (None, DATA_STAGE):
            return None  # no other stage reads tokens
        most = self._most_corpus_bytes // store.manifest.piece_bytes(0)
        first_blocks = ROUNDS_FIRST * spec.sync.round_steps * spec.training.batch_size
        return PieceFetcher(
            store,
            plan,
            parts,
            first_blocks=min(MAX_FIRST_BLOCKS, first_blocks),
            max_pieces=max(1, most),
        )

    def _exchange(self) -> StageExchange | None:
        if self._stage is None or self._spec.pipeline.stages == 1:
            return None
        return exchange_of(self._amended, self._stage, self._stage_peers, self._parts)

    def _averaging(self, slow_P: Float32Vector, exchange: StageExchange | None) -> Averaging:
        parts = self._parts
        return averaging_of(
            AveragingParts(
                services=parts,
                amended=self._amended,
                held=self._held,
                slow_P=slow_P,
                candidates_of=partial(LinkedCandidates, parts, self._held.view),
                shares=self._shares,
                observe_round=self._settings.observe_round,
                checkpoints=self.checkpoints,
                convict=parts.reputation.convict,
                proofs=ProofFile(self._settings.state_dir / "proofs"),
                microbatches=exchange,
                domains=self.domains,
            )
        )

    async def _begin(
        self, averaging: Averaging, membership: Membership, measure: MeasureLoss
    ) -> None:
        facts, parts = self._facts, self._parts
        first = await self._supplies.beginning.take(
            StartContext(
                self._amended,
                self._held,
                self._shares.plan,
                averaging.slow_P,
                averaging.momentum_P,
                services=parts,
                sources=parts.sources,
                look_around=membership.look_around,
                meet=membership.run,
                measure=measure,
            )
        )
        averaging.set_first_round(first.round)
        facts.round, facts.nominal_step = first.round + 1, float(first.step)
        facts.epoch, facts.position, facts.debt = first.epoch, first.position, first.debt
        facts.run_over = first.over
        if first.go_on is not None:
            self.checkpoints.go_on_from(first.go_on, over=first.over)
        self.service.source = OuterSource(averaging, facts, parts.work)

    async def _run_rounds(
        self,
        averaging: Averaging,
        membership: Membership,
        start_trainer: StartTrainer,
        exchange: StageExchange | None,
    ) -> None:
        settings, rounds = self._settings, averaging.begin(start_trainer)
        self.rounds = rounds
        await self._serve_expert(averaging, rounds)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(averaging.serve)
            nursery.start_soon(membership.run)
            if self._fetcher is not None:
                nursery.start_soon(self._fetcher.run)
            nursery.start_soon(self._note_codec)
            if exchange is not None:
                nursery.start_soon(exchange.serve)
                nursery.start_soon(self._keep_balance)
            if self._experts is not None:
                nursery.start_soon(self._watch_experts, self._experts, rounds)
            settings.on_ready()
            await rounds.run()
            if settings.on_finished is not None:
                await settings.on_finished()
            await self._follow()
            if settings.exit_when_done:
                await self.checkpoints.wait_copied(math.inf)
                if self._experts is not None and (again := self._experts.after_the_end()):
                    raise again
                nursery.cancel_scope.cancel()
            await self._until_longer()

    async def _keep_balance(self) -> None:
        """Go where another stage needs us more, unless we were told to stay. Raises JoinAgain."""
        if self._stage is not None and not self._settings.keeps_stage:
            visited = self._spec.pipeline.num_visited
            await keep_balance(self._stage, self._stage_peers, self._facts, visited)

    async def _watch_experts(self, experts: ExpertWatch, rounds: RoundLoop) -> None:
        """Go where another expert needs us more; our checkpoint stays here. Raises JoinAgain."""
        again = await experts.until_needed()
        until = LeaveDeadlines.begun(self._settings.grace_s)
        await rounds.leave(until.trainer_s, until.exchange_s)
        await self.checkpoints.wait_copied(until.copy_s)
        raise again

    async def _until_longer(self) -> None:
        """Wait, after the end, until the run goes on: we were told too late. Raises JoinAgain."""
        facts = self._facts
        while True:
            await self._parts.heard.park()
            await self._follow()
            if self._amended.total_steps_at(facts.nominal_step) > facts.step:
                training = self._held.view.members_training(trio.current_time())
                if can_be_joined(training):
                    raise JoinAgain("the run was made longer while we saw nobody")

    async def _follow(self) -> None:
        """Join the run that follows ours, if one is named, and is wanted. Raises JoinAgain."""
        successor = self._facts.successor
        if successor is not None and self._settings.follows(successor):
            await self.checkpoints.wait_copied(math.inf)
            await self._parts.links.say_leaving()
            raise JoinAgain(f"the run is over; following {successor.run_id}", successor=successor)

    async def _note_codec(self) -> None:
        """Load the codec before the first vector waits for it."""
        num_values, name = self._held.shape.padded_parameters, self._held.codec
        codec = get_codec(name, part_of=num_values)
        loops = await self._parts.work.run(codec.loops_for, num_values, MAIN_MEMORY)
        self._facts.codec, self._facts.loops["daemon"] = name, loops
        self._parts.events.emit(EventName.CODEC_CHOSEN, codec=name, loops=loops)


# --- the state that others take -------------------------------------------------------------------

LARGEST_NORM: Final = 1e9
"""Reported in place of a longer gradient's length, which is a weight (state/rebuilt_stage.py)."""


class OuterSource:
    """The outer state as the state service sees it. Implements `StateSource`."""

    def __init__(self, averaging: Averaging, facts: Facts, work: Work) -> None:
        self._averaging = averaging
        self._facts = facts
        self._work = work
        self._written = 0

    @property
    def group(self) -> str:
        return self._facts.group or ""

    @property
    def round(self) -> int:
        return self._averaging.round

    @property
    def step(self) -> int:
        return self._facts.step

    async def sample(self, seed: bytes) -> bytes:
        async with self._averaging.lock:
            return sample_of(self._averaging.slow_P, seed).astype("<f4").tobytes()

    async def write(self, directory: Path) -> tuple[Path, StateManifest]:
        """Copy the state under the lock of the outer step, so that it is one state.

        Digests and disk are waited for without the lock: an outer step waits no longer than for the
        copy.
        """
        facts, averaging = self._facts, self._averaging
        async with averaging.lock:
            self._written += 1
            path = directory / f"{self._written}.state"
            scalars = StateScalars(
                group=self.group,
                round=averaging.round,
                step=self.step,
                layout_digest=facts.layout_digest or "",
                epoch=facts.epoch,
                position=facts.position,
                tokens=facts.tokens,
                gradient_norm=float(min(facts.gradient_norm, LARGEST_NORM)),
            )
            vectors = (averaging.slow_P, averaging.momentum_P)
            await self._work.run(copy_state, path, scalars, *vectors)
        return path, await self._work.run(seal_state, path, scalars)
