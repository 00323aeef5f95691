"""Serving content to other peers: the conversation `/loco/content/2` (fetching.py asks).

Any peer serves run spec, blobs and pieces of the corpus; the state is that of the peer's group, or
of another that is kept here.

Training pauses for no reader: the state is written once to a file, under the lock of the outer
step, and chunks are served from there. Over a thin line pieces go one after the other (`AtOnce`),
so that the first can soon be given to others; a reader that has waited for TURN_S is refused, and
may ask another.

Bounds for one reader: each peer and each network has its share of places; requests come within
CONTENT_ANSWER_S, and within PINNED_REQUEST_S while a state is kept for the reader; requests are
counted, and so are chunks; all that is sent has a stall limit.
"""

from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import trio
from trio.lowlevel import ParkingLot

from peer.network.conversation import Conversation
from peer.network.handlers import Readers
from peer.runtime import Network, Stream, Work
from protocol.content.scheduler import AtOnce
from protocol.errors import Refused
from protocol.limits import MAX_BLOB_BYTES, MAX_READER_REQUESTS, READERS
from protocol.membership.group import other_group_sentence
from protocol.outcomes import RefusalReason
from protocol.run.needs import KEPT_STATES
from protocol.run.signed_spec import SignedSpec
from protocol.wire import content_messages
from protocol.wire.fields import Message
from protocol.wire.versions import CONTENT

from .fetching import CONTENT_ANSWER_S
from .pieces import PieceStore
from .state_file import StateManifest, read_chunk, remove_state_files

PINNED_REQUEST_S: Final = 10.0
"""Longest silence of a reader while a state is kept for it; CONTENT_ANSWER_S without."""
TURN_S: Final = 20.0
"""Longest wait for a turn: a reader takes us for dead after CONTENT_ANSWER_S."""
LOOK_EVERY_S: Final = 1.0
"""Between two looks whether there is room, which time alone may make."""
READINGS_OF_A_STATE: Final = 2
"""Times that a reader may read a state: it asks again for chunks that were lost."""
REPLACED: Final = "I have no content of that name; a state is replaced by a newer one"


# --- states that are kept for readers -------------------------------------------------------------
class WrittenState(Protocol):
    """The outer state of a group, as joiners are given it."""

    @property
    def group(self) -> str: ...

    @property
    def round(self) -> int:
        """Round of the last outer step; -1 before the first."""

    @property
    def step(self) -> int: ...

    async def write(self, directory: Path) -> tuple[Path, StateManifest]:
        """Write the present state to a new file in `directory`."""


class StateSource(WrittenState, Protocol):
    """The outer state of our group, of which samples are given, too."""

    async def sample(self, seed: bytes) -> bytes: ...


@dataclass(slots=True, eq=False)
class KeptState:
    path: Path
    manifest: StateManifest
    readers: int = 0


class KeptStates:
    """The state files that a source keeps for joiners, KEPT_STATES of them.

    A state is written when a joiner asks and the newest one is of an earlier round. A joiner on a
    thin line reads for longer than rounds last, so a state that is being read is *pinned*: it stays
    until its last reader is through or gone. A joiner is given

      1. the state of the present round, if there is room to write it;
      2. where all files are pinned, the newest if it is of use: slow joiners never take each
         other's state away;
      3. else a refusal: it asks another source, or later.

    Readers have places and a pace: one that asks for nothing, or takes nothing, loses its pin.

    Attributes:
        by_root: the newest last.
    """

    def __init__(self, directory: Path, work: Work) -> None:
        self._directory = directory
        self._work = work
        self.by_root: OrderedDict[str, KeptState] = OrderedDict()
        self._writing = trio.Lock()
        directory.mkdir(parents=True, exist_ok=True)
        remove_state_files(directory, keep=())

    async def newest(self, source: WrittenState) -> KeptState:
        """The state after the last outer step. Raises OSError."""
        async with self._writing:
            return await self._present(source)

    async def for_reader(self, source: WrittenState, minimum_step: int) -> KeptState | None:
        """The state that a joiner is given; None where there is none now. Raises OSError."""
        async with self._writing:
            pinned = [state for state in self.by_root.values() if state.readers]
            if self._is_present(source) or len(pinned) < KEPT_STATES:
                return await self._present(source)
            steps = [state.manifest.scalars.step for state in pinned]
            return pinned[-1] if max(steps) >= minimum_step else None

    def _is_present(self, source: WrittenState) -> bool:
        newest = next(reversed(self.by_root.values()), None)
        return newest is not None and newest.manifest.scalars.round == source.round

    async def _present(self, source: WrittenState) -> KeptState:
        if not self._is_present(source):
            path, manifest = await source.write(self._directory)
            self.by_root[manifest.root] = KeptState(path, manifest)
            idle = [root for root, state in self.by_root.items() if not state.readers]
            for root in idle[:-1]:
                if len(self.by_root) > KEPT_STATES:
                    del self.by_root[root]
            kept = [state.path for state in self.by_root.values()]
            await self._work.run(remove_state_files, self._directory, kept)
        return next(reversed(self.by_root.values()))


