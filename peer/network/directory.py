"""The directory in real life: hivemind's hash table in a process, behind the Directory interface.

The table (dht_node.py) is a child process that speaks to nobody but us (table_messages.py). We put
its questions to other peers, and theirs to it, each on a stream of `/loco/directory/1`:

- A stranger's question passes the gate (handlers.py): a budget of places and a pace for each
  identity and network, the run's admission, bans, conduct. In a run that not everybody may join an
  outsider is told nothing. It is answered within ASK_TIMEOUT_S, or not at all.
- We ask only peers that the gate would let in, so no outsider is given a record to keep.
- Other peers' answers name nodes. Where we know no address of one, the named ones are tried.

The process is not trusted. Each request has two deadlines: in the process CALL_TIMEOUT_S ends a
slow one, which is an ordinary failure; when even that end is not heard of HUNG_AFTER_S later, it is
killed. However it ends, it is started again after a pause, and enters the table by the peers that
the last one was told of. It has no part in p2pd, links or weights, so they do not notice.

Store and get are best effort and raise nothing: their failures are counted by reason. A call waits
a while for a process that is coming up.
"""

import itertools
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import trio
from msgspec.structs import replace

from peer.runtime import Address, PeerId, Stream
from peer.runtime.child_frames import ChildDied, PipeError
from peer.runtime.child_process import ChildProcess
from protocol.errors import LocoError, leaves
from protocol.limits import ANSWER_S, INBOUND_STREAMS, MAX_LINKS
from protocol.membership.book import BackOff
from protocol.wire.directory_messages import (
    FindRecords,
    KeepRecord,
    NearNode,
    RecordKept,
    RecordsFound,
)
from protocol.wire.versions import DIRECTORY

from .conversation import Conversation
from .libp2p import RESTARTS, Libp2pNetwork
from .table_messages import (
    CALL_TIMEOUT_S,
    FROM_TABLE,
    AskNode,
    Enter,
    Get,
    NodeAnswer,
    NodeReply,
    NodeRequest,
    Records,
    Response,
    Serve,
    Store,
    TableRequest,
    Up,
)

HUNG_AFTER_S: Final = 2.0
START_TIMEOUT_S: Final = 60.0
"""Python on a busy machine with a cold disk takes its time."""
ASK_TIMEOUT_S: Final = 2.0
"""The time of another peer to be reached and to answer; one search asks many."""
PROGRAM: Final = "peer.network.table"


class _TableProcess(ChildProcess):
    title = "the directory's process"
    decoder = FROM_TABLE


class _Life:
    """One life of the table's process, and the requests that wait for it."""

    def __init__(self, child: _TableProcess) -> None:
        self.child = child
        self.up = trio.Event()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[trio.Event, list[Response]]] = {}
        self._to_send, self._sent = trio.open_memory_channel[TableRequest | Response](
            2 * INBOUND_STREAMS.total
        )

    async def request(self, body: Any, ahead_s: float) -> Response | None:
        """Ask the process. None: it hung, and is killed, or it is over."""
        number, event, answers = next(self._numbers), trio.Event(), list[Response]()
        self._waiting[number] = event, answers
        try:
            self._to_send.send_nowait(TableRequest(number, body, ahead_s))
            with trio.move_on_after(CALL_TIMEOUT_S + HUNG_AFTER_S) as scope:
                await event.wait()
            if scope.cancelled_caught:
                self.child.kill("hung")
        except (trio.WouldBlock, trio.ClosedResourceError):
            return Response(number, failure="timeout")
        finally:
            del self._waiting[number]
        return answers[0] if answers else None

    def respond(self, response: Response) -> None:
        with suppress(trio.WouldBlock, trio.ClosedResourceError):  # it hangs, or is over
            self._to_send.send_nowait(response)

    def answered(self, response: Response) -> None:
        if response.number in self._waiting:
            event, answers = self._waiting[response.number]
            answers.append(response)
            event.set()

    async def send_on(self) -> None:
        with self._to_send, self._sent:
            async for message in self._sent:
                await self.child.send(message)

    async def must_come_up(self) -> None:
        with trio.move_on_after(START_TIMEOUT_S):
            await self.up.wait()
            return
        self.child.kill("did not come up")

    def end(self) -> None:
        for event, _ in self._waiting.values():
            event.set()


