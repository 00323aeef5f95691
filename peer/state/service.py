"""Serving what a joiner needs: run spec, blobs by digest, the outer state (fetching.py fetches it).

Spec and blobs are the run's, and any peer serves them; the state is that of the group that the peer
is in.

The source pauses for nobody: it writes its state once to a file, under the lock of the outer step,
and serves chunks from there (kept_states.py).

What one reader can cost: a place, of which each peer and each network has its share; a first
request comes within FIRST_REQUEST_S, each further one within REQUEST_S, and one that reads a state
asks within PINNED_REQUEST_S; requests are counted, and so are chunks, of which a state may be read
twice over. All that is sent has a stall limit.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from peer.network.conversation import Conversation
from peer.network.handlers import Readers
from peer.ports import Network, Stream, Work
from protocol.limits import (
    MAX_BLOB_BYTES,
    MAX_STATE_READERS,
    MAX_STATE_READERS_PER_PEER,
    MAX_STATE_READERS_PER_PREFIX,
    MAX_STATE_REQUESTS,
    STATE_CHUNK_BYTES,
)
from protocol.membership.book import Shares
from protocol.membership.group import other_group_sentence
from protocol.outcomes import RefusalReason
from protocol.run.signed_spec import SignedSpec
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

from .kept_states import KeptState, KeptStates, StateSource
from .state_file import (
    StateManifest,
    read_chunk,
)

FIRST_REQUEST_S: Final = 5.0
"""Time that a stream may stay silent before the first request."""
REQUEST_S: Final = 30.0
"""Time that a stream may stay silent between two requests."""
PINNED_REQUEST_S: Final = 10.0
"""The same while a state is kept for it."""
STALL_S: Final = 15.0
READINGS_OF_A_STATE: Final = 2
"""A reader that lost chunks asks for some again; nobody reads for ever."""
READERS: Final = Shares(MAX_STATE_READERS, MAX_STATE_READERS_PER_PEER, MAX_STATE_READERS_PER_PREFIX)


@dataclass(slots=True, eq=False)
class _Reader:
    """One stream, and what it has asked for.

    Attributes:
        state: the one that is kept for it, by `pin`.
        chunks_left: how many of it may still be sent.
    """

    talk: Conversation
    pin: ExitStack
    requests: int = 0
    state: KeptState | None = None
    chunks_left: int = 0

    def reads(self, state: KeptState, states: KeptStates) -> None:
        """Keep this state for it, and no other."""
        if state is not self.state:
            self.pin.close()
            self.pin.enter_context(states.reading(state))
            self.state = state
            self.chunks_left = READINGS_OF_A_STATE * len(state.manifest.digests)

    @property
    def patience_s(self) -> float:
        """How long it may be silent now."""
        if not self.requests:
            return FIRST_REQUEST_S
        return REQUEST_S if self.state is None else PINNED_REQUEST_S


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
        self._signed = signed
        self._blobs = blobs
        self._source: StateSource | None = None
        self.refused: Counter[RefusalReason] = Counter()
        self._states = KeptStates(state_dir, work)
        self._readers = Readers(READERS)

    def serve_state_of(self, source: StateSource) -> None:
        """Serve the state of `source` from now on."""
        self._source = source

    async def start(self) -> None:
        """Answer requests from now on."""
        await self._network.serve(STATE, self._serve)

    async def write(self) -> tuple[Path, StateManifest] | None:
        """The newest state as a file; None while there is none."""
        if self._source is None:
            return None
        state = await self._states.newest(self._source)
        return state.path, state.manifest

    async def _serve(self, stream: Stream) -> None:
        await self._readers.serve(stream, self._read)

    async def _read(self, talk: Conversation) -> None:
        with ExitStack() as pin:
            await self._answer(_Reader(talk, pin))

    async def _answer(self, reader: _Reader) -> None:
        """Answer one request after another."""
        talk = reader.talk
        while True:
            request, _ = await talk.receive(
                GetSpec, GetBlob, GetState, GetSample, GetChunks, timeout_s=reader.patience_s
            )
            reader.requests += not isinstance(request, GetChunks)
            if reader.requests > MAX_STATE_REQUESTS:
                sentence = f"{MAX_STATE_REQUESTS} requests on one stream are enough"
                await talk.refuse(RefusalReason.TOO_MANY, sentence)
                return
            match request:
                case GetSpec():
                    await self._send_spec(talk)
                case GetBlob(digest):
                    await self._send_blob(talk, digest)
                case GetState():
                    await self._send_manifest(talk, request, reader)
                case GetSample():
                    await self._send_sample(talk, request)
                case GetChunks():
                    await self._send_chunks(reader, request)

    async def _send_spec(self, talk: Conversation) -> None:
        signed = self._signed
        reply = SpecReply(signed.founder_public_key, signed.signature)
        await talk.send(reply, signed.spec_bytes, stall_s=STALL_S)

    async def _send_blob(self, talk: Conversation, digest: str) -> None:
        path = self._blobs.get(digest)
        try:
            data = None if path is None else await self._work.run(_small_file, path)
        except OSError as error:
            await talk.refuse(RefusalReason.UNAVAILABLE, f"I cannot read blob {digest}: {error}")
            return
        if data is None and path is not None:
            sentence = (
                f"blob {digest} is larger than {MAX_BLOB_BYTES} bytes, the most that peers give"
                " each other: bring the file to the joiner's cache by other means"
            )
            await talk.refuse(RefusalReason.TOO_LARGE, sentence)
            return
        if data is None:
            await talk.refuse(RefusalReason.UNAVAILABLE, f"I have no blob {digest}")
            return
        await talk.send(BlobReply(digest), data, stall_s=STALL_S)

    async def _asked_source(self, talk: Conversation, group: str) -> StateSource | None:
        """What is served; None where that is not what was asked for, which is said."""
        source = self._source
        if source is None:
            await talk.refuse(RefusalReason.UNAVAILABLE, "I have no state yet")
            return None
        if group != source.group:
            self.refused[RefusalReason.OTHER_GROUP] += 1
            await talk.refuse(RefusalReason.OTHER_GROUP, other_group_sentence(source.group, group))
            return None
        return source

    async def _send_sample(self, talk: Conversation, request: GetSample) -> None:
        source = await self._asked_source(talk, request.group)
        if source is not None:
            await talk.send(SampleReply(), await source.sample(request.seed), stall_s=STALL_S)

    async def _send_manifest(self, talk: Conversation, request: GetState, reader: _Reader) -> None:
        source = await self._asked_source(talk, request.group)
        if source is None:
            return
        if source.step < request.minimum_step:  # nothing need be written to see that
            await self._refuse_as_too_old(talk, source.step, request)
            return
        try:
            state = await self._states.for_reader(source, request.minimum_step)
        except OSError as error:
            await talk.refuse(RefusalReason.UNAVAILABLE, f"I cannot write my state: {error}")
            return
        if state is None:
            sentence = "others are reading all states that I keep; ask another, or later"
            await talk.refuse(RefusalReason.TOO_MANY, sentence)
            return
        manifest, scalars = state.manifest, state.manifest.scalars
        if scalars.step < request.minimum_step:
            await self._refuse_as_too_old(talk, scalars.step, request)
            return
        reader.reads(state, self._states)
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
        await talk.send(reply, b"".join(manifest.digests), stall_s=STALL_S)

    async def _refuse_as_too_old(self, talk: Conversation, step: int, request: GetState) -> None:
        sentence = f"my state is of step {step}, {request.minimum_step} or later was asked for"
        await talk.refuse(RefusalReason.UNAVAILABLE, sentence)

    async def _send_chunks(self, reader: _Reader, request: GetChunks) -> None:
        state, talk = self._states.get(request.root), reader.talk
        if state is None or request.first >= len(state.manifest.digests):
            await talk.refuse(RefusalReason.UNAVAILABLE, "that state is replaced by a newer one")
            return
        reader.reads(state, self._states)
        last = min(request.first + request.count, len(state.manifest.digests))
        reader.chunks_left -= last - request.first
        if reader.chunks_left < 0:
            sentence = f"you have read this state {READINGS_OF_A_STATE} times already"
            await talk.refuse(RefusalReason.TOO_MANY, sentence)
            return
        try:
            for index in range(request.first, last):
                data = await self._work.run(read_chunk, state.path, index)
                await talk.send(Chunk(request.root, index), data, stall_s=STALL_S)
        except (FileNotFoundError, IndexError):
            await talk.refuse(RefusalReason.UNAVAILABLE, "that state is replaced by a newer one")
            return
        if last < request.first + request.count:
            await talk.refuse(RefusalReason.UNAVAILABLE, "the state has no further chunks")


def _small_file(path: Path) -> bytes | None:
    """What a file holds; None where that is more than a blob may. Raises OSError."""
    return path.read_bytes() if path.stat().st_size <= MAX_BLOB_BYTES else None
