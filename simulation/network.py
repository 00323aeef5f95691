"""A network in memory, and a directory, under trio's clock and a seed.

Each direction between two peers is a *link* with a model: latency, jitter, bandwidth, loss.

- A write is cut into segments. A segment leaves when the link is free (links are serial:
  `busy_until_s`), takes size / bandwidth, arrives after latency + jitter, never before its
  predecessor. A lost segment arrives one retransmission later, as over TCP.
- A stream holds at most `WINDOW_BYTES` that its reader has not taken; room comes back to the writer
  one latency after the read. That is the back-pressure, and the limit of one stream on a long link.
- Partition: nothing crosses, in flight or new; after `SILENCE_LIMIT_S` the streams break, dials
  fail after `DIAL_TIMEOUT_S`.
- Kill: the peer's own streams are lost; at the other ends they end cleanly after what had arrived,
  as p2pd's do.

All randomness comes from one generator per link, seeded by (seed, source, destination): the same
seed and the same calls make the same times. Errors and bounds are the real network's (checked by
one shared test suite).

The directory is one shared table, with the rules of the real nodes
(protocol/membership/record_table.py). A handle finds only what was stored by those that it is
connected with through `add_peers`; store never says whether it worked. What it adds: latency,
handles whose clock is wrong, and handles cut off from the table.
"""

import hashlib
import math
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio
from trio.lowlevel import ParkingLot

from peer.network.handlers import BaseNetwork, PeerStream
from peer.runtime import Address, PeerId
from protocol.address import multiaddr
from protocol.address.peer_id import peer_id_to_bytes
from protocol.errors import StreamLost
from protocol.limits import DIAL_TIMEOUT_S
from protocol.membership.node_table import SEARCH_S
from protocol.membership.record_table import RecordTable
from protocol.membership.records import place_of

# --- one direction between two simulated peers: when a segment leaves and arrives -----------------

RETRANSMIT_MIN_S: Final = 0.2
"""The cost of a lost segment, or a round trip if that is more."""


@dataclass(frozen=True, slots=True)
class LinkModel:
    """One direction between two peers.

    Attributes:
        jitter_s: up to so much more latency, evenly spread.
        bandwidth_bytes_per_s: shared by all streams of the link.
        loss: probability that a segment must be sent again.
    """

    latency_s: float = 0.02
    jitter_s: float = 0.0
    bandwidth_bytes_per_s: float = 12.5e6
    loss: float = 0.0


class SimulatedLink:
    def __init__(self, model: LinkModel, seed: bytes) -> None:
        self.model = model
        self.watchers: dict[_Pipe, None] = {}
        self.cut_since_s: float | None = None
        self._random = random.Random(seed)
        self._busy_until_s = 0.0

    def schedule(self, num_bytes: int) -> tuple[float, float]:
        """Take the link for a segment: when it has left, and when it arrives."""
        model = self.model
        start_s = max(trio.current_time(), self._busy_until_s)
        self._busy_until_s = start_s + num_bytes / model.bandwidth_bytes_per_s
        delay_s = model.latency_s + model.jitter_s * self._random.random()
        while model.loss and self._random.random() < model.loss:
            delay_s += max(RETRANSMIT_MIN_S, 2 * model.latency_s)
        return self._busy_until_s, self._busy_until_s + delay_s

    def cut(self) -> None:
        if self.cut_since_s is None:
            self.cut_since_s = trio.current_time()
            for watcher in list(self.watchers):
                watcher.announce()  # all that wait count the silence from now on

    def mend(self) -> None:
        cut_since_s, self.cut_since_s = self.cut_since_s, None
        if cut_since_s is not None:
            for watcher in list(self.watchers):
                watcher.link_mended(cut_since_s)


# --- simulated stream -----------------------------------------------------------------------------

SEGMENT_BYTES: Final = 64 * 1024
WINDOW_BYTES: Final = 6 * 1024 * 1024
"""Most bytes of one direction of a stream that its reader has not taken; what p2pd was measured to
allow."""
SILENCE_LIMIT_S: Final = 45.0
"""A stream on a link that has been cut for so long breaks."""


@dataclass(slots=True)
class _Segment:
    left_s: float
    arrives_s: float
    data: memoryview


