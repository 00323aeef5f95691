"""One peer from its first breath to its last, against the ports alone.

    connecting -> downloading -> training -> finished        (one that joins)
                  starting    -> training -> finished        (one that founds)

Whatever happens on the way, the nursery in `run` owns every task, and `request_stop` ends it.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import trio

from peer.averaging.parts import Averaging, AveragingParts
from peer.averaging.ways import averaging_of
from peer.codec import MAIN_MEMORY, get_codec
from peer.network.pacing import Pacing
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.observe.facts import Facts
from peer.observe.status import PeerState
from peer.ports import Directory, Network, Work
from peer.rounds.loop import RoundLoop
from peer.rounds.shares import DataShares
from peer.rounds.timing import RoundTiming
from peer.stages.balance import keep_balance
from peer.stages.build import stage_exchange
from peer.stages.company import StageCompany
from peer.stages.exchange import StageExchange
from peer.state.held_part import HeldPart
from peer.state.service import StateService
from peer.training.ports import Float32Vector, StartTrainer
from peer.training.warm import warmed_up
from protocol.errors import LocoError
from protocol.membership.group import Group
from protocol.membership.records import Sign
from protocol.membership.view import Roster, View
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec
from protocol.run.stages import part_of_stage, stage_of_part
from protocol.schedule.data_plan import DataPlan

from .beginning import Arrival, Beginning
from .company import LinkedCompany
from .entry import CheckSpec, Entry
from .links import Links
from .membership import Membership
from .outer_source import OuterSource
from .provision import Supplies
from .sources import Sources, fetch_weights

LEAVING_SHARE: Final = 0.6
"""Part of the grace in which an exchange under way may end."""


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What is particular to this peer.

    Attributes:
        on_ready: called once, as soon as others can join through us.
        check_spec: raises when this peer's options do not fit the run.
        bind_run: makes the home one of this run; raises when it is another's.
        keeps_stage: whether it holds its stage of a pipeline whatever happens.
    """

    state_dir: Path
    exit_when_done: bool
    grace_s: float
    on_ready: Callable[[], None]
    check_spec: CheckSpec
    bind_run: Callable[[SignedSpec], None]
    observe_round: Callable[[RoundTiming], None]
    keeps_stage: bool = False


@dataclass(frozen=True, slots=True)
class PeerParts:
    """What a peer is put together from."""

    network: Network
    pacing: Pacing
    directory: Directory
    work: Work
    sources: Sources
    facts: Facts
    roster: Roster
    links: Links
    events: EventLog
    sign: Sign


