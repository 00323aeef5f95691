"""The microbatches of one peer: events to its core, the core's commands to trainer and streams.

    trainer (trainer_messages.py)     streams of other peers     streams to them (transfers.py)
              |  events                      |  ^                      ^
              v                              v  |                      |
             the core (protocol/microbatch): decides what happens

What belongs to one life of the trainer is its `Line` (transfers.py).
"""

from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Final

import trio

from peer.facts import Facts, PeerState
from peer.network.conversation import Conversation
from peer.observe.event_names import EventName
from peer.observe.events import Events
from peer.rounds.services import Services
from peer.rounds.way import TrainerLine
from peer.runtime import PeerId, Stream
from peer.training.shared import MIN_SLOTS, RING_PER_SLOT, SLOTS, BoundaryRing
from protocol.errors import LocoError, RemoteProtocolError
from protocol.limits import ANSWER_S, MAX_REMEMBERED
from protocol.membership.view import TRAINING, Member
from protocol.microbatch.checks import Check, Checks, Compare, Differing, Read
from protocol.microbatch.core import AnswerOffer, Command, SendBoundary, Tell
from protocol.microbatch.data_peer import DataPeerCore
from protocol.microbatch.relay import RelayCore
from protocol.microbatch.trainer_messages import Freed, StageEvent
from protocol.outcomes import RefusalReason
from protocol.routing.routers import PlannedRouter, plan_of, router_of
from protocol.run.amendments import AmendedSpec
from protocol.run.layout import DATA_STAGE
from protocol.wire.messages import Refusal
from protocol.wire.stage_messages import (
    Announcement,
    BoundaryKept,
    GetLinks,
    GetSnapshot,
    Leg,
    Lost,
    Microbatch,
    Notice,
    Trip,
)
from protocol.wire.versions import STAGE

from .company import StageCompany
from .stopwatch import Stopwatch
from .survey import Planner, Survey
from .transfers import SERVED_IDLE_S, Arrivals, Line, Transfers, Unusual

# --- what is told of them -------------------------------------------------------------------------


class LeftOut:
    """The stages that a run trains without, since nobody holds them any more."""

    def __init__(self, facts: Facts, events: Events) -> None:
        self._facts = facts
        self._events = events
        self._since_s: dict[int, float] = {}

    def look(self, core: DataPeerCore) -> None:
        now_s = trio.current_time()
        for stage in core.left_out:
            if stage not in self._since_s:
                self._since_s[stage] = now_s
                self._events.emit(EventName.STAGE_LEFT_OUT, stage=stage, step=self._facts.step)
        for stage in self._since_s.keys() - set(core.left_out):
            seconds = round(now_s - self._since_s.pop(stage), 1)
            step = self._facts.step
            self._events.emit(EventName.STAGE_TAKEN_IN, stage=stage, step=step, seconds=seconds)
        if self._facts.state is PeerState.TRAINING:
            self._facts.now_doing(_doing(core.missing_stages, core.left_out))


def _doing(missing: Sequence[int], left_out: Sequence[int]) -> str:
    if not missing:
        return "training"
    stages = " and ".join(map(str, missing))
    if set(missing) <= set(left_out):
        return f"training without stage {stages}, which nobody holds"
    return f"waiting for a peer that holds stage {stages}"


class OtherPlans:
    """Counts what comes to a relay by another plan than the others' microbatches of late."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._newest_of: dict[PeerId, str] = {}

    def look(self, trip: Trip, data_peers: Collection[PeerId]) -> None:
        for gone in self._newest_of.keys() - set(data_peers):
            del self._newest_of[gone]
        plan = trip.path.plan
        if plan is not None:
            self._newest_of[trip.microbatch.origin] = plan
            others = self._newest_of.values()
            self._facts.pipeline.other_plans += any(other != plan for other in others)


# --- exchange -------------------------------------------------------------------------------------

TICK_S: Final = 0.5
"""Between two looks around, and before what had no answer is said again."""
LOST_TOLD: Final = 3
"""Times that a peer is told of a loss, at most."""
PATIENCE_S: Final = 600.0
"""Longest time for an iteration. Peers that are gone, or say that they have lost something, are not
waited for; this is for what nobody notices, so it is longer than slow swarms' iterations."""


