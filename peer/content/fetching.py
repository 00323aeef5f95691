"""Asking one peer for content: run spec, blobs by digest, states, samples of them, and corpora.

Everything fetched is checked here: the spec against run id and founder's signature, blobs and
pieces of a corpus against their digests, the description of a state against what it has to be. The
stream is authenticated, so what is announced on it is its source's own word. How a state is put
together of chunks is said in gathering.py, how a corpus comes piece by piece in pieces.py.

What one source can cost us is bounded by a minimum rate: below it, it is left and another one is
asked. A stall limit does not suffice: a peer that sends a byte now and then never stalls, and would
hold us for days. So within each window of time so many bytes have to come, or all of what was
asked. What the rate has to be follows from what is fetched: it is to be here within MAX_TRANSFER_S.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import trio

from peer.network.conversation import Conversation, StreamStalled
from peer.ports import Network, PeerId
from protocol.content.manifest import DIGEST_BYTES, CorpusManifest, blob_name
from protocol.content.samples import SAMPLE_BYTES, sample_from
from protocol.errors import RemoteProtocolError
from protocol.limits import (
    MAX_AT_ONCE,
    MAX_BLOB_BYTES,
    MAX_CONTROL_PAYLOAD_BYTES,
    MAX_SPEC_BYTES,
    MAX_TRANSFER_S,
    MIN_FETCH_BYTES_PER_S,
    STATE_CHUNK_BYTES,
)
from protocol.run.signed_spec import SignedSpec
from protocol.wire.content_messages import (
    BlobReply,
    GetBlob,
    GetHoldings,
    GetParts,
    GetSample,
    GetSpec,
    GetState,
    Holdings,
    Part,
    SampleReply,
    SpecReply,
    StateReply,
)
from protocol.wire.fields import Message
from protocol.wire.versions import CONTENT

from .state_file import Float32Vector, StateManifest, StateScalars, state_bytes

ANSWER_S: Final = 30.0
"""Time that a source may take for the first byte of an answer."""
STALL_S: Final = 15.0
RATE_WINDOW_S: Final = 60.0
WRITE_BYTES_PER_S: Final = 20e6
"""The slowest disk that a state may be written to, once it has had ANSWER_S twice."""

A = TypeVar("A", bound=Message)


def slowest_rate(total_bytes: int) -> float:
    """The least bytes per second at which so much may come."""
    return max(MIN_FETCH_BYTES_PER_S, total_bytes / MAX_TRANSFER_S)


@contextmanager
def steady(
    talk: Conversation,
    bytes_per_s: float,
    sharers: Callable[[], int] = lambda: 1,
    wait_s: float = 0.0,
) -> Iterator[Callable[[int], None]]:
    """Yields what is to be called as bytes come (`on_progress` of a receive).

    Args:
        sharers: how many send at once, over what may be one line: each owes its part.
        wait_s: for the first window, beside its time.

    Raises:
        StreamStalled: fewer than so many bytes a second came within a window.
    """
    due_bytes, seen_bytes = bytes_per_s * RATE_WINDOW_S, talk.bytes_received
    deadline = trio.current_time() + wait_s + RATE_WINDOW_S
    with trio.CancelScope(deadline=deadline) as scope:

        def moved(_: int) -> None:
            nonlocal seen_bytes
            if talk.bytes_received - seen_bytes >= due_bytes / sharers():
                seen_bytes = talk.bytes_received
                scope.deadline = trio.current_time() + RATE_WINDOW_S

        yield moved
    if scope.cancelled_caught:
        raise StreamStalled(
            f"{talk.remote_peer_id} sent less than {bytes_per_s:.0f} bytes a second"
            f" for {RATE_WINDOW_S:.0f} s"
        )


class BlobSource(Protocol):
    """Somebody who may give blobs: a `Fetcher`."""

    async def blob(self, digest: str) -> bytes:
        """The blob with this digest, verified. Raises StreamLost, Refused, RemoteProtocolError."""


@dataclass(frozen=True, slots=True)
class ExpectedState:
    """What a state has to be, whoever gives it.

    Attributes:
        group: digest of the one whose state it is.
        minimum_step: the nominal step of the oldest state that is of use.
        maximum_step: the highest step that anybody can be at; None where nobody has told.
        layout_digest: None where any will do.
    """

    group: str
    minimum_step: int = 0
    maximum_step: int | None = None
    layout_digest: str | None = None

    def check(self, reply: StateReply) -> None:
        """Raises RemoteProtocolError: what is announced cannot be it."""
        if reply.step < self.minimum_step:
            sentence = f"{self.minimum_step} or later was asked for"
        elif self.maximum_step is not None and reply.step > self.maximum_step:
            sentence = f"nobody can be beyond {self.maximum_step}"
        elif self.layout_digest not in (None, reply.layout_digest):
            raise RemoteProtocolError(f"a state of layout {reply.layout_digest}, which is not ours")
        else:
            return
        raise RemoteProtocolError(f"a state of step {reply.step}, where {sentence}")


class Fetcher:
    """Asks one peer for content. One stream, request after request.

    All that it does raises StreamLost, Refused, or RemoteProtocolError: the peer could not help.
    """

    def __init__(self, talk: Conversation) -> None:
        self.talk = talk

    @property
    def remote_peer_id(self) -> PeerId:
        """The peer that we ask."""
        return self.talk.remote_peer_id

    async def spec(self, run_id: str | None) -> SignedSpec:
        """The run spec, verified; of this run, if one is named."""
        reply, spec_bytes = await self._ask(GetSpec(), SpecReply, MAX_SPEC_BYTES)
        signed = SignedSpec(spec_bytes, reply.founder_public_key, reply.signature)
        signed.verify(run_id)
        return signed

    async def blob(self, digest: str) -> bytes:
        """The blob with this digest, verified."""
        _, data = await self._ask(GetBlob(digest), BlobReply, MAX_BLOB_BYTES)
        if blob_name(data) != digest:
            raise RemoteProtocolError(f"the blob {digest} does not match its digest")
        return data

    async def description(self, expected: ExpectedState, size: int) -> StateManifest:
        """What the peer's present state is made of: its source stands by it from then on.

        Args:
            size: values of each vector, padding included.
        """
        write_s = 2 * ANSWER_S + state_bytes(size) / WRITE_BYTES_PER_S
        request = GetState(expected.group, expected.minimum_step)
        reply, digests = await self._ask(
            request, StateReply, MAX_CONTROL_PAYLOAD_BYTES, timeout_s=write_s
        )
        expected.check(reply)
        return _manifest(expected.group, reply, digests)

    async def sample(self, group: str, seed: bytes) -> Float32Vector:
        """The peer's weights at the places that follow from the seed."""
        _, data = await self._ask(GetSample(group, seed), SampleReply, SAMPLE_BYTES)
        return sample_from(data)

    async def holdings(
        self, manifest: CorpusManifest, known: int
    ) -> tuple[int, npt.NDArray[np.bool_] | None]:
        """The version of which pieces the peer has, and which; None where it is the known one."""
        total = manifest.num_pieces
        reply, bits = await self._ask(GetHoldings(manifest.name, known), Holdings, -(-total // 8))
        if reply.version == known:
            return known, None
        if reply.whole:
            return reply.version, np.ones(total, bool)
        if len(bits) != -(-total // 8):
            raise RemoteProtocolError(f"{len(bits)} bytes of bits for {total} pieces")
        packed = np.frombuffer(bits, np.uint8)
        return reply.version, np.unpackbits(packed, count=total, bitorder="little").astype(bool)

    async def piece(self, manifest: CorpusManifest, piece: int) -> bytes:
        """A piece of a corpus, checked.

        Its source is held to its part of a line on which as many are on their way as may be: a
        piece that is cut off has come for nothing. A source slower than others is not waited for
        long (protocol/content/requests.py).
        """
        size = manifest.piece_bytes(piece)
        with steady(self.talk, slowest_rate(size), lambda: MAX_AT_ONCE) as moved:
            await self.request(manifest.name, (piece,))
            data = await self.part(piece, size, moved)
        if not manifest.is_piece(piece, data):
            raise RemoteProtocolError(f"what came is not piece {piece} of the corpus")
        return data

    async def request(self, content: str, parts: Sequence[int]) -> None:
        """Ask for parts, which then come in this order."""
        await self.talk.send(GetParts(content, tuple(parts)))

    async def part(self, index: int, max_bytes: int, moved: Callable[[int], None]) -> bytes:
        """The next part of those that were asked for, not verified.

        Args:
            moved: told of bytes as they come (`steady`).
        """
        part, data = await self.talk.receive(
            Part,
            timeout_s=ANSWER_S,
            stall_s=STALL_S,
            max_payload_bytes=max_bytes,
            on_progress=moved,
        )
        if part.index != index:
            raise RemoteProtocolError(f"part {part.index} came where {index} was due")
        return data

    async def _ask(
        self, request: Message, answer: type[A], max_bytes: int, timeout_s: float = ANSWER_S
    ) -> tuple[A, bytes]:
        """The answer to one request, at the minimum rate from its first byte on."""
        await self.talk.send(request)
        with steady(self.talk, slowest_rate(max_bytes), wait_s=timeout_s) as moved:
            return await self.talk.receive(
                answer,
                timeout_s=timeout_s,
                stall_s=STALL_S,
                max_payload_bytes=max_bytes,
                on_progress=moved,
            )


@asynccontextmanager
async def fetch_from(network: Network, peer_id: PeerId) -> AsyncIterator[Fetcher]:
    """Open a stream for requests. Raises StreamLost."""
    stream = await network.open_stream(peer_id, CONTENT)
    try:
        yield Fetcher(Conversation(stream))
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
            await stream.aclose()


def _manifest(group: str, reply: StateReply, digests: bytes) -> StateManifest:
    if reply.chunk_bytes != STATE_CHUNK_BYTES or len(digests) % DIGEST_BYTES:
        raise RemoteProtocolError("a state cut in another way than ours")
    scalars = StateScalars(
        group=group,
        round=reply.round - 1,
        step=reply.step,
        layout_digest=reply.layout_digest,
        epoch=reply.epoch,
        position=reply.position,
        tokens=reply.tokens,
        gradient_norm=reply.gradient_norm,
    )
    starts = range(0, len(digests), DIGEST_BYTES)
    cut = tuple(digests[i : i + DIGEST_BYTES] for i in starts)
    return StateManifest(bytes.fromhex(reply.root), cut, reply.total_bytes, scalars)
