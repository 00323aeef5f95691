"""Our relay: it carries the connections of peers of the run that nobody can dial, within limits.

It speaks libp2p's circuit relay, version 2 (libp2p/specs, relay), in place of the one inside p2pd,
which serves everybody, cuts each connection after 128 KiB or two minutes whatever its flags say,
and cannot be turned off.

A peer that cannot be dialled *reserves* a place at a relay: it says RESERVE on the hop protocol.
Another peer then says CONNECT to the relay, with the first one's id; the relay says CONNECT on the
stop protocol to that one; once both are told OK, the relay carries bytes between the two streams,
and both ends make an encrypted connection of them. So the relay reads nothing of what it carries.

    hop     1 type (0 RESERVE, 1 CONNECT, 2 STATUS), 2 peer, 3 reservation, 5 status
    stop    1 type (0 CONNECT, 1 STATUS), 2 peer, 4 status
    peer    1 id            reservation   1 expiry (Unix time)

We set no limit in the messages: p2pd would take the connection for one that is good for a few small
messages alone. Limits are kept by cutting:
- It gives places to peers of the run that we know, and only while we are not known to be out of
  reach ourselves. It connects whom the run serves; those that we do not know (newcomers, or
  strangers that would tunnel) share STRANGERS_SHARE of the rate.
- A reservation lasts RESERVATION_S. It is kept by peer id, so a peer that comes again renews it.
- They, and circuits, are bounded for all, for a peer that opens them, and for a network.
- A circuit needs a reservation of the peer it leads to. It ends when either side ends, and after
  CIRCUIT_IDLE_S without a byte. (One that is cut can be opened again, so nothing else cuts it.)
- All circuits together keep to one rate, and count against the limits of our line.
- A peer that came through a relay is not relayed any further.
"""

from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from enum import IntEnum
from typing import Final

import trio

from peer.runtime import Address, Network, PeerId, Stream
from protocol.address.multiaddr import is_relayed
from protocol.address.peer_id import peer_id_from_bytes, peer_id_to_bytes
from protocol.address.varint import read_delimited
from protocol.errors import LocoError, RemoteProtocolError, StreamLost
from protocol.limits import ANSWER_S, CIRCUITS, RESERVATIONS, STRANGERS_SHARE
from protocol.membership.book import Budget

from .conversation import close
from .pacing import Bucket
from .protobuf import Field, decode_fields, delimited, encode_fields, one_of

HOP: Final = "/libp2p/circuit/relay/0.2.0/hop"
STOP: Final = "/libp2p/circuit/relay/0.2.0/stop"
RESERVATION_S: Final = 1800.0
CIRCUIT_IDLE_S: Final = 120.0


# --- messages -------------------------------------------------------------------------------------
class HopKind(IntEnum):
    RESERVE = 0
    CONNECT = 1
    STATUS = 2


class CircuitStatus(IntEnum):
    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204


def hop_answer(status: CircuitStatus, expires_s: int | None = None) -> bytes:
    """STATUS of a relay, behind its length."""
    lasts: list[Field] = [] if expires_s is None else [(3, encode_fields([(1, expires_s)]))]
    return delimited([(1, int(HopKind.STATUS)), *lasts, (5, int(status))])


def stop_request(peer: bytes) -> bytes:
    """CONNECT, which names the asker to the peer behind the relay; behind its length."""
    return delimited([(1, 0), (2, encode_fields([(1, peer)]))])


def parse_hop_request(data: bytes) -> bytes | None:
    """The peer (binary id) to relay to; None for a RESERVE. Raises RemoteProtocolError."""
    fields = decode_fields(data)
    kind = one_of(fields, 1, int, 0)
    if kind == HopKind.RESERVE:
        return None
    if kind == HopKind.CONNECT:
        return one_of(decode_fields(one_of(fields, 2, bytes)), 1, bytes)
    raise RemoteProtocolError(f"a relay was asked something of kind {kind}")


def parse_status(data: bytes, kind: int, field: int) -> int:
    """The `CircuitStatus`, or one that is not known, of an answer of this kind, in this field.

    Raises:
        RemoteProtocolError: something else.
    """
    fields = decode_fields(data)
    if one_of(fields, 1, int, 0) != kind:
        raise RemoteProtocolError("an answer without a status")
    return one_of(fields, field, int, 0)


HOP_ANSWER: Final = (int(HopKind.STATUS), 5)
STOP_ANSWER: Final = (1, 4)
"""Kind and field of the answers to what is said on the two protocols."""


