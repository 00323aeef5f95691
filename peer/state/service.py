"""Serving what a joiner needs, and fetching it: run spec, blobs by digest, the outer state.

Spec and blobs are the run's, and any peer serves them; the state is that of the group that the peer
is in.

Everything fetched is checked by the one who fetched it: the spec against run id and founder's
signature, blobs against their digest, the state against the Merkle root that its source announced.
The source pauses for nobody: it writes its state once to a file, under the lock of the outer step,
and serves chunks from there.
"""

from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Protocol

import blake3
import trio

from peer.network.conversation import Conversation
from peer.ports import Network, PeerId, Stream, Work
from protocol.errors import RemoteProtocolError
from protocol.limits import (
    MAX_BLOB_BYTES,
    MAX_SPEC_BYTES,
    MAX_STATE_READERS,
    STATE_CHUNK_BYTES,
)
from protocol.membership.group import other_group_sentence
from protocol.outcomes import RefusalReason
from protocol.run.signed_spec import SignedSpec
from protocol.wire.messages import (
    BlobReply,
    Chunk,
    GetBlob,
    GetChunks,
    GetSpec,
    GetState,
    SpecReply,
    StateReply,
)
from protocol.wire.versions import STATE

from .state_file import (
    Float32Vector,
    StateAssembler,
    StateManifest,
    StateScalars,
    read_chunk,
    remove_state_files,
)

REQUEST_S: Final = 30.0
"""Time that a stream may stay silent between two requests."""
STALL_S: Final = 15.0
WRITE_S: Final = 600.0
"""Time that the source may take to write its state before the first byte."""
CHUNKS_PER_REQUEST: Final = 16
KEPT_STATES: Final = 2
"""State files kept: the newest, and the one that somebody may still be reading."""


class StateSource(Protocol):
    """An owner of the outer state of a group, which the service serves."""

    @property
    def group(self) -> str:
        """Digest of the group."""

    @property
    def round(self) -> int:
        """Round of its last outer step; -1 before the first."""

    @property
    def step(self) -> int:
        """The nominal step that the owner is at."""

    async def write(self, directory: Path) -> tuple[Path, StateManifest]:
        """Write the present state to a new file in `directory`."""


