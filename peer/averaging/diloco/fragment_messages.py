"""Messages about fragments: an outbox, questions and answers, and the checks of what comes.

One lasting stream leads to each other peer, for all that we send it, in order: it costs no round
trip to open and keeps the window that it has grown. Sending never waits: a peer that takes nothing
must not hold up the others. A message to a peer whose queue is full, or whose stream breaks while
it is sent, is lost; the cycle's deadline and the stamps of the next one deal with that, as with
every other loss.

All that comes is checked before anybody acts on it. A message is of our group, names a fragment and
chunks that there are, and its codes have the right size, digest and form; a contribution is signed
by its sender and as long as it says, a result is signed by its owner. A peer that sends anything
else has broken the protocol (RemoteProtocolError), and the stream ends.

Each question has a stream of its own, except for results, which are asked for behind the stamps
that show them. protocol/diloco/healing.py decides what is asked, and what becomes of the answers.
"""

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, get_args

import trio
from msgspec.structs import replace

from peer.codec import Codec, code_digest, codes_as_tensor, root_mean_square
from peer.network.conversation import Conversation, Payload
from peer.runtime import Network, PeerId, Work
from protocol.address.peer_id import Sign
from protocol.diloco.commands import Codes, Contribute
from protocol.errors import LocoError, RemoteProtocolError, StreamLost
from protocol.limits import MAX_CONTRIBUTION_WEIGHT, MAX_EVIDENCE_BYTES, MAX_PAYLOAD_BYTES, READERS
from protocol.membership.group import other_group_sentence
from protocol.plausible import is_length, told_length
from protocol.wire.fields import Message
from protocol.wire.fragment_messages import (
    ChunkStateReply,
    Contribution,
    Doubt,
    FragmentSettled,
    GetChunkState,
    GetOpening,
    GetResult,
    GetStamps,
    NoResult,
    Proof,
    Result,
    Stamps,
    signed_contribution,
)
from protocol.wire.messages import Refusal
from protocol.wire.versions import FRAGMENT

from .outer_fragments import OuterFragments

# --- outbox ---------------------------------------------------------------------------------------
FRAGMENT_STALL_S: Final = 30.0
"""A peer that takes no byte for so long has lost its stream."""


_Outgoing = tuple[Message, Payload]


@dataclass(frozen=True, slots=True)
class _PeerQueue:
    put: trio.MemorySendChannel[_Outgoing]
    scope: trio.CancelScope


class Outbox:
    """One outgoing stream to each peer, with a bounded queue.

    Args:
        start: a task, which lasts until the exchange ends.
    """

    def __init__(self, network: Network, start: Callable[..., None]) -> None:
        self._network = network
        self._start = start
        self._queues: dict[PeerId, _PeerQueue] = {}
        self.posted = self.lost = 0

    def send_soon(self, peer_id: PeerId, message: Message, payload: Payload = b"") -> None:
        """Send this to a peer, some time soon; the payload must lie still until then."""
        queue = self._queues.get(peer_id)
        if queue is None:
            put, take = trio.open_memory_channel[_Outgoing](256)
            queue = self._queues[peer_id] = _PeerQueue(put, trio.CancelScope())
            self._start(self._carry, peer_id, queue, take)
        self.posted += 1
        try:
            queue.put.send_nowait((message, payload))
        except trio.WouldBlock:
            self.lost += 1

    def keep_only(self, peer_ids: Collection[PeerId]) -> None:
        for peer_id in [peer_id for peer_id in self._queues if peer_id not in peer_ids]:
            self._queues.pop(peer_id).scope.cancel()

    async def _carry(
        self,
        peer_id: PeerId,
        queue: _PeerQueue,
        take: trio.MemoryReceiveChannel[_Outgoing],
    ) -> None:
        with queue.scope:
            async for first in take:  # and of each further stream, after one that broke
                try:
                    async with await self._open(peer_id) as talk:
                        await talk.send(*first, stall_s=FRAGMENT_STALL_S)
                        del first  # lent memory, which the stream would keep as long as it lasts
                        async for message, payload in take:
                            await talk.send(message, payload, stall_s=FRAGMENT_STALL_S)
                except LocoError:
                    self.lost += 1

    async def _open(self, peer_id: PeerId) -> Conversation:
        with trio.move_on_after(FRAGMENT_STALL_S):
            return Conversation(await self._network.open_stream(peer_id, FRAGMENT))
        raise LocoError(f"{peer_id} did not answer within {FRAGMENT_STALL_S:.0f} s")


# --- our own contributions ------------------------------------------------------------------------
NOT_SIGNED = bytes(64)


def length_of(codec: Codec, codes: memoryview, num_values: int) -> float:
    """The length of a contribution to a chunk, as it tells it; codes are valid ones."""
    return told_length(root_mean_square(codes, codec, num_values))


