"""The microbatches of one peer: events to its core, the core's commands to trainer and streams.

    trainer (trainer_messages.py)     streams of other peers     streams to them (transfers.py)
              |  events                      |  ^                      ^
              v                              v  |                      |
                    StageCore (protocol/microbatch): decides what happens

What belongs to one life of the trainer is its `Line` (arrivals.py).
"""

import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from peer.facts import Facts, PeerState
from peer.network.conversation import Conversation
from peer.network.pacing import Pacing
from peer.observe.event_names import EventName
from peer.observe.events import Events
from peer.ports import Network, PeerId, Stream, Work
from peer.process.bell import Bell
from peer.rounds.way import TrainerLine
from peer.training.ring import RING_PER_SLOT
from protocol.errors import LocoError, RemoteProtocolError
from protocol.membership.group import other_group_sentence
from protocol.membership.records import Sign
from protocol.membership.view import TRAINING, Member
from protocol.microbatch import trainer_messages as told
from protocol.microbatch.core import (
    AnswerOffer,
    Command,
    Counted,
    FreeInbound,
    HaltRelays,
    OfferAhead,
    SendBoundary,
    StageCore,
    TellLost,
)
from protocol.microbatch.data_peer import DataPeerCore
from protocol.microbatch.relay import RelayCore
from protocol.microbatch.trainer_messages import StageCommand, StageEvent
from protocol.microbatch.trip import Leg, Microbatch, Trip
from protocol.outcomes import RefusalReason
from protocol.run.layout import DATA_STAGE
from protocol.wire.messages import Refusal
from protocol.wire.stage_messages import GetLinks, GetSnapshot, Halt, Kept, Lost, Offer
from protocol.wire.versions import STAGE

from .arrivals import Arrivals, Kind, Line, Unusual
from .company import StageCompany
from .messenger import Messenger
from .notices import NOTICES, Notice, note, origin_of, stage_said
from .stopwatch import Stopwatch
from .survey import Survey
from .transfers import ANSWER_S, SERVED_IDLE_S, Outgoing, Transfers, trip_of

# --- the stages that a run trains without, since nobody holds them any more -----------------------


class LeftOut:
    """Watches the core of a data peer."""

    def __init__(self, facts: Facts, events: Events) -> None:
        self._facts = facts
        self._events = events
        self._since_s: dict[int, float] = {}

    def look(self, core: DataPeerCore) -> None:
        """Say what has changed."""
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
            self._facts.now_doing(_doing(core))


def _doing(core: DataPeerCore) -> str:
    """What a data peer does, in a sentence."""
    missing = core.missing_stages
    if not missing:
        return "training"
    stages = " and ".join(str(stage) for stage in missing)
    if set(missing) <= set(core.left_out):
        return f"training without stage {stages}, which nobody holds"
    return f"waiting for a peer that holds stage {stages}"


# --- what comes by another plan than the others' microbatches of late, at a relay -----------------