class StateService:
    """The conversation `/loco/state/1`, on the side that serves.

    Attributes:
        refused: requests for the state of another group.

    Args:
        blobs: digest to file.
    """

    def __init__(
        self,
        *,
        network: Network,
        work: Work,
        state_dir: Path,
        signed: SignedSpec,
        blobs: Mapping[str, Path],
    ) -> None:
        self._network = network
        self._work = work
        self._state_dir = state_dir
        self._signed = signed
        self._blobs = blobs
        self._source: StateSource | None = None
        self.refused: Counter[RefusalReason] = Counter()
        self._states: OrderedDict[str, tuple[Path, StateManifest]] = OrderedDict()
        self._readers = trio.CapacityLimiter(MAX_STATE_READERS)
        self._writing = trio.Lock()
        remove_state_files(state_dir, keep=())

    def __repr__(self) -> str:
        return f"<StateService {len(self._states)} states, {self._readers.borrowed_tokens} readers>"

    def serve_state_of(self, source: "StateSource") -> None:
        """Serve the state of `source` from now on."""
        self._source = source

    async def start(self) -> None:
        """Answer requests from now on."""
        await self._network.serve(STATE, self._serve)

    async def write(self) -> tuple[Path, StateManifest] | None:
        """The newest state as a file; None while there is none."""
        return None if self._source is None else await self._newest(self._source)

    async def _newest(self, source: "StateSource") -> tuple[Path, StateManifest]:
        """The state as it stands after the last outer step; written once."""
        async with self._writing:
            newest = next(reversed(self._states.values()), None)
            if newest is None or newest[1].scalars.round != source.round:
                path, manifest = await source.write(self._state_dir)
                self._states[manifest.root.hex()] = (path, manifest)
                while len(self._states) > KEPT_STATES:
                    self._states.popitem(last=False)
                kept = [kept_path for kept_path, _ in self._states.values()]
                await self._work.run(remove_state_files, self._state_dir, kept)
            return next(reversed(self._states.values()))

    async def _serve(self, stream: Stream) -> None:
        talk = Conversation(stream)
        try:
            self._readers.acquire_on_behalf_of_nowait(stream)
        except trio.WouldBlock:
            sentence = f"{MAX_STATE_READERS} peers are reading already; ask another, or later"
            await talk.refuse(RefusalReason.TOO_MANY, sentence)
            return
        try:
            while True:
                request, _ = await talk.receive(
                    GetSpec, GetBlob, GetState, GetChunks, timeout_s=REQUEST_S
                )
                match request:
                    case GetSpec():
                        await self._send_spec(talk)
                    case GetBlob(digest):
                        await self._send_blob(talk, digest)
                    case GetState():
                        await self._send_manifest(talk, request)
                    case GetChunks():
                        await self._send_chunks(talk, request)
        finally:
            self._readers.release_on_behalf_of(stream)

    async def _send_spec(self, talk: Conversation) -> None:
        signed = self._signed
        await talk.send(SpecReply(signed.founder_public_key, signed.signature), signed.spec_bytes)

    async def _send_blob(self, talk: Conversation, digest: str) -> None:
        path = self._blobs.get(digest)
        try:
            data = None if path is None else await self._work.run(_small_file, path)
        except OSError as error:
            await talk.refuse(RefusalReason.UNAVAILABLE, f"I cannot read blob {digest}: {error}")
            return
        if data is None:
            sentence = f"I have no blob {digest} of at most {MAX_BLOB_BYTES} bytes"
            await talk.refuse(RefusalReason.UNAVAILABLE, sentence)
            return
        await talk.send(BlobReply(digest), data, stall_s=STALL_S)

    async def _send_manifest(self, talk: Conversation, request: GetState) -> None:
        source = self._source
        if source is not None and request.group != source.group:
            self.refused[RefusalReason.OTHER_GROUP] += 1
            sentence = other_group_sentence(source.group, request.group)
            await talk.refuse(RefusalReason.OTHER_GROUP, sentence)
            return
        if source is None:
            await talk.refuse(RefusalReason.UNAVAILABLE, "I have no state yet")
            return
        if source.step < request.minimum_step:  # nothing need be written to see that
            await self._refuse_as_too_old(talk, source.step, request)
            return
        try:
            _, manifest = await self._newest(source)
        except OSError as error:
            await talk.refuse(RefusalReason.UNAVAILABLE, f"I cannot write my state: {error}")
            return
        scalars = manifest.scalars
        if scalars.step < request.minimum_step:
            await self._refuse_as_too_old(talk, scalars.step, request)
            return
        reply = StateReply(
            round=scalars.round + 1,
            step=scalars.step,
            root=manifest.root.hex(),
            total_bytes=manifest.total_bytes,
            chunk_bytes=STATE_CHUNK_BYTES,
            epoch=scalars.epoch,
            position=scalars.position,
            tokens=scalars.tokens,
            layout_digest=scalars.layout_digest,
            gradient_norm=scalars.gradient_norm,
        )
        await talk.send(reply, b"".join(manifest.digests))

    async def _refuse_as_too_old(self, talk: Conversation, step: int, request: GetState) -> None:
        sentence = f"my state is of step {step}, {request.minimum_step} or later was asked for"
        await talk.refuse(RefusalReason.UNAVAILABLE, sentence)

    async def _send_chunks(self, talk: Conversation, request: GetChunks) -> None:
        known = self._states.get(request.root)
        try:
            if known is None:
                raise FileNotFoundError(request.root)
            if request.first >= len(known[1].digests):
                raise IndexError(request.first)
            for index in range(request.first, request.first + request.count):
                data = await self._work.run(read_chunk, known[0], index)
                await talk.send(Chunk(request.root, index), data, stall_s=STALL_S)
        except (FileNotFoundError, IndexError):
            await talk.refuse(RefusalReason.UNAVAILABLE, "that state is replaced by a newer one")