def contribution_of(
    order: Contribute, group: str, outer: OuterFragments, sign: Sign
) -> tuple[Contribution, memoryview, Codes]:
    """Our contribution to an owner, perhaps us; its codes, together and by chunk. Blocking work."""
    sent, chunks = order.sent, [stamp.chunk for stamp in order.stamps]
    fragment = sent.fragment
    parts = outer.split_codes(fragment, range(len(outer.fragments[fragment].chunks)), sent.codes)
    codes = outer.spare.take(sum(len(parts[chunk]) for chunk in chunks))
    own = outer.split_codes(fragment, chunks, codes)
    for chunk, part in own.items():
        part[:] = parts[chunk]
    unsigned = Contribution(
        group=group,
        fragment=fragment,
        cycle=sent.cycle,
        weight=MAX_CONTRIBUTION_WEIGHT if order.stamps else 0,
        steps=sent.steps,
        tokens=sent.tokens,
        stamps=order.stamps,
        digests=(),
        lengths=(),
        signature=NOT_SIGNED,
    )
    return signed_with(unsigned, own, outer, sign), codes, own


def signed_with(
    unsigned: Contribution, parts: Codes, outer: OuterFragments, sign: Sign
) -> Contribution:
    codec, chunks = outer.codec, [stamp.chunk for stamp in unsigned.stamps]
    sizes = [outer.chunk_values(unsigned.fragment, chunk) for chunk in chunks]
    told = replace(
        unsigned,
        digests=tuple(code_digest(codec, parts[chunk]) for chunk in chunks),
        lengths=tuple(
            length_of(codec, parts[chunk], size) for chunk, size in zip(chunks, sizes, strict=True)
        ),
    )
    return signed_contribution(told, sign)


# --- fragment inbound -----------------------------------------------------------------------------
Inbound = (
    Contribution
    | Result
    | NoResult
    | FragmentSettled
    | Doubt
    | GetStamps
    | GetResult
    | GetChunkState
    | GetOpening
)


class OtherGroup(RemoteProtocolError):
    """A message for another group than ours."""


class FragmentInbound:
    def __init__(self, group: str, outer: OuterFragments, work: Work) -> None:
        self._group = group
        self._outer = outer
        self._work = work
        self._room = memoryview(b"")

    async def next(self, talk: Conversation) -> tuple[Inbound | Proof, Codes | bytes]:
        """The next message, with its codes by chunk; a proof as it came.

        Raises StreamLost, RemoteProtocolError (OtherGroup).
        """
        message, _ = await talk.receive(
            *get_args(Inbound),
            Proof,
            place=self._place,
            max_payload_bytes=MAX_PAYLOAD_BYTES,  # the place says what is right
            stall_s=FRAGMENT_STALL_S,
        )
        if isinstance(message, Proof):
            return message, bytes(self._taken())
        assert isinstance(message, Inbound)
        if isinstance(message, Contribution | Result):
            return message, await self._checked_codes(message, talk)
        self._check_place(message)
        return message, {}

    async def answer(self, talk: Conversation) -> tuple[Result | None, Codes]:
        """A result that was asked for; None when it was refused."""
        message, _ = await talk.receive(
            Result, Refusal, place=self._place, stall_s=FRAGMENT_STALL_S
        )
        if isinstance(message, Refusal):
            return None, {}
        assert isinstance(message, Result)
        return message, await self._checked_codes(message, talk)

    async def _checked_codes(self, message: Contribution | Result, talk: Conversation) -> Codes:
        return await self._work.run(self._checked, message, self._taken(), talk.remote_peer_id)

    def _taken(self) -> memoryview:
        """The receiver alone knows for how long the codes are needed."""
        room, self._room = self._room, memoryview(b"")
        return room

    # --- checks -----------------------------------------------------------------------------------
    def _place(self, message: Message, num_bytes: int) -> memoryview:
        assert isinstance(message, Contribution | Result | Proof)
        self._check_place(message)
        if isinstance(message, Proof):
            if num_bytes > MAX_EVIDENCE_BYTES:
                raise RemoteProtocolError(f"a proof of {num_bytes} bytes")
            self._room = memoryview(bytearray(num_bytes))
            return self._room
        fragment = message.fragment
        expected = sum(self._outer.chunk_code_bytes(fragment, c) for c in _carried(message))
        if num_bytes != expected:
            raise RemoteProtocolError(f"{num_bytes} bytes of codes, expected {expected}")
        self._room = self._outer.spare.take(num_bytes)
        return self._room

    def _check_place(self, message: Inbound | Proof) -> None:
        """Check group, fragment and chunks of a message; a proof names no fragment."""
        if message.group != self._group:
            raise OtherGroup(other_group_sentence(self._group, message.group))
        if isinstance(message, Proof):
            return
        if message.fragment >= len(self._outer.fragments):
            raise RemoteProtocolError(f"there is no fragment {message.fragment}")
        num_chunks = len(self._outer.fragments[message.fragment].chunks)
        chunks = _named(message)
        if len(set(chunks)) != len(chunks) or any(chunk >= num_chunks for chunk in chunks):
            raise RemoteProtocolError(f"chunks {chunks} of a fragment of {num_chunks}")

    def _checked(self, message: Contribution | Result, codes: memoryview, sender: str) -> Codes:
        codec = self._outer.codec
        parts = self._outer.split_codes(message.fragment, _carried(message), codes)
        if isinstance(message, Contribution):
            if not message.is_genuine(sender):
                raise RemoteProtocolError("a contribution that its sender has not signed")
            digests = dict(zip(parts, message.digests, strict=True))
        elif not message.is_genuine():
            raise RemoteProtocolError("a result that its owner has not signed")
        else:
            digests = {chunk.chunk: chunk.digest for chunk in message.chunks}
        if any(code_digest(codec, part) != digests[chunk] for chunk, part in parts.items()):
            raise RemoteProtocolError("codes that do not fit their digest")
        if not all(codec.validate(codes_as_tensor(part)) for part in parts.values()):
            raise RemoteProtocolError("codes that are malformed, or not finite")
        if isinstance(message, Contribution):
            self._check_lengths(message, parts)
        return parts

    def _check_lengths(self, message: Contribution, parts: Codes) -> None:
        for told, (chunk, part) in zip(message.lengths, parts.items(), strict=True):
            num_values = self._outer.chunk_values(message.fragment, chunk)
            if not is_length(told, length_of(self._outer.codec, part, num_values)):
                raise RemoteProtocolError("a contribution that is not as long as it says")


