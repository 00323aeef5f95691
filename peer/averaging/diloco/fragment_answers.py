"""What a peer answers when others ask for its fragments: stamps, results, the state of a chunk."""

import trio

from peer.network.conversation import Conversation
from peer.ports import Work
from protocol.diloco.fragment_core import FragmentCore
from protocol.outcomes import RefusalReason
from protocol.wire.fragment_messages import ChunkStamp
from protocol.wire.messages import ChunkState, GetChunkState, GetResult, GetStamps, Stamps

from .fragment_posts import STALL_S
from .outer_fragments import OuterFragments

Question = GetStamps | GetResult | GetChunkState


class FragmentAnswers:
    """Answers to the questions of others.

    Args:
        core: knows stamps and results.
        lock: held while the outer state moves or is read as a whole.
    """

    def __init__(
        self,
        outer: OuterFragments,
        core: FragmentCore,
        work: Work,
        lock: trio.Lock,
    ) -> None:
        self._outer = outer
        self._core = core
        self._work = work
        self._lock = lock

    async def answer(self, talk: Conversation, question: Question) -> None:
        """Send what was asked for, or refuse."""
        match question:
            case GetStamps(fragment=fragment):
                await talk.send(self._stamps(fragment))
            case GetResult():
                await self._send_result(talk, question)
            case GetChunkState(fragment=fragment, chunk=chunk):
                state, values = await self._read(fragment, chunk)
                await talk.send(state, values, stall_s=STALL_S)

    def _stamps(self, fragment: int) -> Stamps:
        ledger = self._core.ledger(fragment)
        chunks = range(len(ledger.stamps))
        return Stamps(
            fragment,
            tuple(ChunkStamp.of(chunk, ledger.stamp(chunk)) for chunk in chunks),
            tuple(ledger.cycle(chunk) for chunk in chunks),
        )

    async def _send_result(self, talk: Conversation, asked: GetResult) -> None:
        kept = self._core.result_of(asked.fragment, asked.cycle, asked.chunk)
        if kept is None:
            await talk.refuse(RefusalReason.UNAVAILABLE, "I hold no such result")
        else:
            await talk.send(*kept, stall_s=STALL_S)

    async def _read(self, fragment: int, chunk: int) -> tuple[ChunkState, bytes]:
        async with self._lock:
            ledger = self._core.ledger(fragment)
            stamp = ChunkStamp.of(chunk, ledger.stamp(chunk))
            state = ChunkState(fragment, ledger.cycle(chunk), stamp)
            return state, await self._work.run(self._outer.read, fragment, chunk)
