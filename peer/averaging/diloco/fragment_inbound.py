"""What comes on fragment streams, checked before anybody acts on it.

A message is of our group, names a fragment and chunks that there are, and its codes have the size,
the digest and the form that they must have; a contribution is signed by its sender and as long as
it says, a result is signed by its owner. A peer that sends anything else has broken the protocol
(RemoteProtocolError), and the stream ends.
"""

from peer.codec import codes_as_tensor
from peer.codec.leaves import code_digest
from peer.network.conversation import Conversation
from peer.ports import Work
from protocol.errors import RemoteProtocolError
from protocol.limits import MAX_EVIDENCE_BYTES, MAX_PAYLOAD_BYTES
from protocol.membership.group import other_group_sentence
from protocol.plausible import is_length
from protocol.wire.fragment_messages import Doubt, GetOpening, Proof
from protocol.wire.messages import (
    Contribution,
    FragmentSettled,
    GetChunkState,
    GetResult,
    GetStamps,
    Message,
    NoResult,
    Refusal,
    Result,
)

from .contributions import length_of
from .fragment_posts import STALL_S
from .outer_fragments import OuterFragments

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
Parts = dict[int, memoryview]
"""Codes by chunk."""


class OtherGroup(RemoteProtocolError):
    """A message is meant for another group than ours."""


class FragmentInbound:
    """Reads one stream."""

    def __init__(self, group: str, outer: OuterFragments, work: Work) -> None:
        self._group = group
        self._outer = outer
        self._work = work
        self._room = memoryview(b"")

    async def next(self, talk: Conversation) -> tuple[Inbound | Proof, Parts | bytes]:
        """The next message, with its codes by chunk; a proof as it came.

        Raises:
            StreamLost, RemoteProtocolError (OtherGroup)
        """
        message, _ = await talk.receive(
            Contribution,
            Result,
            NoResult,
            FragmentSettled,
            Doubt,
            Proof,
            GetStamps,
            GetResult,
            GetChunkState,
            GetOpening,
            place=self._place,
            max_payload_bytes=MAX_PAYLOAD_BYTES,  # the place says what is right
            stall_s=STALL_S,
        )
        if isinstance(message, Proof):
            return message, bytes(self._taken())
        assert isinstance(message, Inbound)
        if isinstance(message, Contribution | Result):
            sender = talk.remote_peer_id
            return message, await self._work.run(self._checked, message, self._taken(), sender)
        self._check_place(message)
        return message, {}

    async def answer(self, talk: Conversation) -> tuple[Result | None, Parts]:
        """A result that was asked for; None when it was refused."""
        message, _ = await talk.receive(Result, Refusal, place=self._place, stall_s=STALL_S)
        if isinstance(message, Refusal):
            return None, {}
        assert isinstance(message, Result)
        sender = talk.remote_peer_id
        return message, await self._work.run(self._checked, message, self._taken(), sender)

    def _taken(self) -> memoryview:
        """The codes of the message; their receiver alone knows for how long they are needed."""
        room, self._room = self._room, memoryview(b"")
        return room

    # --- checks -----------------------------------------------------------------------------------
    def _place(self, message: Message, num_bytes: int) -> memoryview:
        if isinstance(message, Proof):
            return self._place_of_proof(message, num_bytes)
        assert isinstance(message, Contribution | Result)
        self._check_place(message)
        fragment = message.fragment
        expected = sum(self._outer.chunk_code_bytes(fragment, c) for c in _carried(message))
        if num_bytes != expected:
            raise RemoteProtocolError(f"{num_bytes} bytes of codes, expected {expected}")
        self._room = self._outer.spare.take(num_bytes)
        return self._room

    def _place_of_proof(self, message: Proof, num_bytes: int) -> memoryview:
        if message.group != self._group:
            raise OtherGroup(other_group_sentence(self._group, message.group))
        if num_bytes > MAX_EVIDENCE_BYTES:
            raise RemoteProtocolError(f"a proof of {num_bytes} bytes")
        self._room = memoryview(bytearray(num_bytes))
        return self._room

    def _check_place(self, message: Inbound) -> None:
        """Our group, and a fragment and chunks that there are."""
        if message.group != self._group:
            raise OtherGroup(other_group_sentence(self._group, message.group))
        if message.fragment >= len(self._outer.fragments):
            raise RemoteProtocolError(f"there is no fragment {message.fragment}")
        num_chunks = len(self._outer.fragments[message.fragment].chunks)
        chunks = _named(message)
        if len(set(chunks)) != len(chunks) or any(chunk >= num_chunks for chunk in chunks):
            raise RemoteProtocolError(f"chunks {chunks} of a fragment of {num_chunks}")

    def _checked(self, message: Contribution | Result, codes: memoryview, sender: str) -> Parts:
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

    def _check_lengths(self, message: Contribution, parts: Parts) -> None:
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