class HivemindDirectory:
    """Implements `peer.runtime.Directory`; made by `open_hivemind_directory`.

    Attributes:
        failures: by reason: `timeout`, `error`, `down`.
        restarts: processes that ended and were replaced.
        last_failure: how the last one ended.
    """

    def __init__(self, network: Libp2pNetwork, wall_clock: Callable[[], float]) -> None:
        self._network = network
        self._wall_clock = wall_clock
        self._offset_s = 0.0
        self._life: _Life | None = None
        self._changed = trio.lowlevel.ParkingLot()
        self._entry_peers: dict[PeerId, None] = {}
        self.restarts = 0
        self.last_failure = ""
        self.failures: Counter[str] = Counter()

    @property
    def process_id(self) -> int | None:
        return None if self._life is None else self._life.child.process.pid

    def swarm_time_s(self) -> float:
        return self._wall_clock() + self._offset_s

    def correct_clock(self, offset_s: float) -> None:
        self._offset_s = offset_s

    async def store(self, key: bytes, subkey: str, value: bytes, expires_s: float) -> None:
        """Store a record of our own: no node would take another's from us."""
        if subkey == self._network.peer_id:
            await self._call(Store(key, value, float(expires_s)))

    async def get(self, key: bytes) -> Mapping[str, bytes]:
        found = await self._call(Get(key))
        return dict(found.records) if isinstance(found, Records) else {}

    async def add_peers(self, addresses: Sequence[Address]) -> None:
        named = (address.rpartition("/p2p/")[::2] for address in addresses)
        peer_ids = dict.fromkeys(peer_id for front, peer_id in named if front)
        if not peer_ids:
            return
        kept = {known: None for known in self._entry_peers if known not in peer_ids}
        self._entry_peers = dict.fromkeys([*kept, *peer_ids][-MAX_LINKS:])
        await self._call(Enter(tuple(self._entry_peers)))

    async def _call(self, body: Store | Get | Enter) -> NodeAnswer | Records | None:
        response = await self._request(body)
        failure = "down" if response is None else response.failure
        if failure:
            self.failures[failure] += 1
        return None if response is None else response.body

    async def _request(self, body: Store | Get | Enter | Serve) -> Response | None:
        """Ask the process, and wait for it a while; None: it is not there, or hung."""
        with trio.move_on_after(CALL_TIMEOUT_S):
            while self._life is None or not self._life.up.is_set():
                await self._changed.park()
        life = self._life
        if life is None or not life.up.is_set():
            return None
        ahead_s = self.swarm_time_s() - wall_time_s()
        return await life.request(body, ahead_s)

    # --- other peers ------------------------------------------------------------------------------
    async def serve(self, stream: Stream) -> None:
        """Answer one question of another peer."""
        talk, peer_id = Conversation(stream), stream.remote_peer_id
        question, _ = await talk.receive(FindRecords, KeepRecord, timeout_s=ANSWER_S)
        response = None
        with trio.move_on_after(ASK_TIMEOUT_S):  # nobody waits longer, and places are few
            response = await self._request(Serve(peer_id, stream.remote_address, question))
        told = None if response is None else response.body
        if isinstance(told, NodeAnswer) and told.answer is not None:
            await talk.send(self._with_addresses(told.answer))

    async def _ask(self, life: _Life, asking: NodeRequest) -> None:
        told = NodeAnswer(None)
        with trio.move_on_after(ASK_TIMEOUT_S):
            told = await self._told(asking.body)
        life.respond(Response(asking.number, told))

    async def _told(self, ask: AskNode) -> NodeAnswer:
        if not self._network.would_serve(ask.peer_id):
            return NodeAnswer(None)
        expected = RecordsFound if isinstance(ask.question, FindRecords) else RecordKept
        try:
            stream = await self._network.open_stream(ask.peer_id, DIRECTORY)
            async with Conversation(stream) as talk:
                await talk.send(ask.question)
                answer: Any = (await talk.receive(expected))[0]
        except (LocoError, trio.BrokenResourceError, trio.ClosedResourceError):
            return NodeAnswer(None)
        return NodeAnswer(self._without_addresses(answer), stream.remote_address)

    def _with_addresses(self, answer: NodeReply) -> NodeReply:
        if isinstance(answer, RecordKept):
            return answer
        known = self._network.known_addresses
        nearest = (NearNode(node.peer_id, known(node.peer_id)) for node in answer.nearest)
        return replace(answer, nearest=tuple(nearest))

    def _without_addresses(self, answer: NodeReply) -> NodeReply:
        """Note the addresses of nodes that we know none of."""
        if isinstance(answer, RecordKept):
            return answer
        for node in answer.nearest:
            self._network.note_addresses(node.peer_id, node.addresses)
        return replace(answer, nearest=tuple(NearNode(node.peer_id) for node in answer.nearest))

    # --- the process ------------------------------------------------------------------------------
    async def supervise(self) -> None:
        """Keep a process running."""
        pauses = BackOff(*RESTARTS)
        while True:
            try:
                await self._live_once()
            except* (ChildDied, PipeError, OSError) as group:
                self.last_failure = str(leaves(group)[0])
            self.restarts += 1
            await trio.sleep(pauses.failed("table", trio.current_time()))

    async def _live_once(self) -> None:
        """One life of the process. Raises ChildDied, PipeError and OSError, in groups or alone."""
        child = await _TableProcess.run(
            PROGRAM, self._network.peer_id, environment=dict(os.environ)
        )
        self._life = life = _Life(child)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(life.send_on)
                nursery.start_soon(life.must_come_up)
                while True:
                    match await child.receive():
                        case Up():
                            life.up.set()
                            self._changed.unpark_all()
                            if self._entry_peers:
                                enter = Enter(tuple(self._entry_peers))
                                nursery.start_soon(self._call, enter)
                        case Response() as response:
                            life.answered(response)
                        case NodeRequest() as asking:
                            nursery.start_soon(self._ask, life, asking)
        finally:
            self._life = None
            life.end()
            await child.aclose()


def wall_time_s() -> float:
    return time.time()  # noqa: TID251 - this is the port


@asynccontextmanager
async def open_hivemind_directory(
    network: Libp2pNetwork, *, wall_clock: Callable[[], float] = wall_time_s
) -> AsyncIterator[HivemindDirectory]:
    """A directory on this network. Its process comes up meanwhile."""
    directory = HivemindDirectory(network, wall_clock)
    await network.serve(DIRECTORY, directory.serve)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(directory.supervise)
        yield directory
        nursery.cancel_scope.cancel()
