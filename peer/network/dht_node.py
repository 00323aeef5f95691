"""One node of hivemind's hash table, and its asyncio loop: the only file that knows either.

It runs in a process of its own (table.py). hivemind gives the routing table, the search through the
nodes, and the choice of those that keep a record. What it would do with the network is ours:

- The node has no socket but that to the daemon, which puts its questions to other peers, and those
  of other peers to it, as messages of `/loco/directory/1`. So what a stranger sends has passed the
  gate (handlers.py), is of bounded length, and was decoded by our codec before it comes here; no
  encoding of hivemind's is read.
- A peer's node id is the hash of its peer id, so one identity is one node.
- Records are kept by protocol/membership/record_table.py. Nothing is sent to a node that is new.
- A search returns the records that the nodes on its way had, each checked here; one that takes too
  long, because nodes are silent or name others without end, returns those found until then.
- The routing table is bounded: nodes of one network, and those that stand by for a full bucket.
- No caches: they save nothing on values this small, and would keep dead peers around.

The clock: hivemind takes `time.time` by name in several modules. They get a function that follows
the swarm's clock, by what the daemon says of it with each request.

A call to a silent peer is given up by the daemon after ASK_TIMEOUT_S; the peer leaves the routing
table, and rests.
"""

import asyncio
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import hivemind.dht.node
import hivemind.dht.protocol
import hivemind.dht.routing
import hivemind.utils.timed_storage
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.utils.logging import use_hivemind_log_handler
from msgspec import Struct

from peer.runtime.child_frames import READ_BYTES, FrameDecoder, encode
from protocol.limits import NEAREST_NODES, RECORDS, RECORDS_OF_SHARD
from protocol.membership.book import REDIALS, BackOff, Budget
from protocol.membership.record_table import RecordTable, live_record_at
from protocol.membership.records import place_of
from protocol.wire.directory_messages import (
    FindRecords,
    FoundRecord,
    KeepRecord,
    NearNode,
    RecordKept,
    RecordsFound,
)

from .table_messages import (
    CALL_TIMEOUT_S,
    TO_TABLE,
    AskNode,
    Enter,
    Get,
    NodeAnswer,
    NodeQuestion,
    NodeReply,
    NodeRequest,
    Records,
    Response,
    Serve,
    Store,
    TableRequest,
    Up,
)

REPLICAS: Final = 5
"""Nodes that a record is stored at."""
NODES: Final = replace(RECORDS, per_peer=1)
"""Nodes of the routing table: one for each peer."""


class _Clock:
    ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s  # noqa: TID251 - the daemon says how far it is off


_clock: Final = _Clock()

for _module in (
    hivemind.utils.timed_storage,
    hivemind.dht.routing,
    hivemind.dht.protocol,
    hivemind.dht.node,
):
    _module.get_dht_time = _clock

use_hivemind_log_handler("nowhere")
logging.getLogger("hivemind").setLevel(logging.CRITICAL)


def node_id_of(peer_id: str) -> Any:
    return DHTID.from_bytes(place_of(peer_id.encode()))


# --- the daemon -----------------------------------------------------------------------------------
class DaemonConnection:
    """The table's end of the socket pair.

    A thread reads it, so that the end of the daemon ends this process, also where the loop hangs.
    """

    def __init__(self, fd: int, peer_id: str) -> None:
        self.peer_id = peer_id
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[NodeAnswer]] = {}

    async def ask(self, peer_id: str, question: NodeQuestion) -> NodeAnswer:
        number = next(self._numbers)
        self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(NodeRequest(number, AskNode(peer_id, question)))
            return await self._asked[number]
        finally:
            del self._asked[number]

    def answered(self, response: Response) -> None:
        future = self._asked.get(response.number)
        if future is not None and not future.done():
            future.set_result(
                response.body if isinstance(response.body, NodeAnswer) else NodeAnswer(None)
            )

    def send(self, message: Struct) -> None:
        self._socket.sendall(encode(message))

    def read_from_a_thread(self, arrived: asyncio.Queue[TableRequest | Response]) -> None:
        loop = asyncio.get_running_loop()

        def read() -> None:
            frames = FrameDecoder(TO_TABLE)
            with suppress(OSError):
                while data := self._socket.recv(READ_BYTES):
                    for message in frames.feed(data):
                        loop.call_soon_threadsafe(arrived.put_nowait, message)
            os._exit(os.EX_OK)  # the daemon is gone

        threading.Thread(target=read, name="daemon", daemon=True).start()