async def receive_delimited(stream: Stream) -> bytes:
    """The next message, and not one byte of what follows it. Raises RemoteProtocolError."""

    async def exactly(num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        if num_bytes:
            await stream.receive_into(memoryview(data))
        return bytes(data)

    try:
        return await read_delimited(exactly)
    except ValueError as error:
        raise RemoteProtocolError(str(error)) from error


# --- relay ----------------------------------------------------------------------------------------
@dataclass(eq=False)
class Relay:
    """Serves reservations and circuits to peers that nobody can dial.

    Args:
        carry: waits until so many bytes of others may go over our line.
        knows: whether a peer is one of the run, as far as we know.
        offers: whether we can be of use to others now.
        mbps: how fast all circuits together may go; 0 is no relay.
        wall_time_s: for the expiry that we tell.
    """

    network: Network
    carry: Callable[[int], Awaitable[None]]
    _: KW_ONLY
    knows: Callable[[PeerId], bool]
    offers: Callable[[], bool]
    mbps: float
    wall_time_s: Callable[[], float]

    def __post_init__(self) -> None:
        bytes_per_s = max(1.0, self.mbps * 1e6 / 8)
        self._bucket, self._strangers = Bucket(bytes_per_s), Bucket(bytes_per_s * STRANGERS_SHARE)
        self._reserved: dict[PeerId, tuple[float, Address]] = {}
        self._places = Budget(RESERVATIONS)
        self._circuits = Budget(CIRCUITS)
        self.carried_bytes = 0
        self.refused = 0

    @property
    def reservations(self) -> int:
        self._forget_expired()
        return len(self._reserved)

    @property
    def circuits(self) -> int:
        return self._circuits.taken

    async def start(self) -> None:
        await self.network.serve(HOP, self._serve)

    async def _serve(self, stream: Stream) -> None:
        try:
            with trio.fail_after(ANSWER_S):
                target = parse_hop_request(await receive_delimited(stream))
        except trio.TooSlowError:
            raise StreamLost("a relay was asked nothing") from None
        if target is None:
            await self._reserve(stream)
        else:
            await self._connect(stream, target)

    # --- reservations -----------------------------------------------------------------------------
    async def _reserve(self, stream: Stream) -> None:
        self._forget_expired()
        status, peer_id = self._reservable(stream), stream.remote_peer_id
        if status is not CircuitStatus.OK:
            await self._refuse(stream, status)
            return
        until_s = trio.current_time() + RESERVATION_S
        if peer_id not in self._reserved:
            self._places.take(peer_id, stream.remote_address)
            self._reserved[peer_id] = until_s, stream.remote_address
        self._reserved[peer_id] = until_s, self._reserved[peer_id][1]
        await stream.send_all(hop_answer(status, int(self.wall_time_s() + RESERVATION_S)))

    def _reservable(self, stream: Stream) -> CircuitStatus:
        peer_id, address = stream.remote_peer_id, stream.remote_address
        if not self.mbps or not self.offers() or is_relayed(address) or not self.knows(peer_id):
            return CircuitStatus.PERMISSION_DENIED
        if peer_id not in self._reserved and not self._places.has_room(peer_id, address):
            return CircuitStatus.RESERVATION_REFUSED
        return CircuitStatus.OK

    def _forget_expired(self) -> None:
        now_s = trio.current_time()
        over = [peer for peer, (until_s, _) in self._reserved.items() if until_s <= now_s]
        for peer in over:
            self._places.give_back(peer, self._reserved.pop(peer)[1])

    async def _refuse(self, stream: Stream, status: CircuitStatus) -> None:
        self.refused += 1
        await stream.send_all(hop_answer(status))

    # --- circuits ---------------------------------------------------------------------------------
    async def _connect(self, stream: Stream, target: bytes) -> None:
        source, address = stream.remote_peer_id, stream.remote_address
        status = self._connectable(stream, target)
        if status is not CircuitStatus.OK:
            await self._refuse(stream, status)
            return
        with self._circuits.held(source, address):
            onward = await self._reach(source, peer_id_from_bytes(target))
            if onward is None:
                await self._refuse(stream, CircuitStatus.CONNECTION_FAILED)
                return
            try:
                await stream.send_all(hop_answer(status))
                await self._carry_both(stream, onward)
            finally:
                await close(onward)

    def _connectable(self, stream: Stream, target: bytes) -> CircuitStatus:
        self._forget_expired()
        if not self.mbps or is_relayed(stream.remote_address):
            return CircuitStatus.PERMISSION_DENIED
        if peer_id_from_bytes(target) not in self._reserved:
            return CircuitStatus.NO_RESERVATION
        if not self._circuits.has_room(stream.remote_peer_id, stream.remote_address):
            return CircuitStatus.RESOURCE_LIMIT_EXCEEDED
        return CircuitStatus.OK

    async def _reach(self, source: PeerId, target: PeerId) -> Stream | None:
        """A stream to the peer behind us, which has agreed; None where that failed."""
        onward = None
        try:
            with trio.fail_after(ANSWER_S):
                onward = await self.network.open_stream(target, STOP)
                await onward.send_all(stop_request(peer_id_to_bytes(source)))
                if parse_status(await receive_delimited(onward), *STOP_ANSWER) == CircuitStatus.OK:
                    return onward
        except (LocoError, trio.TooSlowError):
            pass
        if onward is not None:
            await onward.aclose()
        return None

    async def _carry_both(self, one: Stream, other: Stream) -> None:
        """Carry bytes both ways until either side ends, or nothing comes for long.

        Args:
            one: of the peer that asked for the circuit.
        """
        opener = one.remote_peer_id
        with trio.move_on_after(CIRCUIT_IDLE_S) as idle:
            async with trio.open_nursery() as nursery:

                async def one_way(source: Stream, sink: Stream) -> None:
                    while data := await source.receive_some():
                        idle.deadline = trio.current_time() + CIRCUIT_IDLE_S
                        if not self.knows(opener):
                            await self._strangers.turn(len(data))
                        await self._bucket.turn(len(data))
                        await self.carry(len(data))
                        await sink.send_all(data)
                        self.carried_bytes += len(data)
                    nursery.cancel_scope.cancel()

                nursery.start_soon(one_way, one, other)
                nursery.start_soon(one_way, other, one)


async def reserve(network: Network, relay: PeerId) -> float:
    """Reserve a place at a relay; for how long, in seconds. Raises LocoError."""
    stream = await network.open_stream(relay, HOP)
    try:
        with trio.fail_after(ANSWER_S):
            await stream.send_all(delimited([(1, int(HopKind.RESERVE))]))
            status = parse_status(await receive_delimited(stream), *HOP_ANSWER)
    except trio.TooSlowError:
        raise RemoteProtocolError(f"{relay} does not answer as a relay") from None
    finally:
        await close(stream)
    if status != CircuitStatus.OK:
        raise LocoError(f"{relay} does not relay for us (status {status})")
    return RESERVATION_S