class _Pipe:
    """One direction of a stream, which no task moves.

    Writer and reader compute from the clock what has left, arrived and been taken, and sleep until
    the next moment at which that changes. `announce` wakes them when something else changes it.

    Args:
        credit_delay_s: how long news of a read takes back to the writer.
    """

    def __init__(self, link: SimulatedLink, credit_delay_s: float) -> None:
        self._link = link
        self._credit_delay_s = credit_delay_s
        self._segments: deque[_Segment] = deque()
        self._held_bytes = 0
        self._credits: deque[tuple[float, int]] = deque()
        self._last_arrival_s = 0.0
        self._ends_s = math.inf
        self._reader_gone_s = math.inf
        self._changed = ParkingLot()
        link.watchers[self] = None

    # --- the writer's side ------------------------------------------------------------------------
    async def send(self, data: memoryview, check: Callable[[], None]) -> None:
        """Send one segment; returns when it has left. Raises StreamLost.

        `check` raises when the stream was broken meanwhile.
        """
        await self._wait_room(len(data), check)
        left_s, arrives_s = self._link.schedule(len(data))
        self._last_arrival_s = max(self._last_arrival_s, arrives_s)
        self._segments.append(_Segment(left_s, self._last_arrival_s, memoryview(bytes(data))))
        self._held_bytes += len(data)
        self.announce()
        await trio.sleep_until(left_s)
        check()

    async def _wait_room(self, num_bytes: int, check: Callable[[], None]) -> None:
        while True:
            check()
            now_s = trio.current_time()
            if now_s >= self._reader_gone_s:
                raise StreamLost("the peer closed the stream")
            while self._credits and self._credits[0][0] <= now_s:
                self._held_bytes -= self._credits.popleft()[1]
            if self._held_bytes + num_bytes <= WINDOW_BYTES:
                return
            room_s = self._credits[0][0] if self._credits else math.inf
            await self._wait_until(min(room_s, self._reader_gone_s))

    def end(self, *, abruptly: bool = False) -> None:
        """End the direction. Abruptly: what has not left yet never will."""
        now_s = trio.current_time()
        while abruptly and self._segments and self._segments[-1].left_s > now_s:
            self._segments.pop()
        if self._ends_s == math.inf:
            arrived_s = self._segments[-1].arrives_s if self._segments else 0.0
            self._ends_s = max(arrived_s, now_s + self._link.model.latency_s)
        self.announce()

    # --- the reader's side ------------------------------------------------------------------------
    async def receive(self, max_bytes: int, check: Callable[[], None]) -> memoryview:
        """Wait for some bytes that have arrived; empty at the end. Raises StreamLost."""
        while True:
            check()
            next_s = self._segments[0].arrives_s if self._segments else self._ends_s
            cut_s = self._link.cut_since_s
            if next_s <= (trio.current_time() if cut_s is None else cut_s):
                return self._take(max_bytes) if self._segments else memoryview(b"")
            await self._wait_until(next_s if cut_s is None else math.inf)

    def _take(self, max_bytes: int) -> memoryview:
        segment = self._segments[0]
        piece, segment.data = segment.data[:max_bytes], segment.data[max_bytes:]
        if not segment.data:
            self._segments.popleft()
        self._credits.append((trio.current_time() + self._credit_delay_s, len(piece)))
        self.announce()
        return piece

    def leave(self) -> None:
        """The reader is gone; the writer hears of it one latency later."""
        self._link.watchers.pop(self, None)
        self._reader_gone_s = min(self._reader_gone_s, trio.current_time() + self._credit_delay_s)
        self.announce()

    # --- both -------------------------------------------------------------------------------------
    async def _wait_until(self, time_s: float) -> None:
        """Wait until this time, or until something changes. Raises StreamLost."""
        cut_s = self._link.cut_since_s
        silent_s = math.inf if cut_s is None else cut_s + SILENCE_LIMIT_S
        if trio.current_time() >= silent_s:
            raise StreamLost(f"nothing was heard for {SILENCE_LIMIT_S:.0f} s")
        with trio.move_on_at(min(time_s, silent_s)):
            await self._changed.park()

    def link_mended(self, cut_since_s: float) -> None:
        """Send again what was held up: it arrives one latency from now, at the earliest."""
        earliest_s = trio.current_time() + self._link.model.latency_s
        for segment in self._segments:
            if segment.arrives_s > cut_since_s:
                segment.arrives_s = max(segment.arrives_s, earliest_s)
        self._last_arrival_s = max(self._last_arrival_s, earliest_s)
        if self._ends_s > cut_since_s:
            self._ends_s = max(self._ends_s, earliest_s)
        self.announce()

    def announce(self) -> None:
        """Let writer and reader look again."""
        self._changed.unpark_all()


