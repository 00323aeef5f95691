"""Averaging of fragments among all: streams in, streams out, threads, clock.

The thin shell around `protocol/diloco/core.py`. The core is told of checked messages, what the
trainer has sent, answers, the ends of blocking work, and time; its commands become messages,
questions, blocking work and what the trainer gets. One task writes the outer copy, one tells the
trainer, one signs what we contribute, one averages, each in the order of the commands; questions
have tasks of their own. Nothing is decided here.
"""

import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Concatenate, Final, Generic, ParamSpec, Protocol, TypeVar

import blake3
import trio

from peer.network.conversation import Conversation
from peer.network.handlers import Readers
from peer.rounds.services import Services
from peer.runtime import PeerId, Stream
from protocol.diloco import commands
from protocol.diloco.collecting import MAX_COLLECTIONS
from protocol.diloco.commands import Codes, GroupSeen, HoldOutcome, SendEnded, Sent, WriteOrder
from protocol.diloco.core import FragmentCore
from protocol.diloco.cycle_machine import MAX_WAITING
from protocol.diloco.healing import most_say
from protocol.diloco.peers import FragmentCounts, SendPlan
from protocol.errors import LocoError, RemoteProtocolError
from protocol.limits import INBOUND_STREAMS, MAX_CONVICTED, READERS
from protocol.outcomes import RefusalReason
from protocol.trainer_messages import Merge, Yield
from protocol.wire import fragment_messages
from protocol.wire.versions import FRAGMENT

from .averages import ChunkAverages, FragmentAudits
from .fragment_messages import (
    FRAGMENT_STALL_S,
    FragmentInbound,
    FragmentQuestions,
    Inbound,
    OtherGroup,
    Outbox,
    contribution_of,
)
from .nesterov import load_loops
from .outer_fragments import OuterFragments

JobT = TypeVar("JobT")
ToldP = ParamSpec("ToldP")


class FragmentTrainer(Protocol):
    """The trainer, as the exchange of fragments sees it."""

    @property
    def can_write(self) -> bool:
        """Whether the trainer does not read the whole outer copy."""

    async def may_write(self) -> None: ...

    async def merge(self, message: Merge) -> None:
        """A fragment has been written: tell the trainer that sent it, or yielded it."""

    async def hold(self, message: Yield) -> HoldOutcome:
        """Make the trainer read nothing of the fragment until `merge`."""


class GroupMembers(Protocol):
    """The other peers of the group."""

    def seen(self) -> GroupSeen: ...

    def is_linked(self, peer_id: PeerId) -> bool: ...


class ProofStore(Protocol):
    """Proofs that outlive the process. Blocking."""

    def read(self) -> Sequence[tuple[PeerId, bytes]]:
        """Owners, each with what was a proof when it was kept."""

    def keep(self, owner: PeerId, proof: bytes) -> None:
        """Keep one more proof, if there is room."""


@dataclass(frozen=True, slots=True)
class FragmentParts:
    """The group with which fragments are averaged, and what becomes of them.

    Attributes:
        group: digest of ours.
        convict: bans a peer that was proved to have lied.
        lock: held while the outer state moves or is read as a whole.
        trims: whether averages are trimmed means (nesterov.py).
        last_sent: the last cycle of each fragment that was sent before our first round; -1 before
            the first.
        inner_steps: H, the steps of a peer of median speed between two sends of a fragment.
    """

    services: Services
    group: str
    members: GroupMembers
    trainer: FragmentTrainer
    ended: Callable[[SendEnded], None]
    convict: Callable[[PeerId], None]
    proofs: ProofStore
    lock: trio.Lock
    counts: FragmentCounts
    trims: bool
    last_sent: Sequence[int]
    inner_steps: int


# --- fragment exchange ----------------------------------------------------------------------------
AUDIT_DRAWS: Final = b"loco/v1/audit-draws\0"
"""Our signature of this seeds the draws of audits: nobody else can make it."""
AUDITORS: Final = replace(READERS, total=INBOUND_STREAMS.total)
"""Readers of openings: all that ask, since a result that is not opened is not believed."""
TICK_S: Final = 0.25
"""How often it is seen who is there, at least."""
MAX_ASKED_FOR_STAMPS: Final = 5
"""Peers that a joiner asks which states its values are in."""


