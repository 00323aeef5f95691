"""Speaking to p2pd over its control socket, straight from trio.

p2pd (go-libp2p-daemon, as shipped inside the hivemind wheel) takes a protobuf `Request` behind a
uvarint length on its unix socket and answers with a `Response`:

    Request     1 kind   2, 3, 4 what is asked for, of CONNECT, STREAM_OPEN and STREAM_HANDLER
    Response    1 whether it failed   2 {1 why}   3 StreamInfo   4 our own peer   6 peers connected
    StreamInfo  1 peer   2 address   3 protocol
    peer        1 id     2 addresses

Every request has a connection of its own, except that one lasting connection is upgraded to a
*persistent* one, on which nothing is ever said: p2pd lives for as long as one of those is open, and
its end tells us at once that p2pd is gone. A connection on which a STREAM_OPEN succeeded has become
the stream itself. For a stream from outside, p2pd connects to our listener and writes a StreamInfo
first.
"""

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import trio

from protocol.address.varint import read_delimited
from protocol.errors import LocoError, RemoteProtocolError
from protocol.limits import ANSWER_S

from .dial_errors import BACKOFF
from .handlers import DIAL_TIMEOUT_S
from .p2pd_process import P2pdFailed
from .protobuf import Field, Fields, all_of, decode_fields, delimited, encode_fields, one_of
from .tls_probe import receive_exactly

MAX_CONTROL_MESSAGE_BYTES: Final = 4 << 20
"""Longest message accepted from p2pd; LIST_PEERS with thousands of peers stays below."""
BACKOFF_WAIT_S: Final = 6.0
"""A little more than p2pd's shortest pause after a failed dial."""
BACKOFF_LOOK_S: Final = 0.25
STREAM_BUFFER_BYTES: Final = 256 * 1024
"""Kernel buffer asked for on stream sockets. What waits here has been given to one stream and
cannot go by another: with 4 MiB the last pieces of a striped vector come late, and on loopback
nothing is gained."""


class P2pdRefused(LocoError):
    """p2pd could not do what it was asked; the message is p2pd's own."""


class RequestType(IntEnum):
    """Kinds of requests."""

    IDENTIFY = 0
    CONNECT = 1
    STREAM_OPEN = 2
    STREAM_HANDLER = 3
    LIST_PEERS = 5
    PERSISTENT_CONN_UPGRADE = 9


class PeerAddresses(NamedTuple):
    """A peer (binary id) and its binary multiaddrs."""

    peer: bytes
    addresses: tuple[bytes, ...]


class StreamInfo(NamedTuple):
    """The peer at the other end of a stream, where it is (both binary), and the protocol."""

    peer: bytes
    address: bytes
    protocol: str


def request(kind: RequestType, *body: Field) -> bytes:
    """A request, with its length before it."""
    fields: list[Field] = [(1, int(kind))]
    if body:
        fields.append((kind + 1, encode_fields(body)))
    return delimited(fields)


def parse_response(data: bytes) -> Fields:
    """What p2pd answers.

    Raises:
        P2pdRefused: it could not do it; says why.
        RemoteProtocolError: p2pd sent something else.
    """
    fields = decode_fields(data)
    if 2 in fields or fields.get(1) == [1]:
        why = decode_fields(one_of(fields, 2, bytes, b""))
        raise P2pdRefused(one_of(why, 1, bytes, b"no reason given").decode(errors="replace"))
    return fields


def parse_stream_info(data: bytes) -> StreamInfo:
    """Raises RemoteProtocolError: p2pd sent something else."""
    fields = decode_fields(data)
    protocol = one_of(fields, 3, bytes).decode(errors="replace")
    return StreamInfo(one_of(fields, 1, bytes), one_of(fields, 2, bytes), protocol)


def parse_peer(data: bytes) -> PeerAddresses:
    """Raises RemoteProtocolError: p2pd sent something else."""
    fields = decode_fields(data)
    return PeerAddresses(one_of(fields, 1, bytes), tuple(all_of(fields, 2)))


