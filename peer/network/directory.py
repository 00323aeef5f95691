"""The directory in real life: hivemind's hash table in a thread, behind the Directory interface.

hivemind is written for asyncio, the daemon for trio. One thread runs a uvloop with one node
(dht_node.py) on the network's p2pd; a call from trio is handed over with `call_soon_threadsafe` and
its answer comes back through trio's token. A call is a name and plain values, and so is its answer:
the node could as well be in another process.

The thread is not trusted. Each call has two deadlines: inside the loop CALL_TIMEOUT_S ends a slow
call, which is an ordinary failure; when even that end is not heard of HUNG_AFTER_S later, the loop
itself does not run. Such a thread is *abandoned*: a thread cannot be killed, so its connection to
p2pd is cut (it can then neither answer nor ask as a node of ours), and it is told to stop should it
ever wake. A p2pd that goes away ends the node's thread, too.

Without a thread the directory is *detached*: its calls return empty at once. It attaches again,
with a new thread that is told the peers that the old one was: after a hang, when it is called
(every REATTACH_EVERY_S at most), or at `reattach`. When MAX_RESTARTS_IN_A_ROW threads and one more
have hung without one answered call between, `DirectoryUnrecoverable` says that only a new process
will help.

Store and get are best effort and raise nothing else: their failures are counted by reason.
"""

import contextlib
import socket
import threading
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import trio

from peer.runtime import Address, DirectoryUnrecoverable
from protocol.errors import StreamLost

if TYPE_CHECKING:
    from .dht_node import DhtNode

CALL_TIMEOUT_S: Final = 8.0
HUNG_AFTER_S: Final = 2.0
START_TIMEOUT_S: Final = 60.0
"""Importing torch on a busy machine with a cold disk takes its time."""
REATTACH_EVERY_S: Final = 2.0
MAX_RESTARTS_IN_A_ROW: Final = 3
MAX_ENTRY_PEERS: Final = 64
"""Addresses to enter the table by after a restart; the oldest give way."""

_loading = threading.Lock()
"""Held while hivemind is imported: the set of warning filters belongs to the whole process."""


class _Hung(Exception): ...


class _ThreadEnded(Exception):
    """The thread has ended: p2pd is gone, or was never there."""


