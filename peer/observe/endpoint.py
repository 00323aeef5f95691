"""A very small HTTP server for one page: `GET /metrics`, and HEAD for monitors.

Anybody who can reach the port can ask, so everything is bounded: connections, the request's length
and how long it may take. One request per connection; the answer is rendered in the daemon's
own task, so no thread ever reads half-changed numbers.
"""

from collections.abc import Callable
from http import HTTPStatus
from typing import Final

import trio

from peer.options.values import HostPort
from protocol.errors import LocoError

from .control import Clients

MAX_REQUEST_BYTES: Final = 8 * 1024
REQUEST_TIMEOUT_S: Final = 5.0
"""Time of one request, from the first byte awaited to the last byte sent."""


class EndpointUnavailable(LocoError):
    """The daemon cannot listen on the address for metrics."""


async def serve_metrics(
    where: HostPort,
    render: Callable[[], bytes],
    content_type: str,
    *,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve metrics until cancelled. `nursery.start` returns the URL; port 0 picks a free one.

    Raises:
        EndpointUnavailable
    """
    try:
        listeners = await trio.open_tcp_listeners(where.port, host=where.host)
    except OSError as error:
        raise EndpointUnavailable(
            f"cannot serve metrics on {where}: {error.strerror or error};"
            " choose another --metrics HOST:PORT"
        ) from error
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(where.host, where.host)  # noqa: S104
    port = listeners[0].socket.getsockname()[1]
    task_status.started(f"http://{HostPort(host, port)}/metrics")
    await trio.serve_listeners(clients_of(render, content_type).answer, listeners)


def clients_of(render: Callable[[], bytes], content_type: str) -> Clients:
    """Those that ask for the page, each once."""

    async def converse(stream: trio.SocketStream) -> None:
        with trio.move_on_after(REQUEST_TIMEOUT_S):
            head = await _read_head(stream)
            if head is None:
                return
            status, body = _page(head, render)
            lines = [
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
                f"Content-Type: {content_type if status == 200 else 'text/plain; charset=utf-8'}",
                f"Content-Length: {len(body)}",
                *(["Allow: GET, HEAD"] if status == 405 else []),
                "Connection: close",
            ]
            body = b"" if head.startswith(b"HEAD ") else body
            await stream.send_all("\r\n".join([*lines, "", ""]).encode() + body)
            with trio.move_on_after(1):  # let the answer arrive before the connection is reset
                await stream.send_eof()
                await stream.receive_some(1)

    return Clients(converse)


def _page(head: bytes, render: Callable[[], bytes]) -> tuple[int, bytes]:
    """Status and body of the answer."""
    words = head.split(b"\r\n", 1)[0].split(b" ")
    if len(head) > MAX_REQUEST_BYTES:
        return 431, b""
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return 400, b""
    if words[0] not in (b"GET", b"HEAD"):
        return 405, b""
    if words[1].split(b"?")[0] != b"/metrics":
        return 404, b"metrics are at /metrics\n"
    try:
        return 200, render()
    except Exception as error:  # noqa: BLE001 - a page that cannot be made must not end the run
        return 500, f"{error!r}\n".encode()


async def _read_head(stream: trio.SocketStream) -> bytes | None:
    """Read up to the empty line, or just past `MAX_REQUEST_BYTES`; None when the client left."""
    head = bytearray()
    while b"\r\n\r\n" not in head and len(head) <= MAX_REQUEST_BYTES:
        chunk = await stream.receive_some(MAX_REQUEST_BYTES)
        if not chunk:
            return None
        head += chunk
    return bytes(head)
