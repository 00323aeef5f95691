"""Averaging of fragments among all: streams in, streams out, threads, clock.

The thin shell around `protocol/diloco/fragment_core.py`. Checked messages, what the trainer has
sent, answers, the ends of blocking work and time become the core's events; the core's commands
become messages, questions, blocking work and calls of the trainer. One task per fragment carries
out, in order, what is ordered for it; one task averages; each question has a task of its own.
Nothing is decided here.
"""

from collections import deque
from collections.abc import AsyncIterable
from typing import Final

import trio

from peer.network.conversation import Conversation
from peer.ports import PeerId, Stream
from protocol.diloco import fragment_commands as commands
from protocol.diloco.digests import short_digest
from protocol.diloco.fragment_core import FragmentCore, FragmentCoreStatistics
from protocol.diloco.fragment_events import (
    Began,
    FetchFailed,
    FragmentEvent,
    PeersSeen,
    QuestionsEnded,
    Received,
    Sent,
    Tick,
    TrainerHeld,
)
from protocol.diloco.owner import MAX_COLLECTIONS
from protocol.diloco.send_plan import SendPlan
from protocol.errors import LocoError
from protocol.outcomes import RefusalReason
from protocol.wire.messages import Contribution, GetChunkState, GetResult, GetStamps
from protocol.wire.versions import FRAGMENT

from .chunk_averages import ChunkAverages
from .fragment_answers import FragmentAnswers
from .fragment_inbound import FragmentInbound, OtherGroup
from .fragment_posts import Posts
from .fragment_questions import FragmentQuestions
from .nesterov import load_loops
from .outer_fragments import OuterFragments
from .outer_writes import WriteOrder, adoptable, carry_out, not_begun
from .surroundings import FragmentSurroundings

TICK_S: Final = 0.25
"""How often it is seen who is there, at least."""
MAX_ORDERS: Final = 16
"""Orders that wait for one fragment's task; the core gives the next write when one has ended."""
MAX_QUESTIONS: Final = 256
"""Questions whose tasks have not begun yet."""

Question = commands.AskStamps | commands.FetchChunk


