"""One peer from its first breath to its last, against the ports alone.

    connecting -> downloading -> training -> finished        (a joiner)
                  starting    -> training -> finished        (the founder)

Whatever happens on the way, the nursery in `run` owns every task, and `request_stop` ends it.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import trio

from peer.averaging.parts import Averaging, AveragingParts
from peer.averaging.ways import averaging_of
from peer.codec import MAIN_MEMORY, get_codec
from peer.network.pacing import Pacing
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.observe.facts import Facts
from peer.observe.status import PeerState
from peer.ports import Directory, Network, PeerId, Work
from peer.rounds.loop import RoundLoop
from peer.rounds.shares import DataShares
from peer.rounds.timing import RoundTiming
from peer.state.held_part import HeldPart
from peer.state.service import Fetcher, StateService, fetch_from
from peer.state.state_file import StateScalars
from peer.training.ports import StartTrainer
from peer.training.warm import warmed_up
from protocol.errors import InvalidRunSpec, LocoError
from protocol.membership.group import Group
from protocol.membership.records import Sign
from protocol.membership.view import Roster, View
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec
from protocol.schedule.data_plan import DataPlan, start_position
from protocol.schedule.rounds import oldest_useful

from .company import LinkedCompany
from .hello import Greeter
from .joining import Bootstrap, is_final
from .links import Links
from .membership import Membership
from .outer_source import OuterSource
from .provision import Provision, Supplies

T = TypeVar("T")

SOURCE_PAUSE_S: Final = 0.5
"""Between two tries to fetch from a peer."""
LEAVING_SHARE: Final = 0.6
"""Part of the grace in which an exchange under way may end."""


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What is particular to this peer.

    Attributes:
        on_ready: called once, as soon as others can join through us.
        check_spec: raises when this peer's options do not fit the run.
        bind_run: makes the home one of this run; raises when it is another's.
    """

    state_dir: Path
    exit_when_done: bool
    grace_s: float
    on_ready: Callable[[], None]
    check_spec: Callable[[RunSpec], None]
    bind_run: Callable[[SignedSpec], None]
    observe_round: Callable[[RoundTiming], None]


