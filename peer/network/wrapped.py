"""A network that wraps another network and its streams, and passes everything through unchanged.

A layer overrides methods of `WrappedStream`, and `WrappedNetwork._wrapped`, which every stream
passes, opened or served.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

from peer.ports import Address, Network, NetworkStatistics, OnBytes, PeerId, Stream, StreamHandler

InnerStream = TypeVar("InnerStream", bound=Stream)


class WrappedStream(Generic[InnerStream]):
    """Implements `peer.ports.Stream`."""

    def __init__(self, stream: InnerStream) -> None:
        self._stream = stream

    @property
    def remote_peer_id(self) -> PeerId:
        """The authenticated peer at the other end."""
        return self._stream.remote_peer_id

    @property
    def remote_address(self) -> Address:
        """The address that the peer came from."""
        return self._stream.remote_address

    async def turn(self, num_bytes: int) -> int:
        """Wait until bulk may go; how much of it may go now."""
        return await self._stream.turn(num_bytes)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`; raises StreamLost."""
        await self._stream.send_all(data)

    async def receive_some(self, max_bytes: int = 65536) -> bytes:
        """At least one byte, or `b""` at the end; raises StreamLost."""
        return await self._stream.receive_some(max_bytes)

    async def receive_into(self, buffer: memoryview, arrived: OnBytes | None = None) -> None:
        """Fill `buffer`; `arrived` is told how much of it is there. Raises StreamLost."""
        await self._stream.receive_into(buffer, arrived)

    async def aclose(self) -> None:
        """Close the stream."""
        await self._stream.aclose()


class WrappedNetwork:
    """Implements `peer.ports.Network`."""

    def __init__(self, network: Network) -> None:
        self._network = network

    @property
    def peer_id(self) -> PeerId:
        """Our peer id."""
        return self._network.peer_id

    @property
    def addresses(self) -> Sequence[Address]:
        """The addresses of the network within."""
        return self._network.addresses

    def announce(self, addresses: Sequence[Address]) -> None:
        """Tell others these addresses too."""
        self._network.announce(addresses)

    async def probe(self, address: Address) -> PeerId:
        """The peer that answers at an address; raises StreamLost."""
        return await self._network.probe(address)

    async def connect(self, peer_id: PeerId, addresses: Sequence[Address]) -> None:
        """Connect through the network within."""
        await self._network.connect(peer_id, addresses)

    async def open_stream(self, peer_id: PeerId, protocol: str) -> Stream:
        """Open a stream; raises StreamLost."""
        return self._wrapped(await self._network.open_stream(peer_id, protocol), protocol)

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Serve `protocol` from now on; raises LocalProtocolError."""

        async def handle(stream: Stream) -> None:
            await handler(self._wrapped(stream, protocol))

        await self._network.serve(protocol, handle)

    def statistics(self) -> NetworkStatistics:
        """The statistics of the network within."""
        return self._network.statistics()

    def _wrapped(self, stream: Stream, protocol: str) -> Stream:
        """Lay a stream around one of the network within; here it stays as it is."""
        return stream
