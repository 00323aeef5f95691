"""One node of hivemind's hash table, and its asyncio loop: the only file that knows either.

Importing this file imports hivemind and with it torch, which takes about a second; the directory
does so in the node's thread, in which all of this runs.

hivemind's DHTNode stores any value that anybody sends, and believes replicas about expiry. Here
every node is a `LocoDirectoryV1`, whose rules are ours:
- Only dictionary entries (subkey = peer id) that hold a record signed by that peer for that place
  are stored, sent on or read. Plain values, which would replace a whole dictionary, and undecodable
  ones, which would hang a reader, get nowhere.
- An entry's expiry is the one inside the signature, at most MAX_RECORD_LIFETIME_S away.
- A dictionary holds MAX_RECORDS_PER_SHARD entries; a node holds MAX_STORED_KEYS dictionaries,
  and refuses further ones.
- From a replica's answer invalid entries are dropped one by one; its word on the dictionary's
  expiry is recomputed, for hivemind ends a search early on an answer that claims to be fresh
  enough.
- No caches: they save nothing on values this small, and would keep dead peers around.

The clock: hivemind takes `time.time` by name in several modules. They get a function that asks for
the clock of the running thread, so that nodes with different clocks fit into one process. Peers are
pinged without hivemind's own clock check (which refuses 3 s): a wrong clock here is corrected, not
shut out.

A call to a silent peer is given up after WAIT_TIMEOUT_S, and the peer leaves the routing table; a
store to five replicas costs at most one or two such waits, once per peer that fell silent.
"""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Self

import hivemind.dht.node
import hivemind.dht.protocol
import hivemind.dht.routing
import hivemind.utils
import hivemind.utils.auth
import hivemind.utils.timed_storage
import msgpack
import uvloop
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import DaemonConnector
from hivemind.proto import dht_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import ValueWithExpiration

from protocol.address.peer_id import peer_id_to_bytes
from protocol.errors import RemoteProtocolError
from protocol.limits import MAX_RECORD_BYTES, MAX_RECORDS_PER_SHARD
from protocol.membership.records import valid_record_at

WAIT_TIMEOUT_S: Final = 2.0
PARALLEL_RPC: Final = 32
MAX_RECORD_LIFETIME_S: Final = 3600.0
MAX_STORED_KEYS: Final = 4096
MAX_KEYS_PER_REQUEST: Final = 16
"""Keys that one request may name: 16 full dictionaries stay far below p2pd's 4 MiB."""

Call = tuple[Any, ...]
"""The name of a method of `DhtNode`, and its arguments."""
Report = Callable[[Any, BaseException | None], None]

_thread = threading.local()


def thread_time() -> float:
    clock: Callable[[], float] = getattr(_thread, "clock", time.time)  # noqa: TID251
    return clock()


for _module in (
    hivemind.utils.timed_storage,
    hivemind.utils,
    hivemind.utils.auth,
    hivemind.dht.routing,
    hivemind.dht.protocol,
    hivemind.dht.node,
):
    _module.get_dht_time = thread_time

use_hivemind_log_handler("nowhere")
logging.getLogger("hivemind").setLevel(logging.CRITICAL)

_open_persistent_connection = DaemonConnector.open_persistent_connection


async def _open_and_note(self: Any) -> Any:
    """Keep a second handle on the connection to p2pd, by which another thread can cut it."""
    reader, writer = await _open_persistent_connection(self)
    handle = socket.socket(fileno=socket.dup(writer.get_extra_info("socket").fileno()))
    _thread.connections.append(handle)
    return reader, writer


DaemonConnector.open_persistent_connection = _open_and_note


def _unpacked(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, raw=False)
    except Exception:  # noqa: BLE001 - whatever msgpack finds wrong, it is no value or subkey
        return None


def _unwrap(wrapped: Any) -> bytes | None:
    if type(wrapped) is not bytes or len(wrapped) > 2 * MAX_RECORD_BYTES:
        return None  # nothing long is unpacked: a record with what msgpack puts around it is short
    value = _unpacked(wrapped)
    return value if type(value) is bytes else None