@dataclass(frozen=True, slots=True)
class PeerParts:
    """What a peer is put together from."""

    network: Network
    pacing: Pacing
    directory: Directory
    work: Work
    provision: Provision
    facts: Facts
    roster: Roster
    links: Links
    greeter: Greeter
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
        self._provision = parts.provision
        self._facts = parts.facts
        self._roster = parts.roster
        self._links = parts.links
        self._greeter = parts.greeter
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

    async def found(self, spec: RunSpec, sign_spec: Callable[[RunSpec], SignedSpec]) -> None:
        """Found a run, train it, and serve it until asked to stop.

        Raises:
            InvalidRunSpec, HomeError, CannotTrain, TrainingImpossible
        """

        async def life() -> None:
            self._facts.now_doing("preparing the data", PeerState.STARTING)
            frozen, supplies = await self._provision.found(spec)
            await self._train(sign_spec(frozen), supplies)

        await self._live(life)

    async def join(self, bootstrap: Bootstrap) -> None:
        """Join the run that a bootstrap address leads to, and stay until asked to stop.

        Raises:
            Refused, InvalidRunSpec, ConfigError, HomeError, CannotTrain, TrainingImpossible
        """

        async def life() -> None:
            self._facts.now_doing("looking for the swarm", PeerState.CONNECTING)
            first, hello = await bootstrap.enter()
            self._greeter.correct_clock()
            await self._directory.add_peers(hello.addresses)
            self._facts.now_doing("fetching the run spec", PeerState.DOWNLOADING)
            signed = await self._fetch(
                lambda fetcher: fetcher.spec(hello.run_id), self._roster, first
            )
            self._events.emit(
                EventName.RUN_RECEIVED, remote=first, run_id=signed.run_id, name=signed.spec().name
            )
            self._settings.check_spec(signed.spec())
            self._facts.now_doing("fetching the data")
            supplies = await self._fetch(
                lambda fetcher: self._provision.obtain(signed.spec(), fetcher), self._roster, first
            )
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

    # --- fetching ---------------------------------------------------------------------------------
    async def _fetch(
        self,
        ask: Callable[[Fetcher], Awaitable[T]],
        among: Roster | View,
        preferred: PeerId | None = None,
    ) -> T:
        """Ask one peer after another until one can answer.

        Args:
            among: what any peer of the run has is asked of the roster, what those of our group have
                of our view.
            preferred: is asked first.

        Raises:
            Refused: everybody refuses for good.
            InvalidRunSpec: what was received cannot be used here.
        """
        while True:
            sources, final = self._sources(among, preferred), list[LocoError]()
            if not sources:
                self._facts.now_doing("waiting for a peer that could help")
            for peer_id in sources:
                try:
                    async with fetch_from(self._network, peer_id) as fetcher:
                        return await ask(fetcher)
                except InvalidRunSpec:
                    raise
                except LocoError as error:
                    self._facts.now_doing(f"{peer_id[-8:]} could not help: {error}")
                    if is_final(error):
                        final.append(error)
            if sources and len(final) == len(sources):
                raise final[0]
            await trio.sleep(SOURCE_PAUSE_S)

    def _sources(self, among: Roster | View, preferred: PeerId | None) -> list[PeerId]:
        """Everybody alive who may have what we need: `preferred` first, then the newest."""
        alive = among.alive(trio.current_time())
        ready = [m for m in alive if m.progress.state in (PeerState.TRAINING, PeerState.FINISHED)]
        ready.sort(key=lambda m: (m.peer_id != preferred, -m.progress.round, m.peer_id))
        return [m.peer_id for m in ready] or [m.peer_id for m in alive]

    async def _download(self, spec: RunSpec, held: HeldPart, averaging: Averaging) -> None:
        """Take over the state of our group."""
        started_s = trio.current_time()
        source: list[PeerId] = []

        async def ask(fetcher: Fetcher) -> StateScalars:
            source.append(fetcher.remote_peer_id)
            return await fetcher.state(
                held.group.digest,
                averaging.slow_P,
                averaging.momentum_P,
                lambda share: self._facts.now_doing(f"fetching the state: {share:.0%}"),
                minimum_step=_oldest_useful_step(spec, held.view),
            )

        state = await self._fetch(ask, held.view)
        if state.layout_digest != held.shape.layout_digest:
            raise InvalidRunSpec("the swarm's model has another layout than ours")
        averaging.arrived(state.round)
        self._facts.round = state.round + 1
        positions = [
            (m.progress.epoch, m.progress.position)
            for m in held.view.members_training(trio.current_time())
        ]
        # A peer that has said no more than hello has told no position; the state knows one.
        known = [position for position in positions if position != (0, 0)]
        positions = [*known, (state.epoch, state.position)]
        self._facts.epoch, self._facts.position = start_position(positions)
        self._events.emit(
            EventName.STATE_RECEIVED,
            round=state.round,
            remotes=source[-1:],
            bytes=8 * held.shape.padded_parameters,
            seconds=trio.current_time() - started_s,
        )

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
            averaging = averaging_of(
                AveragingParts(
                    spec=spec,
                    held=held,
                    slow_P=slow.array,
                    facts=facts,
                    company_of=partial(
                        LinkedCompany,
                        held.view,
                        facts,
                        heard=self._links.heard,
                        tell=self._links.tell,
                    ),
                    shares=DataShares(DataPlan(spec.seed, supplies.num_blocks), facts),
                    network=self._network,
                    work=self._work,
                    sign=self._sign,
                    events=self._events,
                    observe_round=self._settings.observe_round,
                )
            )
            self._pacing.senders = lambda: averaging.senders
            source = OuterSource(averaging, facts, self._work)
            membership = self._membership(held)
            if supplies.begins_group:
                await supplies.engine.initialise(slow)
                service.serve_state_of(source)
            facts.now_doing("starting the trainer")
            async with warmed_up(start, slow.array) as start_warm:
                if not supplies.begins_group:
                    facts.now_doing("fetching the state")
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(membership.look_around)  # a helper need not hold it
                        await self._download(signed.spec(), held, averaging)
                        nursery.cancel_scope.cancel()
                    service.serve_state_of(source)
                await self._run_rounds(signed.spec(), membership, averaging, start_warm)

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
    ) -> None:
        rounds = self.rounds = averaging.begin(start_trainer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(averaging.serve)
            nursery.start_soon(membership.run)
            nursery.start_soon(self._note_codec, spec)
            self._settings.on_ready()
            await rounds.run()
            if self._settings.exit_when_done:
                nursery.cancel_scope.cancel()

    async def _note_codec(self, spec: RunSpec) -> None:
        """Say what codes vectors on this side; it is loaded before the first of them waits."""
        assert spec.frozen is not None
        num_values, name = spec.frozen.padded_parameters, spec.sync.codec
        codec = get_codec(name, part_of=num_values)
        loops = await self._work.run(codec.loops_for, num_values, MAIN_MEMORY)
        self._facts.codec, self._facts.loops["daemon"] = name, loops
        self._events.emit(EventName.CODEC_CHOSEN, codec=name, loops=loops)


def _oldest_useful_step(spec: RunSpec, view: View) -> int:
    """The oldest step that is of use beside those that train and are not past the end."""
    inner_steps = spec.sync.inner_steps
    heard = [m.progress.step for m in view.members_training(trio.current_time())]
    last = spec.total_rounds * inner_steps
    return oldest_useful([step for step in heard if step <= last], inner_steps)