class Fetcher:
    """Asks one peer for what a joiner needs. One stream, request after request."""

    def __init__(self, talk: Conversation) -> None:
        self._talk = talk

    @property
    def remote_peer_id(self) -> PeerId:
        """The peer that we ask."""
        return self._talk.remote_peer_id

    async def spec(self, run_id: str | None) -> SignedSpec:
        """The run spec, verified; of this run, if one is named.

        Raises:
            StreamLost, Refused, RemoteProtocolError
        """
        await self._talk.send(GetSpec())
        reply, spec_bytes = await self._talk.receive(
            SpecReply, timeout_s=REQUEST_S, stall_s=STALL_S, max_payload_bytes=MAX_SPEC_BYTES
        )
        signed = SignedSpec(spec_bytes, reply.founder_public_key, reply.signature)
        signed.verify(run_id)
        return signed

    async def blob(self, digest: str) -> bytes:
        """The blob with this digest, verified.

        Raises:
            StreamLost, Refused, RemoteProtocolError
        """
        await self._talk.send(GetBlob(digest))
        _, data = await self._talk.receive(
            BlobReply, timeout_s=REQUEST_S, stall_s=STALL_S, max_payload_bytes=MAX_BLOB_BYTES
        )
        if blake3.blake3(data).hexdigest(length=16) != digest:
            raise RemoteProtocolError(f"the blob {digest} does not match its digest")
        return data

    async def state(
        self,
        group: str,
        phi_P: Float32Vector,
        delta_P: Float32Vector,
        on_progress: Callable[[float], None] = lambda _: None,
        *,
        minimum_step: int = 0,
    ) -> StateScalars:
        """The peer's present state, verified chunk by chunk; says where it stands.

        Args:
            group: digest of the one whose state it has to be.
            phi_P, delta_P: where the state goes, of the group's padded parameters. They hold no
                state, but parts of one, until this has returned.
            on_progress: told the share received so far.
            minimum_step: the nominal step of the oldest state that is of use.

        Raises:
            StreamLost, Refused, RemoteProtocolError
        """
        await self._talk.send(GetState(group, minimum_step))
        reply, digests = await self._talk.receive(StateReply, timeout_s=WRITE_S, stall_s=STALL_S)
        if reply.step < minimum_step:
            sentence = f"a state of step {reply.step}, where {minimum_step} or later was asked for"
            raise RemoteProtocolError(sentence)
        assembler = StateAssembler(_manifest(group, reply, digests), phi_P, delta_P)
        total = len(assembler.missing())
        while not assembler.complete:
            first = assembler.missing()[0]
            count = min(CHUNKS_PER_REQUEST, total - first)
            await self._talk.send(GetChunks(reply.root, first, count))
            for _ in range(count):
                chunk, data = await self._talk.receive(
                    Chunk,
                    timeout_s=REQUEST_S,
                    stall_s=STALL_S,
                    max_payload_bytes=STATE_CHUNK_BYTES,
                )
                assembler.add(chunk.index, data)
            on_progress(1 - len(assembler.missing()) / total)
        return assembler.result()


@asynccontextmanager
async def fetch_from(network: Network, peer_id: PeerId) -> AsyncIterator[Fetcher]:
    """Open a stream for requests. Raises StreamLost."""
    stream = await network.open_stream(peer_id, STATE)
    try:
        yield Fetcher(Conversation(stream))
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
            await stream.aclose()


def _small_file(path: Path) -> bytes | None:
    """What a file holds; None where that is more than a blob may. Raises OSError."""
    return path.read_bytes() if path.stat().st_size <= MAX_BLOB_BYTES else None


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