class OtherPlans:
    """See the top of the file."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._newest_of: dict[PeerId, str] = {}

    def look(self, trip: Trip, data_peers: Collection[PeerId]) -> None:
        """A microbatch comes, while these data peers are there."""
        for gone in self._newest_of.keys() - set(data_peers):
            del self._newest_of[gone]
        if trip.plan is not None:
            self._newest_of[trip.microbatch.origin] = trip.plan
            self._facts.pipeline.other_plans += any(
                plan != trip.plan for plan in self._newest_of.values()
            )


# --- exchange -------------------------------------------------------------------------------------

TICK_S: Final = 0.5
MAX_ENDED: Final = 256
"""Microbatches remembered that were lost or halted of late."""
PATIENCE_S: Final = 600.0
"""Longest time for an iteration. A peer that is gone, or says that it has lost something, is not
waited for; this is for what nobody notices, so it is longer than the iterations of slow swarms."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a peer has around the exchange of its stage.

    Attributes:
        heard: rings when a peer has told anything.
        pacing: is told how fast boundaries go.
    """

    network: Network
    facts: Facts
    events: Events
    heard: Bell
    sign: Sign
    work: Work
    pacing: Pacing | None = None


class StageExchange:
    """See the top of the file.

    Args:
        stage: ours.
        total_steps_at: nominal steps of the run, as is in force at a nominal step.
        survey: measures and plans.
    """

    def __init__(
        self,
        *,
        stage: int,
        core: StageCore,
        company: StageCompany,
        around: Surroundings,
        total_steps_at: Callable[[float], int],
        survey: Survey,
    ) -> None:
        self._facts = facts = around.facts
        facts.microbatches = core.counts
        self._left_out = LeftOut(facts, around.events)
        self._heard = around.heard
        self._total_steps_at = total_steps_at
        self._stage = stage
        self._core = core
        self._company = company
        self._network = around.network
        self._survey = survey
        has_loss = stage == DATA_STAGE
        self._stopwatch = Stopwatch(survey.measures, facts.pipeline, has_loss=has_loss)
        self._transfers = Transfers(around.network, PATIENCE_S, self._stopwatch, around.pacing)
        self._arrivals = Arrivals(around.work, PATIENCE_S)
        self._messenger = Messenger(core, company, self._transfers, self._do)
        self._other_plans = OtherPlans(facts)
        self._ended: deque[Microbatch] = deque(maxlen=MAX_ENDED)
        self._line: Line | None = None
        self._answers: dict[int, Callable[[RefusalReason | None], None]] = {}
        self._next_ticket = 0
        self._could_end_s = math.inf
        self._nursery: trio.Nursery | None = None

    # --- the trainer ------------------------------------------------------------------------------
    def began(self, line: TrainerLine) -> None:
        """A trainer has started."""
        ring = line.trainer.boundaries
        assert ring is not None, "a trainer of a stage has boundaries"
        self._line = Line(ring)
        self._stopwatch.restarted(trio.current_time())
        line.nursery.start_soon(self._line.run, line)
        self._survey.slots = ring.slots // RING_PER_SLOT
        self._do(self._core.restarted(self._survey.slots))

    async def took(self, event: StageEvent) -> None:
        """The trainer has said something."""
        now_s = trio.current_time()
        match event:
            case told.Produced(leg, number, slot, loss):
                self._stopwatch.produced(leg, number, now_s)
                self._do(self._core.produced(leg, number, slot, loss, now_s))
            case told.Returned(number):
                self._stopwatch.returned(number, now_s)
                self._do(self._core.returned(number, now_s))
            case told.Taken(slot):
                self._free_inbound(slot)
            case told.Begun(microbatches):
                assert isinstance(self._core, DataPeerCore)
                self._stopwatch.begun(now_s)
                self._do(self._core.begun(microbatches, now_s))
            case told.Stepped(clipped=clipped):
                self._core.counts[Counted.CLIPPED] += clipped
                self._stopwatch.stepped()
                if isinstance(self._core, RelayCore):
                    self._do(self._core.stepped(now_s))
            case told.Waiting():
                pass

    def step_of(self, step: float) -> float:
        """No further than the data peers are, for a relay, and short of the end while one trains.

        Data peers do not end in one iteration, and a relay that has ended steps no more: the others
        would wait for it. One that never ends is waited for as long as an iteration is.
        """
        if not isinstance(self._core, RelayCore):
            return step
        there = self._company.data_peers()
        step = min(step, max((float(m.progress.step) for m in there), default=step))
        total = self._total_steps_at(step)
        if step < total or not any(map(self._trains, there)):
            self._could_end_s = math.inf  # an amended run ends a second time
            return step
        now_s = trio.current_time()
        self._could_end_s = min(self._could_end_s, now_s)
        return step if now_s - self._could_end_s > PATIENCE_S else total - 1.0

    async def wait_unneeded(self) -> None:
        """A relay waits until no data peer trains, since they validate to the last."""
        if isinstance(self._core, RelayCore):
            self._facts.now_doing("waiting for the data peers to end")
            with trio.move_on_after(PATIENCE_S):
                while any(m.progress.state == TRAINING for m in self._company.data_peers()):
                    await self._heard.wait()

    def _trains(self, member: Member) -> bool:
        return member.progress.state == TRAINING and not self._has_ended(member)

    def _has_ended(self, member: Member) -> bool:
        return member.progress.step >= self._total_steps_at(member.progress.step)

    # --- other peers ------------------------------------------------------------------------------
    async def serve(self) -> None:
        """Serve other peers, and see to it that nothing is waited for in vain, until cancelled."""
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
            patience_s = ANSWER_S
            while True:
                await self._answer_next(talk, patience_s)
                patience_s = SERVED_IDLE_S

    async def _answer_next(self, talk: Conversation, patience_s: float) -> None:
        message, _ = await talk.receive(
            Offer, *NOTICES, GetLinks, GetSnapshot, timeout_s=patience_s
        )
        if isinstance(message, GetLinks | GetSnapshot):
            await self._survey.answer(talk, message)
            return
        assert isinstance(message, Offer | Notice)
        refusal = self._refusal(message, talk.remote_peer_id)
        ends = talk.remote_peer_id, self._network.peer_id
        if refusal is not None:
            await talk.send(refusal, stall_s=ANSWER_S)
        elif isinstance(message, Offer):
            await self._take(talk, trip_of(message, *ends))
        else:
            if isinstance(message, Lost | Halt) and isinstance(self._core, RelayCore):
                ended = Microbatch(talk.remote_peer_id, message.iteration, message.index)
                self._withdraw(ended)
            reply, commands = note(self._core, message, *ends, trio.current_time())
            self._do(commands)
            await talk.send(reply, stall_s=ANSWER_S)

    def _refusal(self, message: Offer | Notice, sender: PeerId) -> Refusal | None:
        """Why a message is none of our business; None when it is.

        A relay works for the data peers that it knows, and heeds no other's iterations: what a
        stranger says would move them for all.
        """
        ours = self._company.group(self._stage)
        if message.group != ours:
            sentence = other_group_sentence(ours, message.group)
            return Refusal(RefusalReason.OTHER_GROUP, sentence)
        stage = stage_said(message)
        if stage not in (None, self._stage):
            sentence = f"I hold stage {self._stage}, not stage {stage}"
            return Refusal(RefusalReason.OTHER_GROUP, sentence)
        if self._line is None:
            return Refusal(RefusalReason.NOT_TRAINING, "my trainer has not started yet")
        origin = message.origin if isinstance(message, Offer) else origin_of(message, sender)
        if isinstance(self._core, RelayCore) and not self._company.holds(origin, DATA_STAGE):
            sentence = f"I know of no data peer {origin}; ask again when we are linked"
            return Refusal(RefusalReason.UNAVAILABLE, sentence)
        return None

    async def _take(self, talk: Conversation, trip: Trip) -> None:
        if trip.leg is Leg.FORWARD and isinstance(self._core, RelayCore):
            there = {member.peer_id for member in self._company.data_peers()}
            self._other_plans.look(trip, there)
        offered_s = trio.current_time()
        refusal = await self._ask_core(trip)
        if refusal is not None:
            sentence = f"microbatch {trip.microbatch.index}: {refusal}"
            await talk.send(Refusal(refusal, sentence), stall_s=ANSWER_S)
            return
        line = self._line
        assert line is not None, "offers are refused before the first trainer"
        try:
            begun = partial(self._offer_ahead, trip.next_move())
            kind = Kind(self._company.stage_of(trip.sender), trip.leg is Leg.BACKWARD)
            arrived = await self._arrivals.receive(talk, line, kind, offered_s, begun)
        except LocoError as error:
            self._take_back(trip)
            refused = isinstance(error, RemoteProtocolError | Unusual)
            self._do(self._core.broke_off(trip, trio.current_time(), refused=refused))
            raise
        self._stopwatch.received(trip.sender, arrived.took_s)
        if line is not self._line:
            return  # its trainer is gone, and all that it held
        commands = self._core.arrived(trip, arrived.slot, arrived.loss)
        if FreeInbound(arrived.slot) in commands:
            self._take_back(trip)
        self._do(commands)
        await talk.send(Kept(), stall_s=ANSWER_S)

    async def _ask_core(self, trip: Trip) -> RefusalReason | None:
        """Whether a trip is welcome; waits for its turn."""
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        answered, answer = trio.Event(), list[RefusalReason | None]()

        def tell(refusal: RefusalReason | None) -> None:
            answer.append(refusal)
            answered.set()

        self._answers[ticket] = tell
        try:
            self._do(self._core.offered(ticket, trip))
            with trio.move_on_after(PATIENCE_S):
                await answered.wait()
        finally:
            self._answers.pop(ticket, None)
            if not answer:
                self._do(self._core.withdrawn(ticket))
        return answer[0] if answer else RefusalReason.BUSY

    # --- commands ---------------------------------------------------------------------------------
    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self._do_one(command)

    def _do_one(self, command: Command) -> None:
        if isinstance(command, StageCommand):
            self._tell(command)
            return
        match command:
            case FreeInbound(slot):
                self._free_inbound(slot)
            case AnswerOffer(ticket, refusal):
                self._answers.pop(ticket, _nobody)(refusal)
            case SendBoundary():
                self._start(self._send, command)
            case OfferAhead(trip):
                self._offer_ahead(trip)
            case _:
                if isinstance(command, TellLost | HaltRelays):
                    self._withdraw(command.microbatch)
                for job in self._messenger.jobs(command):
                    self._start(job)

    def _tell(self, command: StageCommand) -> None:
        if isinstance(command, told.Deliver):
            self._stopwatch.delivered(command.leg, command.number, trio.current_time())
        elif isinstance(command, told.Drop):
            self._stopwatch.dropped(command.number)
        if self._line is not None:
            self._line.send(command)

    def _free_inbound(self, slot: int) -> None:
        if self._line is not None:
            self._line.give_back(slot)

    def _start(self, job: Callable[..., Awaitable[None]], *arguments: object) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(job, *arguments)

    async def _send(self, command: SendBoundary) -> None:
        line, group = self._line, self._company.group_of(command.trip.receiver)
        taken = False
        if line is not None and group is not None:
            line.begin_reading(command.slot)
            codes = line.ring.slot(command.slot)
            outgoing = Outgoing(command.trip, group, codes, command.loss)
            taken = await self._transfers.send(outgoing)
        if line is not self._line:
            return
        if line is not None:
            line.end_reading(command.slot)
            if not command.keeps:
                line.send(told.Release(command.slot))
        self._do(self._core.sent(command.trip, trio.current_time(), taken=taken))

    def _offer_ahead(self, trip: Trip | None) -> None:
        """Offer a move whose boundary will be there soon, unless there will be none."""
        if trip is None or trip.microbatch in self._ended:
            return
        group = self._company.group_of(trip.receiver)
        if group is not None:
            self._transfers.plan_ahead(trip)
            self._start(self._transfers.offer_ahead, trip, group)

    def _take_back(self, trip: Trip) -> None:
        """Take back the offer that the first byte of this move has led to: nothing comes of it."""
        onward = trip.next_move()
        if onward is not None:
            self._start(self._transfers.take_back, onward)

    def _withdraw(self, microbatch: Microbatch) -> None:
        """Take back what was offered ahead of a microbatch that is lost or halted."""
        self._ended.append(microbatch)
        self._start(self._transfers.withdraw, microbatch)


def _nobody(_refusal: RefusalReason | None) -> None:
    """Nobody waits for this answer any more."""