class P2pdClient:
    """Requests to the p2pd behind one control socket."""

    def __init__(self, control_path: Path, persistent: trio.SocketStream) -> None:
        self._control_path = control_path
        self._persistent = persistent

    async def wait_lost(self) -> None:
        """Wait until p2pd is gone."""
        try:
            while await self._persistent.receive_some():
                pass
        except trio.BrokenResourceError:
            return

    async def is_lost(self) -> bool:
        """Whether p2pd is gone, or does not answer."""
        try:
            await self.identify()
        except LocoError:
            return True
        return False

    async def identify(self) -> PeerAddresses:
        """Our own binary peer id and the binary addresses p2pd tells others."""
        return parse_peer(one_of(await self._ask(request(RequestType.IDENTIFY)), 4, bytes))

    async def list_peers(self) -> list[PeerAddresses]:
        """The peers that p2pd is connected to, once for each connection."""
        answer = await self._ask(request(RequestType.LIST_PEERS))
        return [parse_peer(each) for each in all_of(answer, 6)]

    async def connect(self, peer: bytes, addresses: Sequence[bytes]) -> None:
        """Connect to a peer (binary id) at binary multiaddrs, waiting while p2pd does not try.

        After a failed dial, its own included, p2pd tries that address again only some seconds
        later. A peer that restarts would stay out of reach for as long, although it is back.

        Raises:
            P2pdRefused: it cannot be reached.
        """
        where: list[Field] = [(2, address) for address in addresses]
        asked = request(RequestType.CONNECT, (1, peer), *where, (3, DIAL_TIMEOUT_S))
        give_up_s = trio.current_time() + BACKOFF_WAIT_S
        while True:
            try:
                await self._ask(asked, DIAL_TIMEOUT_S + ANSWER_S)
                return
            except P2pdRefused as error:
                if BACKOFF not in str(error) or trio.current_time() > give_up_s:
                    raise
            await trio.sleep(BACKOFF_LOOK_S)

    async def set_handler(self, listener: bytes, protocol: str) -> None:
        """Have streams of `protocol` brought to the unix listener (binary multiaddr)."""
        body: tuple[Field, ...] = ((1, listener), (2, protocol.encode()), (3, 0))
        await self._ask(request(RequestType.STREAM_HANDLER, *body))

    async def open_stream(self, peer: bytes, protocol: str) -> tuple[trio.SocketStream, bytes]:
        """Open a stream to a peer (binary id).

        Returns:
            The connection, which is the stream, and the binary address that it goes to.

        Raises:
            P2pdRefused: the peer cannot be reached or does not speak `protocol`.
        """
        body: tuple[Field, ...] = ((1, peer), (2, protocol.encode()), (3, DIAL_TIMEOUT_S))
        connection = await _open_control(self._control_path)
        try:
            asked = request(RequestType.STREAM_OPEN, *body)
            answer = await _exchange(connection, asked, DIAL_TIMEOUT_S + ANSWER_S)
            address = parse_stream_info(one_of(answer, 3, bytes)).address if 3 in answer else b""
        except BaseException:
            await trio.aclose_forcefully(connection)
            raise
        return connection, address

    async def _ask(self, asked: bytes, timeout_s: float = ANSWER_S) -> Fields:
        async with await _open_control(self._control_path) as connection:
            return await _exchange(connection, asked, timeout_s)


@asynccontextmanager
async def attach(control_path: Path) -> AsyncIterator[P2pdClient]:
    """Attach to a running p2pd, and keep it alive for as long as the context is open.

    Raises:
        P2pdFailed: nobody answers there.
    """
    async with await _open_control(control_path) as connection:
        await _exchange(connection, request(RequestType.PERSISTENT_CONN_UPGRADE), ANSWER_S)
        yield P2pdClient(control_path, connection)


async def receive_stream_info(connection: trio.SocketStream) -> StreamInfo:
    """Read what p2pd says about a stream that it brings to our listener.

    Raises:
        P2pdFailed: the connection ended, or something else came.
    """
    try:
        with trio.fail_after(ANSWER_S):
            return parse_stream_info(await _receive_message(connection))
    except (trio.BrokenResourceError, trio.TooSlowError, RemoteProtocolError) as error:
        raise P2pdFailed(f"p2pd announced no stream: {error}") from error


def size_buffers(connection: trio.SocketStream) -> None:
    """Give a stream's socket kernel buffers of a set size; the kernel may grant less."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, STREAM_BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, STREAM_BUFFER_BYTES)


async def _open_control(control_path: Path) -> trio.SocketStream:
    try:
        connection = await trio.open_unix_socket(str(control_path))
    except OSError as error:
        raise P2pdFailed(f"p2pd does not answer on {control_path}: {error.strerror}") from error
    size_buffers(connection)
    return connection


async def _exchange(connection: trio.SocketStream, asked: bytes, timeout_s: float) -> Fields:
    try:
        with trio.fail_after(timeout_s):
            await connection.send_all(asked)
            return parse_response(await _receive_message(connection))
    except trio.TooSlowError as error:
        raise P2pdFailed(f"p2pd did not answer in {timeout_s:.0f} s") from error
    except trio.BrokenResourceError as error:
        raise P2pdFailed("p2pd hung up") from error


async def _receive_message(connection: trio.SocketStream) -> bytes:
    # The length is read byte by byte: what follows the message belongs to the stream.
    try:
        return await read_delimited(partial(receive_exactly, connection), MAX_CONTROL_MESSAGE_BYTES)
    except ValueError as error:
        raise P2pdFailed(f"p2pd does not speak as it should: {error}") from error
