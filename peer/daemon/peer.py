"""One peer from its first breath to its last, against the ports alone.

    connecting -> downloading -> training -> finished        (one that joins)
                  starting    -> training -> finished        (one that founds)

Whatever happens on the way, the nursery in `run` owns every task, and `request_stop` ends it.
"""

import math
from contextlib import suppress
from functools import partial
from typing import Final

import trio

from peer.averaging.parts import Averaging, AveragingParts, averaging_of
from peer.codec import MAIN_MEMORY, get_codec
from peer.content.service import ContentService
from peer.facts import HeldPart, PeerState
from peer.observe.event_names import EventName
from peer.process.rejoin import JoinAgain, addresses_of
from peer.rounds.loop import RoundLoop
from peer.rounds.shares import DataShares
from peer.stages.company import StageCompany, Surroundings, keep_balance
from peer.stages.exchange import StageExchange
from peer.state.kept_proofs import KeptProofs
from peer.training.ports import Float32Vector, StartTrainer
from peer.training.warm import warmed_up
from protocol.membership.group import Group
from protocol.membership.view import View
from protocol.run.amendments import AmendedSpec
from protocol.run.layout import stage_of_part
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec

from .beginning import Arrival, Beginning
from .checkpointing import Checkpointing, NoCheckpoints, check_room, checkpointing_of
from .comparison import MeasureLoss, Witnesses, cannot_tell
from .door import Door
from .entry import Entry
from .group import CorpusPieces, LinkedCompany, Membership, OuterSource
from .peer_parts import PeerParts, PeerSettings
from .provision import Supplies

KEEP_EVERY_S: Final = 2.0
TRAINER_SHARE: Final = 0.5
"""Part of the grace in which the trainer may write its part of the last checkpoint."""
LEAVING_SHARE: Final = 0.6
"""Part of the grace in which an exchange under way may end."""
COPYING_SHARE: Final = 0.9
"""Part of the grace in which the last checkpoint may be copied elsewhere."""