class SimulatedStream(PeerStream):
    """One end of a stream; `SimulatedNetwork.open_stream` makes both."""

    def __init__(
        self,
        network: BaseNetwork,
        protocol: str,
        peer_id: PeerId,
        address: Address,
        incoming: _Pipe,
        outgoing: _Pipe,
    ) -> None:
        super().__init__(network, protocol, peer_id, address)
        self._incoming = incoming
        self._outgoing = outgoing
        self._sending = False

    async def _send_all(self, view: memoryview) -> None:
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._sending = True
        try:
            await trio.lowlevel.checkpoint()
            for start in range(0, len(view), SEGMENT_BYTES):
                await self._send_segment(view[start : start + SEGMENT_BYTES])
        finally:
            self._sending = False

    async def _send_segment(self, segment: memoryview) -> None:
        with segment:
            try:
                await self._outgoing.send(segment, self._check)
            except trio.Cancelled:
                self._lost = self._lost or "a write was cancelled half-way"
                raise
            except StreamLost as error:
                raise self._loss(str(error)) from error
            self._count_sent(len(segment))

    async def _receive(self, max_bytes: int) -> bytes:
        await trio.lowlevel.checkpoint()
        try:
            return bytes(await self._incoming.receive(max_bytes, self._check))
        except StreamLost as error:
            raise self._loss(str(error)) from error

    async def _receive_into(self, view: memoryview, filled: int) -> int:
        piece = await self._receive(len(view) - filled)
        if not piece:
            where = f"after {filled} of {len(view)} bytes"
            raise self._loss(f"the peer closed the stream {where}")
        view[filled : filled + len(piece)] = piece
        return len(piece)

    def _break(self) -> None:
        self._part(abruptly=True)

    def close(self) -> None:
        if self._note_closed():
            self._part(abruptly=self._lost is not None)

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def _part(self, *, abruptly: bool) -> None:
        self._outgoing.end(abruptly=abruptly)
        self._incoming.leave()


# --- the network ----------------------------------------------------------------------------------


class SimulatedInternet:
    """The links between simulated peers.

    Args:
        seed: of all jitter and loss.
        link: model of every link, unless `link_of` is given.
        link_of: model of the link from the first peer to the second.
    """

    def __init__(
        self,
        seed: int,
        *,
        link: LinkModel = LinkModel(),
        link_of: Callable[[PeerId, PeerId], LinkModel] | None = None,
    ) -> None:
        self._seed = seed
        self._link_of = link_of or (lambda _source, _destination: link)
        self._links: dict[tuple[PeerId, PeerId], SimulatedLink] = {}
        self._networks: dict[PeerId, SimulatedNetwork] = {}
        self._cut: set[frozenset[PeerId]] = set()
        self._healed = trio.Event()
        self._num_joined = 0

    @asynccontextmanager
    async def open_network(
        self, peer_id: PeerId, address: Address | None = None
    ) -> AsyncIterator["SimulatedNetwork"]:
        """Bring a peer online until the block ends or the peer is killed.

        Without an address it takes the next one of a private network.
        """
        peer_id_to_bytes(peer_id)
        if peer_id in self._networks:
            raise ValueError(f"{peer_id} is online already")
        network = SimulatedNetwork(self, peer_id, address or self._next_address())
        async with trio.open_nursery() as nursery:
            await nursery.start(network.host)
            self._networks[peer_id] = network
            try:
                yield network
            finally:
                self.kill(peer_id)

    def kill(self, peer_id: PeerId) -> None:
        """Take a peer off the network at once, as kill -9 does; nothing if it is not online."""
        network = self._networks.pop(peer_id, None)
        if network is not None:
            network.die()

    def partition(self, one: Iterable[PeerId], other: Iterable[PeerId]) -> None:
        """Cut every link between the two sets of peers, both ways."""
        others = list(other)
        for a in one:
            for b in others:
                self._cut.add(frozenset((a, b)))
                self.link(a, b).cut()
                self.link(b, a).cut()

    def heal(self) -> None:
        """Mend every link."""
        self._cut.clear()
        self._healed.set()
        self._healed = trio.Event()
        for link in self._links.values():
            link.mend()

    def link(self, source: PeerId, destination: PeerId) -> SimulatedLink:
        """The link from one peer to another; made when first asked for."""
        key = (source, destination)
        if key not in self._links:
            seed = hashlib.blake2b(f"{self._seed}/{source}/{destination}".encode()).digest()
            self._links[key] = SimulatedLink(self._link_of(source, destination), seed)
        return self._links[key]

    def find(self, peer_id: PeerId) -> "SimulatedNetwork | None":
        return self._networks.get(peer_id)

    def answering_at(self, address: Address) -> PeerId | None:
        """The peer that is online at an address."""
        return next((p for p, net in self._networks.items() if net._address == address), None)

    async def round_trip(self, source: PeerId, destination: PeerId) -> None:
        """Let the time of one small message and its answer pass. Raises StreamLost."""
        there, back = self.link(source, destination), self.link(destination, source)
        with trio.move_on_after(DIAL_TIMEOUT_S):
            while frozenset((source, destination)) in self._cut:
                await self._healed.wait()
            await trio.sleep(there.model.latency_s + back.model.latency_s)
            return
        raise StreamLost(f"dial: cannot reach {destination}: no answer in {DIAL_TIMEOUT_S:.0f} s")

    def _next_address(self) -> Address:
        self._num_joined += 1
        high, low = divmod(self._num_joined, 256)
        return f"/ip4/10.{high >> 8}.{high & 255}.{low}/tcp/4001"