class Jobs(Generic[JobT]):
    """Commands that one task carries out in their order."""

    def __init__(self, most: float) -> None:
        channel, self._waiting = trio.open_memory_channel[JobT](most)
        self.put = channel.send_nowait

    def put_or_drop(self, job: JobT) -> None:
        with suppress(trio.WouldBlock):
            self.put(job)

    def __aiter__(self) -> AsyncIterator[JobT]:
        return self._waiting


class FragmentExchange:
    """One peer's part in the exchange. `run` must be running."""

    def __init__(self, parts: FragmentParts, outer: OuterFragments) -> None:
        services, group = parts.services, parts.group
        self._parts, self._outer = parts, outer
        self._network, self._work, self._sign = services.network, services.work, services.sign
        self._own_id = services.network.peer_id
        plan = SendPlan(group, len(outer.fragments), outer.is_last)
        seed = blake3.blake3(services.sign(AUDIT_DRAWS + group.encode())).digest()
        self._core = FragmentCore(
            plan, self._own_id, outer.first_stamps(), seed, self._carry_out, parts.counts
        )
        self._outbox = Outbox(services.network, self._start)
        self._averages = ChunkAverages(
            group, self._own_id, services.facts.incarnation, outer, services.sign, trims=parts.trims
        )
        self._questions = FragmentQuestions(group, services.network, outer, services.work)
        self._audits = FragmentAudits(
            group, services.network, outer, services.work, trims=parts.trims
        )
        self._readers, self._auditors = Readers(), Readers(AUDITORS)
        self._seen: GroupSeen | None = None
        self._changed = trio.Event()
        self._further: dict[tuple[int, PeerId], deque[fragment_messages.GetResult]] = {}
        # No bound: of each fragment the core has one write and one hold at a time.
        self._writes = Jobs[WriteOrder](math.inf)
        self._for_trainer = Jobs[commands.ForTrainer](math.inf)
        self._convictions = Jobs[commands.Convict](MAX_CONVICTED)
        self._averagings = Jobs[commands.Average](MAX_COLLECTIONS)
        self._contributions = Jobs[commands.Contribute](MAX_WAITING)
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        async with trio.open_nursery() as self._nursery:
            nursery = self._nursery
            if self._outer.is_long:  # before the first contributions wait for it
                nursery.start_soon(self._work.run, load_loops, self._outer.codec)
            nursery.start_soon(self._average_all)
            nursery.start_soon(self._contribute_all)
            nursery.start_soon(self._tick)
            await self._network.serve(FRAGMENT, self._serve)
            await self._adopt_stamps()
            self._tell_core(FragmentCore.begin, self._parts.last_sent)
            nursery.start_soon(self._write_all)
            nursery.start_soon(self._tell_trainer)
            await self._convict_again()
            async for convict in self._convictions:
                with suppress(OSError):  # a full disk: it holds for as long as this process
                    await self._work.run(self._parts.proofs.keep, convict.owner, convict.proof)

    async def _convict_again(self) -> None:
        for owner, proof in await self._work.run(self._parts.proofs.read):
            with suppress(RemoteProtocolError):  # of another run, or a damaged file
                await self._audits.check(fragment_messages.Proof(self._parts.group, owner), proof)
                self._tell_core(FragmentCore.proved, owner, proof)

    def sent(self, sent: Sent) -> None:
        steps_share = min(1.0, sent.steps / self._parts.inner_steps)
        self._outer.sends(sent.fragment, sent.codes, steps_share)
        self._tell_core(FragmentCore.sent, sent)

    # --- the core's side --------------------------------------------------------------------------
    def _tell_core(
        self,
        call: Callable[Concatenate[FragmentCore, ToldP], None],
        *told: ToldP.args,
        **named: ToldP.kwargs,
    ) -> None:
        """Tell the core something, after the time and how the group looks."""
        self._core.at(trio.current_time())
        seen = self._parts.members.seen()
        if seen != self._seen:
            self._seen = seen
            self._core.see(seen)
        call(self._core, *told, **named)
        self._changed.set()  # whoever waits for its next deadline looks again

    def _carry_out(self, command: commands.FragmentCommand) -> None:
        match command:
            case commands.SendMessage(peer_id, message, codes):
                self._outbox.send_soon(peer_id, message, codes)
            case commands.Contribute():
                self._contributions.put_or_drop(command)  # as lost as what no line carries
            case commands.ForgetOthers(present):
                self._outbox.keep_only(present - {self._own_id})
            case commands.Ask(peer_id, question):
                self._ask(peer_id, question)
            case commands.Audit():
                self._start(self._audit, command)
            case commands.Average():
                self._averagings.put(command)
            case commands.SendEnded():
                self._parts.ended(command)
            case commands.Convict(owner):
                self._parts.convict(owner)
                self._convictions.put_or_drop(command)
            case Merge() | Yield():
                self._for_trainer.put(command)
            case _:
                self._writes.put(command)

    def _start(self, function: Callable[..., Awaitable[None]], *arguments: object) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(function, *arguments)

    async def _tick(self) -> None:
        while True:
            self._changed = trio.Event()
            due_s, look_s = self._core.next_deadline_s, trio.current_time() + TICK_S
            with trio.move_on_at(look_s if due_s is None else min(due_s, look_s)):
                await self._changed.wait()
                continue
            self._tell_core(FragmentCore.tick)

    # --- the trainer, and the outer copy ----------------------------------------------------------
    async def _tell_trainer(self) -> None:
        trainer = self._parts.trainer
        async for message in self._for_trainer:
            match message:
                case Merge():
                    await trainer.merge(message)
                case Yield():  # which it may answer late
                    self._start(self._hold, message)

    async def _hold(self, message: Yield) -> None:
        held = await self._parts.trainer.hold(message)
        self._tell_core(FragmentCore.trainer_held, message.fragment, held)

    async def _write_all(self) -> None:
        """Fragments that were sent together are checked, and leave, in that order."""
        async for order in self._writes:
            if isinstance(order, commands.Verify):
                corrupted = await self._written(order)
                self._tell_core(FragmentCore.verified, order.fragment, corrupted)
                continue
            stamps: Mapping[int, fragment_messages.Stamp] = {}
            with trio.move_on_at(order.until_s):
                stamps = await self._written(order)
            self._tell_core(FragmentCore.written, order.fragment, stamps)

    async def _written(self, order: WriteOrder) -> Mapping[int, fragment_messages.Stamp]:
        while True:
            await self._parts.trainer.may_write()
            async with self._parts.lock:
                if self._parts.trainer.can_write:
                    return await self._work.run(self._outer.carry_out, order)

    async def _average_all(self) -> None:
        async for order in self._averagings:
            made = await self._work.run(self._averages.averaged, order)
            if made is not None:
                self._audits.keep(order, made.result)
            self._tell_core(FragmentCore.averaged, order.fragment, order.cycle, made)

    # --- what is sent -----------------------------------------------------------------------------
    async def _contribute_all(self) -> None:
        async for order in self._contributions:
            contribution, codes, own = await self._work.run(
                contribution_of, order, self._parts.group, self._outer, self._sign
            )
            if order.owner == self._own_id:
                self._tell_core(FragmentCore.received, order.owner, contribution, own)
            else:
                self._outbox.send_soon(order.owner, contribution, codes)

    # --- what others are asked --------------------------------------------------------------------
    def _ask(self, peer_id: PeerId, question: commands.FragmentQuestion) -> None:
        match question:
            case fragment_messages.GetResult(fragment=fragment):
                self._further[fragment, peer_id].append(question)
            case fragment_messages.GetStamps():
                self._start(self._ask_stamps, peer_id, question)
            case fragment_messages.GetChunkState():
                self._start(self._fetch, peer_id, question)

    async def _audit(self, order: commands.Audit) -> None:
        outcome, proof = await self._audits.audit(order)
        self._tell_core(FragmentCore.audited, order.result, outcome, proof)

    async def _fetch(self, peer_id: PeerId, question: fragment_messages.GetChunkState) -> None:
        answer: fragment_messages.ChunkStateReply | None = None
        values: Codes = {}
        with suppress(LocoError):
            answer, values = await self._questions.fetch(peer_id, question)
        self._tell_core(FragmentCore.answered, peer_id, question, answer, values)

    async def _ask_stamps(self, peer_id: PeerId, question: fragment_messages.GetStamps) -> None:
        further = self._further[question.fragment, peer_id] = deque[fragment_messages.GetResult]()
        with suppress(LocoError):  # the stamps of the next cycle show it again
            async with self._questions.stream_to(peer_id) as talk:
                stamps = await self._questions.stamps(talk, question.fragment)
                self._tell_core(FragmentCore.answered, peer_id, question, stamps, {})
                while further:
                    asked = further.popleft()
                    result, codes = await self._questions.result(talk, asked)
                    self._tell_core(FragmentCore.answered, peer_id, asked, result, codes)
        del self._further[question.fragment, peer_id]
        self._tell_core(FragmentCore.answered, peer_id, question, None, {})

    async def _adopt_stamps(self) -> None:
        """A joiner has values, but not their stamps: it takes those that most of the asked name.

        Chunks that were stepped since are healed when that shows.
        """
        answers: dict[PeerId, list[fragment_messages.Stamps]] = {}
        others = sorted(self._parts.members.seen().present - {self._own_id})
        async with trio.open_nursery() as nursery:
            for peer_id in others[:MAX_ASKED_FOR_STAMPS]:
                nursery.start_soon(self._ask_all_stamps, peer_id, answers)
        of_fragments = zip(*(answers[each] for each in sorted(answers)), strict=True)
        for fragment, of_fragment in enumerate(of_fragments):
            states = most_say(of_fragment)
            fitting = await self._work.run(self._outer.fitting, fragment, states)
            self._tell_core(FragmentCore.adopt, fragment, fitting)

    async def _ask_all_stamps(
        self, peer_id: PeerId, answers: dict[PeerId, list[fragment_messages.Stamps]]
    ) -> None:
        with suppress(LocoError):  # another one may know
            async with self._questions.stream_to(peer_id) as talk:
                fragments = range(len(self._outer.fragments))
                answers[peer_id] = [await self._questions.stamps(talk, f) for f in fragments]

    # --- what others send -------------------------------------------------------------------------
    async def _serve(self, stream: Stream) -> None:
        inbound = FragmentInbound(self._parts.group, self._outer, self._work)
        refused = self._parts.counts.refused
        async with Conversation(stream) as talk:
            try:
                while self._parts.members.is_linked(talk.remote_peer_id):
                    message, codes = await inbound.next(talk)
                    await self._handle(talk, message, codes)
                refused[RefusalReason.NOT_LINKED] += 1
                sentence = "I have no link with you as a peer of my group"
                await talk.refuse(RefusalReason.NOT_LINKED, sentence)
            except OtherGroup as stray:
                refused[RefusalReason.OTHER_GROUP] += 1
                await talk.refuse(RefusalReason.OTHER_GROUP, str(stray))

    async def _handle(
        self, talk: Conversation, message: Inbound | fragment_messages.Proof, came: Codes | bytes
    ) -> None:
        """Raises RemoteProtocolError: a proof is not valid."""
        match message:
            case fragment_messages.GetStamps(fragment=fragment):
                await talk.send(self._stamps(fragment))
            case fragment_messages.GetResult():
                await self._readers.serve(talk, partial(self._send_result, message))
            case fragment_messages.GetChunkState():
                await self._readers.serve(talk, partial(self._send_chunk, message))
            case fragment_messages.GetOpening():
                await self._auditors.serve(talk, partial(self._audits.answer, asked=message))
            case fragment_messages.Proof(owner=owner):
                assert isinstance(came, bytes)
                if not self._core.is_convicted(owner):
                    await self._audits.check(message, came)
                    self._tell_core(FragmentCore.proved, owner, came)
            case _:
                assert not isinstance(came, bytes)
                self._tell_core(FragmentCore.received, talk.remote_peer_id, message, came)

    async def _send_result(self, asked: fragment_messages.GetResult, talk: Conversation) -> None:
        kept = self._core.result_of(asked.fragment, asked.cycle, asked.chunk)
        if kept is None:
            await talk.refuse(RefusalReason.UNAVAILABLE, "I hold no such result")
        else:
            await talk.send(*kept, stall_s=FRAGMENT_STALL_S)

    async def _send_chunk(self, asked: fragment_messages.GetChunkState, talk: Conversation) -> None:
        fragment, chunk = asked.fragment, asked.chunk
        async with self._parts.lock:
            stamps = self._stamps(fragment)
            state = fragment_messages.ChunkStateReply(
                fragment, stamps.cycles[chunk], stamps.stamps[chunk]
            )
            values = await self._work.run(self._outer.read, fragment, chunk)
        await talk.send(state, values, stall_s=FRAGMENT_STALL_S)

    def _stamps(self, fragment: int) -> fragment_messages.Stamps:
        ledger = self._core.ledger(fragment)
        return fragment_messages.Stamps(fragment, tuple(ledger.stamps), tuple(ledger.cycles))