def _carried(message: Contribution | Result) -> tuple[int, ...]:
    if isinstance(message, Contribution):
        return tuple(stamp.chunk for stamp in message.stamps)
    return message.carried


def _named(message: Inbound) -> tuple[int, ...]:
    match message:
        case Contribution():
            return _carried(message)
        case Result():
            known = tuple(chunk.chunk for chunk in message.chunks)
            if not set(message.carried) <= set(known):
                raise RemoteProtocolError("codes of chunks of which the result says nothing")
            return known
        case GetResult(chunk=chunk) | GetChunkState(chunk=chunk) | GetOpening(chunk=chunk):
            return (chunk,)
        case _:
            return ()


# --- fragment questions ---------------------------------------------------------------------------
class FragmentQuestions:
    """Asks other peers, and checks what they answer."""

    def __init__(self, group: str, network: Network, outer: OuterFragments, work: Work) -> None:
        self._group = group
        self._network = network
        self._outer = outer
        self._work = work
        self._turns: dict[PeerId, trio.CapacityLimiter] = {}

    @asynccontextmanager
    async def _turn(self, peer_id: PeerId) -> AsyncIterator[None]:
        """Wait for one of the places for questions to this peer."""
        turns = self._turns.setdefault(peer_id, trio.CapacityLimiter(READERS.per_peer))
        try:
            async with turns:
                yield
        finally:
            if not turns.borrowed_tokens:
                self._turns.pop(peer_id, None)

    @asynccontextmanager
    async def stream_to(self, peer_id: PeerId) -> AsyncIterator[Conversation]:
        """Raises LocoError, also when the time is up."""
        with trio.move_on_after(2 * FRAGMENT_STALL_S) as scope:  # a question, and its answer
            async with Conversation(await self._network.open_stream(peer_id, FRAGMENT)) as talk:
                yield talk
        if scope.cancelled_caught:
            raise StreamLost(f"{peer_id} took longer than {2 * FRAGMENT_STALL_S:.0f} s to answer")

    async def stamps(self, talk: Conversation, fragment: int) -> Stamps:
        """Raises LocoError."""
        await talk.send(GetStamps(self._group, fragment))
        answer, _ = await talk.receive(Stamps)
        chunks = list(range(len(self._outer.fragments[fragment].chunks)))
        named = [stamp.chunk for stamp in answer.stamps]
        if answer.fragment != fragment or named != chunks or len(answer.cycles) != len(chunks):
            raise RemoteProtocolError(f"no stamps of the {len(chunks)} chunks of {fragment}")
        return answer

    async def result(self, talk: Conversation, asked: GetResult) -> tuple[Result | None, Codes]:
        """A result of theirs; None if they no longer have it. Raises LocoError."""
        async with self._turn(talk.remote_peer_id):
            await talk.send(asked)
            return await FragmentInbound(self._group, self._outer, self._work).answer(talk)

    async def fetch(self, peer_id: PeerId, asked: GetChunkState) -> tuple[ChunkStateReply, Codes]:
        """A chunk as they have it. Raises LocoError."""
        fragment, chunk = asked.fragment, asked.chunk
        async with self._turn(peer_id), self.stream_to(peer_id) as talk:
            await talk.send(asked)
            room = memoryview(bytearray(8 * self._outer.chunk_values(fragment, chunk)))
            state, _ = await talk.receive(ChunkStateReply, into=room, stall_s=FRAGMENT_STALL_S)
        if (state.fragment, state.stamp.chunk) != (fragment, chunk):
            raise RemoteProtocolError("another chunk than was asked for")
        return state, {chunk: room}