class SimulatedNetwork(BaseNetwork):
    """Implements `peer.runtime.Network`. Made by `SimulatedInternet.open_network`."""

    def __init__(self, internet: SimulatedInternet, peer_id: PeerId, address: Address) -> None:
        super().__init__()
        self._internet = internet
        self.peer_id: Final = peer_id
        self._address = address
        self._nursery: trio.Nursery
        self._known: dict[PeerId, tuple[Address, ...]] = {}
        self._alive = True

    @property
    def addresses(self) -> Sequence[Address]:
        everywhere = (self._address, *self._announced)
        return tuple(multiaddr.with_peer_id(address, self.peer_id) for address in everywhere)

    async def probe(self, address: Address) -> PeerId:
        answering = self._internet.answering_at(multiaddr.split_peer_id(address)[0])
        if answering is None:
            raise StreamLost(f"dial: cannot connect to {address}: connection refused")
        await self._internet.round_trip(self.peer_id, answering)
        return answering

    def move(self, address: Address) -> None:
        self._address = address

    async def host(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the handlers until the peer dies."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    async def connect(self, peer_id: PeerId, addresses: Sequence[Address]) -> None:
        peer_id_to_bytes(peer_id)
        bare = tuple(multiaddr.split_peer_id(address)[0] for address in addresses)
        for address in bare:
            multiaddr.to_bytes(address)
        if bare:
            self._known[peer_id] = bare
        await self._reach(peer_id)

    async def open_stream(self, peer_id: PeerId, protocol: str) -> SimulatedStream:
        peer_id_to_bytes(peer_id)
        remote = await self._reach(peer_id)
        if protocol not in remote._handlers:
            raise StreamLost(f"protocol: {peer_id} does not speak {protocol}")
        there = self._internet.link(self.peer_id, peer_id)
        back = self._internet.link(peer_id, self.peer_id)
        out, home = _Pipe(there, back.model.latency_s), _Pipe(back, there.model.latency_s)
        ours = SimulatedStream(self, protocol, peer_id, "", home, out)
        theirs = SimulatedStream(remote, protocol, self.peer_id, self._address, out, home)
        if remote.has_room(protocol, self.peer_id, self._address):
            remote._nursery.start_soon(remote.run, protocol, theirs)
        else:
            theirs.close()
        return ours

    def die(self) -> None:
        """Lose every stream and stop serving; what `SimulatedInternet.kill` does to us."""
        self._alive = False
        for stream in list(self.streams):
            stream.lose("our own network is gone")
        self._nursery.cancel_scope.cancel()

    async def _reach(self, peer_id: PeerId) -> "SimulatedNetwork":
        self._check_alive(peer_id)
        if peer_id == self.peer_id:
            raise StreamLost(f"dial: cannot reach {peer_id}: that is ourselves")
        if peer_id not in self._known:
            raise StreamLost(f"dial: cannot reach {peer_id}: no address is known")
        await self._internet.round_trip(self.peer_id, peer_id)
        self._check_alive(peer_id)
        remote = self._internet.find(peer_id)
        if remote is None:
            raise StreamLost(f"dial: cannot reach {peer_id}: connection refused")
        if remote._address not in self._known[peer_id]:
            known = ", ".join(self._known[peer_id])
            raise StreamLost(f"dial: cannot reach {peer_id}: nobody answers at {known}")
        remote._known[self.peer_id] = (self._address,)  # a later life may come from elsewhere
        return remote

    def _check_alive(self, peer_id: PeerId) -> None:
        if not self._alive:
            raise StreamLost(f"dial: cannot reach {peer_id}: our own network is gone")


# --- the directory --------------------------------------------------------------------------------
EPOCH_S: Final = 1_700_000_000.0
"""Unix time of the simulated world at trio's time zero."""


class SimulatedDhtWorld:
    """The table that all handles share.

    Args:
        latency_s: shortest and longest duration of an operation.
        shared: whether anybody finds records of others.
    """

    def __init__(
        self, seed: int, latency_s: tuple[float, float] = (0.01, 0.2), *, shared: bool = True
    ) -> None:
        self._random = random.Random(seed)
        self._latency_s = latency_s
        self._shared = shared
        self._table = RecordTable()
        self._parents: dict[str, str] = {}

    def connect(self, peer_id: str, other: str) -> None:
        """Let two peers, and all that they are connected with, find each other's records."""
        self._parents[self._root(other)] = self._root(peer_id)

    def keep(self, key: bytes, writer: str, value: bytes) -> bool:
        """Keep a peer's record by the world's true time. Returns whether it is kept now."""
        return self._table.keep(self.true_time_s(), place_of(key), writer, value, "")

    def find(self, key: bytes, reader: str, now_s: float) -> dict[str, bytes]:
        """The records that this reader sees under a key at its own idea of the time."""
        root, there = self._root(reader), self._table.at(now_s, place_of(key))
        return {
            writer: value
            for writer, value in sorted(there.items())
            if self._root(writer) == root and (self._shared or writer == reader)
        }

    def true_time_s(self) -> float:
        """The Unix time that a right clock shows."""
        return EPOCH_S + trio.current_time()

    def draw_latency_s(self) -> float:
        return self._random.uniform(*self._latency_s)

    def _root(self, peer_id: str) -> str:
        while (parent := self._parents.get(peer_id, peer_id)) != peer_id:
            peer_id = parent
        return peer_id


class SimulatedDirectory:
    """One peer's handle on a `SimulatedDhtWorld`; implements `peer.runtime.Directory`.

    Attributes:
        clock_skew_s: how far its wall clock is ahead of the truth.
        refused: values that were not taken in.
    """

    def __init__(self, world: SimulatedDhtWorld, peer_id: str, clock_skew_s: float = 0.0) -> None:
        self._world = world
        self._peer_id = peer_id
        self._offset_s = 0.0
        self.refused = 0
        self.clock_skew_s = clock_skew_s
        self.online = True

    def swarm_time_s(self) -> float:
        return self._world.true_time_s() + self.clock_skew_s + self._offset_s

    def correct_clock(self, offset_s: float) -> None:
        self._offset_s = offset_s

    async def store(self, key: bytes, value: bytes) -> None:
        if await self._reach_table():
            self.refused += not self._world.keep(key, self._peer_id, value)

    async def get(self, key: bytes) -> Mapping[str, bytes]:
        if not await self._reach_table():
            return {}
        return self._world.find(key, self._peer_id, self.swarm_time_s())

    async def add_peers(self, addresses: Sequence[Address]) -> None:
        if not await self._reach_table():
            return
        for address in addresses:
            _, found, peer_id = address.rpartition("/p2p/")
            if found:
                self._world.connect(self._peer_id, peer_id)

    async def _reach_table(self) -> bool:
        await trio.sleep(self._world.draw_latency_s() if self.online else SEARCH_S)
        return self.online
