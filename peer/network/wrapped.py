"""Networks that wrap another network.

`WrappedNetwork` and its streams pass everything through unchanged. A layer overrides
`WrappedNetwork._wrapped`, which every stream passes, opened or served, and methods of
`WrappedStream`.

`AdmittedNetwork` serves only admitted peers that behave; it wraps the paced network. Every
conversation that another peer opens in one of our protocols passes this one check; libp2p's own
protocols do not, nor do streams that we open. In the hello a peer shows that it may join, and is
told why it may not (peer/daemon/links.py), so there only its conduct counts. What a peer sends
against the rules is held against it here, whatever the conversation. A peer that opens streams
faster than any needs to waits for its turn (protocol/membership/paces.py), and meanwhile fills its
own places.

Streams of a `PacedNetwork` are paced (pacing.py); it wraps a real or a simulated network. A sender
that has not asked for a turn does not wait, so small messages are sent at once. Reading waits too,
except for the messages of links.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Generic, Protocol, TypeVar

import trio

from peer.ports import Address, Network, NetworkStatistics, OnBytes, PeerId, Stream, StreamHandler
from protocol.errors import RemoteProtocolError
from protocol.limits import (
    INBOUND_STREAMS_BURST_S,
    INBOUND_STREAMS_PER_S_OF_PREFIX,
    PER_PEER_PER_S,
)
from protocol.membership.conduct import Fault
from protocol.membership.paces import Paces
from protocol.wire.messages import Refusal
from protocol.wire.versions import HELLO

from .conversation import Conversation
from .pacing import Pacing

# --- wrapped --------------------------------------------------------------------------------------

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


# --- admitted -------------------------------------------------------------------------------------


class Judge(Protocol):
    """Implemented by `peer.daemon.standing.Standing`."""

    def judge(self, peer_id: PeerId) -> Refusal | None:
        """Why a peer is not served; None when it is."""

    def judge_conduct(self, peer_id: PeerId) -> Refusal | None:
        """Why a peer is not even greeted; None when it is."""

    def wait_s(self, peer_id: PeerId) -> float:
        """For how long a stream of this peer waits before it is served."""

    def blame(self, peer_id: PeerId, fault: Fault) -> None:
        """Hold a fault against a peer."""


class AdmittedNetwork(WrappedNetwork):
    """See the top of the file."""

    def __init__(self, network: Network, judge: Judge) -> None:
        super().__init__(network)
        self._judge = judge
        self._paces = Paces(
            PER_PEER_PER_S, INBOUND_STREAMS_PER_S_OF_PREFIX, INBOUND_STREAMS_BURST_S
        )

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Serve `protocol` to admitted peers from now on; raises LocalProtocolError."""
        judge = self._judge

        async def handle(stream: Stream) -> None:
            peer_id = stream.remote_peer_id
            if wait_s := self._paces.begin(trio.current_time(), peer_id, stream.remote_address):
                await trio.sleep(wait_s)
            decide = judge.judge_conduct if protocol == HELLO else judge.judge
            refusal = decide(peer_id)
            if refusal is not None:
                await Conversation(stream).refuse(refusal.reason, refusal.sentence)
                return
            if wait_s := judge.wait_s(peer_id):
                await trio.sleep(wait_s)
            try:
                await handler(stream)
            except* RemoteProtocolError:
                judge.blame(peer_id, Fault.BROKEN_RULE)
                raise

        await super().serve(protocol, handle)


# --- paced ----------------------------------------------------------------------------------------


class PacedNetwork(WrappedNetwork):
    """The network whose streams keep to the pace."""

    def __init__(self, network: Network, pacing: Pacing) -> None:
        super().__init__(network)
        self._pacing = pacing

    def _wrapped(self, stream: Stream, protocol: str) -> Stream:
        return PacedStream(stream, self._pacing, reads_slowly=protocol != HELLO)


class PacedStream(WrappedStream[Stream]):
    """One stream at the pace of its peer and of the line.

    Args:
        reads_slowly: to keep to the download limit.
    """

    def __init__(self, stream: Stream, pacing: Pacing, *, reads_slowly: bool) -> None:
        super().__init__(stream)
        self._pacing = pacing
        self._reads_slowly = reads_slowly
        self._granted_bytes = 0
        self._held = b""

    async def turn(self, num_bytes: int) -> int:
        """Wait until bulk may go to this peer; how much of it may go now."""
        with self._pacing.sending(self.remote_peer_id):
            granted_bytes = await self._pacing.turn(self.remote_peer_id, num_bytes)
        self._granted_bytes += granted_bytes
        return granted_bytes

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data` now; raises StreamLost."""
        granted_bytes = min(self._granted_bytes, len(data))
        self._granted_bytes -= granted_bytes
        self._pacing.sent(self.remote_peer_id, len(data) - granted_bytes)
        with self._pacing.sending(self.remote_peer_id) if granted_bytes else nullcontext():
            await self._stream.send_all(data)

    async def receive_some(self, max_bytes: int = 65536) -> bytes:
        """At least one byte, or `b""` at the end; raises StreamLost."""
        if not self._held:
            self._held = await self._stream.receive_some(max_bytes)
            self._pacing.received(self.remote_peer_id, len(self._held))
        await self._may_receive()  # who is cancelled here finds it next time
        data, self._held = self._held[:max_bytes], self._held[max_bytes:]
        return data

    async def receive_into(self, buffer: memoryview, arrived: OnBytes | None = None) -> None:
        """Fill `buffer`; `arrived` is told how much of it is there. Raises StreamLost."""
        held_bytes = min(len(self._held), len(buffer))
        buffer[:held_bytes] = self._held[:held_bytes]
        self._held = self._held[held_bytes:]
        tell = None if arrived is None else lambda num_bytes: arrived(held_bytes + num_bytes)
        await self._stream.receive_into(buffer[held_bytes:], tell)
        self._pacing.received(self.remote_peer_id, len(buffer) - held_bytes)
        await self._may_receive()

    async def _may_receive(self) -> None:
        if self._reads_slowly:
            await self._pacing.may_receive()
