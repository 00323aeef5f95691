"""The real network: libp2p streams through a p2pd that is kept alive.

    supervisor     one p2pd life after another, on the same identity, ports and control socket, with
                   back-off in between. At the start of each life the handlers are registered again;
                   at its end every stream is lost.
    listener       a unix socket of ours that outlives p2pd; p2pd connects to it for each stream
                   from outside.
    address book   the addresses `connect` was told, by peer. A new p2pd knows no peer:
                   `open_stream` dials again on demand.

Streams. p2pd pipes each stream through a unix connection of its own. Rules:

- A clean-looking end may be a truncation: p2pd ends the connection the same way whether the other
  side closed or vanished. Length and digest are the conversation's affair.
- When our own p2pd dies, every stream it carried is lost, however clean its end looks: the network
  calls `lose`, and an end of input is believed only once p2pd has shown that it is alive (a dying
  process closes its connections one after another).
- A write that was cancelled half-way leaves the stream unusable; it is marked lost rather than left
  to corrupt what follows.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import trio
from trio.lowlevel import ParkingLot

from peer.runtime import Address, PeerId, StreamHandler
from protocol.address import multiaddr
from protocol.address.peer_id import peer_id_from_bytes, peer_id_to_bytes
from protocol.errors import LocoError, StreamLost, leaves
from protocol.limits import (
    ANSWER_S,
    MAX_ADDRESS_CHARS,
    MAX_ADDRESSES_PER_PEER,
    MAX_MEMBERS,
    MAX_RECORD_ADDRESSES,
    forget_oldest,
)
from protocol.membership.book import BackOff, Pauses
from protocol.membership.crowds import idle_peers, to_close
from protocol.names import size_text

from .conversation import WRITE_BYTES
from .dial_errors import dial_sentence, unresolved_sentence
from .handlers import BaseNetwork, PeerStream, print_bug
from .p2pd import (
    MAX_MEMORY_BYTES,
    P2pdClient,
    P2pdConfig,
    P2pdFailed,
    P2pdProcess,
    P2pdRefused,
    attach,
    held_ports,
    listen_at,
    receive_stream_info,
    run_p2pd,
    size_buffers,
    socket_paths,
    wait_until_unused,
)
from .reachability import best_first, is_usable, local_form, num_relayed, text_of
from .tls_probe import read_peer_id

# --- streams --------------------------------------------------------------------------------------

SMALL_PIECE_BYTES: Final = 32 * 1024
GATHER_S: Final = 0.002
"""p2pd hands on what it gets in pieces of some KiB, and to wake up for each costs more than to move
it. While more than a small piece is missing, a small piece is followed by this pause."""


class Libp2pStream(PeerStream):
    def __init__(
        self,
        network: BaseNetwork,
        protocol: str,
        peer_id: PeerId,
        address: Address,
        connection: trio.SocketStream,
        carrier_is_lost: Callable[[], Awaitable[bool]],
    ) -> None:
        super().__init__(network, protocol, peer_id, address)
        self._connection = connection
        self._carrier_is_lost = carrier_is_lost
        self._came_bytes = 0

    async def _send_all(self, view: memoryview) -> None:
        if not view:
            await trio.lowlevel.checkpoint()
        for start in range(0, len(view), WRITE_BYTES):
            with view[start : start + WRITE_BYTES] as piece:
                try:
                    await self._connection.send_all(piece)
                except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                    raise await self._loss_now("the peer closed the stream") from error
                except trio.Cancelled:
                    self._lost = self._lost or "a write was cancelled half-way"
                    raise
                self._count_sent(len(piece))

    async def _receive(self, max_bytes: int) -> bytes:
        try:
            data = bytes(await self._connection.receive_some(max_bytes))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise await self._loss_now("the peer reset the stream") from error
        if not data and (self._lost or await self._carrier_is_lost()):
            raise self._loss("our p2pd died")
        return data

    async def _receive_into(self, view: memoryview, filled: int) -> int:
        if filled and self._came_bytes < SMALL_PIECE_BYTES < len(view) - filled:
            await trio.sleep(GATHER_S)
        with view[filled:] as piece:
            try:
                self._came_bytes = await self._connection.socket.recv_into(piece)
            except (OSError, trio.ClosedResourceError) as error:
                raise await self._loss_now("the peer reset the stream") from error
        if not self._came_bytes:
            where = f"after {filled} of {len(view)} bytes"
            raise await self._loss_now(f"the peer closed the stream {where}")
        return self._came_bytes

    def _break(self) -> None:
        self._connection.socket.close()

    async def aclose(self) -> None:
        self._note_closed()
        await self._connection.aclose()

    async def _loss_now(self, reason: str) -> StreamLost:
        """The error for a stream that just ended; our own p2pd may be to blame."""
        if not self._closed and not self._lost and await self._carrier_is_lost():
            reason = "our p2pd died"
        return self._loss(reason)


# --- known addresses of peers, and which of them p2pd was told since it last started -------------
class AddressBook:
    """Binary addresses by peer; the oldest entries give way.

    Attributes:
        dialled: peers that this p2pd has been connected to.
    """

    def __init__(self) -> None:
        self._addresses: dict[PeerId, tuple[bytes, ...]] = {}
        self.dialled: set[PeerId] = set()

    def __contains__(self, peer_id: PeerId) -> bool:
        return peer_id in self._addresses

    def __len__(self) -> int:
        return len(self._addresses)

    def of(self, peer_id: PeerId) -> tuple[bytes, ...]:
        return self._addresses.get(peer_id, ())

    def remember(self, peer_id: PeerId, addresses: Sequence[Address]) -> None:
        """Replace the addresses of a peer. Raises StreamLost: one of them is another peer's."""
        usable = []
        for address in addresses[:MAX_ADDRESSES_PER_PEER]:
            bare, named = multiaddr.split_peer_id(address)
            if named not in (None, peer_id):
                raise StreamLost(f"dial: {address} is another peer's address, not {peer_id}'s")
            if "/quic-v1" not in bare:  # p2pd would use it
                usable.append(multiaddr.to_bytes(bare))
        if usable:
            self._addresses.pop(peer_id, None)
            self._addresses[peer_id] = tuple(usable)
            forget_oldest(self._addresses, MAX_MEMBERS)
            self.dialled &= self._addresses.keys()


