"""Averaging of fragments among all: streams in, streams out, threads, clock.

The thin shell around `protocol/diloco/fragment_core.py`. Checked messages, what the trainer has
sent, answers, the ends of blocking work and time become the core's events; the core's commands
become messages, questions, blocking work and calls of the trainer. One task per fragment carries
out, in order, what is ordered for it; one task averages; each question has a task of its own.
Nothing is decided here.
"""

from collections import Counter, deque
from collections.abc import AsyncIterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

import blake3
import trio

from peer.network.conversation import Conversation
from peer.ports import Network, PeerId, Stream, Work
from protocol.diloco import fragment_events as commands
from protocol.diloco.fragment_core import FragmentCore, FragmentCoreStatistics
from protocol.diloco.fragment_events import (
    Audited,
    Began,
    Changes,
    FetchFailed,
    FragmentEvent,
    FragmentTick,
    GroupSeen,
    HoldOutcome,
    MessageReceived,
    Parts,
    Proved,
    QuestionsEnded,
    SendEnded,
    Sent,
    StampsAdopted,
    StampsAnswered,
    TrainerHeld,
    UndoSteps,
    Verified,
    Verify,
    WriteChunk,
    WriteResults,
    Written,
)
from protocol.diloco.healing import HealingStatistics, most_say
from protocol.diloco.owner import MAX_COLLECTIONS
from protocol.diloco.peers import SendPlan
from protocol.errors import LocoError, RemoteProtocolError
from protocol.limits import MAX_CONVICTED
from protocol.membership.records import Sign
from protocol.outcomes import AuditOutcome, RefusalReason
from protocol.wire.fragment_messages import GetChunkState, GetOpening, GetResult, GetStamps, Proof
from protocol.wire.versions import FRAGMENT

from .chunk_averages import ChunkAverages
from .fragment_audits import FragmentAudits
from .fragment_messages import (
    FragmentAnswers,
    FragmentInbound,
    FragmentQuestions,
    Inbound,
    OtherGroup,
    Posts,
    contribution_of,
)
from .nesterov import load_loops
from .outer_fragments import OuterFragments

# --- what the core orders to be done with the outer copy, in a worker thread ----------------------

WriteOrder = Verify | WriteResults | WriteChunk | UndoSteps


def carry_out(outer: OuterFragments, order: WriteOrder) -> Verified | Written:
    """Do it; returned is what the core is to be told."""
    match order:
        case Verify(fragment, cycles):
            return Verified(fragment, outer.verify(fragment, cycles))
        case WriteResults(fragment, results):
            plausible = [result for result in results if outer.is_plausible(fragment, result)]
            written = {result.chunk: outer.write(fragment, result) for result in plausible}
            return Written(fragment, written)
        case WriteChunk(fragment, chunk, cycle, stamp, values):
            try:
                outer.heal(fragment, chunk, cycle, stamp, values)
            except RemoteProtocolError:
                return Written(fragment, {})  # not what its stamp says: another peer will have it
            return Written(fragment, {chunk: stamp})
        case UndoSteps(fragment, stamps):
            for chunk in stamps:
                outer.undo(fragment, chunk)
            return Written(fragment, stamps)


def not_begun(order: WriteOrder) -> Written:
    """The time was up before; what has no time is never up."""
    return Written(order.fragment, {})


def adoptable(outer: OuterFragments, answer: StampsAnswered) -> StampsAdopted:
    """The stamps of another peer that are those of the values that we have."""
    fragment = answer.fragment
    return StampsAdopted(
        fragment,
        {
            theirs.chunk: (cycle, theirs.stamp)
            for theirs, cycle in answer.states
            if outer.fits(fragment, theirs.chunk, cycle, theirs.stamp)
        },
    )


# --- what the exchange asks of its surroundings ---------------------------------------------------


