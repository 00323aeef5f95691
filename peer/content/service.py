"""Serving content to other peers: the conversation `/loco/content/1` (fetching.py asks).

Run spec, blobs and pieces of the corpus are the run's, and any peer serves them; the state is that
of the group that the peer is in.

The source pauses for nobody: it writes its state once to a file, under the lock of the outer step,
and serves chunks from there. Pieces go at the pace that all bulk has (peer/network/pacing.py). Over
a thin line they go one after the other (`AtOnce`): the first is soon where it can be given to
others. A reader that waits for TURN_S is told that the line is busy, and may ask another.

What one reader can cost: a place, of which each peer and each network has its share; a first
request comes within FIRST_REQUEST_S, each further one within REQUEST_S, and one that reads a state
asks within PINNED_REQUEST_S; requests are counted, and so are chunks, of which a state may be read
twice over. All that is sent has a stall limit.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import trio

from peer.network.conversation import Conversation
from peer.network.handlers import Readers
from peer.ports import Network, Stream, Work
from protocol.content.requests import AtOnce
from protocol.limits import (
    MAX_BLOB_BYTES,
    MAX_READER_REQUESTS,
    MAX_READERS,
    MAX_READERS_PER_PEER,
    MAX_READERS_PER_PREFIX,
    STATE_CHUNK_BYTES,
)
from protocol.membership.book import Shares
from protocol.membership.group import other_group_sentence
from protocol.outcomes import RefusalReason
from protocol.run.needs import KEPT_STATES
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
from protocol.wire.versions import CONTENT

from .state_file import StateManifest, read_chunk, remove_state_files
from .store import PieceStore

FIRST_REQUEST_S: Final = 15.0
"""Time that a stream may stay silent before the first request, which is long under way where the
reader gives pieces too, over a thin line."""
REQUEST_S: Final = 30.0
"""Time that a stream may stay silent between two requests."""
PINNED_REQUEST_S: Final = 10.0
"""The same while a state is kept for it."""
TURN_S: Final = 20.0
"""Longest wait of a reader for its turn: it takes us for dead after ANSWER_S (fetching.py)."""
LOOK_EVERY_S: Final = 1.0
"""A turn may come with time alone."""
READINGS_OF_A_STATE: Final = 2
"""A reader that lost chunks asks for some again; nobody reads for ever."""
READERS: Final = Shares(MAX_READERS, MAX_READERS_PER_PEER, MAX_READERS_PER_PREFIX)
REPLACED: Final = "I have no content of that name; a state is replaced by a newer one"


# --- states that are kept for readers -------------------------------------------------------------
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

    async def sample(self, seed: bytes) -> bytes:
        """Its weights at the places that follow from the seed, as bytes."""

    async def write(self, directory: Path) -> tuple[Path, StateManifest]:
        """Write the present state to a new file in `directory`."""


@dataclass(slots=True, eq=False)
class KeptState:
    """One state file, and by how many it is being read."""

    path: Path
    manifest: StateManifest
    readers: int = 0

    def __enter__(self) -> None:
        self.readers += 1

    def __exit__(self, *_: object) -> None:
        self.readers -= 1


class KeptStates:
    """The state files that a source keeps for joiners, and which of them a joiner is given.

    A state is written when a joiner asks and the newest one is of an earlier round. A joiner on a
    thin line reads for longer than rounds last, so a state that is being read is *pinned*: it stays
    until its last reader is through or gone. Two files are kept, so

      1. a joiner is given the state of the present round, as long as there is room to write it;
      2. where the files that there is room for are all being read, it is given the newest of them
         that is of use to it, and no new one is written: slow joiners never take each other's state
         away;
      3. where none of them is, it is refused, and asks another source, or later.

    Pins are bounded by the places of readers, and by their pace: a reader that asks for nothing, or
    takes nothing, loses its place and its pin.
    """

    def __init__(self, directory: Path, work: Work) -> None:
        self._directory = directory
        self._work = work
        self._by_root: OrderedDict[str, KeptState] = OrderedDict()
        self._writing = trio.Lock()
        remove_state_files(directory, keep=())

    def get(self, root: str) -> KeptState | None:
        """The state of this root, if it is kept."""
        return self._by_root.get(root)

    async def newest(self, source: StateSource) -> KeptState:
        """The state as it stands after the last outer step. Raises OSError."""
        async with self._writing:
            return await self._present(source)

    async def for_reader(self, source: StateSource, minimum_step: int) -> KeptState | None:
        """What a joiner is given; None where there is nothing for it now. Raises OSError.

        Args:
            minimum_step: nominal step of the oldest state that is of use to it.
        """
        async with self._writing:
            pinned = [state for state in self._by_root.values() if state.readers]
            if self._is_present(source) or len(pinned) < KEPT_STATES:
                return await self._present(source)
            steps = [state.manifest.scalars.step for state in pinned]
            return pinned[-1] if max(steps) >= minimum_step else None

    def _is_present(self, source: StateSource) -> bool:
        newest = next(reversed(self._by_root.values()), None)
        return newest is not None and newest.manifest.scalars.round == source.round

    async def _present(self, source: StateSource) -> KeptState:
        if not self._is_present(source):
            path, manifest = await source.write(self._directory)
            self._by_root[manifest.root.hex()] = KeptState(path, manifest)
            idle = [root for root, state in self._by_root.items() if not state.readers]
            for root in idle[:-1]:
                if len(self._by_root) > KEPT_STATES:
                    del self._by_root[root]
            kept = [state.path for state in self._by_root.values()]
            await self._work.run(remove_state_files, self._directory, kept)
        return next(reversed(self._by_root.values()))


# --- the service ----------------------------------------------------------------------------------
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

    def reads(self, state: KeptState) -> None:
        """Keep this state for it, and no other."""
        if state is not self.state:
            self.pin.close()
            self.pin.enter_context(state)
            self.state = state
            self.chunks_left = READINGS_OF_A_STATE * len(state.manifest.digests)

    @property
    def patience_s(self) -> float:
        """How long it may be silent now."""
        if not self.requests:
            return FIRST_REQUEST_S
        return REQUEST_S if self.state is None else PINNED_REQUEST_S


class ContentService:
    """See the top of the file.

    Attributes:
        refused: requests for the state of another group.
        store: the pieces of the corpus that are here; None where there are none to give.

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
        store: PieceStore | None = None,
    ) -> None:
        self._network = network
        self._work = work
        self._signed = signed
        self._blobs = blobs
        self.store = store
        self._source: StateSource | None = None
        self.refused: Counter[RefusalReason] = Counter()
        self._states = KeptStates(state_dir, work)
        self._readers = Readers(READERS)
        self._at_once = AtOnce(MAX_READERS)
        self._turns = trio.Lock()
        self._ended = trio.Event()

    def serve_state_of(self, source: StateSource) -> None:
        """Serve the state of `source` from now on."""
        self._source = source

    async def start(self) -> None:
        """Answer requests from now on."""
        await self._network.serve(CONTENT, self._serve)

    async def write(self) -> tuple[Path, StateManifest] | None:
        """The newest state as a file; None while there is none."""
        if self._source is None:
            return None
        state = await self._states.newest(self._source)
        return state.path, state.manifest

    async def _serve(self, stream: Stream) -> None:
        await self._readers.serve(stream, self._read)

    async def _read(self, talk: Conversation) -> None:
        """Answer one request after another."""
        with ExitStack() as pin:
            reader = _Reader(talk, pin)
            while True:
                request, _ = await talk.receive(
                    GetSpec,
                    GetBlob,
                    GetState,
                    GetSample,
                    GetHoldings,
                    GetParts,
                    timeout_s=reader.patience_s,
                )
                of_state = isinstance(request, GetParts) and not self._is_corpus(request.content)
                reader.requests += not of_state
                if reader.requests > MAX_READER_REQUESTS:
                    sentence = f"{MAX_READER_REQUESTS} requests on one stream are enough"
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
                    case GetHoldings():
                        await self._send_holdings(talk, request)
                    case GetParts() if of_state:
                        await self._send_chunks(reader, request)
                    case GetParts():
                        await self._send_pieces(talk, request.parts)

    # --- what is whole ----------------------------------------------------------------------------
    async def _send_spec(self, talk: Conversation) -> None:
        signed = self._signed
        reply = SpecReply(signed.founder_public_key, signed.signature)
        await talk.send(reply, signed.spec_bytes)

    async def _send_blob(self, talk: Conversation, digest: str) -> None:
        path = self._blobs.get(digest)
        if path is None:
            await talk.refuse(RefusalReason.UNAVAILABLE, f"I have no blob {digest}")
            return
        try:
            data = await self._work.run(_small_file, path)
        except OSError as error:
            await talk.refuse(RefusalReason.UNAVAILABLE, f"I cannot read blob {digest}: {error}")
            return
        if data is None:
            sentence = (
                f"blob {digest} is larger than {MAX_BLOB_BYTES} bytes, the most that peers give"
                " each other: bring the file to the joiner's cache by other means"
            )
            await talk.refuse(RefusalReason.TOO_LARGE, sentence)
            return
        await talk.send(BlobReply(digest), data)

    # --- the state --------------------------------------------------------------------------------
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
            await talk.send(SampleReply(), await source.sample(request.seed))

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
        reader.reads(state)
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

    async def _send_chunks(self, reader: _Reader, request: GetParts) -> None:
        state, talk = self._states.get(request.content), reader.talk
        if state is None:
            await talk.refuse(RefusalReason.UNAVAILABLE, REPLACED)
            return
        reader.reads(state)
        for index in request.parts:
            if index >= len(state.manifest.digests):
                await talk.refuse(RefusalReason.UNAVAILABLE, "the state has no further chunks")
                return
            reader.chunks_left -= 1
            if reader.chunks_left < 0:
                sentence = f"you have read this state {READINGS_OF_A_STATE} times already"
                await talk.refuse(RefusalReason.TOO_MANY, sentence)
                return
            try:
                data = await self._work.run(read_chunk, state.path, index)
            except FileNotFoundError:
                await talk.refuse(RefusalReason.UNAVAILABLE, REPLACED)
                return
            await talk.send(Part(index), data)

    # --- the corpus -------------------------------------------------------------------------------
    def _is_corpus(self, name: str) -> bool:
        return self.store is not None and name == self.store.manifest.name

    async def _send_holdings(self, talk: Conversation, request: GetHoldings) -> None:
        store = self.store
        if store is None or not self._is_corpus(request.corpus):
            sentence = f"I have no corpus {request.corpus}"
            await talk.refuse(RefusalReason.UNAVAILABLE, sentence)
            return
        here, version = store.here, store.version
        whole = bool(here.all())
        is_known = whole or request.known == version
        bits = b"" if is_known else np.packbits(here, bitorder="little").tobytes()
        await talk.send(Holdings(version, whole), bits)

    async def _send_pieces(self, talk: Conversation, pieces: tuple[int, ...]) -> None:
        assert self.store is not None
        for piece in pieces:
            is_one = piece < self.store.manifest.num_pieces and self.store.here[piece]
            if is_one and not await self._may_begin():
                sentence = "my line is busy with other pieces; ask another, or later"
                await talk.refuse(RefusalReason.TOO_MANY, sentence)
                return
            if not (is_one and await self._send_piece(talk, piece, self.store)):
                sentence = f"I have no piece {piece}"
                await talk.refuse(RefusalReason.UNAVAILABLE, sentence)
                return

    async def _may_begin(self) -> bool:
        """Wait for a turn, in the order of asking; whether it came, and then it is taken."""
        with trio.move_on_after(TURN_S):
            async with self._turns:
                while not self._at_once.has_room(trio.current_time()):
                    with trio.move_on_after(LOOK_EVERY_S):
                        await self._ended.wait()
                self._at_once.began(trio.current_time())
                return True
        return False

    async def _send_piece(self, talk: Conversation, piece: int, store: PieceStore) -> bool:
        """Send a piece in its turn; False where it is not here after all."""
        ended = self._at_once.lost
        try:
            data = await self._work.run(store.read, piece)
            if data is None:
                ended = self._at_once.refused
                return False
            # The usual patience of a send, and no less: many streams of a thin line each take long
            # for one write, though all of them move.
            await talk.send(Part(piece), data)
            ended = self._at_once.came
            return True
        finally:
            ended(trio.current_time())
            self._ended.set()
            self._ended = trio.Event()


def _small_file(path: Path) -> bytes | None:
    """What a file holds; None where that is more than a blob may. Raises OSError."""
    return path.read_bytes() if path.stat().st_size <= MAX_BLOB_BYTES else None