# --- libp2p ---------------------------------------------------------------------------------------

RESTARTS: Final = Pauses(0.1, 30.0)
LOOK_EVERY_S: Final = 2.0
"""How often p2pd's memory and connections are looked at, and our own addresses; one that hangs does
not answer then."""
MAX_CONTROL_REQUESTS: Final = 64


class Libp2pNetwork(BaseNetwork):
    """Implements `peer.runtime.Network`. Made by `open_libp2p_network`."""

    def __init__(self, config: P2pdConfig, listener_path: Path) -> None:
        super().__init__()
        self.tellers.append(print_bug)
        self._generation = 0
        """Lives of p2pd so far; 1 once the first is up."""
        self._config = config
        self._listener = multiaddr.to_bytes(f"/unix{listener_path}")
        self._client: P2pdClient | None = None
        self._changed = ParkingLot()
        self._requests = trio.CapacityLimiter(MAX_CONTROL_REQUESTS)
        self._book = AddressBook()
        self.listening = config.listen
        """Addresses of this machine; others may reach us under other numbers."""
        self.peer_id: PeerId = ""
        self.addresses: Sequence[Address] = ()
        """Full multiaddrs with /p2p/, best first, one of them dialable locally."""

    def announce(self, addresses: Sequence[Address]) -> None:
        super().announce(addresses)
        self._note_addresses()

    async def probe(self, address: Address) -> PeerId:
        (_, host), (_, port), *_ = multiaddr.parse(address)
        return await read_peer_id(host, int(port))

    async def connect(self, peer_id: PeerId, addresses: Sequence[Address]) -> None:
        peer = peer_id_to_bytes(peer_id)
        self._book.remember(peer_id, addresses)
        async with self._requests:
            client = await self._wait_up(peer_id)
            await self._dial(client, peer_id, peer)

    def known_addresses(self, peer_id: PeerId) -> tuple[Address, ...]:
        """The first addresses of a peer, as far as a message can carry them."""
        texts = map(text_of, self._book.of(peer_id))
        return tuple(t for t in texts if 0 < len(t) <= MAX_ADDRESS_CHARS)[:MAX_RECORD_ADDRESSES]

    def note_addresses(self, peer_id: PeerId, addresses: Sequence[Address]) -> None:
        """Remember them if there is room, as `peer.runtime.Network` says."""
        if peer_id not in self._book and len(self._book) < MAX_MEMBERS:
            with suppress(StreamLost, multiaddr.InvalidAddress):  # it is no use to anybody
                self._book.remember(peer_id, addresses)

    async def open_stream(self, peer_id: PeerId, protocol: str) -> Libp2pStream:
        peer = peer_id_to_bytes(peer_id)
        async with self._requests:
            client = await self._wait_up(peer_id)
            may_dial = peer_id in self._book
            if may_dial and peer_id not in self._book.dialled:
                await self._dial(client, peer_id, peer)
                may_dial = False
            while True:
                try:
                    connection, goes_to = await client.open_stream(peer, protocol)
                    break
                except LocoError as error:
                    if not may_dial or "protocol" in str(error):
                        raise StreamLost(dial_sentence(peer_id, error, protocol)) from error
                # The connection may have gone, and p2pd forgets addresses: tell it again.
                await self._dial(client, peer_id, peer)
                may_dial = False
        return self._stream(client, connection, peer_id, protocol, text_of(goes_to))

    async def _dial(self, client: P2pdClient, peer_id: PeerId, peer: bytes) -> None:
        try:
            await client.connect(peer, self._book.of(peer_id))
        except LocoError as error:
            # p2pd passes over names that it cannot resolve without a word.
            unresolved = await unresolved_sentence(peer_id, self._book.of(peer_id))
            raise StreamLost(unresolved or dial_sentence(peer_id, error)) from error
        if peer_id in self._book:
            self._book.dialled.add(peer_id)

    async def _wait_up(self, peer_id: PeerId) -> P2pdClient:
        with trio.move_on_after(ANSWER_S):
            while self._client is None:
                await self._changed.park()
        if self._client is None:
            raise StreamLost(
                f"dial: cannot reach {peer_id}: our p2pd is down ({self.carried.last_failure})"
            )
        return self._client

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        await super().serve(protocol, handler)
        if self._client is not None:
            with suppress(P2pdFailed):  # it just died; its successor is told of all handlers
                await self._client.set_handler(self._listener, protocol)

    def _stream(
        self,
        client: P2pdClient,
        connection: trio.SocketStream,
        peer_id: PeerId,
        protocol: str,
        address: Address,
    ) -> Libp2pStream:
        stream = Libp2pStream(self, protocol, peer_id, address, connection, client.is_lost)
        if client is not self._client:
            stream.lose("our p2pd died")
        return stream

    # --- streams from outside ---------------------------------------------------------------------
    async def handle_inbound(self, connection: trio.SocketStream) -> None:
        """Serve one stream that p2pd brought to our listener."""
        client = self._client
        try:
            info = await receive_stream_info(connection)
            peer_id = peer_id_from_bytes(info.peer)
            address = text_of(info.address)
        except LocoError:
            client = None
        # Through a relay without an Ed25519 key, say: its network is unknown.
        if client is None or not address or not self.has_room(info.protocol, peer_id, address):
            await trio.aclose_forcefully(connection)
            return
        size_buffers(connection)
        stream = self._stream(client, connection, peer_id, info.protocol, address)
        await self.run(info.protocol, stream)

    # --- the supervisor ---------------------------------------------------------------------------
    async def supervise(
        self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Keep a p2pd running. Raises P2pdFailed: the first one did not come up."""
        pauses = BackOff(*RESTARTS)
        while True:
            failure = await self._live_once(task_status if self._generation == 0 else None)
            if self._generation == 0:
                raise P2pdFailed(failure)
            self.carried.last_failure = failure
            await trio.sleep(pauses.failed("p2pd", trio.current_time()))

    async def _live_once(self, task_status: trio.TaskStatus[None] | None) -> str:
        """One life of p2pd; returns why it ended."""
        failure = ""
        try:
            async with (
                run_p2pd(self._config) as process,
                attach(self._config.control_path) as client,
            ):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(process.keep_reading)
                    nursery.start_soon(self._look_after, process, client)
                    await self._come_up(process, client)
                    if task_status is not None:
                        task_status.started()
                    await client.wait_lost()
                    nursery.cancel_scope.cancel()
                failure = await process.describe_end()
        except* (LocoError, OSError, trio.BrokenResourceError) as group:
            failure = str(leaves(group)[0])
        finally:
            self._go_down(failure or "the network is being closed")
        return failure

    async def _come_up(self, process: P2pdProcess, client: P2pdClient) -> None:
        self.peer_id = peer_id_from_bytes((await client.identify()).peer)
        self._note_addresses()
        for protocol in list(self._handlers):
            await client.set_handler(self._listener, protocol)
        self._client = client
        self.carried.p2pd_pid = process.pid
        self.carried.restarts = self._generation
        self._generation += 1
        self._changed.unpark_all()

    def _go_down(self, reason: str) -> None:
        self._client = None
        self.carried.p2pd_pid = None
        self._book.dialled.clear()
        for stream in list(self.streams):
            stream.lose(reason)
        self._changed.unpark_all()

    async def _look_after(self, process: P2pdProcess, client: P2pdClient) -> None:
        """Keep to bounds what others make it hold. Raises P2pdFailed: it has grown too large."""
        idle: Collection[bytes] = ()
        while True:
            await trio.sleep(LOOK_EVERY_S)
            self._note_addresses()
            if process.memory_bytes > MAX_MEMORY_BYTES:
                raise P2pdFailed(f"p2pd took more than {size_text(MAX_MEMORY_BYTES)} of memory")
            listed = await client.list_peers()
            self.carried.relayed_peers = num_relayed(listed)
            connections = [(peer, text_of(at[0]) if at else "") for peer, at in listed]
            used = {peer_id_to_bytes(stream.remote_peer_id) for stream in self.streams}
            for peer in to_close(connections, used, idle):
                with suppress(P2pdRefused):  # it has gone
                    await client.disconnect(peer)
            idle = idle_peers(connections, used).keys()

    def _note_addresses(self) -> None:
        """Note our addresses of now; the last one is that which works on this machine."""
        local = [local_form(address) for address in self._config.listen]
        told = [*self._announced, *self._config.announced(), *local]
        best = best_first(filter(is_usable, told), self._config.announce)
        kept = best[: MAX_ADDRESSES_PER_PEER - 1] + best[-1:]
        named = (multiaddr.with_peer_id(address, self.peer_id) for address in kept)
        self.addresses = tuple(dict.fromkeys(named))


@asynccontextmanager
async def open_libp2p_network(
    identity_path: Path,
    *,
    listen: Sequence[Address] = ("/ip4/127.0.0.1/tcp/0",),
    announce: Sequence[Address] = (),
    runtime_dir: Path,
) -> AsyncIterator[Libp2pNetwork]:
    """Run p2pd, and speak libp2p through it.

    Args:
        identity_path: as `peer.network.identity` writes it.
        listen: TCP multiaddrs; port 0 takes a free port, and keeps it through restarts.
        announce: that others should dial; empty announces those listened on.
        runtime_dir: where the unix sockets go.

    Raises:
        P2pdFailed: p2pd did not come up; says why.
    """
    control_path, listener_path = socket_paths(identity_path, runtime_dir)
    await wait_until_unused(control_path)
    failure: P2pdFailed | None = None
    with held_ports(listen) as addresses:
        config = P2pdConfig(identity_path, control_path, addresses, tuple(announce))
        network = Libp2pNetwork(config, listener_path)
        async with listen_at(listener_path) as listener, trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, network.handle_inbound, [listener])
            try:
                await nursery.start(network.supervise)
            except P2pdFailed as error:
                failure = error
            else:
                yield network
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
