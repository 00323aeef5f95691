"""The microbatches of one peer: events to its core, the core's commands to trainer and streams.

         the trainer                  streams of other peers     streams to them (transfers.py)
              |  events                      |  ^                      ^
              v                              v  |                      |
             the core (protocol/microbatch): decides what happens

The trainer's events and commands are those of protocol/microbatch/trainer_messages.py. What belongs
to one life of the trainer is its `StageSession` (transfers.py). What data peers and relays do
differently is in roles.py.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Final, Protocol

import trio

from peer.facts import Facts
from peer.network.conversation import Conversation
from peer.observe.event_names import EventName
from peer.rounds.services import Services
from peer.rounds.way import TrainerLine
from peer.runtime import PeerId, Stream
from peer.training.shared import RING_PER_SLOT, BoundaryRing
from protocol.errors import LocoError, RemoteProtocolError
from protocol.limits import ANSWER_S
from protocol.microbatch.checks import Check, Compare, Differing, Read
from protocol.microbatch.core import AnswerOffer, Command, OfferAhead, SendBoundary, SendNotice
from protocol.microbatch.data_peer import DataPeerCore
from protocol.microbatch.relay import RelayCore
from protocol.microbatch.trainer_messages import Freed, StageEvent
from protocol.outcomes import RefusalReason
from protocol.routing.routers import PlannedRouter
from protocol.run.amendments import AmendedSpec
from protocol.run.layout import DATA_STAGE
from protocol.wire.messages import Refusal
from protocol.wire.stage_messages import (
    Announcement,
    BoundaryKept,
    Direction,
    GetLinks,
    GetSnapshot,
    Hop,
    Lost,
    Notice,
)
from protocol.wire.versions import STAGE

from .peers import StagePeers
from .stopwatch import Stopwatch
from .survey import Planner, Survey
from .transfers import SERVED_IDLE_S, BoundaryReceiver, BoundarySender, StageSession, Unusual

# --- exchange -------------------------------------------------------------------------------------

TICK_S: Final = 0.5
"""Between two looks around, and before what had no answer is said again."""
LOST_TOLD: Final = 3
"""Times that a peer is told of a loss, at most."""
PATIENCE_S: Final = 600.0
"""Longest time for an iteration. Peers that are gone, or say that they have lost something, are not
waited for; this is for what nobody notices, so it is longer than slow swarms' iterations."""


