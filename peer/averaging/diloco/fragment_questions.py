"""Questions to other peers about what they hold: stamps, results, and the values of chunks.

What is asked for, and what becomes of the answers, is decided in protocol/diloco/healing.py. Each
question has a stream of its own, but for results, which are asked for behind the stamps that show
them.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from peer.network.conversation import Conversation
from peer.ports import Network, PeerId, Work
from protocol.diloco.fragment_events import (
    AskResult,
    ChunkFetched,
    FetchChunk,
    FetchFailed,
    ResultAnswered,
    StampsAnswered,
)
from protocol.errors import LocoError, RemoteProtocolError, StreamLost
from protocol.wire.messages import ChunkState, GetChunkState, GetResult, GetStamps, Stamps
from protocol.wire.versions import FRAGMENT

from .fragment_inbound import FragmentInbound
from .fragment_posts import STALL_S
from .outer_fragments import OuterFragments

QUESTION_S: Final = 60.0
"""A question and its answer, values of a chunk among them."""


class FragmentQuestions:
    """See the top of the file."""

    def __init__(self, group: str, network: Network, outer: OuterFragments, work: Work) -> None:
        self._group = group
        self._network = network
        self._outer = outer
        self._work = work

    @asynccontextmanager
    async def stream_to(self, peer_id: PeerId) -> AsyncIterator[Conversation]:
        """A stream for questions. Raises LocoError, also when the time is up."""
        with trio.move_on_after(QUESTION_S) as scope:
            async with Conversation(await self._network.open_stream(peer_id, FRAGMENT)) as talk:
                yield talk
        if scope.cancelled_caught:
            raise StreamLost(f"{peer_id} took longer than {QUESTION_S:.0f} s to answer")

    async def stamps(self, talk: Conversation, fragment: int) -> StampsAnswered:
        """Each chunk's state as they have it. Raises LocoError."""
        await talk.send(GetStamps(self._group, fragment))
        answer, _ = await talk.receive(Stamps)
        chunks = list(range(len(self._outer.fragments[fragment].chunks)))
        named = [stamp.chunk for stamp in answer.stamps]
        if answer.fragment != fragment or named != chunks or len(answer.cycles) != len(chunks):
            raise RemoteProtocolError(f"no stamps of the {len(chunks)} chunks of {fragment}")
        states = tuple(zip(answer.stamps, answer.cycles, strict=True))
        return StampsAnswered(fragment, talk.remote_peer_id, states)

    async def result(self, talk: Conversation, asked: AskResult) -> ResultAnswered:
        """The result that led them where they are, if they still have it. Raises LocoError."""
        inbound = FragmentInbound(self._group, self._outer, self._work)
        await talk.send(GetResult(self._group, asked.fragment, asked.cycle, asked.theirs.chunk))
        result, codes = await inbound.answer(talk)
        return ResultAnswered(
            asked.fragment, asked.peer_id, asked.cycle, asked.theirs, result, codes
        )

    async def fetch(self, asked: FetchChunk) -> ChunkFetched | FetchFailed:
        """A chunk as they have it."""
        fragment, chunk = asked.fragment, asked.chunk
        try:
            async with self.stream_to(asked.peer_id) as talk:
                await talk.send(GetChunkState(self._group, fragment, chunk))
                room = memoryview(bytearray(8 * self._outer.chunk_values(fragment, chunk)))
                state, _ = await talk.receive(ChunkState, into=room, stall_s=STALL_S)
        except LocoError:
            return FetchFailed(fragment, chunk)
        if (state.fragment, state.stamp.chunk) != (fragment, chunk):
            return FetchFailed(fragment, chunk)
        return ChunkFetched(fragment, chunk, state.cycle, state.stamp.stamp, room)