async def no_other(_: str) -> None:
    """There are no states of other groups."""


# --- the service ----------------------------------------------------------------------------------
@dataclass(slots=True, eq=False)
class _Reader:
    talk: Conversation
    requests: int = 0
    state: KeptState | None = None
    content: str = ""  # the state whose chunks were asked for last; chunks_left bounds them
    chunks_left: int = 0

    def reads(self, state: KeptState) -> None:
        if state is not self.state:
            self.ended()
            self.state = state
            state.readers += 1
            self.chunks_left = READINGS_OF_A_STATE * len(state.manifest.digests)

    def ended(self) -> None:
        if self.state is not None:
            self.state.readers -= 1


@dataclass(eq=False, kw_only=True)
class ContentService:
    """Answers the requests of readers, each on a stream of its own.

    Attributes:
        refused: requests for the state of another group.
        source: of the state that is served; None while there is none.
        stores: the pieces of each corpus that there are any of, by its name.

    Args:
        blobs: digest to file.
        other: the state of another group that is kept here, by the group's digest.
    """

    network: Network
    work: Work
    state_dir: Path
    signed: SignedSpec
    blobs: Mapping[str, Path]
    stores: Mapping[str, PieceStore] = field(default_factory=dict)
    other: Callable[[str], Awaitable[WrittenState | None]] = no_other

    def __post_init__(self) -> None:
        self.source: StateSource | None = None
        self.refused: Counter[RefusalReason] = Counter()
        self._states = KeptStates(self.state_dir, self.work)
        self._others: dict[str, KeptStates] = {}
        for directory in self.state_dir.glob("*/"):  # of groups whose states were asked for before
            remove_state_files(directory, keep=())
        self._readers = Readers()
        self._at_once = AtOnce(READERS.total)
        self._turns = trio.Lock()
        self._ended = ParkingLot()

    async def start(self) -> None:
        await self.network.serve(CONTENT, self._serve)

    async def write(self) -> tuple[Path, StateManifest] | None:
        """The newest state as a file; None while there is none."""
        if self.source is None:
            return None
        state = await self._states.newest(self.source)
        return state.path, state.manifest

    async def _serve(self, stream: Stream) -> None:
        await self._readers.serve(Conversation(stream), self._read)

    async def _read(self, talk: Conversation) -> None:
        reader = _Reader(talk)
        try:
            while True:
                request, _ = await talk.receive(
                    content_messages.GetSpec,
                    content_messages.GetBlob,
                    content_messages.GetState,
                    content_messages.GetSample,
                    content_messages.GetHoldings,
                    content_messages.GetParts,
                    timeout_s=CONTENT_ANSWER_S if reader.state is None else PINNED_REQUEST_S,
                )
                reader.requests += not (
                    isinstance(request, content_messages.GetParts)
                    and request.content == reader.content
                )
                if reader.requests > MAX_READER_REQUESTS:
                    sentence = f"{MAX_READER_REQUESTS} requests on one stream are enough"
                    await talk.refuse(RefusalReason.TOO_MANY, sentence)
                    return
                try:
                    await self._answer(reader, request)
                except Refused as refused:
                    await talk.refuse(refused.reason, refused.sentence)
        finally:
            reader.ended()

    async def _answer(self, reader: _Reader, request: Message) -> None:
        match request:
            case content_messages.GetSpec():
                signed = self.signed
                reply = content_messages.SpecReply(signed.founder_public_key, signed.signature)
                await reader.talk.send(reply, signed.spec_bytes)
            case content_messages.GetBlob(digest):
                await reader.talk.send(content_messages.BlobReply(digest), await self._blob(digest))
            case content_messages.GetState():
                await self._send_manifest(reader, request)
            case content_messages.GetSample():
                sample = await self._own_source(request.group).sample(request.seed)
                await reader.talk.send(content_messages.SampleReply(), sample)
            case content_messages.GetHoldings():
                await self._send_holdings(reader.talk, request)
            case content_messages.GetParts() if request.content in self.stores:
                for piece in request.parts:
                    await self._send_piece(reader.talk, self.stores[request.content], piece)
            case content_messages.GetParts():
                await self._send_chunks(reader, request)

    async def _blob(self, digest: str) -> bytes:
        path = self.blobs.get(digest)
        if path is None:
            raise Refused(RefusalReason.UNAVAILABLE, f"I have no blob {digest}")
        try:
            if path.stat().st_size <= MAX_BLOB_BYTES:
                return await self.work.run(path.read_bytes)
        except OSError as error:
            sentence = f"I cannot read blob {digest}: {error.strerror}"  # without its path
            raise Refused(RefusalReason.UNAVAILABLE, sentence) from error
        raise Refused(
            RefusalReason.TOO_LARGE,
            f"blob {digest} is larger than {MAX_BLOB_BYTES} bytes, the most that peers give"
            " each other: bring the file to the joiner's cache by other means",
        )

    # --- the state --------------------------------------------------------------------------------
    async def _asked_source(self, group: str) -> tuple[WrittenState, KeptStates]:
        """The state of a group, and its files. Raises Refused: there is none of it here."""
        source = self.source
        if (source is None or group != source.group) and (other := await self.other(group)):
            files = self._others.get(group) or KeptStates(self.state_dir / group, self.work)
            return other, self._others.setdefault(group, files)
        return self._own_source(group), self._states

    def _own_source(self, group: str) -> StateSource:
        """The source of our group's state. Raises Refused: another was asked for."""
        source = self.source
        if source is None:
            raise Refused(RefusalReason.UNAVAILABLE, "I have no state yet")
        if group != source.group:
            self.refused[RefusalReason.OTHER_GROUP] += 1
            raise Refused(RefusalReason.OTHER_GROUP, other_group_sentence(source.group, group))
        return source

    async def _send_manifest(self, reader: _Reader, request: content_messages.GetState) -> None:
        source, states = await self._asked_source(request.group)
        _check_age(source.step, request)  # nothing need be written to see that
        try:
            state = await states.for_reader(source, request.minimum_step)
        except OSError as error:
            sentence = f"I cannot write my state: {error.strerror}"
            raise Refused(RefusalReason.UNAVAILABLE, sentence) from error
        if state is None:
            sentence = "others are reading all states that I keep; ask another, or later"
            raise Refused(RefusalReason.TOO_MANY, sentence)
        _check_age(state.manifest.scalars.step, request)
        reader.reads(state)
        await reader.talk.send(state.manifest.scalars, b"".join(state.manifest.digests))

    async def _send_chunks(self, reader: _Reader, request: content_messages.GetParts) -> None:
        all_states = (self._states, *self._others.values())
        found = (states.by_root.get(request.content) for states in all_states)
        if (state := next(filter(None, found), None)) is None:
            raise Refused(RefusalReason.UNAVAILABLE, REPLACED)
        reader.content = request.content
        reader.reads(state)
        for index in request.parts:
            if index >= len(state.manifest.digests):
                raise Refused(RefusalReason.UNAVAILABLE, "the state has no further chunks")
            reader.chunks_left -= 1
            if reader.chunks_left < 0:
                sentence = f"you have read this state {READINGS_OF_A_STATE} times already"
                raise Refused(RefusalReason.TOO_MANY, sentence)
            try:
                data = await self.work.run(read_chunk, state.path, index)
            except FileNotFoundError:
                raise Refused(RefusalReason.UNAVAILABLE, REPLACED) from None
            await reader.talk.send(content_messages.Part(index), data)

    # --- the corpus -------------------------------------------------------------------------------
    async def _send_holdings(
        self, talk: Conversation, request: content_messages.GetHoldings
    ) -> None:
        store = self.stores.get(request.corpus)
        if store is None:
            raise Refused(RefusalReason.UNAVAILABLE, f"I have no corpus {request.corpus}")
        here, version = store.here, store.version
        whole = bool(here.all())
        is_known = whole or request.known == version
        bits = b"" if is_known else np.packbits(here, bitorder="little").tobytes()
        await talk.send(content_messages.Holdings(version, whole), bits)

    async def _send_piece(self, talk: Conversation, store: PieceStore, piece: int) -> None:
        if piece >= store.manifest.num_pieces or not store.here[piece]:
            raise Refused(RefusalReason.UNAVAILABLE, f"I have no piece {piece}")
        if not await self._may_begin():
            sentence = "my line is busy with other pieces; ask another, or later"
            raise Refused(RefusalReason.TOO_MANY, sentence)
        ended = self._at_once.lost
        try:
            data = await self.work.run(store.read, piece)
            if data is None:
                ended = self._at_once.refused
                raise Refused(RefusalReason.UNAVAILABLE, f"I have no piece {piece}")
            # With the usual patience of a send: of many streams on a thin line each takes long.
            await talk.send(content_messages.Part(piece), data)
            ended = self._at_once.came
        finally:
            ended(trio.current_time())
            self._ended.unpark_all()

    async def _may_begin(self) -> bool:
        """Wait for a turn, in the order of asking, and take it. Returns whether it came."""
        with trio.move_on_after(TURN_S):
            async with self._turns:
                while not self._at_once.has_room(trio.current_time()):
                    with trio.move_on_after(LOOK_EVERY_S):
                        await self._ended.park()
                self._at_once.began(trio.current_time())
                return True
        return False


def _check_age(step: int, request: content_messages.GetState) -> None:
    if step < request.minimum_step:
        sentence = f"my state is of step {step}, {request.minimum_step} or later was asked for"
        raise Refused(RefusalReason.UNAVAILABLE, sentence)
