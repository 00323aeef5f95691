"""Whatever a peer lacks of the outer copy, and how it gets it from one that has it.

Two questions. *Which states are your chunks in?* is asked of a peer that ended a cycle with another
digest than ours: what it has better than we is then fetched, as the result that we lack if that can
be applied here (one byte a value), else as the chunk itself (eight). *Send me this chunk* is also
asked when a header shows at once that we differ. Answers go to the fragment's keeper; a question
that fails is not repeated: the next cycle's headers show what is still wrong.

Of two states with equal histories the next result decides (protocol/fragment/chunk_ledger.py, rule
1). When the run is over there is none, and the lower digest wins.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio

from peer.network.conversation import Conversation
from peer.ports import Network, PeerId, Work
from protocol.errors import LocoError, RemoteProtocolError, StreamLost
from protocol.fragment.chunk_ledger import Stamp, Verdict
from protocol.wire.fragment_messages import ChunkStamp
from protocol.wire.messages import ChunkState, GetChunkState, GetResult, GetStamps, Stamps
from protocol.wire.versions import FRAGMENT

from .fragment_inbound import FragmentInbound
from .fragment_items import Arrived, Fetched
from .fragment_posts import STALL_S
from .outer_fragments import OuterFragments

QUESTION_S: Final = 60.0
"""A question and its answer, values of a chunk among them."""


@dataclass(frozen=True, slots=True)
class HealingStatistics:
    """Counts since the start.

    Attributes:
        diverged: chunks found to differ from a better state of another peer.
        healed: those that were fetched.
        healed_s: what that took, all together.
    """

    diverged: int
    healed: int
    healed_s: float


class FragmentHealing:
    """See the top of the file. `run` must be running.

    Args:
        write: runs what writes the outer copy.
        put: hands a keeper, by its fragment, what came.
        is_over: whether the run has ended here.
    """

    def __init__(
        self,
        group: str,
        *,
        network: Network,
        work: Work,
        outer: OuterFragments,
        write: Callable[..., Awaitable[None]],
        put: Callable[[int, Arrived | Fetched], None],
        is_over: Callable[[], bool],
    ) -> None:
        self._group = group
        self._network = network
        self._work = work
        self._outer = outer
        self._write = write
        self._is_over = is_over
        self._put = put
        self._since_s: dict[tuple[int, int], float] = {}
        self._asking: set[tuple[int, PeerId]] = set()
        self._nursery: trio.Nursery | None = None
        self._diverged = self._healed = 0
        self._healed_s = 0.0

    def __repr__(self) -> str:
        return f"<FragmentHealing of {sorted(self._since_s)}, asking {len(self._asking)}>"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Ask, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    def statistics(self) -> HealingStatistics:
        """Counts since the start."""
        return HealingStatistics(self._diverged, self._healed, self._healed_s)

    def heal(self, fragment: int, chunk: int, peer_id: PeerId) -> None:
        """Fetch a chunk from a peer that has a better state of it."""
        if (fragment, chunk) not in self._since_s:
            self._since_s[fragment, chunk] = trio.current_time()
            self._diverged += 1
            self._start(self._fetch_state, fragment, chunk, peer_id)

    def is_healing(self, fragment: int) -> bool:
        """Whether a chunk is being fetched."""
        return any(of == fragment for of, _ in self._since_s)

    def ask(self, fragment: int, peer_id: PeerId) -> None:
        """See what a peer has better than we, and fetch it."""
        if (fragment, peer_id) not in self._asking:
            self._asking.add((fragment, peer_id))
            self._start(self._ask_stamps, fragment, peer_id)

    async def adopt_stamps(self, peer_ids: Sequence[PeerId]) -> None:
        """We begin with values, but do not know their stamps: the others do, if they have them.

        Chunks that were stepped since the values were taken are healed when that shows.
        """
        for peer_id in peer_ids:
            try:
                async with self._asked(peer_id) as talk:
                    for fragment in range(len(self._outer.fragments)):
                        for theirs, cycle in await self._stamps(talk, fragment):
                            await self._write(
                                self._outer.adopt, fragment, theirs.chunk, cycle, theirs.stamp
                            )
                    return
            except LocoError:
                continue  # the next one may know

    async def _ask_stamps(self, fragment: int, peer_id: PeerId) -> None:
        """Take from a peer whatever it has better than we."""
        try:
            async with self._asked(peer_id) as talk:
                ledger = self._outer.ledgers[fragment]
                for theirs, cycle in await self._stamps(talk, fragment):
                    ours = ledger.stamp(theirs.chunk)
                    if theirs.stamp != ours and not ours.is_ahead_of(theirs.stamp):
                        await self._ask_result(talk, fragment, max(cycle, 0), theirs)
        except LocoError:
            pass  # the stamps of the next cycle show it again
        finally:
            self._asking.discard((fragment, peer_id))

    async def _stamps(self, talk: Conversation, fragment: int) -> list[tuple[ChunkStamp, int]]:
        """Of each chunk as they have it: stamp and cycle. Raises LocoError."""
        await talk.send(GetStamps(self._group, fragment))
        answer, _ = await talk.receive(Stamps)
        chunks = list(range(len(self._outer.fragments[fragment].chunks)))
        named = [stamp.chunk for stamp in answer.stamps]
        if answer.fragment != fragment or named != chunks or len(answer.cycles) != len(chunks):
            raise RemoteProtocolError(f"no stamps of the {len(chunks)} chunks of {fragment}")
        return list(zip(answer.stamps, answer.cycles, strict=True))

    async def _ask_result(
        self, talk: Conversation, fragment: int, cycle: int, theirs: ChunkStamp
    ) -> None:
        """The result that we lack, if it can be applied here; else the chunk, if that is ahead."""
        chunk, ledger = theirs.chunk, self._outer.ledgers[fragment]
        inbound = FragmentInbound(self._group, self._outer, self._work)
        await talk.send(GetResult(self._group, fragment, cycle, chunk))
        result, parts = await inbound.answer(talk)
        if result is not None and (of_chunk := result.chunk(chunk)) is not None:
            verdict = ledger.judge(chunk, cycle, of_chunk.base_stamp, result.outcome(of_chunk))
            if verdict in (Verdict.STEP, Verdict.REDO):
                arrived = Arrived(result, of_chunk, parts[chunk], talk.remote_peer_id, asked=True)
                self._put(fragment, arrived)
                return
        if self._is_better(theirs.stamp, ledger.stamp(chunk)):
            self.heal(fragment, chunk, talk.remote_peer_id)

    def _is_better(self, theirs: Stamp, ours: Stamp) -> bool:
        """Whether a state that another peer has is to take the place of ours."""
        if theirs.is_ahead_of(ours) or ours.is_ahead_of(theirs):
            return theirs.is_ahead_of(ours)
        return self._is_over() and theirs.digest < ours.digest

    async def _fetch_state(self, fragment: int, chunk: int, peer_id: PeerId) -> None:
        began_s = self._since_s[fragment, chunk]
        try:
            async with self._asked(peer_id) as talk:
                await talk.send(GetChunkState(self._group, fragment, chunk))
                room = memoryview(bytearray(8 * self._outer.chunk_values(fragment, chunk)))
                state, _ = await talk.receive(ChunkState, into=room, stall_s=STALL_S)
            if (state.fragment, state.stamp.chunk) != (fragment, chunk):
                raise RemoteProtocolError("the state of another chunk")
            fetched = Fetched(chunk, state.cycle, state.stamp.stamp, room)
            self._put(fragment, fetched)
            self._healed += 1
            self._healed_s += trio.current_time() - began_s
        except LocoError:
            pass  # the stamps of the next cycle show it again
        finally:
            self._since_s.pop((fragment, chunk), None)

    @asynccontextmanager
    async def _asked(self, peer_id: PeerId) -> AsyncIterator[Conversation]:
        """A stream for questions. Raises LocoError, also when the time is up."""
        with trio.move_on_after(QUESTION_S) as scope:
            async with Conversation(await self._network.open_stream(peer_id, FRAGMENT)) as talk:
                yield talk
        if scope.cancelled_caught:
            raise StreamLost(f"{peer_id} took longer than {QUESTION_S:.0f} s to answer")

    def _start(self, function: Callable[..., Awaitable[None]], *args: object) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(function, *args)
