"""A network in memory, under trio's clock and a seed.

Time is what makes it a network. Each direction between two peers is a *link* with a model: latency,
jitter, bandwidth, loss.

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
"""

import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio

from peer.ports import Address, PeerId
from protocol.address import multiaddr
from protocol.address.peer_id import peer_id_to_bytes
from protocol.errors import StreamLost
from protocol.limits import DIAL_TIMEOUT_S

from .handlers import BaseNetwork
from .simulated_stream import LinkModel, SimulatedLink, SimulatedStream, open_pair

_PORT: Final = 4001


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
        """Bring a peer online until the context ends or the peer is killed.

        Args:
            address: where it is; None takes the next of a private network.
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
        """The network of a peer that is online."""
        return self._networks.get(peer_id)

    def answering_at(self, address: Address) -> PeerId | None:
        """The peer that is online at an address."""
        return next((p for p, net in self._networks.items() if net.is_at(address)), None)

    async def round_trip(self, source: PeerId, destination: PeerId) -> None:
        """Let the time of one small message and its answer pass.

        Raises:
            StreamLost: the way is cut.
        """
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
        return f"/ip4/10.{high >> 8}.{high & 255}.{low}/tcp/{_PORT}"


class SimulatedNetwork(BaseNetwork):
    """Implements `peer.ports.Network`. Made by `SimulatedInternet.open_network`."""

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
        """Full multiaddrs with /p2p/."""
        everywhere = (self._address, *self._announced)
        return tuple(multiaddr.with_peer_id(address, self.peer_id) for address in everywhere)

    async def probe(self, address: Address) -> PeerId:
        """The peer that answers at an address.

        Raises:
            StreamLost: nobody does.
        """
        answering = self._internet.answering_at(multiaddr.split_peer_id(address)[0])
        if answering is None:
            raise StreamLost(f"dial: cannot connect to {address}: connection refused")
        await self._internet.round_trip(self.peer_id, answering)
        return answering

    def move(self, address: Address) -> None:
        """From now on this machine has another address."""
        self._address = address

    async def host(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the handlers until the peer dies."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    async def connect(self, peer_id: PeerId, addresses: Sequence[Address]) -> None:
        """Remember `addresses` for `peer_id`, and connect.

        Raises:
            StreamLost: names the step that failed.
            InvalidAddress: one of the addresses is none.
        """
        peer_id_to_bytes(peer_id)
        bare = tuple(multiaddr.split_peer_id(address)[0] for address in addresses)
        for address in bare:
            multiaddr.to_bytes(address)
        if bare:
            self._known[peer_id] = bare
        await self._reach(peer_id)

    async def open_stream(self, peer_id: PeerId, protocol: str) -> SimulatedStream:
        """Open a stream.

        Raises:
            StreamLost: the peer is unreachable or does not speak `protocol`.
        """
        peer_id_to_bytes(peer_id)
        remote = await self._reach(peer_id)
        if protocol not in remote._handlers:
            raise StreamLost(f"protocol: {peer_id} does not speak {protocol}")
        peers = (self.peer_id, peer_id)
        links = (self._internet.link(*peers), self._internet.link(*reversed(peers)))
        ours, theirs = open_pair(protocol, (self, remote), peers, links, self._address)
        if remote.has_room(protocol, self.peer_id, self._address):
            remote._nursery.start_soon(remote.run, protocol, theirs)
        else:
            theirs.close()
        return ours

    def is_at(self, address: Address) -> bool:
        """Whether this machine has that address."""
        return self._address == address

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
