"""Fetching what a joiner needs from one peer: run spec, blobs by digest, the outer state.

Everything fetched is checked here: the spec against run id and founder's signature, blobs against
their digest, the state against the Merkle root that its source announced, and against where the
others are. The stream is authenticated, so what is announced on it is its source's own word.

What one source can cost a joiner is bounded: below a minimum rate (steady.py) it is left. How a
state is put together of chunks is said in gathering.py.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import blake3
import trio

from peer.network.conversation import Conversation, StreamStalled
from peer.ports import Network, PeerId
from protocol.errors import RemoteProtocolError
from protocol.limits import MAX_BLOB_BYTES, MAX_SPEC_BYTES, STATE_CHUNK_BYTES
from protocol.run.signed_spec import SignedSpec
from protocol.state_sample import SAMPLE_BYTES
from protocol.wire.state_messages import (
    BlobReply,
    Chunk,
    GetBlob,
    GetChunks,
    GetSample,
    GetSpec,
    GetState,
    SampleReply,
    SpecReply,
    StateReply,
)
from protocol.wire.versions import STATE

from .sample import sample_from
from .state_file import Float32Vector, StateManifest, StateScalars, state_bytes
from .steady import RATE_WINDOW_S, slowest_rate, steady

ANSWER_S: Final = 30.0
"""Time that a source may take for the first byte of an answer."""
STALL_S: Final = 15.0
WRITE_S: Final = 60.0
"""Time that a source may take to write a small state."""
WRITE_BYTES_PER_S: Final = 20e6
"""The slowest disk that a larger one may be written to."""


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
    """Asks one peer for what a joiner needs. One stream, request after request."""

    def __init__(self, talk: Conversation) -> None:
        self._talk = talk

    @property
    def talk(self) -> Conversation:
        """The stream."""
        return self._talk

    @property
    def remote_peer_id(self) -> PeerId:
        """The peer that we ask."""
        return self._talk.remote_peer_id

    async def spec(self, run_id: str | None) -> SignedSpec:
        """The run spec, verified; of this run, if one is named.

        Raises:
            StreamLost, Refused, RemoteProtocolError
        """
        with steady(self._talk, slowest_rate(MAX_SPEC_BYTES)):
            await self._talk.send(GetSpec())
            reply, spec_bytes = await self._talk.receive(
                SpecReply, timeout_s=ANSWER_S, stall_s=STALL_S, max_payload_bytes=MAX_SPEC_BYTES
            )
        signed = SignedSpec(spec_bytes, reply.founder_public_key, reply.signature)
        signed.verify(run_id)
        return signed

    async def blob(self, digest: str) -> bytes:
        """The blob with this digest, verified.

        Raises:
            StreamLost, Refused, RemoteProtocolError
        """
        with steady(self._talk, slowest_rate(MAX_BLOB_BYTES)) as moved:
            await self._talk.send(GetBlob(digest))
            _, data = await self._talk.receive(
                BlobReply,
                timeout_s=ANSWER_S,
                stall_s=STALL_S,
                max_payload_bytes=MAX_BLOB_BYTES,
                on_progress=moved,
            )
        if blake3.blake3(data).hexdigest(length=16) != digest:
            raise RemoteProtocolError(f"the blob {digest} does not match its digest")
        return data

    async def description(self, expected: ExpectedState, size: int) -> StateManifest:
        """What the peer's present state is made of: its source stands by it from then on.

        Args:
            size: values of each vector, padding included.

        Raises:
            StreamLost, Refused, RemoteProtocolError
        """
        group = expected.group
        await self._talk.send(GetState(group, expected.minimum_step))
        write_s = WRITE_S + state_bytes(size) / WRITE_BYTES_PER_S
        with trio.move_on_after(write_s + RATE_WINDOW_S) as scope:
            reply, digests = await self._talk.receive(
                StateReply, timeout_s=write_s, stall_s=STALL_S
            )
        if scope.cancelled_caught:
            raise StreamStalled(f"{self.remote_peer_id} was too slow to describe its state")
        expected.check(reply)
        return _manifest(group, reply, digests)

    async def chunks(
        self,
        root: str,
        wanted: range,
        take: Callable[[int, bytes], None],
        moved: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Fetch chunks of the state that the peer has described by this root.

        Args:
            wanted: one after another.
            take: is given each as it comes, not verified.
            moved: told of bytes as they come (steady.py).

        Raises:
            StreamLost, Refused, RemoteProtocolError
        """
        await self._talk.send(GetChunks(root, wanted.start, len(wanted)))
        for index in wanted:
            chunk, data = await self._talk.receive(
                Chunk,
                timeout_s=ANSWER_S,
                stall_s=STALL_S,
                max_payload_bytes=STATE_CHUNK_BYTES,
                on_progress=moved,
            )
            if chunk.index != index:
                raise RemoteProtocolError(f"chunk {chunk.index} came where {index} was due")
            take(index, data)

    async def sample(self, group: str, seed: bytes) -> Float32Vector:
        """The peer's weights at the places that follow from the seed.

        Raises:
            StreamLost, Refused, RemoteProtocolError
        """
        await self._talk.send(GetSample(group, seed))
        _, data = await self._talk.receive(
            SampleReply, timeout_s=ANSWER_S, stall_s=STALL_S, max_payload_bytes=SAMPLE_BYTES
        )
        return sample_from(data)


@asynccontextmanager
async def fetch_from(network: Network, peer_id: PeerId) -> AsyncIterator[Fetcher]:
    """Open a stream for requests. Raises StreamLost."""
    stream = await network.open_stream(peer_id, STATE)
    try:
        yield Fetcher(Conversation(stream))
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
            await stream.aclose()


def _manifest(group: str, reply: StateReply, digests: bytes) -> StateManifest:
    if reply.chunk_bytes != STATE_CHUNK_BYTES or len(digests) % 32:
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
    cut = tuple(digests[i : i + 32] for i in range(0, len(digests), 32))
    return StateManifest(bytes.fromhex(reply.root), cut, reply.total_bytes, scalars)
