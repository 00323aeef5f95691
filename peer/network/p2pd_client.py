"""Speaking to p2pd over its control socket, straight from trio.

Every request has a connection of its own, except that one lasting connection is upgraded to a
*persistent* one, on which nothing is ever said: p2pd lives for as long as one of those is open, and
its end tells us at once that p2pd is gone. A connection on which a STREAM_OPEN succeeded has become
the stream itself.
"""

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import trio

from protocol.address.varint import encode_uvarint, read_delimited
from protocol.errors import LocoError, RemoteProtocolError
from protocol.limits import ANSWER_S

from . import p2pd_messages as messages
from .p2pd_messages import PeerAddresses, RequestType, Response, StreamInfo
from .p2pd_process import P2pdFailed
from .tls_probe import receive_exactly

DIAL_TIMEOUT_S: Final = 15
"""Time for a request that makes p2pd dial a peer; p2pd is told the same figure."""
BACKOFF_WAIT_S: Final = 6.0
"""A little more than p2pd's shortest pause after a failed dial."""
BACKOFF_LOOK_S: Final = 0.25
STREAM_BUFFER_BYTES: Final = 256 * 1024
"""Kernel buffer asked for on stream sockets. What waits here has been given to one stream and
cannot go by another: with 4 MiB the last pieces of a striped vector come late, and on loopback
nothing is gained."""


class P2pdRefused(LocoError):
    """p2pd could not do what it was asked; the message is p2pd's own."""


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
        response = await self._request(messages.simple_request(RequestType.IDENTIFY), ANSWER_S)
        if response.identity is None:
            raise P2pdFailed("p2pd does not say who it is")
        return response.identity

    async def list_peers(self) -> tuple[PeerAddresses, ...]:
        """The peers that p2pd is connected to."""
        request = messages.simple_request(RequestType.LIST_PEERS)
        return (await self._request(request, ANSWER_S)).peers

    async def connect(self, peer: bytes, addresses: Sequence[bytes]) -> None:
        """Connect to a peer (binary id) at binary multiaddrs.

        Raises:
            P2pdRefused: it cannot be reached.
        """
        request = messages.connect_request(peer, addresses, DIAL_TIMEOUT_S)
        await self._request(request, DIAL_TIMEOUT_S + ANSWER_S)

    async def set_handler(self, listener: bytes, protocol: str) -> None:
        """Have streams of `protocol` brought to the unix listener (binary multiaddr)."""
        request = messages.stream_handler_request(listener, protocol)
        await self._request(request, ANSWER_S)

    async def open_stream(self, peer: bytes, protocol: str) -> tuple[trio.SocketStream, bytes]:
        """Open a stream to a peer (binary id).

        Returns:
            The connection, which is the stream, and the binary address that it goes to.

        Raises:
            P2pdRefused: the peer cannot be reached or does not speak `protocol`.
        """
        connection = await self._open()
        try:
            request = messages.stream_open_request(peer, protocol, DIAL_TIMEOUT_S)
            answer = await _exchange(connection, request, DIAL_TIMEOUT_S + ANSWER_S)
        except BaseException:
            await trio.aclose_forcefully(connection)
            raise
        return connection, b"" if answer.stream is None else answer.stream.address

    async def _request(self, request: bytes, timeout_s: float) -> Response:
        async with await self._open() as connection:
            return await _exchange(connection, request, timeout_s)

    async def _open(self) -> trio.SocketStream:
        return await _open_control(self._control_path)


@asynccontextmanager
async def attach(control_path: Path) -> AsyncIterator[P2pdClient]:
    """Attach to a running p2pd, and keep it alive for as long as the context is open.

    Raises:
        P2pdFailed: nobody answers there.
    """
    async with await _open_control(control_path) as connection:
        request = messages.simple_request(RequestType.PERSISTENT_CONN_UPGRADE)
        await _exchange(connection, request, ANSWER_S)
        yield P2pdClient(control_path, connection)


async def connect_past_backoff(client: P2pdClient, peer: bytes, addresses: Sequence[bytes]) -> None:
    """Connect, waiting while p2pd refuses to try.

    After a failed dial, its own included, p2pd tries that address again only some seconds later.
    A peer that restarts would stay out of reach for as long, although it is back.

    Raises:
        P2pdRefused: it cannot be reached.
    """
    give_up_s = trio.current_time() + BACKOFF_WAIT_S
    while True:
        try:
            return await client.connect(peer, addresses)
        except P2pdRefused as error:
            if "dial backoff" not in str(error) or trio.current_time() > give_up_s:
                raise
        await trio.sleep(BACKOFF_LOOK_S)


async def receive_stream_info(connection: trio.SocketStream) -> StreamInfo:
    """Read what p2pd says about a stream that it brings to our listener.

    Raises:
        P2pdFailed: the connection ended, or something else came.
    """
    try:
        with trio.fail_after(ANSWER_S):
            return messages.parse_stream_info(await _receive_message(connection))
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


async def _exchange(connection: trio.SocketStream, request: bytes, timeout_s: float) -> Response:
    try:
        with trio.fail_after(timeout_s):
            await connection.send_all(encode_uvarint(len(request)) + request)
            response = messages.parse_response(await _receive_message(connection))
    except trio.TooSlowError as error:
        raise P2pdFailed(f"p2pd did not answer in {timeout_s:.0f} s") from error
    except trio.BrokenResourceError as error:
        raise P2pdFailed("p2pd hung up") from error
    if response.error is not None:
        raise P2pdRefused(response.error)
    return response


async def _receive_message(connection: trio.SocketStream) -> bytes:
    # The length is read byte by byte: what follows the message belongs to the stream.
    try:
        exactly = partial(receive_exactly, connection)
        return await read_delimited(exactly, messages.MAX_CONTROL_MESSAGE_BYTES)
    except ValueError as error:
        raise P2pdFailed(f"p2pd does not speak as it should: {error}") from error
