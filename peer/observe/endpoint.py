"""A very small HTTP server for one page: `GET /metrics`, and HEAD for monitors.

Anybody who can reach the port can ask, so everything is bounded: connections, the request's length
and how long it may take. One request per connection; the answer is rendered in the daemon's
own task, so no thread ever reads half-changed numbers.
"""

from collections.abc import Callable
from typing import Final

import trio

from peer.options.values import HostPort
from protocol.errors import LocoError

MAX_REQUEST_BYTES: Final = 8 * 1024
MAX_CONNECTIONS: Final = 8
REQUEST_TIMEOUT_S: Final = 5.0
"""Time of one request, from the first byte awaited to the last byte sent."""
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
}


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
    port = listeners[0].socket.getsockname()[1]
    server = _Server(render, content_type)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, server.answer, listeners)
        task_status.started(f"http://{HostPort(_dialable(where.host), port)}/metrics")


def _dialable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104


class _Server:
    def __init__(self, render: Callable[[], bytes], content_type: str) -> None:
        self._render = render
        self._content_type = content_type
        self._connections = 0

    async def answer(self, stream: trio.SocketStream) -> None:
        """Answer one request on one connection. Whatever the other side does ends here."""
        self._connections += 1
        try:
            if self._connections <= MAX_CONNECTIONS:
                with trio.move_on_after(REQUEST_TIMEOUT_S):
                    await self._converse(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self._connections -= 1
            with trio.move_on_after(0):
                await trio.aclose_forcefully(stream)

    async def _converse(self, stream: trio.SocketStream) -> None:
        head = await _read_head(stream)
        if head is None:
            return
        status, body = self._page(head)
        answer = self._response(status, body)
        if head.startswith(b"HEAD "):
            answer = answer.removesuffix(body)
        await stream.send_all(answer)
        with trio.move_on_after(1):  # let the answer arrive before the connection is reset
            await stream.send_eof()
            await stream.receive_some(1)

    def _page(self, head: bytes) -> tuple[int, bytes]:
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
            return 200, self._render()
        except Exception as error:  # noqa: BLE001 - a page that cannot be made must not end the run
            return 500, f"{error!r}\n".encode()

    def _response(self, status: int, body: bytes) -> bytes:
        kind = self._content_type if status == 200 else "text/plain; charset=utf-8"
        lines = [
            f"HTTP/1.1 {status} {_REASONS[status]}",
            f"Content-Type: {kind}",
            f"Content-Length: {len(body)}",
            *(["Allow: GET, HEAD"] if status == 405 else []),
            "Connection: close",
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body


async def _read_head(stream: trio.SocketStream) -> bytes | None:
    """Read up to the empty line, or just past `MAX_REQUEST_BYTES`; None when the client left."""
    head = bytearray()
    while b"\r\n\r\n" not in head and len(head) <= MAX_REQUEST_BYTES:
        chunk = await stream.receive_some(MAX_REQUEST_BYTES)
        if not chunk:
            return None
        head += chunk
    return bytes(head)