class OtherPlans:
    """Counts microbatches that come to a relay by another plan than those of other data peers."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._newest_of: dict[PeerId, str] = {}

    def count(self, hop: Hop, data_peers: Collection[PeerId]) -> None:
        for gone in self._newest_of.keys() - set(data_peers):
            del self._newest_of[gone]
        plan = hop.path.plan
        if plan is not None:
            self._newest_of[hop.microbatch.origin] = plan
            others = self._newest_of.values()
            self._facts.pipeline.other_plans += any(other != plan for other in others)


class StageRole(Protocol):
    """The part of an exchange in which data peers and relays differ."""

    @property
    def core(self) -> DataPeerCore | RelayCore: ...

    def look_around(self, now_s: float) -> Sequence[Command]:
        """Tell the core which peers are there."""

    def step_of(self, step: float) -> float:
        """How far others see us, where this is the step of our trainer."""

    async def wait_unneeded(self) -> None:
        """Wait at the end of the run until nobody needs our stage any longer."""


class StageExchange:
    """Carries out what a core commands, and tells it what happens.

    Args:
        router: takes the plans; None where nothing is planned.

    Attributes:
        step_of, wait_unneeded: as of the role.
    """

    def __init__(
        self,
        role: StageRole,
        amended: AmendedSpec,
        stage: int,
        peers: StagePeers,
        services: Services,
        plan: Planner,
        router: PlannedRouter | None = None,
    ) -> None:
        self.step_of, self.wait_unneeded = role.step_of, role.wait_unneeded
        self._facts, self._network = services.facts, services.network
        self._events, self._work = services.events, services.work
        self._stage, self._peers = stage, peers
        self._role, self._core = role, role.core
        self._peer_id = services.network.peer_id
        self._facts.microbatches = self._core.counts
        self._survey = Survey(amended.founding, stage, peers, services, router, plan)
        self._stopwatch = Stopwatch(
            self._survey.measures, self._facts.pipeline, has_loss=stage == DATA_STAGE
        )
        self._boundary_sender = BoundarySender(
            self._network, PATIENCE_S, self._stopwatch, services.pacing
        )
        self._boundary_receiver = BoundaryReceiver(services.work, PATIENCE_S)
        self._other_plans = OtherPlans(self._facts)
        self._being_sent: set[tuple[PeerId, Notice]] = set()
        self._session: StageSession | None = None
        self._answers: dict[int, trio.MemorySendChannel[RefusalReason | None]] = {}
        self._next_ticket = 0
        self._nursery: trio.Nursery | None = None

    # --- the trainer ------------------------------------------------------------------------------
    def began(self, line: TrainerLine) -> None:
        ring = line.trainer.boundaries
        assert ring is not None, "a trainer of a stage has boundaries"
        self._session = StageSession(ring)
        self._stopwatch.restarted(trio.current_time())
        line.nursery.start_soon(self._session.run, line)
        self._survey.slots = ring.slots // RING_PER_SLOT
        self._do(self._core.restarted(self._survey.slots))

    async def took(self, event: StageEvent) -> None:
        now_s = trio.current_time()
        self._stopwatch.took(event, now_s)
        self._do(self._core.on_event(event, now_s))

    # --- other peers ------------------------------------------------------------------------------
    async def serve(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await self._network.serve(STAGE, self._answer)
            nursery.start_soon(self._survey.run)
            while True:
                await trio.sleep(TICK_S)
                now_s = trio.current_time()
                self._do(self._role.look_around(now_s))
                self._do(self._core.ticked(now_s))

    async def _answer(self, stream: Stream) -> None:
        async with Conversation(stream) as talk:
            sender, patience_s = talk.remote_peer_id, ANSWER_S
            while True:
                message, _ = await talk.receive(
                    Hop, Announcement, Lost, GetLinks, GetSnapshot, timeout_s=patience_s
                )
                patience_s = SERVED_IDLE_S
                if isinstance(message, GetLinks | GetSnapshot):
                    await self._survey.answer(talk, message)
                    continue
                assert isinstance(message, Hop | Notice)
                refusal = self._refusal(message, sender)
                if refusal is not None:
                    await talk.send(refusal, stall_s=ANSWER_S)
                elif isinstance(message, Hop):
                    await self._take(talk, message, sender)
                else:
                    if isinstance(message, Lost) and message.microbatch.origin == sender:
                        self._withdraw(message)
                    answer, commands = self._core.on_message(sender, message, trio.current_time())
                    self._do(commands)
                    await talk.send(answer, stall_s=ANSWER_S)

    def _refusal(self, message: Hop | Notice, sender: PeerId) -> Refusal | None:
        """Why a message is none of our business; None when it is.

        A relay works for the data peers that it knows, and heeds no other's iterations: what a
        stranger says would move them for all.

        Raises:
            RemoteProtocolError: its path is no sound one, or does not lead from the sender to us.
        """
        stage = message.stage if isinstance(message, Hop) else None
        if stage not in (None, self._stage):
            # Paths are made before they are travelled: we may have gone over to another since.
            sentence = f"I hold stage {self._stage}, not stage {stage}"
            return Refusal(RefusalReason.OTHER_GROUP, sentence)
        if self._session is None:
            return Refusal(RefusalReason.NOT_TRAINING, "my trainer has not started yet")
        origin = sender if isinstance(message, Announcement) else message.microbatch.origin
        if self._stage != DATA_STAGE and self._peers.stage_of(origin) != DATA_STAGE:
            sentence = f"I know of no data peer {origin}; ask again when we are linked"
            return Refusal(RefusalReason.UNAVAILABLE, sentence)
        if isinstance(message, Hop):
            message.check(sender, self._peer_id)
            if not message.path.rises:  # an honest relay may pass on a path that another made
                sentence = f"stages must rise along a path, not be {message.path.stages}"
                return Refusal(RefusalReason.IMPLAUSIBLE, sentence)
        return None

    async def _take(self, talk: Conversation, hop: Hop, sender: PeerId) -> None:
        if hop.direction is Direction.FORWARD and self._stage != DATA_STAGE:
            there = {member.peer_id for member in self._peers.data_peers()}
            self._other_plans.count(hop, there)
        offered_s = trio.current_time()
        refusal = await self._wait_turn(hop)
        if refusal is not None:
            sentence = f"microbatch {hop.microbatch.index}: {refusal}"
            await talk.send(Refusal(refusal, sentence), stall_s=ANSWER_S)
            return
        session, onward = self._session, hop.next_hop()
        assert session is not None, "offers are refused before the first trainer"
        try:
            stage, waited_s = self._peers.stage_of(sender), trio.current_time() - offered_s
            kind = sender, stage, hop.direction is Direction.BACKWARD
            begun = partial(self._offer_ahead, onward)
            arrival = await self._boundary_receiver.receive(talk, session, kind, waited_s, begun)
        except LocoError as error:
            self._take_back(onward)
            refused = isinstance(error, RemoteProtocolError | Unusual)
            self._do(self._core.broke_off(hop, trio.current_time(), refused=refused))
            raise
        slot, loss, took_s = arrival
        self._stopwatch.measures.received(sender, took_s)
        if session is not self._session:  # its trainer is gone, and all that it held
            self._take_back(onward)
            return
        commands = self._core.arrived(hop, slot, loss)
        if Freed(slot) in commands:
            self._take_back(onward)
        self._do(commands)
        await talk.send(BoundaryKept(), stall_s=ANSWER_S)

    async def _wait_turn(self, hop: Hop) -> RefusalReason | None:
        """Wait until a hop is welcome. Returns None then, or why it is not."""
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._answers[ticket], answer = trio.open_memory_channel[RefusalReason | None](1)
        try:
            self._do(self._core.offered(ticket, hop))
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
                case OfferAhead(hop):
                    self._offer_ahead(hop)
                case Read() | Compare() | Differing():
                    self._check(command)
                case SendNotice(to, message):
                    self._send_notices(to, message)
                case _:
                    self._stopwatch.told(command, trio.current_time())
                    if self._session is not None:
                        self._session.send(command)

    def _send_notices(self, to: Sequence[PeerId], message: Notice) -> None:
        if isinstance(message, Lost):
            self._withdraw(message)
        for peer_id in to:
            self._start(self._send_notice, peer_id, message)

    def _check(self, command: Read | Compare | Differing) -> None:
        session, core = self._session, self._core
        assert session is not None, "checks are of what has come to this trainer"
        assert isinstance(core, DataPeerCore), "relays check nothing"
        match command:
            case Read(check, relay, slot):
                self._do(core.read(check, relay, bytes(session.ring.slot(slot))))
            case Compare(check):
                self._start(self._compare, core, session.ring, check)
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
        session, taken, receiver = self._session, False, command.hop.receiver
        if session is not None:
            if self._peers.stage_of(receiver) is not None:
                codes = session.ring.slot(command.slot)
                taken = await self._boundary_sender.send(receiver, command, codes)
            if session is self._session:  # else what it had made is gone with it
                session.send(Freed(command.slot))
        self._do(self._core.sent(command.hop, trio.current_time(), taken=taken))

    async def _send_notice(self, peer_id: PeerId, message: Notice) -> None:
        """Send a notice, unless it is being sent already, and give the core the answer."""
        said = peer_id, message
        if said in self._being_sent:
            return
        self._being_sent.add(said)
        answer, tries = None, LOST_TOLD if isinstance(message, Lost) else 1
        while answer is None and tries:
            if self._peers.stage_of(peer_id) is not None:
                answer = await self._boundary_sender.ask(peer_id, message)
            tries -= 1
            if answer is None and tries:
                await trio.sleep(TICK_S)
        self._being_sent.remove(said)
        if answer is not None:
            self._do(self._core.noted(peer_id, message, answer))

    def _offer_ahead(self, hop: Hop | None) -> None:
        """Offer a hop whose boundary will be there soon. Where none comes, it is taken back."""
        if hop is None:
            return
        receiver = hop.receiver
        if self._peers.stage_of(receiver) is not None:
            self._boundary_sender.plan_ahead(hop)
            self._start(self._boundary_sender.offer_ahead, receiver, hop)

    def _take_back(self, onward: Hop | None) -> None:
        if onward is not None:
            self._start(self._boundary_sender.take_back, onward)

    def _withdraw(self, lost: Lost) -> None:
        self._start(self._boundary_sender.withdraw, lost.microbatch, lost.attempt)