def acceptable(place: bytes, peer_id: Any, wrapped: Any, expires_s: Any) -> bool:
    """Whether an entry (peer id: value) may be kept at this place of the table."""
    value = _unwrap(wrapped)
    if value is None or type(peer_id) is not str:
        return False
    record = valid_record_at(place, peer_id, value)
    latest_s = thread_time() + MAX_RECORD_LIFETIME_S
    return record is not None and record.expires_s == expires_s and expires_s <= latest_s


class _RecordCheck(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    """The rule of `acceptable` on hivemind's own paths (storing at ourselves)."""

    def validate(self, record: DHTRecord) -> bool:
        peer_id = _unpacked(record.subkey)
        return acceptable(record.key, peer_id, record.value, record.expiration_time)


class LocoDirectoryV1(DHTProtocol):  # type: ignore[misc]  # hivemind has no types
    """hivemind's remote procedures under our rules. Its name is part of the protocol ids."""

    async def rpc_store(
        self, request: dht_pb2.StoreRequest, context: P2PContext
    ) -> dht_pb2.StoreResponse:
        if request.peer:
            ping = dht_pb2.PingRequest(peer=request.peer)
            _spawn(self.rpc_ping(ping, context))
        response = dht_pb2.StoreResponse(store_ok=[], peer=self.node_info)
        entries = zip(
            request.keys, request.subkeys, request.values, request.expiration_time, strict=True
        )
        for place, tag, value, expires_s in list(entries)[:MAX_KEYS_PER_REQUEST]:
            response.store_ok.append(self._take_in(place, tag, value, expires_s))
        return response

    def _take_in(self, place: bytes, tag: bytes, value: bytes, expires_s: float) -> bool:
        if len(place) != DHTID.HASH_NBYTES:
            return False
        if tag != self.IS_DICTIONARY:
            return self._keep(place, msgpack.unpackb(tag, raw=False), value, expires_s)
        dictionary = self.serializer.loads(value)
        if not isinstance(dictionary, DictionaryDHTValue):
            return False
        with dictionary.freeze():
            entries = list(dictionary.items())[:MAX_RECORDS_PER_SHARD]
        kept = [self._keep(place, peer_id, *entry) for peer_id, entry in entries]
        return all(kept)

    def _keep(self, place: bytes, peer_id: Any, wrapped: Any, expires_s: float) -> bool:
        if not acceptable(place, peer_id, wrapped, expires_s):
            return False
        key = DHTID.from_bytes(place)
        there = self.storage.get(key)
        if there is None:
            has_room = len(self.storage) < MAX_STORED_KEYS
        else:
            entry = there.value.get(peer_id)
            if entry is not None and entry.expiration_time >= expires_s:
                return False
            has_room = entry is not None or len(there.value) < MAX_RECORDS_PER_SHARD
        return has_room and bool(self.storage.store_subkey(key, peer_id, wrapped, expires_s))

    async def rpc_find(
        self, request: dht_pb2.FindRequest, context: P2PContext
    ) -> dht_pb2.FindResponse:
        if len(request.keys) > MAX_KEYS_PER_REQUEST:
            raise RemoteProtocolError(f"{len(request.keys)} keys in one request")
        return await super().rpc_find(request, context)

    async def call_find(self, peer: PeerID, keys: Any) -> Any:
        found = await super().call_find(peer, keys) or {}
        return {key: (_with_true_expiry(item), nearest) for key, (item, nearest) in found.items()}

    def _validate_dictionary(self, key_bytes: bytes, dictionary: Any) -> bool:
        if not isinstance(dictionary, DictionaryDHTValue):
            return False
        dictionary.maxsize = float("inf")
        with dictionary.freeze():
            kept = 0
            for peer_id, (value, expires_s) in list(dictionary.items()):
                room = kept < MAX_RECORDS_PER_SHARD
                if room and acceptable(key_bytes, peer_id, value, expires_s):
                    kept += 1
                else:
                    del dictionary[peer_id]
        return True


def _with_true_expiry(item: Any) -> Any:
    """A replica's dictionary with the expiry of its entries; None when nothing is left of it."""
    if item is None or not isinstance(item.value, DictionaryDHTValue) or not item.value.data:
        return None
    latest_s = max(entry.expiration_time for entry in item.value.data.values())
    item.value.latest_expiration_time = latest_s
    return ValueWithExpiration(item.value, latest_s)


hivemind.dht.node.DHTProtocol = LocoDirectoryV1

_background: set[asyncio.Task[Any]] = set()


def _spawn(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.get_running_loop().create_task(work)
    _background.add(task)
    task.add_done_callback(_background.discard)
    return task


def _peer_in(address: str) -> Any:
    try:
        return PeerID(peer_id_to_bytes(address.rpartition("/p2p/")[2]))
    except RemoteProtocolError:
        return None


class DhtNode:
    """A node of the table, for the thread of its loop; others may `submit` and `stop` alone."""

    def __init__(self, p2p: Any, node: Any) -> None:
        self._p2p = p2p
        self._node = node
        self.loop = asyncio.get_running_loop()
        self._life = asyncio.ensure_future(self._until_lost())

    @classmethod
    async def open(cls, control_address: str) -> Self:
        """Attach to p2pd at a unix multiaddr. Raises OSError when nothing listens there."""
        p2p = await P2P.replicate(Multiaddr(control_address))
        node = await DHTNode.create(
            p2p=p2p,
            wait_timeout=WAIT_TIMEOUT_S,
            parallel_rpc=PARALLEL_RPC,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
            record_validator=_RecordCheck(),
        )
        return cls(p2p, node)

    async def store(self, key: bytes, subkey: str, value: bytes, expires_s: float) -> None:
        """Store at the nearest nodes, perhaps ourselves among them."""
        await self._node.store(key, value, float(expires_s), subkey=subkey)

    async def get(self, key: bytes) -> Mapping[str, bytes]:
        """The live entries that the nearest nodes hold, the newest of each."""
        found = await self._node.get(key, latest=True)
        if found is None or not isinstance(found.value, dict):
            return {}
        now_s = thread_time()
        return {
            subkey: entry.value
            for subkey, entry in sorted(found.value.items())
            if entry.expiration_time > now_s
        }

    async def add_peers(self, addresses: Sequence[str]) -> None:
        """Ping nodes by the peer ids of their addresses, then look for our own neighbours."""
        peers = {_peer_in(address) for address in addresses} - {None, self._p2p.peer_id}
        await asyncio.gather(*(self._node.protocol.call_ping(peer) for peer in peers))
        await self._node.find_nearest_nodes([self._node.node_id])

    async def _until_lost(self) -> None:
        await asyncio.wait([self._p2p._client.control._read_task])

    async def live(self) -> None:
        """Wait until p2pd closes its connection, or `stop`; then let go of p2pd."""
        with contextlib.suppress(asyncio.CancelledError):
            await self._life
        self._node.is_alive = False
        await self._p2p.shutdown()

    # --- for other threads ------------------------------------------------------------------------
    def submit(self, call: Call, timeout_s: float, report: Report) -> Callable[[], None]:
        """Make a call in the node's thread, and `report(result, error)` from there.

        Returns a function that gives the call up. Raises RuntimeError: the node is no more.
        """
        tasks: list[asyncio.Task[Any]] = []

        def finished(task: asyncio.Task[Any]) -> None:
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            report(None if error else task.result(), error)

        def give_up() -> None:
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])

        def begin() -> None:
            tasks.append(_spawn(self._make(call, timeout_s)))
            tasks[0].add_done_callback(finished)

        self.loop.call_soon_threadsafe(begin)
        return give_up

    async def _make(self, call: Call, timeout_s: float) -> Any:
        name, *arguments = call
        async with asyncio.timeout(timeout_s):
            return await getattr(self, name)(*arguments)

    def stop(self) -> None:
        """End the node, as soon as its loop comes to it."""
        with contextlib.suppress(RuntimeError):  # closed already
            self.loop.call_soon_threadsafe(self._life.cancel)


def run_node(
    control_address: str,
    clock: Callable[[], float],
    connections: list[socket.socket],
    on_ready: Callable[[DhtNode], None],
) -> None:
    """Be a node until p2pd goes away or we are stopped. The body of the directory's thread.

    `connections` gets a handle on each connection to p2pd; shut down, it cuts this node off.

    Raises:
        OSError: p2pd cannot be reached.
    """
    _thread.clock, _thread.connections = clock, connections

    async def live() -> None:
        node = await DhtNode.open(control_address)
        on_ready(node)
        await node.live()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.get_loop().set_exception_handler(lambda _loop, _context: None)
        runner.run(live())