class _NodeThread:
    """One life of one node in a thread of its own; abandoned as a whole when it hangs."""

    def __init__(self, control_address: str, clock: Callable[[], float]) -> None:
        self._control_address = control_address
        self._clock = clock
        self._connections: list[socket.socket] = []
        self._token = trio.lowlevel.current_trio_token()
        self._started = trio.Event()
        self._ended = trio.Event()
        self._waiting: set[trio.Event] = set()
        self._error: BaseException | None = None
        self.node: DhtNode | None = None

    @property
    def attached(self) -> bool:
        return self.node is not None and not self._ended.is_set()

    async def start(self) -> None:
        """Raises _ThreadEnded when p2pd is not there, _Hung when the thread does not come up."""
        threading.Thread(target=self._main, name="directory", daemon=True).start()
        with trio.move_on_after(START_TIMEOUT_S):
            await self._started.wait()
        if not self._started.is_set():
            raise _Hung
        if self.node is None:
            raise _ThreadEnded(str(self._error or "p2pd closed the connection"))

    async def call(self, *call: Any) -> Any:
        """Call a method of the node by name. Raises _Hung, _ThreadEnded, or what it raised."""
        node, done, answer = self.node, trio.Event(), []
        if node is None or self._ended.is_set():
            raise _ThreadEnded

        def report(result: Any, error: BaseException | None) -> None:
            answer.append((result, error))
            self._tell_trio(done.set)

        try:
            give_up = node.submit(call, CALL_TIMEOUT_S, report)
        except RuntimeError as error:
            raise _ThreadEnded from error
        self._waiting.add(done)
        try:
            with trio.move_on_after(CALL_TIMEOUT_S + HUNG_AFTER_S):
                await done.wait()
        finally:
            self._waiting.discard(done)
            if not answer:
                give_up()
        if not answer:
            raise _ThreadEnded if self._ended.is_set() else _Hung
        result, failure = answer[0]
        if failure is not None:  # asyncio's cancellation is none of trio's
            raise failure if isinstance(failure, Exception) else _ThreadEnded
        return result

    def abandon(self) -> None:
        self._cut()
        if self.node is not None:
            self.node.stop()

    async def close(self) -> None:
        """Stop in good order, or within HUNG_AFTER_S in any order."""
        if self.node is not None:
            self.node.stop()
        with trio.move_on_after(HUNG_AFTER_S, shield=True):
            await self._ended.wait()
        self.abandon()

    def _cut(self) -> None:
        for connection in list(self._connections):
            with contextlib.suppress(OSError):  # cut already
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _tell_trio(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(function)

    def _main(self) -> None:
        try:
            # torch takes a second to import, and warns of what it deprecates in itself
            with _loading, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from .dht_node import run_node
            run_node(self._control_address, self._clock, self._connections, self._ready)
        except BaseException as error:  # noqa: BLE001 - whatever it was, this life is over
            self._error = error
        self._cut()
        self._tell_trio(self._end)

    def _end(self) -> None:
        for event in (self._ended, self._started, *self._waiting):
            event.set()

    def _ready(self, node: "DhtNode") -> None:
        self.node = node
        self._tell_trio(self._started.set)


class HivemindDirectory:
    """Implements `peer.runtime.Directory`; made by `open_hivemind_directory`.

    Attributes:
        failures: by reason: `timeout`, `hung`, `detached`, or the name of what was raised.
        restarts: threads that hung, and were replaced.
    """

    def __init__(self, control_address: str, wall_clock: Callable[[], float]) -> None:
        self._control_address = control_address
        self._wall_clock = wall_clock
        self._offset_s = 0.0
        self._thread: _NodeThread | None = None
        self._changing = trio.Lock()
        self._entry_peers: tuple[Address, ...] = ()
        self._hung_in_a_row = 0
        self._next_attach_s = 0.0
        self._why_detached = ""
        self.restarts = 0
        self.failures: Counter[str] = Counter()

    def swarm_time_s(self) -> float:
        return self._wall_clock() + self._offset_s

    def correct_clock(self, offset_s: float) -> None:
        self._offset_s = offset_s

    async def store(self, key: bytes, subkey: str, value: bytes, expires_s: float) -> None:
        await self._attempt("store", key, subkey, value, expires_s)

    async def get(self, key: bytes) -> Mapping[str, bytes]:
        found: Mapping[str, bytes] | None = await self._attempt("get", key)
        return found or {}

    async def add_peers(self, addresses: Sequence[Address]) -> None:
        wanted = tuple(address for address in addresses if "/p2p/" in address)[-MAX_ENTRY_PEERS:]
        if not wanted:
            return
        kept = (address for address in self._entry_peers if address not in wanted)
        self._entry_peers = tuple(dict.fromkeys((*kept, *wanted)))[-MAX_ENTRY_PEERS:]
        await self._attempt("add_peers", wanted)

    async def reattach(self, control_address: str) -> None:
        """Attach to a restarted p2pd, if it is there (`attached`)."""
        async with self._changing:
            self._control_address = control_address
            if self._thread is not None:
                await self._thread.close()
            await self._attach()

    @property
    def attached(self) -> bool:
        return self._thread is not None and self._thread.attached

    async def aclose(self) -> None:
        if self._thread is not None:
            await self._thread.close()
        self._thread = None

    async def open(self) -> None:
        """Attach for the first time. Raises StreamLost when p2pd is not there."""
        async with self._changing:
            await self._attach()
        if not self.attached:
            where, why = self._control_address, self._why_detached
            raise StreamLost(f"the directory cannot attach to p2pd at {where}: {why}")

    async def _attempt(self, *call: Any) -> Any:
        thread = await self._attached_thread()
        if thread is None:
            self.failures["detached"] += 1
            return None
        try:
            result = await thread.call(*call)
        except _Hung:
            async with self._changing:
                if thread is self._thread:  # no other call has seen to it
                    self._abandon(thread, "calls get no answer")
                    await self._attach()
            return None
        except _ThreadEnded:
            self.failures["detached"] += 1
            return None
        except Exception as error:  # noqa: BLE001 - hivemind raises what it likes; it is counted
            reason = "timeout" if isinstance(error, TimeoutError) else type(error).__name__
            self.failures[reason] += 1
            result = None
        self._hung_in_a_row = 0
        return result

    async def _attached_thread(self) -> _NodeThread | None:
        async with self._changing:
            if not self.attached and trio.current_time() >= self._next_attach_s:
                await self._attach()
        if self._hung_in_a_row > MAX_RESTARTS_IN_A_ROW:
            raise DirectoryUnrecoverable(
                f"the directory's thread hung {self._hung_in_a_row} times in a row"
            )
        return self._thread

    def _abandon(self, thread: _NodeThread, why: str) -> None:
        thread.abandon()
        self._thread = None
        self._why_detached = why
        self.failures["hung"] += 1
        self._hung_in_a_row += 1
        if self._hung_in_a_row <= MAX_RESTARTS_IN_A_ROW:
            self.restarts += 1

    async def _attach(self) -> None:
        """A fresh thread, which knows the peers that the last one was told of."""
        if self._hung_in_a_row > MAX_RESTARTS_IN_A_ROW:
            return
        self._next_attach_s = trio.current_time() + REATTACH_EVERY_S
        thread = _NodeThread(self._control_address, self.swarm_time_s)
        self._thread = None
        try:
            await thread.start()
        except _ThreadEnded as error:
            self._why_detached = str(error)
            return
        except _Hung:
            self._abandon(thread, "the thread does not start")
            return
        self._thread = thread
        if self._entry_peers:
            with contextlib.suppress(Exception):
                await thread.call("add_peers", self._entry_peers)


def wall_time_s() -> float:
    return time.time()  # noqa: TID251 - this is the port


@asynccontextmanager
async def open_hivemind_directory(
    control_address: str,
    *,
    wall_clock: Callable[[], float] = wall_time_s,
) -> AsyncIterator[HivemindDirectory]:
    """A directory on the p2pd at this control socket. Raises StreamLost: it is not there."""
    directory = HivemindDirectory(control_address, wall_clock)
    try:
        await directory.open()
        yield directory
    finally:
        await directory.aclose()