class FragmentExchange:
    """See the top of the file. `run` must be running."""

    def __init__(self, around: FragmentSurroundings, outer: OuterFragments) -> None:
        group, network, work = around.group, around.network, around.work
        self._around = around
        self._own_id = network.peer_id
        self._outer = outer
        self._work = work
        plan = SendPlan(group, len(outer.fragments), outer.last_cycle)
        self._core = FragmentCore(plan, network.peer_id, outer.first_stamps())
        self._posts = Posts(network)
        self._averages = ChunkAverages(group, network.peer_id, outer, around.sign)
        self._questions = FragmentQuestions(group, network, outer, work)
        self._answers = FragmentAnswers(outer, self._core, work, around.lock)
        self._seen: PeersSeen | None = None
        self._told: deque[FragmentEvent] = deque()
        self._changed = trio.Event()
        self._further: dict[tuple[int, PeerId], deque[commands.AskResult]] = {}
        self._ask, self._to_ask = trio.open_memory_channel[Question](MAX_QUESTIONS)
        self._average, self._to_average = trio.open_memory_channel[commands.Average](
            MAX_COLLECTIONS
        )
        self._orders = [
            trio.open_memory_channel[commands.InOrder](MAX_ORDERS) for _ in outer.fragments
        ]

    def __repr__(self) -> str:
        return f"<FragmentExchange with {self._core!r}, {self._posts!r}>"

    async def run(self) -> None:
        """Serve, collect, average and keep, until cancelled."""
        async with trio.open_nursery() as nursery:
            if self._outer.is_long:  # before the first contributions wait for it
                nursery.start_soon(self._work.run, load_loops, self._outer.codec)
            await nursery.start(self._posts.run)
            nursery.start_soon(self._average_all)
            nursery.start_soon(self._ask_all)
            nursery.start_soon(self._tick)
            await self._around.network.serve(FRAGMENT, self._serve)
            await self._adopt_stamps()
            self._feed(Began(tuple(self._around.last_sent)))
            for _, orders in self._orders:
                nursery.start_soon(self._carry_out_all, orders)
            await trio.sleep_forever()

    def sent(self, sent: Sent) -> None:
        """The trainer has sent a fragment."""
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
            case commands.Send(peer_id, message, codes):
                self._posts.post(peer_id, message, codes)
            case commands.Contribute():
                self._contribute(command)
            case commands.ForgetOthers(present):
                self._posts.keep_only(present - {self._own_id})
            case commands.CountRefusal(reason):
                self._around.refused[reason] += 1
            case commands.AskStamps() | commands.FetchChunk():
                self._ask_soon(command)
            case commands.AskResult(fragment, peer_id):
                self._further[fragment, peer_id].append(command)
            case commands.Average():
                self._average.send_nowait(command)
            case commands.Returned():
                self._around.record.returned(command, self._core.statistics().healing)
            case _:
                self._orders[command.fragment][0].send_nowait(command)

    async def _tick(self) -> None:
        while True:
            self._changed = trio.Event()
            due_s, look_s = self._core.next_deadline_s, trio.current_time() + TICK_S
            with trio.move_on_at(look_s if due_s is None else min(due_s, look_s)):
                await self._changed.wait()
                continue
            self._feed(Tick())

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
                case commands.WriteResults() | commands.WriteChunk():
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
            self._feed(await self._work.run(self._averages.averaged, order))

    # --- what is sent -----------------------------------------------------------------------------
    def _contribute(self, order: commands.Contribute) -> None:
        """Copy an owner's part of the codes, and send it, or take it if the owner is we."""
        sent, chunks = order.sent, [stamp.chunk for stamp in order.stamps]
        num_chunks = len(self._outer.fragments[sent.fragment].chunks)
        parts = self._outer.split_codes(sent.fragment, range(num_chunks), sent.codes)
        codes = self._outer.spare.take(sum(len(parts[chunk]) for chunk in chunks))
        own = self._outer.split_codes(sent.fragment, chunks, codes)
        for chunk, part in own.items():
            part[:] = parts[chunk]
        contribution = Contribution(
            group=self._around.group,
            fragment=sent.fragment,
            cycle=sent.cycle,
            weight=order.weight,
            steps=sent.steps,
            tokens=sent.tokens,
            stamps=order.stamps,
            digest=short_digest(codes),
        )
        if order.owner == self._own_id:
            self._feed(Received(order.owner, contribution, own))
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
                else:
                    nursery.start_soon(self._ask_stamps, question)

    async def _fetch(self, asked: commands.FetchChunk) -> None:
        self._feed(await self._questions.fetch(asked))

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

        Chunks that were stepped since the values were taken are healed when that shows.
        """
        for peer_id in sorted(self._around.company.seen().present - {self._own_id}):
            try:
                async with self._questions.stream_to(peer_id) as talk:
                    for fragment in range(len(self._outer.fragments)):
                        answer = await self._questions.stamps(talk, fragment)
                        self._feed(await self._work.run(adoptable, self._outer, answer))
                return
            except LocoError:
                continue  # the next one may know

    # --- what others send -------------------------------------------------------------------------
    async def _serve(self, stream: Stream) -> None:
        inbound = FragmentInbound(self._around.group, self._outer, self._work)
        async with Conversation(stream) as talk:
            try:
                while True:
                    message, codes = await inbound.next(talk)
                    if isinstance(message, GetStamps | GetResult | GetChunkState):
                        await self._answers.answer(talk, message)
                    else:
                        self._feed(Received(talk.remote_peer_id, message, codes))
            except OtherGroup as stray:
                self._around.refused[RefusalReason.OTHER_GROUP] += 1
                await talk.refuse(RefusalReason.OTHER_GROUP, str(stray))


def _unanswered(question: Question) -> FragmentEvent:
    """The end of a question, as the core is told of it."""
    if isinstance(question, commands.FetchChunk):
        return FetchFailed(question.fragment, question.chunk)
    return QuestionsEnded(question.fragment, question.peer_id)