# --- hivemind -------------------------------------------------------------------------------------
class _AsItIs:
    """In place of hivemind's serializer: what we store are bytes, and stay so."""

    @staticmethod
    def dumps(value: Any) -> Any:
        return value

    loads = dumps


class _OwnRecords:
    """Stands in for hivemind's storage, as far as a store at ourselves needs it."""

    def __init__(self, records: RecordTable) -> None:
        self._records = records

    def store(self, key: Any, value: bytes, expires_s: float, subkey: str) -> bool:
        return self._records.keep(_clock(), key.to_bytes(), subkey, value, "")


class _Resting:
    """In place of hivemind's blacklist, which never forgets a name."""

    def __init__(self) -> None:
        self._pauses = BackOff(*REDIALS)

    def register_failure(self, peer_id: str) -> None:
        self._pauses.failed(peer_id, _clock())

    def register_success(self, peer_id: str) -> None:
        self._pauses.answered(peer_id)

    def __contains__(self, peer_id: str) -> bool:
        return not self._pauses.is_due(peer_id, _clock())


class TableProtocol(DHTProtocol):  # type: ignore[misc]  # hivemind has no types
    """hivemind's calls to other nodes, put by the daemon. Theirs come by `Serve`."""

    serializer = _AsItIs
    p2p: DaemonConnection

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gathered: dict[bytes, list[dict[str, bytes]]] = {}
        """The searches under way for a place, and what they have found."""
        self._nodes = Budget(NODES)
        self._addresses: dict[str, str] = {}

    async def add_p2p_handlers(self, *_: Any, **__: Any) -> None: ...

    async def call_ping(self, peer: str, **_: Any) -> Any:
        found = await self.call_find(peer, [self.node_id])
        return node_id_of(peer) if found else None

    async def call_find(self, peer: str, keys: Collection[Any]) -> Any:
        """The nodes that a peer names, by key; `gathered` takes the records."""
        found = {}
        for key in keys:
            answer = await self._ask(peer, FindRecords(key.to_bytes()))
            if not isinstance(answer, RecordsFound):
                return None
            for gathered in self.gathered.get(key.to_bytes(), ()):
                _add_newest(gathered, key.to_bytes(), answer.records)
            names = {node.peer_id for node in answer.nearest} - {self.p2p.peer_id}
            found[key] = None, {node_id_of(name): name for name in names}
        return found

    async def call_store(
        self, peer: str, keys: Sequence[Any], values: Sequence[bytes], *_: Any, **__: Any
    ) -> list[bool] | None:
        kept = []
        for key, value in zip(keys, values, strict=True):
            answer = await self._ask(peer, KeepRecord(key.to_bytes(), value))
            if not isinstance(answer, RecordKept):
                return None
            kept.append(answer.kept)
        return kept

    async def _ask(self, peer_id: str, question: NodeQuestion) -> NodeReply | None:
        async with self.rpc_semaphore:
            told = await self.p2p.ask(peer_id, question)
        if told.answer is None:
            self._forget(peer_id)
        else:
            self.met(peer_id, told.address)
        return told.answer

    # --- the routing table ------------------------------------------------------------------------
    @property
    def knows_nodes(self) -> bool:
        return bool(self._addresses)

    def met(self, peer_id: str, address: str) -> None:
        """A peer asked or answered, from this address: it is a node of the table."""
        if peer_id not in self._addresses:
            if peer_id == self.p2p.peer_id or not self._nodes.has_room(peer_id, address):
                return
            self._nodes.take(peer_id, address)
            self._addresses[peer_id] = address
        node_id, table = node_id_of(peer_id), self.routing_table
        oldest = table.add_or_update_node(node_id, peer_id)
        standing_by = table.buckets[table.get_bucket_index(node_id)].replacement_nodes
        if len(standing_by) > NEAREST_NODES:
            self._forget(next(iter(standing_by.values())))
        if oldest is not None:
            _spawn(self.call_ping(oldest[1]))

    def _forget(self, peer_id: str) -> None:
        if peer_id in self._addresses:
            self._nodes.give_back(peer_id, self._addresses.pop(peer_id))
            del self.routing_table[node_id_of(peer_id)]


def _add_newest(gathered: dict[str, bytes], place: bytes, found: Collection[FoundRecord]) -> None:
    """Add those of the records found that are valid, live, and outlast what was found before."""
    for peer_id, value in ((each.peer_id, each.value) for each in found):
        held = gathered.get(peer_id)
        # Honest nodes keep nearly the same records, so there are never many more than one keeps.
        if value == held or (held is None and len(gathered) >= 4 * RECORDS_OF_SHARD.total):
            continue  # most nodes have the same: a signature takes time to check
        record = live_record_at(_clock(), place, peer_id, value)
        before = None if held is None else live_record_at(_clock(), place, peer_id, held)
        if record is not None and (before is None or before.expires_s < record.expires_s):
            gathered[peer_id] = value