CHECK_DRAWS: Final = b"loco/v1/stage-checks\0"
"""Our signature of this seeds the draws of checks: nobody else can make it."""


class StageExchange:
    def __init__(
        self,
        amended: AmendedSpec,
        stage: int,
        company: StageCompany,
        services: Services,
        plan: Planner = plan_of,
    ) -> None:
        self._facts, self._network = services.facts, services.network
        self._heard = services.heard
        self._total_steps_at = amended.total_steps_at
        self._stage, self._company = stage, company
        spec, self._peer_id = amended.founding, services.network.peer_id
        planned: PlannedRouter | None = None
        self._core: DataPeerCore | RelayCore = RelayCore(SLOTS, PATIENCE_S)
        if stage == DATA_STAGE:
            router = router_of(spec, self._peer_id, MIN_SLOTS)
            planned = router if isinstance(router, PlannedRouter) else None
            checks = Checks(services.sign(CHECK_DRAWS).hex())
            self._core = DataPeerCore(
                self._peer_id, router, PATIENCE_S, in_flight=SLOTS, checks=checks
            )
        self._events, self._work = services.events, services.work
        self._facts.microbatches = self._core.counts
        self._survey = Survey(spec, stage, company, services, planned, plan)
        self._stopwatch = Stopwatch(
            self._survey.measures, self._facts.pipeline, has_loss=stage == DATA_STAGE
        )
        self._transfers = Transfers(self._network, PATIENCE_S, self._stopwatch, services.pacing)
        self._arrivals = Arrivals(services.work, PATIENCE_S)
        self._left_out = LeftOut(self._facts, services.events)
        self._other_plans = OtherPlans(self._facts)
        self._ended: deque[tuple[Microbatch, int]] = deque(maxlen=MAX_REMEMBERED)
        self._saying: set[tuple[PeerId, Notice]] = set()
        self._line: Line | None = None
        self._answers: dict[int, trio.MemorySendChannel[RefusalReason | None]] = {}
        self._next_ticket = 0
        self._nursery: trio.Nursery | None = None

    # --- the trainer ------------------------------------------------------------------------------
    def began(self, line: TrainerLine) -> None:
        ring = line.trainer.boundaries
        assert ring is not None, "a trainer of a stage has boundaries"
        self._line = Line(ring)
        self._stopwatch.restarted(trio.current_time())
        line.nursery.start_soon(self._line.run, line)
        self._survey.slots = ring.slots // RING_PER_SLOT
        self._do(self._core.restarted(self._survey.slots))

    async def took(self, event: StageEvent) -> None:
        now_s = trio.current_time()
        self._stopwatch.took(event, now_s)
        self._do(self._core.took(event, now_s))

    def step_of(self, step: float) -> float:
        """For a relay: no further than the data peers are, and not to the end while one trains."""
        if not isinstance(self._core, RelayCore):
            return step
        there = self._company.data_peers()
        step = min(step, max((float(m.progress.step) for m in there), default=step))
        may_end = self._core.may_end(
            trio.current_time(),
            ended=step >= self._total_steps_at(step),
            needed=any(map(self._trains, there)),
        )
        return step if may_end else self._total_steps_at(step) - 1.0

    async def wait_unneeded(self) -> None:
        """A relay waits until no data peer trains, since they validate to the last."""
        if isinstance(self._core, RelayCore):
            self._facts.now_doing("waiting for the data peers to end")
            with trio.move_on_after(PATIENCE_S):
                while any(m.progress.state == TRAINING for m in self._company.data_peers()):
                    await self._heard.park()

    def _trains(self, member: Member) -> bool:
        return member.progress.state == TRAINING and not self._has_ended(member)

    def _has_ended(self, member: Member) -> bool:
        return member.progress.step >= self._total_steps_at(member.progress.step)

    # --- other peers ------------------------------------------------------------------------------
    async def serve(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await self._network.serve(STAGE, self._answer)
            nursery.start_soon(self._survey.run)
            while True:
                await trio.sleep(TICK_S)
                now_s = trio.current_time()
                self._look_around(now_s)
                self._do(self._core.ticked(now_s))

    def _look_around(self, now_s: float) -> None:
        core = self._core
        if isinstance(core, RelayCore):
            there = self._company.data_peers()
            ended = bool(there) and all(map(self._has_ended, there))
            training = [m.peer_id for m in there if self._trains(m)]
            alive = [m.peer_id for m in there]
            self._do(core.present(training, now_s, ended=ended, alive=alive))
        elif isinstance(core, DataPeerCore):
            others = self._company.others()
            trained = self._facts.step > 0 or any(m.progress.step > 0 for m in others)
            self._do(core.present(self._company.relays(), now_s, trained=trained))
            self._left_out.look(core)

    async def _answer(self, stream: Stream) -> None:
        async with Conversation(stream) as talk:
            sender, patience_s = talk.remote_peer_id, ANSWER_S
            while True:
                message, _ = await talk.receive(
                    Trip, Announcement, Lost, GetLinks, GetSnapshot, timeout_s=patience_s
                )
                patience_s = SERVED_IDLE_S
                if isinstance(message, GetLinks | GetSnapshot):
                    await self._survey.answer(talk, message)
                    continue
                assert isinstance(message, Trip | Notice)
                refusal = self._refusal(message, sender)
                if refusal is not None:
                    await talk.send(refusal, stall_s=ANSWER_S)
                elif isinstance(message, Trip):
                    await self._take(talk, message, sender)
                else:
                    if isinstance(message, Lost) and message.microbatch.origin == sender:
                        self._withdraw(message)
                    answer, commands = self._core.told(sender, message, trio.current_time())
                    self._do(commands)
                    await talk.send(answer, stall_s=ANSWER_S)

    def _refusal(self, message: Trip | Notice, sender: PeerId) -> Refusal | None:
        """Why a message is none of our business; None when it is.

        A relay works for the data peers that it knows, and heeds no other's iterations: what a
        stranger says would move them for all.

        Raises:
            RemoteProtocolError: its path is none, does not lead to us, or not from the sender.
        """
        stage = message.stage if isinstance(message, Trip) else None
        if stage not in (None, self._stage):
            # Paths are made before they are travelled: we may have gone over to another since.
            sentence = f"I hold stage {self._stage}, not stage {stage}"
            return Refusal(RefusalReason.OTHER_GROUP, sentence)
        if self._line is None:
            return Refusal(RefusalReason.NOT_TRAINING, "my trainer has not started yet")
        origin = sender if isinstance(message, Announcement) else message.microbatch.origin
        if isinstance(self._core, RelayCore) and self._company.stage_of(origin) != DATA_STAGE:
            sentence = f"I know of no data peer {origin}; ask again when we are linked"
            return Refusal(RefusalReason.UNAVAILABLE, sentence)
        if isinstance(message, Trip):
            message.check(sender, self._peer_id)
        return None

    async def _take(self, talk: Conversation, trip: Trip, sender: PeerId) -> None:
        if trip.leg is Leg.FORWARD and isinstance(self._core, RelayCore):
            there = {member.peer_id for member in self._company.data_peers()}
            self._other_plans.look(trip, there)
        offered_s = trio.current_time()
        refusal = await self._wait_turn(trip)
        if refusal is not None:
            sentence = f"microbatch {trip.microbatch.index}: {refusal}"
            await talk.send(Refusal(refusal, sentence), stall_s=ANSWER_S)
            return
        line, onward = self._line, trip.next_move()
        assert line is not None, "offers are refused before the first trainer"
        try:
            stage, waited_s = self._company.stage_of(sender), trio.current_time() - offered_s
            kind = sender, stage, trip.leg is Leg.BACKWARD
            begun = partial(self._offer_ahead, onward)
            arrival = await self._arrivals.receive(talk, line, kind, waited_s, begun)
        except LocoError as error:
            self._take_back(onward)
            refused = isinstance(error, RemoteProtocolError | Unusual)
            self._do(self._core.broke_off(trip, trio.current_time(), refused=refused))
            raise
        slot, loss, took_s = arrival
        self._stopwatch.measures.received(sender, took_s)
        if line is not self._line:
            return  # its trainer is gone, and all that it held
        commands = self._core.arrived(trip, slot, loss)
        if Freed(slot) in commands:
            self._take_back(onward)
        self._do(commands)
        await talk.send(BoundaryKept(), stall_s=ANSWER_S)

    async def _wait_turn(self, trip: Trip) -> RefusalReason | None:
        """Wait until a trip is welcome. Returns None then, or why it is not."""
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._answers[ticket], answer = trio.open_memory_channel[RefusalReason | None](1)
        try:
            self._do(self._core.offered(ticket, trip))
            with trio.move_on_after(PATIENCE_S):
                return await answer.receive()
        finally:
            if self._answers.pop(ticket, None) is not None:
                self._do(self._core.withdrawn(ticket))
        return RefusalReason.BUSY

    # --- commands ---------------------------------------------------------------------------------
    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case AnswerOffer(ticket, refusal):
                    if ticket in self._answers:  # somebody waits for it
                        self._answers.pop(ticket).send_nowait(refusal)
                case SendBoundary():
                    self._start(self._send, command)
                case Trip():
                    self._offer_ahead(command)
                case Read() | Compare() | Differing():
                    self._check(command)
                case Tell(to, message):
                    self._say(to, message)
                case _:
                    self._stopwatch.told(command, trio.current_time())
                    if self._line is not None:
                        self._line.send(command)

    def _say(self, to: Sequence[PeerId], message: Notice) -> None:
        if isinstance(message, Lost):
            self._withdraw(message)
        for peer_id in to:
            self._start(self._tell, peer_id, message)

    def _check(self, command: Read | Compare | Differing) -> None:
        line, core = self._line, self._core
        assert line is not None, "checks are of what has come to this trainer"
        assert isinstance(core, DataPeerCore), "relays check nothing"
        match command:
            case Read(check, relay, slot):
                self._do(core.read(check, relay, bytes(line.ring.slot(slot))))
            case Compare(check):
                self._start(self._compare, core, line.ring, check)
            case Differing():
                self._events.emit(
                    EventName.REPLICAS_DIFFER,
                    stage=command.stage,
                    step=self._facts.step,
                    remotes=list(command.remotes),
                    odd=command.odd,
                    distance=round(command.distance, 3),
                    bound=round(command.bound, 3),
                    left_out=command.left_out,
                )

    async def _compare(self, core: DataPeerCore, ring: BoundaryRing, check: Check) -> None:
        distances = await self._work.run(ring.distances, tuple(check.outputs.values()))
        self._do(core.compared(check, distances, trio.current_time()))

    def _start(self, job: Callable[..., Awaitable[None]], *arguments: object) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(job, *arguments)

    async def _send(self, command: SendBoundary) -> None:
        line, taken, receiver = self._line, False, command.trip.receiver
        if line is not None:
            with line.reading(command.slot) as codes:
                if self._company.stage_of(receiver) is not None:
                    taken = await self._transfers.send(receiver, command, codes)
            if line is self._line:  # else what it had made is gone with it
                line.send(Freed(command.slot))
        self._do(self._core.sent(command.trip, trio.current_time(), taken=taken))

    async def _tell(self, peer_id: PeerId, message: Notice) -> None:
        """Say something once at a time, and tell the core what is answered."""
        said = peer_id, message
        if said in self._saying:
            return
        self._saying.add(said)
        answer, tries = None, LOST_TOLD if isinstance(message, Lost) else 1
        while answer is None and tries:
            if self._company.stage_of(peer_id) is not None:
                answer = await self._transfers.ask(peer_id, message)
            tries -= 1
            if answer is None and tries:
                await trio.sleep(TICK_S)
        self._saying.remove(said)
        if answer is not None and isinstance(self._core, DataPeerCore):
            self._do(self._core.noted(peer_id, message, answer))

    def _offer_ahead(self, trip: Trip | None) -> None:
        """Offer a move whose boundary will be there soon, unless there will be none."""
        if trip is None:
            return
        ended = [attempt for lost, attempt in self._ended if lost == trip.microbatch]
        if trip.attempt <= max(ended, default=-1):
            return
        receiver = trip.receiver
        if self._company.stage_of(receiver) is not None:
            self._transfers.plan_ahead(trip)
            self._start(self._transfers.offer_ahead, receiver, trip)

    def _take_back(self, onward: Trip | None) -> None:
        if onward is not None:
            self._start(self._transfers.take_back, onward)

    def _withdraw(self, lost: Lost) -> None:
        self._ended.append((lost.microbatch, lost.attempt))
        self._start(self._transfers.withdraw, lost.microbatch, lost.attempt)