class Peer:
    """Runs one peer from its first connection to its end."""

    def __init__(self, settings: PeerSettings, parts: PeerParts) -> None:
        self.settings = settings
        self.parts = parts
        self.service: ContentService | None = None
        self.rounds: RoundLoop | None = None
        self._kept: Checkpointing | NoCheckpoints = NoCheckpoints()

    @property
    def door(self) -> Door:
        """The rules of admission."""
        return self.parts.standing.door

    def request_stop(self) -> None:
        """Leave gracefully, soon."""
        self.settings.stop.set()

    async def run(self, entry: Entry) -> None:
        """Come to a run, train it, and serve it until asked to stop.

        Raises:
            Refused, InvalidRunSpec, ConfigError, HomeError, CannotTrain, TrainingImpossible
        """
        stop, links = self.settings.stop, self.parts.links

        async def leave_when_banned() -> None:
            await self.door.expelled.wait()
            stop.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(links.run)
            nursery.start_soon(leave_when_banned)
            await links.serving.wait()
            nursery.start_soon(self._come_and_train, entry)
            await stop.wait()
            await self._leave()
            nursery.cancel_scope.cancel()
        self.door.check_not_banned()

    async def _come_and_train(self, entry: Entry) -> None:
        """Come to the run and train it; then go, if that is wanted, or serve until cancelled."""
        stop = self.settings.stop
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(entry.keep_looking)
                signed, supplies = await entry.enter(self.settings.check_spec)
                nursery.start_soon(self._keep_acquaintances)
                await self._train(signed, supplies)
                nursery.cancel_scope.cancel()
        except* JoinAgain:
            if not stop.is_set():  # else we go anyway
                raise
        if not self.settings.exit_when_done:
            await trio.sleep_forever()
        stop.set()

    async def _keep_acquaintances(self) -> None:
        """Write down who is there, until cancelled, for the time after a restart.

        A disk that refuses costs what would have been remembered.
        """
        parts = self.parts
        while True:
            await trio.sleep(KEEP_EVERY_S)
            with suppress(OSError):
                alive = parts.roster.alive(trio.current_time())
                await parts.work.run(parts.acquaintances.keep, alive)

    async def _leave(self) -> None:
        """Write the last checkpoint, before anything that others can spoil; then take leave."""
        self.parts.facts.now_doing("leaving", PeerState.LEAVING)
        reason = "banned" if self.door.expelled.is_set() else "requested"
        self.parts.events.emit(EventName.LEAVING, reason=reason)
        began_s, grace_s = trio.current_time(), self.settings.grace_s
        if self.rounds is not None:
            await self.rounds.leave(
                began_s + grace_s * TRAINER_SHARE, began_s + grace_s * LEAVING_SHARE
            )
        await self.parts.links.say_leaving()
        await self._kept.wait_copied(began_s + grace_s * COPYING_SHARE)

    # --- training ---------------------------------------------------------------------------------
    def _hold(self, signed: SignedSpec, supplies: Supplies) -> HeldPart:
        """From now on we are in a group."""
        group = Group(signed.run_id, supplies.part)
        view = View(self.parts.roster, group.digest)
        held = HeldPart(group, supplies.shape, signed.spec().sync.codec, view)
        self.parts.facts.held = held
        self.parts.events.emit(
            EventName.GROUP_ENTERED,
            group=group.digest,
            part=group.part,
            padded_parameters=held.shape.padded_parameters,
        )
        return held

    async def _train(self, signed: SignedSpec, supplies: Supplies) -> None:
        """Get a state, then run rounds until the run is over; goes on serving until cancelled."""
        self.settings.bind_run(signed)
        parts, amended, facts = self.parts, self.door.amended, self.parts.facts
        spec = amended.founding
        facts.run_id = signed.run_id
        facts.inner_steps_per_round = spec.sync.round_steps
        facts.tokens_per_step = spec.tokens_per_step
        held = self._hold(signed, supplies)
        if self.settings.on_run is not None:
            self.settings.on_run(spec, supplies.num_blocks * spec.model.context_length)
        most = self.settings.max_corpus_bytes
        if (plan := self.settings.checkpoints) is not None:
            size = held.shape.padded_parameters
            check_room(plan.store, size, supplies.store, most, parts.events)
        service = self.service = ContentService(
            network=parts.network,
            work=parts.work,
            state_dir=self.settings.state_dir,
            signed=signed,
            blobs=supplies.blobs,
            store=supplies.store,
        )
        service.refused = facts.refused
        await service.start()
        pieces = CorpusPieces(parts, supplies, spec, most)
        with supplies.engine.memory(held.shape.padded_parameters) as slow:
            start = supplies.engine.starter(slow)
            exchange = self._exchange(amended, held)
            kept = self._kept = checkpointing_of(
                self.settings.checkpoints,
                held,
                facts=facts,
                events=parts.events,
                work=parts.work,
                wall_time_s=parts.directory.swarm_time_s,
            )
            averaging = self._averaging(amended, held, slow.array, pieces, exchange, kept)
            parts.pacing.senders = lambda: averaging.senders
            membership, beginning = await self._membership(held), supplies.beginning

            async def begin(measure: MeasureLoss) -> None:
                await self._begin(beginning, amended, held, averaging, membership, kept, measure)
                service.serve_state_of(OuterSource(averaging, facts, parts.work))

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
            network=self.parts.network,
            facts=self.parts.facts,
            events=self.parts.events,
            heard=self.parts.links.heard,
            sign=self.parts.sign,
            work=self.parts.work,
            pacing=self.parts.pacing,
        )
        return StageExchange(amended, stage, self._stages(spec, held), around)

    async def _keep_balance(self, spec: RunSpec, held: HeldPart) -> None:
        """Go where another stage needs us more, unless we were told to stay. Raises JoinAgain."""
        stage = stage_of_part(held.group.part)
        if stage is not None and not self.settings.keeps_stage:
            company = self._stages(spec, held)
            await keep_balance(stage, company, self.parts.facts, spec.pipeline.num_visited)

    def _stages(self, spec: RunSpec, held: HeldPart) -> StageCompany:
        return StageCompany(self.parts.roster, held.group.run_id, spec.pipeline.stages)

    def _averaging(
        self,
        spec: AmendedSpec,
        held: HeldPart,
        slow_P: Float32Vector,
        pieces: CorpusPieces,
        exchange: StageExchange | None,
        kept: Checkpointing | NoCheckpoints,
    ) -> Averaging:
        links, facts = self.parts.links, self.parts.facts
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
                    blame=self.parts.standing.blame,
                    heard=links.heard,
                    tell=links.tell,
                ),
                shares=DataShares(pieces.plan, facts, pieces.feed),
                network=self.parts.network,
                work=self.parts.work,
                sign=self.parts.sign,
                events=self.parts.events,
                observe_round=self.settings.observe_round,
                checkpoints=kept,
                convict=self.parts.standing.convict,
                proofs=KeptProofs(self.settings.state_dir / "proofs"),
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
        facts = self.parts.facts
        first = await beginning.take(
            Arrival(
                spec,
                held,
                averaging.slow_P,
                averaging.momentum_P,
                facts=facts,
                events=self.parts.events,
                sources=self.parts.sources,
                roster=self.parts.roster,
                look_around=membership.look_around,
                meet=membership.run,
                witnesses_of=partial(Witnesses, self.parts.network, held.view, self.parts.sign),
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
            self.parts.facts.incarnation,
            network=self.parts.network,
            directory=self.parts.directory,
            roster=self.parts.roster,
            sign=self.parts.sign,
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
            self.settings.on_ready()
            await rounds.run()
            if self.settings.on_finished is not None:
                await self.settings.on_finished()
            if self.settings.exit_when_done:
                await self._kept.wait_copied(math.inf)
                nursery.cancel_scope.cancel()
            await self._until_longer(held.view)

    async def _until_longer(self, view: View) -> None:
        """Wait, after the end, until the run goes on: we were told too late. Raises JoinAgain."""
        facts = self.parts.facts
        while True:
            await self.parts.links.heard.wait()
            if self.door.amended.total_steps_at(facts.nominal_step) > facts.step:
                training = view.members_training(trio.current_time())
                if addresses := addresses_of(training):
                    raise JoinAgain(addresses, "the run was made longer while we saw nobody")

    async def _note_codec(self, spec: RunSpec, held: HeldPart) -> None:
        """Say what codes vectors on this side; it is loaded before the first of them waits."""
        num_values, name = held.shape.padded_parameters, spec.sync.codec
        codec = get_codec(name, part_of=num_values)
        loops = await self.parts.work.run(codec.loops_for, num_values, MAIN_MEMORY)
        self.parts.facts.codec, self.parts.facts.loops["daemon"] = name, loops
        self.parts.events.emit(EventName.CODEC_CHOSEN, codec=name, loops=loops)