class FragmentTrainer(Protocol):
    """What is asked of the trainer."""

    @property
    def can_write(self) -> bool:
        """Whether nobody reads the whole outer copy."""

    async def may_write(self) -> None:
        """Wait until `can_write`."""

    async def merge(self, fragment: int, cycle: int, changes: Changes) -> None:
        """The send is over; this has changed."""

    async def hold(self, fragment: int) -> HoldOutcome:
        """Make it read nothing of the fragment until `amend`."""

    async def amend(self, fragment: int, changes: Changes) -> None:
        """This has changed; go on."""


class CycleCompany(Protocol):
    """The other peers of the group, as the exchange of fragments sees them."""

    def seen(self) -> GroupSeen:
        """How the group looks now."""

    def is_linked(self, peer_id: PeerId) -> bool:
        """Whether we have a live link with a peer of the group."""


class SendRecord(Protocol):
    """Where the ends of sends are written down."""

    def returned(self, returned: SendEnded, healing: HealingStatistics) -> None:
        """A send has ended; so much was healed until now."""


class OwnersConduct(Protocol):
    """Where it is told how owners keep their word."""

    def audited(self, outcome: AuditOutcome) -> None:
        """An audit has ended."""

    def convicted(self, owner: PeerId) -> None:
        """An owner was proved to have lied: from now on nobody here has to do with it."""


class KeptProofs(Protocol):
    """Proofs that outlive the process. Blocking."""

    def read(self) -> Sequence[tuple[PeerId, bytes]]:
        """Owners, each with what was a proof when it was kept."""

    def keep(self, owner: PeerId, proof: bytes) -> None:
        """Keep one more, if there is room."""


@dataclass(frozen=True, slots=True)
class FragmentSurroundings:
    """The peers with which fragments are averaged, and the means.

    Attributes:
        group: digest of ours.
        incarnation: which life of ours this is.
        proofs: those that this home keeps.
        lock: held while the outer state moves or is read as a whole.
        refused: counts contributions and results of others that were not taken, streams of those
            that we are not linked with, and whatever is meant for another group, by reason.
        trims: whether averages are trimmed means (nesterov.py).
        last_sent: the last cycle of each fragment that was sent before our first round; -1 before
            the first.
        inner_steps: H, the steps of a peer of median speed between two sends of a fragment.
    """

    group: str
    incarnation: int
    network: Network
    work: Work
    sign: Sign
    company: CycleCompany
    trainer: FragmentTrainer
    record: SendRecord
    conduct: OwnersConduct
    proofs: KeptProofs
    lock: trio.Lock
    refused: Counter[RefusalReason]
    trims: bool
    last_sent: Sequence[int]
    inner_steps: int


# --- fragment exchange ----------------------------------------------------------------------------

AUDIT_DRAWS: Final = b"loco/v1/audit-draws\0"
"""What our key signs of this nobody else can know: what audits are drawn by."""
TICK_S: Final = 0.25
"""How often it is seen who is there, at least."""
MAX_ORDERS: Final = 16
"""Orders that wait for one fragment's task; the core gives the next write when one has ended."""
MAX_ASKED_FOR_STAMPS: Final = 5
"""Peers that a joiner asks which states its values are in."""
MAX_QUESTIONS: Final = 256
"""Questions whose tasks have not begun yet."""
MAX_CONTRIBUTIONS: Final = 1024
"""Parts of our own codes, one for each owner, that are to be signed and sent."""

Question = commands.AskStamps | commands.FetchChunk | commands.Audit


