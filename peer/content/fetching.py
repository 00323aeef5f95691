"""Asking peers for content: run spec, blobs by digest, states, samples of them, and corpora.

Everything is checked here: the spec against run id and founder's signature, blobs and pieces
(pieces.py) against their digests, the description of a state against what is expected. The stream
is authenticated, so an announcement on it is its source's own word.

A source that sends less than a minimum rate is left for another one. A stall limit does not
suffice: a byte now and then never stalls, and would hold us for days. The rate follows from what is
fetched: it has to be here within MAX_TRANSFER_S.

A state comes from one source or several at once (protocol/content/state_plan.py). What a failed
source owes is asked of the others. A chunk of zeros is known by its digest and not asked for:
without outer momentum that is half of a state.
"""

import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import trio
from trio.lowlevel import ParkingLot

from peer.network.conversation import Conversation, StreamStalled
from peer.runtime import Network, PeerId
from protocol import limits
from protocol.content.manifest import DIGEST_BYTES, CorpusManifest, blob_name, digest_of
from protocol.content.samples import SAMPLE_BYTES, Float32Vector, sample_from
from protocol.content.scheduler import Request
from protocol.content.state_plan import OWN, StatePlan
from protocol.errors import LocoError, RemoteProtocolError
from protocol.run.signed_spec import SignedSpec
from protocol.wire import content_messages
from protocol.wire.fields import Message
from protocol.wire.versions import CONTENT

from . import state_file

CONTENT_ANSWER_S: Final = 30.0
CONTENT_STALL_S: Final = 15.0
"""Longest silence of the other end where a message, or the rest of one, is due."""
RATE_WINDOW_S: Final = 60.0
WRITE_BYTES_PER_S: Final = 20e6
"""The slowest disk that a state may be written to, once it has had CONTENT_ANSWER_S twice."""

A = TypeVar("A", bound=Message)


def slowest_rate(total_bytes: int) -> float:
    return max(limits.MIN_FETCH_BYTES_PER_S, total_bytes / limits.MAX_TRANSFER_S)