class Peer:
    """See the top of the file."""

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
        self._stop = trio.Event()
        self.service: StateService | None = None
        self.rounds: RoundLoop | None = None

    def __repr__(self) -> str:
        return f"<Peer {self._facts.state} {self.rounds!r}>"

    def request_stop(self) -> None:
        """Leave gracefully, soon."""
        self._stop.set()

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
            signed, supplies = await entry.enter(self._settings.check_spec)
            await self._train(signed, supplies)

        await self._live(life)

    async def _live(self, life: Callable[[], Awaitable[None]]) -> None:
        """Run links and `life` until it ends or a stop is requested."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._links.run)
            await self._links.serving.wait()

            async def live() -> None:
                await life()
                if not self._settings.exit_when_done:
                    await trio.sleep_forever()
                self._stop.set()

            nursery.start_soon(live)
            await self._stop.wait()
            await self._leave()
            nursery.cancel_scope.cancel()

    async def _leave(self) -> None:
        self._facts.now_doing("leaving", PeerState.LEAVING)
        self._events.emit(EventName.LEAVING, reason="requested")
        if self.rounds is not None:
            with trio.move_on_after(self._settings.grace_s * LEAVING_SHARE):
                await self.rounds.wait_settled()
        await self._links.say_leaving()

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
        spec, facts = signed.spec(), self._facts
        facts.run_id = signed.run_id
        facts.inner_steps_per_round = spec.sync.inner_steps
        facts.tokens_per_step = spec.tokens_per_step
        held = self._hold(signed, supplies)
        service = self.service = StateService(
            network=self._network,
            work=self._work,
            state_dir=self._settings.state_dir,
            signed=signed,
            blobs=supplies.blobs,
        )
        service.refused = facts.refused
        await service.start()
        with supplies.engine.memory(held.shape.padded_parameters) as slow:
            start = supplies.engine.starter(slow)
            exchange = self._exchange(spec, held)
            averaging = self._averaging(spec, held, slow.array, supplies.num_blocks, exchange)
            self._pacing.senders = lambda: averaging.senders
            membership, beginning = self._membership(held), supplies.beginning

            async def begin() -> None:
                await self._begin(beginning, spec, held, averaging, membership)
                service.serve_state_of(OuterSource(averaging, facts, self._work))

            if not beginning.ages:
                await begin()
            facts.now_doing("starting the trainer")
            async with warmed_up(start, slow.array) as start_warm:
                if beginning.ages:
                    await begin()
                await self._run_rounds(spec, membership, averaging, start_warm, held, exchange)

    def _exchange(self, spec: RunSpec, held: HeldPart) -> StageExchange | None:
        """The microbatches of our stage; None where we hold the whole model."""
        stage = stage_of_part(held.group.part)
        if stage is None or spec.pipeline.stages == 1:
            return None
        return stage_exchange(
            spec,
            stage,
            self._stages(spec, held),
            self._network,
            self._facts,
            self._links.heard,
            sign=self._sign,
            work=self._work,
            state_dir=self._settings.state_dir,
        )

    async def _keep_balance(self, spec: RunSpec, held: HeldPart) -> None:
        """Go where another stage needs us more, unless we were told to stay. Raises JoinAgain."""
        stage = stage_of_part(held.group.part)
        if stage is not None and not self._settings.keeps_stage:
            company = self._stages(spec, held)
            await keep_balance(stage, company, self._facts, spec.pipeline.num_visited)

    def _stages(self, spec: RunSpec, held: HeldPart) -> StageCompany:
        return StageCompany(
            self._roster, held.group.run_id, spec.pipeline.stages, self._facts.peer_id
        )

    def _averaging(
        self,
        spec: RunSpec,
        held: HeldPart,
        slow_P: Float32Vector,
        num_blocks: int,
        exchange: StageExchange | None,
    ) -> Averaging:
        links, facts = self._links, self._facts
        return averaging_of(
            AveragingParts(
                spec=spec,
                held=held,
                slow_P=slow_P,
                facts=facts,
                company_of=partial(
                    LinkedCompany, held.view, facts, heard=links.heard, tell=links.tell
                ),
                shares=DataShares(DataPlan(spec.seed, num_blocks), facts),
                network=self._network,
                work=self._work,
                sign=self._sign,
                events=self._events,
                observe_round=self._settings.observe_round,
                microbatches=exchange,
            )
        )

    async def _begin(
        self,
        beginning: Beginning,
        spec: RunSpec,
        held: HeldPart,
        averaging: Averaging,
        membership: Membership,
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
            )
        )
        averaging.stands_after(first.round)
        facts.round, facts.nominal_step = first.round + 1, float(first.step)
        facts.epoch, facts.position = first.epoch, first.position

    def _membership(self, held: HeldPart) -> Membership:
        return Membership(
            held.group.digest,
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
    ) -> None:
        rounds = self.rounds = averaging.begin(start_trainer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(averaging.serve)
            nursery.start_soon(membership.run)
            nursery.start_soon(self._note_codec, spec, held)
            if exchange is not None:
                nursery.start_soon(exchange.serve)
                nursery.start_soon(self._keep_balance, spec, held)
            self._settings.on_ready()
            await rounds.run()
            if self._settings.exit_when_done:
                nursery.cancel_scope.cancel()

    async def _note_codec(self, spec: RunSpec, held: HeldPart) -> None:
        """Say what codes vectors on this side; it is loaded before the first of them waits."""
        num_values, name = held.shape.padded_parameters, spec.sync.codec
        codec = get_codec(name, part_of=num_values)
        loops = await self._work.run(codec.loops_for, num_values, MAIN_MEMORY)
        self._facts.codec, self._facts.loops["daemon"] = name, loops
        self._events.emit(EventName.CODEC_CHOSEN, codec=name, loops=loops)