hivemind.dht.node.DHTProtocol = TableProtocol

_background: set[asyncio.Task[Any]] = set()


def _spawn(work: Coroutine[Any, Any, Any]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    _background.add(task)
    task.add_done_callback(_background.discard)


# --- the node -------------------------------------------------------------------------------------
class DhtNode:
    def __init__(self, daemon: DaemonConnection, node: Any) -> None:
        self._daemon = daemon
        self._node = node
        self._protocol: TableProtocol = node.protocol
        self._records = RecordTable()
        self._entry_peers: tuple[str, ...] = ()
        self._protocol.storage = _OwnRecords(self._records)
        node.blacklist = _Resting()

    @classmethod
    async def open(cls, daemon: DaemonConnection) -> "DhtNode":
        node = await DHTNode.create(
            p2p=daemon,
            node_id=node_id_of(daemon.peer_id),
            bucket_size=NEAREST_NODES,
            num_replicas=REPLICAS,
            parallel_rpc=32,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
        )
        return cls(daemon, node)

    async def run(self) -> None:
        arrived: asyncio.Queue[TableRequest | Response] = asyncio.Queue()
        self._daemon.read_from_a_thread(arrived)
        self._daemon.send(Up())
        while True:
            match await arrived.get():
                case TableRequest() as request:
                    _clock.ahead_s = request.ahead_s
                    _spawn(self._respond(request))
                case response:
                    self._daemon.answered(response)

    async def _respond(self, request: TableRequest) -> None:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                response = Response(request.number, await self._done(request.body))
        except TimeoutError:
            response = Response(request.number, failure="timeout")
        except Exception:  # noqa: BLE001 - hivemind raises what it likes; the daemon counts it
            response = Response(request.number, failure="error")
        self._daemon.send(response)

    async def _done(self, body: Store | Get | Enter | Serve) -> NodeAnswer | Records | None:
        match body:
            case Store(key, value, expires_s):
                await self._stay_in()
                await self._node.store(key, value, expires_s, subkey=self._daemon.peer_id)
                return None
            case Get(key):
                await self._stay_in()
                return Records(tuple(sorted((await self._get(place_of(key))).items())))
            case Enter(peer_ids):
                self._entry_peers = peer_ids
                await self._enter()
                return None
            case Serve(peer_id, address, question):
                self._protocol.met(peer_id, address)
                return NodeAnswer(self._answer(peer_id, address, question))

    async def _enter(self) -> None:
        await asyncio.gather(*map(self._protocol.call_ping, self._entry_peers))
        await self._node.find_nearest_nodes([self._node.node_id])

    async def _stay_in(self) -> None:
        """Enter again, where all nodes have fallen silent: our own line may have been down."""
        if not self._protocol.knows_nodes and self._entry_peers:
            await self._enter()

    async def _get(self, place: bytes) -> dict[str, bytes]:
        """The live records that the nearest nodes hold, the newest of each peer."""
        gathered = self._records.at(_clock(), place)
        self._protocol.gathered.setdefault(place, []).append(gathered)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(CALL_TIMEOUT_S / 2):
                    # Some of the nearest have not heard of a record, and some are silent.
                    beam = 2 * REPLICAS
                    await self._node.find_nearest_nodes([DHTID.from_bytes(place)], REPLICAS, beam)
        finally:
            searches = self._protocol.gathered[place]
            searches[:] = [each for each in searches if each is not gathered]
            if not searches:
                del self._protocol.gathered[place]
        return gathered

    def _answer(self, peer_id: str, address: str, question: NodeQuestion) -> NodeReply:
        if isinstance(question, KeepRecord):
            place, value = question.place, question.value
            return RecordKept(self._records.keep(_clock(), place, peer_id, value, address))
        there = self._records.at(_clock(), question.place)
        near = self._protocol.routing_table.get_nearest_neighbors(
            DHTID.from_bytes(question.place), NEAREST_NODES, exclude=node_id_of(peer_id)
        )
        return RecordsFound(
            tuple(FoundRecord(*each) for each in there.items()),
            tuple(NearNode(name) for _, name in near),
        )


def run_table(fd: int, peer_id: str) -> None:
    """Be a node until the daemon ends."""

    async def live() -> None:
        await (await DhtNode.open(DaemonConnection(fd, peer_id))).run()

    asyncio.run(live())