@contextmanager
def steady(
    talk: Conversation,
    bytes_per_s: float,
    sharers: Callable[[], int] = lambda: 1,
    wait_s: float = 0.0,
) -> Iterator[Callable[[int], None]]:
    """Demand a minimum rate of what is received within. Raises StreamStalled.

    Args:
        sharers: how many send at once, over what may be one line: each owes its part.
        wait_s: added to the first window.
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
    async def blob(self, digest: str) -> bytes:
        """The blob with this digest, verified. Raises StreamLost, Refused, RemoteProtocolError."""


@dataclass(frozen=True, slots=True)
class ExpectedState:
    """Demands on a state, whoever gives it.

    Attributes:
        minimum_step, maximum_step: the oldest nominal step that is of use, and the highest that
            anybody can be at.
    """

    group: str
    minimum_step: int = 0
    maximum_step: int | None = None
    layout_digest: str | None = None

    def check(self, told: content_messages.StateScalars) -> None:
        """Raises RemoteProtocolError."""
        if told.group != self.group:
            raise RemoteProtocolError(f"a state of group {told.group}, which is not ours")
        if self.layout_digest not in (None, told.layout_digest):
            raise RemoteProtocolError(f"a state of layout {told.layout_digest}, which is not ours")
        if told.round > limits.MAX_ITERATION:
            raise RemoteProtocolError(f"a state of round {told.round}, which nobody can be in")
        if told.step < self.minimum_step:
            sentence = f"{self.minimum_step} or later was asked for"
        elif self.maximum_step is not None and told.step > self.maximum_step:
            sentence = f"nobody can be beyond {self.maximum_step}"
        else:
            return
        raise RemoteProtocolError(f"a state of step {told.step}, where {sentence}")


class ContentClient:
    """Asks one peer for content, request after request on one stream.

    Its methods raise StreamLost, Refused, or RemoteProtocolError: the peer could not help.
    """

    def __init__(self, talk: Conversation) -> None:
        self.talk = talk

    @property
    def remote_peer_id(self) -> PeerId:
        return self.talk.remote_peer_id

    async def spec(self, run_id: str | None) -> SignedSpec:
        reply, spec_bytes = await self._ask(
            content_messages.GetSpec(), content_messages.SpecReply, limits.MAX_SPEC_BYTES
        )
        signed = SignedSpec(spec_bytes, reply.founder_public_key, reply.signature)
        signed.verify(run_id)
        return signed

    async def blob(self, digest: str) -> bytes:
        _, data = await self._ask(
            content_messages.GetBlob(digest), content_messages.BlobReply, limits.MAX_BLOB_BYTES
        )
        if blob_name(data) != digest:
            raise RemoteProtocolError(f"the blob {digest} does not match its digest")
        return data

    async def description(self, expected: ExpectedState, size: int) -> state_file.StateManifest:
        """The chunks of the peer's present state, which is two vectors of `size` values."""
        write_s = 2 * CONTENT_ANSWER_S + state_file.state_bytes(size) / WRITE_BYTES_PER_S
        request = content_messages.GetState(expected.group, expected.minimum_step)
        told, digests = await self._ask(
            request,
            content_messages.StateScalars,
            limits.MAX_CONTROL_PAYLOAD_BYTES,
            timeout_s=write_s,
        )
        expected.check(told)
        starts = range(0, len(digests), DIGEST_BYTES)
        described = state_file.StateManifest(
            tuple(digests[i : i + DIGEST_BYTES] for i in starts), told
        )
        described.check(size)
        return described

    async def sample(self, group: str, seed: bytes) -> Float32Vector:
        _, data = await self._ask(
            content_messages.GetSample(group, seed), content_messages.SampleReply, SAMPLE_BYTES
        )
        return sample_from(data)

    async def holdings(
        self, manifest: CorpusManifest, known: int
    ) -> tuple[int, npt.NDArray[np.bool_] | None]:
        """The version of the peer's set of pieces, and the set if that version is not `known`."""
        total = manifest.num_pieces
        reply, bits = await self._ask(
            content_messages.GetHoldings(manifest.name, known),
            content_messages.Holdings,
            -(-total // 8),
        )
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

        Its rate is that of a line on which MAX_ASKED pieces are on their way: one cut off is lost.
        """
        size = manifest.piece_bytes(piece)
        with steady(self.talk, slowest_rate(size), lambda: limits.MAX_ASKED) as moved:
            await self.request(manifest.name, (piece,))
            data = await self.part(piece, size, moved)
        if not manifest.is_piece(piece, data):
            raise RemoteProtocolError(f"what came is not piece {piece} of the corpus")
        return data

    async def request(self, content: str, parts: Sequence[int]) -> None:
        """Ask for parts; they come in this order (`part`)."""
        await self.talk.send(content_messages.GetParts(content, tuple(parts)))

    async def part(self, index: int, max_bytes: int, moved: Callable[[int], None]) -> bytes:
        """The next part that was asked for, not verified."""
        part, data = await self.talk.receive(
            content_messages.Part,
            timeout_s=CONTENT_ANSWER_S,
            stall_s=CONTENT_STALL_S,
            max_payload_bytes=max_bytes,
            on_progress=moved,
        )
        if part.index != index:
            raise RemoteProtocolError(f"part {part.index} came where {index} was due")
        return data

    async def _ask(
        self, request: Message, answer: type[A], max_bytes: int, timeout_s: float = CONTENT_ANSWER_S
    ) -> tuple[A, bytes]:
        """The answer to one request, at the minimum rate from its first byte on."""
        await self.talk.send(request)
        with steady(self.talk, slowest_rate(max_bytes), wait_s=timeout_s) as moved:
            return await self.talk.receive(
                answer,
                timeout_s=timeout_s,
                stall_s=CONTENT_STALL_S,
                max_payload_bytes=max_bytes,
                on_progress=moved,
            )


@asynccontextmanager
async def fetch_from(network: Network, peer_id: PeerId) -> AsyncIterator[ContentClient]:
    """Open a stream for requests. Raises StreamLost."""
    async with Conversation(await network.open_stream(peer_id, CONTENT)) as talk:
        yield ContentClient(talk)


# --- a state of several sources -------------------------------------------------------------------
class StateDownload:
    """One state, put together from the chunks of its sources.

    `ContentClient.description` has checked the size of what it is given.

    Args:
        slow_P, momentum_P: where the state goes; no state before `follow` has returned.
        own: digests of the chunks that the vectors hold already (`own_digests`).
        takes_any_replica, lost_lag: as of `StatePlan`.

    Attributes:
        on_progress: is called when a chunk has come.
        plan: a source that is doubted is `gone` from it.
    """

    def __init__(
        self,
        slow_P: Float32Vector,
        momentum_P: Float32Vector,
        own: Mapping[int, bytes] | None = None,
        *,
        takes_any_replica: bool = False,
        lost_lag: float = math.inf,
    ) -> None:
        self._memory = state_file.StateMemory(slow_P, momentum_P)
        units = state_file.units_of(slow_P.size) if takes_any_replica else None
        self.plan = StatePlan(own, units=units, lost_lag=lost_lag)
        self._changed = ParkingLot()
        self.fetched_bytes = 0
        self.on_progress: Callable[[], None] = lambda: None
        self._gave: set[PeerId] = set()
        self._at_work = 0

    @property
    def share(self) -> float:
        return 1 - self.plan.num_missing / state_file.chunk_count(self._memory.total_bytes)

    @property
    def total_bytes(self) -> int:
        return self._memory.total_bytes

    @property
    def num_sources(self) -> int:
        """How many have given something, kept or not."""
        return len(self._gave)

    @property
    def missing_bytes(self) -> int:
        return self.plan.num_missing * limits.STATE_CHUNK_BYTES

    @property
    def remotes(self) -> list[PeerId]:
        return [name for name, _ in self.plan.givers().most_common() if name]

    @property
    def kept_bytes(self) -> int:
        own = self.plan.givers()[OWN]
        return min(own * limits.STATE_CHUNK_BYTES, self._memory.total_bytes)

    async def follow(
        self, client: ContentClient, described: state_file.StateManifest
    ) -> content_messages.StateScalars:
        """Download the state that this source has described; others may `help` meanwhile.

        Raises as `ContentClient`: this source failed, and another one may lead.
        """
        name = client.remote_peer_id
        self.plan.follow_manifest(name, described.digests, described.scalars.step)
        try:
            await self._put_zeros(name, described)
            await self._work(client, described)
            self._memory.check(described.scalars)
            return described.scalars
        except LocoError as error:
            self.plan.gone(name, believed=not isinstance(error, RemoteProtocolError))
            raise

    async def help(self, client: ContentClient, described: state_file.StateManifest) -> None:
        """Take from this source too what it has of the state that another one leads.

        Raises as `ContentClient`: this source failed; the download goes on.
        """
        name = client.remote_peer_id
        self.plan.add_helper(name, described.digests, described.scalars.step)
        self._tell()
        try:
            await self._work(client, described)
        except RemoteProtocolError:
            self.plan.gone(name, believed=False)
            raise
        finally:
            self.plan.gone(name)
            self._tell()

    def gave(self, name: PeerId, values: range) -> bool:
        """Whether these weights, fewer than fit in a chunk, are here and from this source."""
        ends = state_file.weights_chunk(values.start), state_file.weights_chunk(values.stop - 1)
        return all(self.plan.giver(index) == name for index in ends)

    async def _put_zeros(self, name: PeerId, described: state_file.StateManifest) -> None:
        for index in self.plan.missing:
            zeros = _digest_of_zeros(state_file.chunk_bytes(index, self._memory.total_bytes))
            if described.digests[index] == zeros and self.plan.wants(name, index):
                self._memory.put_zeros(index)
                self.plan.arrived(name, index, was_sent=False)
                await trio.lowlevel.checkpoint()

    async def _work(self, client: ContentClient, described: state_file.StateManifest) -> None:
        """Ask this source until all is here, from whomever."""
        rate = slowest_rate(self._memory.total_bytes)
        while not self.plan.complete:
            self._at_work += 1
            try:
                with steady(client.talk, rate, lambda: self._at_work) as moved:
                    await self._pump(client, described, moved)
            finally:
                self._at_work -= 1
            if not self.plan.complete:
                await self._changed.park()

    async def _pump(
        self,
        client: ContentClient,
        described: state_file.StateManifest,
        moved: Callable[[int], None],
    ) -> None:
        """Ask this source for as long as there is something for it, one unit ahead."""
        name, root = client.remote_peer_id, described.root
        due = deque[tuple[Request, Sequence[int]]]()
        try:
            while True:
                batch = self.plan.next_of(name)
                due.extend(batch)
                for _, chunks in batch:
                    await client.request(root, chunks)
                if not due:
                    return
                request, chunks = due[0]
                for index in chunks:
                    chunk = await client.part(index, limits.STATE_CHUNK_BYTES, moved)
                    if digest_of(chunk) != described.digests[index]:
                        sentence = f"chunk {index} of the state does not match its digest"
                        raise RemoteProtocolError(sentence)
                    self.fetched_bytes += len(chunk)
                    if self.plan.wants(name, index):  # nobody else has given it meanwhile
                        self._memory.put(index, chunk)
                        self._gave.add(name)
                        self.plan.arrived(name, index)
                        self._tell()
                    self.on_progress()
                due.popleft()
                self.plan.answered(request)
                self._tell()  # one more may be asked for, whether these were wanted or not
        finally:
            for request, _ in due:
                self.plan.failed(request)

    def _tell(self) -> None:
        self._changed.unpark_all()


async def whole_state(
    client: ContentClient, expected: ExpectedState, slow_P: Float32Vector, momentum_P: Float32Vector
) -> content_messages.StateScalars:
    """Fetch a peer's present state into these vectors. Raises as `ContentClient`."""
    described = await client.description(expected, slow_P.size)
    return await StateDownload(slow_P, momentum_P).follow(client, described)


def own_digests(slow_P: Float32Vector, momentum_P: Float32Vector) -> dict[int, bytes]:
    """Digests of chunks, except the writer's own first one, and zeros, which nobody sends."""
    digests = dict[int, bytes]()
    for index, chunk in enumerate(state_file.StateMemory(slow_P, momentum_P).chunks()):
        digest = digest_of(chunk)
        if index and digest != _digest_of_zeros(len(chunk)):
            digests[index] = digest
    return digests


@cache
def _digest_of_zeros(length: int) -> bytes:
    # There are two lengths: the last chunk's, and all others'.
    return digest_of(bytes(length))