class FragmentExchange:
    """See the top of the file. `run` must be running."""

    def __init__(self, around: FragmentSurroundings, outer: OuterFragments) -> None:
        group, network, work = around.group, around.network, around.work
        self._around = around
        self._own_id = network.peer_id
        self._outer = outer
        self._work = work
        plan = SendPlan(group, len(outer.fragments), outer.is_last)
        seed = blake3.blake3(around.sign(AUDIT_DRAWS + group.encode())).digest()
        self._core = FragmentCore(plan, network.peer_id, outer.first_stamps(), seed)
        self._posts = Posts(network)
        self._averages = ChunkAverages(
            group, network.peer_id, around.incarnation, outer, around.sign, trims=around.trims
        )
        self._questions = FragmentQuestions(group, network, outer, work)
        self._answers = FragmentAnswers(outer, self._core, work, around.lock)
        self._audits = FragmentAudits(group, network, outer, work, trims=around.trims)
        self._seen: GroupSeen | None = None
        self._told: deque[FragmentEvent] = deque()
        self._changed = trio.Event()
        self._further: dict[tuple[int, PeerId], deque[commands.AskResult]] = {}
        self._ask, self._to_ask = trio.open_memory_channel[Question](MAX_QUESTIONS)
        self._keep, self._to_keep = trio.open_memory_channel[commands.Convict](MAX_CONVICTED)
        self._average, self._to_average = trio.open_memory_channel[commands.Average](
            MAX_COLLECTIONS
        )
        self._contribute, self._to_contribute = trio.open_memory_channel[commands.Contribute](
            MAX_CONTRIBUTIONS
        )
        self._orders = [
            trio.open_memory_channel[commands.InOrder](MAX_ORDERS) for _ in outer.fragments
        ]

    async def run(self) -> None:
        """Serve, collect, average and keep, until cancelled."""
        async with trio.open_nursery() as nursery:
            if self._outer.is_long:  # before the first contributions wait for it
                nursery.start_soon(self._work.run, load_loops, self._outer.codec)
            await nursery.start(self._posts.run)
            nursery.start_soon(self._average_all)
            nursery.start_soon(self._contribute_all)
            nursery.start_soon(self._ask_all)
            nursery.start_soon(self._tick)
            await self._around.network.serve(FRAGMENT, self._serve)
            await self._adopt_stamps()
            self._feed(Began(tuple(self._around.last_sent)))
            for _, orders in self._orders:
                nursery.start_soon(self._carry_out_all, orders)
            await self._convict_again()
            async for convict in self._to_keep:
                with suppress(OSError):  # a full disk: it holds for as long as this process
                    await self._work.run(self._around.proofs.keep, convict.owner, convict.proof)

    async def _convict_again(self) -> None:
        """Have nothing to do with owners of whom this home keeps a proof."""
        for owner, proof in await self._work.run(self._around.proofs.read):
            message = Proof(self._around.group, owner)
            with suppress(RemoteProtocolError):  # of another run, or a damaged file
                await self._audits.check(message, proof)
                self._feed(Proved(message, proof))

    def sent(self, sent: Sent) -> None:
        """The trainer has sent a fragment."""
        part = min(1.0, sent.steps / self._around.inner_steps)
        self._outer.sends(sent.fragment, sent.codes, part)
        self._feed(sent)

    def contributors_by_chunk(self, fragment: int) -> dict[int, int]:
        """The number of peers in the result of each chunk, of the fragment's last cycle."""
        return self._core.contributors_by_chunk(fragment)

    def statistics(self) -> FragmentCoreStatistics:
        """Counts since the start."""
        return self._core.statistics()

    # --- the core's side --------------------------------------------------------------------------
    def _feed(self, event: FragmentEvent) -> None:
        """Tell the core, and do what it says; what that leads to at once is told behind it."""
        self._told.append(event)
        if len(self._told) > 1:
            return  # in the midst of it: the loop below, further up, goes on with it
        while self._told:
            self._see()
            for command in self._core.step(trio.current_time(), self._told[0]):
                self._carry_out(command)
            self._told.popleft()
        self._changed.set()

    def _see(self) -> None:
        seen = self._around.company.seen()
        if seen != self._seen:
            self._seen = seen
            for command in self._core.step(trio.current_time(), seen):
                self._carry_out(command)

    def _carry_out(self, command: commands.FragmentCommand) -> None:
        match command:
            case commands.SendMessage(peer_id, message, codes):
                self._posts.post(peer_id, message, codes)
            case commands.Contribute():
                with suppress(trio.WouldBlock):  # as lost as what no line carries
                    self._contribute.send_nowait(command)
            case commands.ForgetOthers(present):
                self._posts.keep_only(present - {self._own_id})
            case commands.CountRefusal() | commands.CountAudit() | commands.Convict():
                self._note(command)
            case commands.AskStamps() | commands.FetchChunk() | commands.Audit():
                self._ask_soon(command)
            case commands.AskResult(fragment, peer_id):
                self._further[fragment, peer_id].append(command)
            case commands.Average():
                self._average.send_nowait(command)
            case commands.SendEnded():
                self._around.record.returned(command, self._core.statistics().healing)
            case _:
                self._orders[command.fragment][0].send_nowait(command)

    def _note(
        self, command: commands.CountRefusal | commands.CountAudit | commands.Convict
    ) -> None:
        match command:
            case commands.CountRefusal(reason):
                self._around.refused[reason] += 1
            case commands.CountAudit(outcome):
                self._around.conduct.audited(outcome)
            case commands.Convict(owner):
                self._around.conduct.convicted(owner)
                with suppress(trio.WouldBlock):
                    self._keep.send_nowait(command)

    async def _tick(self) -> None:
        while True:
            self._changed = trio.Event()
            due_s, look_s = self._core.next_deadline_s, trio.current_time() + TICK_S
            with trio.move_on_at(look_s if due_s is None else min(due_s, look_s)):
                await self._changed.wait()
                continue
            self._feed(FragmentTick())

    # --- what is ordered for a fragment -----------------------------------------------------------
    async def _carry_out_all(self, orders: AsyncIterable[commands.InOrder]) -> None:
        trainer = self._around.trainer
        async for order in orders:
            match order:
                case commands.MergeIntoTrainer(fragment, cycle, changes):
                    await trainer.merge(fragment, cycle, changes)
                case commands.HoldTrainer(fragment):
                    self._feed(TrainerHeld(fragment, await trainer.hold(fragment)))
                case commands.AmendTrainer(fragment, changes):
                    await trainer.amend(fragment, changes)
                case commands.Verify():
                    await self._write(order)
                case commands.WriteResults() | commands.WriteChunk() | commands.UndoSteps():
                    with trio.move_on_at(order.until_s):
                        await self._write(order)
                        continue
                    self._feed(not_begun(order))

    async def _write(self, order: WriteOrder) -> None:
        """Write the outer copy when nobody reads all of it; the core knows before anybody does."""
        while True:
            await self._around.trainer.may_write()
            async with self._around.lock:
                if self._around.trainer.can_write:
                    self._feed(await self._work.run(carry_out, self._outer, order))
                    return

    async def _average_all(self) -> None:
        async for order in self._to_average:
            averaged = await self._work.run(self._averages.averaged, order)
            if averaged.averages is not None:
                self._audits.keep(order, averaged.averages.result)
            self._feed(averaged)

    # --- what is sent -----------------------------------------------------------------------------
    async def _contribute_all(self) -> None:
        """Copy each owner's part of the codes, and send it, or take it if the owner is we."""
        around = self._around
        async for order in self._to_contribute:
            made = await self._work.run(
                contribution_of, order, around.group, self._outer, around.sign
            )
            contribution, codes, own = made
            if order.owner == self._own_id:
                self._feed(MessageReceived(order.owner, contribution, own))
            else:
                self._posts.post(order.owner, contribution, codes)

    # --- what others are asked --------------------------------------------------------------------
    def _ask_soon(self, question: Question) -> None:
        try:
            self._ask.send_nowait(question)
        except trio.WouldBlock:  # the stamps of the next cycle show it again
            self._feed(_unanswered(question))

    async def _ask_all(self) -> None:
        async with trio.open_nursery() as nursery:
            async for question in self._to_ask:
                if isinstance(question, commands.FetchChunk):
                    nursery.start_soon(self._fetch, question)
                elif isinstance(question, commands.Audit):
                    nursery.start_soon(self._audit, question)
                else:
                    nursery.start_soon(self._ask_stamps, question)

    async def _fetch(self, asked: commands.FetchChunk) -> None:
        self._feed(await self._questions.fetch(asked))

    async def _audit(self, asked: commands.Audit) -> None:
        self._feed(await self._audits.audit(asked))

    async def _ask_stamps(self, asked: commands.AskStamps) -> None:
        """Ask for stamps, and then for the results that the core wants."""
        further = self._further[asked.fragment, asked.peer_id] = deque[commands.AskResult]()
        try:
            async with self._questions.stream_to(asked.peer_id) as talk:
                self._feed(await self._questions.stamps(talk, asked.fragment))
                while further:
                    self._feed(await self._questions.result(talk, further.popleft()))
        except LocoError:
            pass  # the stamps of the next cycle show it again
        del self._further[asked.fragment, asked.peer_id]
        self._feed(_unanswered(asked))

    async def _adopt_stamps(self) -> None:
        """A joiner has values, but does not know their stamps: the others do.

        Several are asked, and the state that most of them are in counts. Chunks that were stepped
        since the values were taken are healed when that shows.
        """
        answers: dict[PeerId, list[StampsAnswered]] = {}
        others = sorted(self._around.company.seen().present - {self._own_id})
        async with trio.open_nursery() as nursery:
            for peer_id in others[:MAX_ASKED_FOR_STAMPS]:
                nursery.start_soon(self._ask_all_stamps, peer_id, answers)
        for of_fragment in zip(*(answers[each] for each in sorted(answers)), strict=True):
            for answer in most_say(of_fragment):
                self._feed(await self._work.run(adoptable, self._outer, answer))

    async def _ask_all_stamps(
        self, peer_id: PeerId, answers: dict[PeerId, list[StampsAnswered]]
    ) -> None:
        with suppress(LocoError):  # another one may know
            async with self._questions.stream_to(peer_id) as talk:
                fragments = range(len(self._outer.fragments))
                answers[peer_id] = [await self._questions.stamps(talk, f) for f in fragments]

    # --- what others send -------------------------------------------------------------------------
    async def _serve(self, stream: Stream) -> None:
        inbound = FragmentInbound(self._around.group, self._outer, self._work)
        async with Conversation(stream) as talk:
            try:
                while self._around.company.is_linked(talk.remote_peer_id):
                    message, codes = await inbound.next(talk)
                    await self._take(talk, message, codes)
                self._around.refused[RefusalReason.NOT_LINKED] += 1
                sentence = "I have no link with you as a peer of my group"
                await talk.refuse(RefusalReason.NOT_LINKED, sentence)
            except OtherGroup as stray:
                self._around.refused[RefusalReason.OTHER_GROUP] += 1
                await talk.refuse(RefusalReason.OTHER_GROUP, str(stray))

    async def _take(
        self, talk: Conversation, message: Inbound | Proof, came: Parts | bytes
    ) -> None:
        """Answer a question, or tell the core. Raises RemoteProtocolError: a proof is none."""
        match message:
            case GetStamps() | GetResult() | GetChunkState():
                await self._answers.answer(talk, message)
            case GetOpening():
                await self._audits.answer(talk, message)
            case Proof(owner=owner):
                assert isinstance(came, bytes)
                if not self._core.is_convicted(owner):
                    await self._audits.check(message, came)
                    self._feed(Proved(message, came))
            case _:
                assert not isinstance(came, bytes)
                self._feed(MessageReceived(talk.remote_peer_id, message, came))


def _unanswered(question: Question) -> FragmentEvent:
    """The end of a question, as the core is told of it."""
    if isinstance(question, commands.Audit):
        return Audited(question.result, AuditOutcome.INCONCLUSIVE)
    if isinstance(question, commands.FetchChunk):
        return FetchFailed(question.fragment, question.chunk)
    return QuestionsEnded(question.fragment, question.peer_id)
