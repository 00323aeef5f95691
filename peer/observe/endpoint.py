"""The pages of a peer over HTTP: metrics for Prometheus, and a web page to watch the run.

    GET /metrics       numbers for Prometheus
    GET /              the page, which asks for the others and for nothing else anywhere
    GET /status.json   `status`, the last lines of the console, and the points of its curves
    GET /now.json      the same without the points

HEAD is for monitors. Nothing can be changed from here. Anybody who can reach the port can ask, so:

- Connections, the request's length and its time are bounded.
- A web page elsewhere could have the browser of somebody who can reach the port ask, by a name of
  its own that leads here (DNS rebinding): so it answers to addresses, to names that only a local
  network has, and to those that the user gave.
- With a token all that is asked must bring it: programs as `Authorization: Bearer`; a browser once
  as `/?token=`, which gives it a cookie. Without one, metrics are for all, as Prometheus expects,
  and the rest, which tells of people's machines, is for this machine alone.
- The page shows what peers say as text nodes, and its policy forbids scripts of other origin.

What is served is rendered in the daemon's own task, so no thread ever reads half-changed numbers.
"""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final

import msgspec
import trio

from peer.options.values import HostPort
from protocol.errors import Unusable
from protocol.limits import ANSWER_S, MAX_HEADER_BYTES

from .control import Clients, read_until
from .metrics import Metrics

_FOLDER: Final = Path(__file__).parent / "page"
_FILES: Final = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/uPlot.min.css": ("uPlot.min.css", "text/css"),
    "/uPlot.iife.min.js": ("uPlot.iife.min.js", "text/javascript"),
}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_GUARDED: Final = (
    f"Content-Security-Policy: {_POLICY}",
    "Cross-Origin-Resource-Policy: same-origin",
    "Referrer-Policy: no-referrer",
    "X-Content-Type-Options: nosniff",
    "Cache-Control: no-store",
)


class EndpointUnavailable(Unusable): ...


@dataclass(frozen=True, slots=True)
class Page:
    content_type: str
    render: Callable[[], bytes]
    is_for_all: bool = False


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[str, ...] = ()

    def to_bytes(self, *, head_only: bool) -> bytes:
        lines = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(self.body)}",
            *_GUARDED,
            *self.headers,
            "Connection: close",
        ]
        return "\r\n".join([*lines, "", ""]).encode() + (b"" if head_only else self.body)


def pages_of(metrics: Metrics, snapshot: Callable[[bool], Mapping[str, object]]) -> dict[str, Page]:
    """All pages of a peer, by path.

    Args:
        snapshot: the status, with the history where it is given True.
    """
    files = {
        path: Page(f"{kind}; charset=utf-8", (_FOLDER / name).read_bytes)
        for path, (name, kind) in _FILES.items()
    }
    json = "application/json"
    return files | {
        "/metrics": Page(metrics.content_type, metrics.render, is_for_all=True),
        "/status.json": Page(json, lambda: msgspec.json.encode(snapshot(True))),
        "/now.json": Page(json, lambda: msgspec.json.encode(snapshot(False))),
    }


# --- who may read what ----------------------------------------------------------------------------

_HOST: Final = re.compile(rb"\r\nhost:[ \t]*(\[[^]]*\]|[^:\r]*)", re.IGNORECASE)
_BEARER: Final = re.compile(rb"\r\nauthorization:[ \t]*bearer[ \t]+([^\r]*)", re.IGNORECASE)
_COOKIES: Final = re.compile(rb"\r\ncookie:[ \t]*([^\r]*)", re.IGNORECASE)
_OTHER_HOST: Final = b"nothing is served by that name; give it with --metrics-host\n"
_NO_TOKEN: Final = (
    b"the token is missing or wrong: open /?token=TOKEN, or send 'Authorization: Bearer TOKEN'\n"
)
_ELSEWHERE: Final = (
    b"from another machine this takes a token: start the peer with --metrics-token, or use a tunnel"
    b" (ssh -L)\n"
)


@dataclass(frozen=True, slots=True)
class Site:
    """The pages of a peer.

    Attributes:
        hosts: names that it may be asked for by, beside addresses and names without a dot.
        token: that a request must bring; None asks for none.
    """

    pages: Mapping[str, Page]
    hosts: Collection[str] = ()
    token: str | None = field(default=None, repr=False)

    def answer(self, head: bytes, *, is_here: bool) -> HttpAnswer:
        """Args: is_here: the request comes from this machine."""
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(head) > MAX_HEADER_BYTES:
            return HttpAnswer(431)
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return HttpAnswer(400)
        if words[0] not in (b"GET", b"HEAD"):
            return HttpAnswer(405, headers=("Allow: GET, HEAD",))
        named = [host.decode("latin-1").strip().lower() for host in _HOST.findall(head)]
        if not all(_is_local(host) or host in self.hosts for host in named):
            return HttpAnswer(421, _OTHER_HOST)
        path, _, query = words[1].partition(b"?")
        return self._served(path.decode("latin-1"), query, head, is_here=is_here)

    def _served(self, path: str, query: bytes, head: bytes, *, is_here: bool) -> HttpAnswer:
        if self.token is not None and path == "/" and self._is_token(query.removeprefix(b"token=")):
            return self._welcome(self.token)
        if self.token is not None and not any(map(self._is_token, _tokens(head))):
            return HttpAnswer(401, _NO_TOKEN, headers=("WWW-Authenticate: Bearer",))
        page = self.pages.get(path)
        if page is None:
            return HttpAnswer(404, f"there are: {', '.join(self.pages)}\n".encode())
        if self.token is None and not (is_here or page.is_for_all):
            return HttpAnswer(403, _ELSEWHERE)
        try:
            return HttpAnswer(200, page.render(), page.content_type)
        except Exception as error:  # noqa: BLE001 - a page that cannot be made must not end the run
            return HttpAnswer(500, f"{error!r}\n".encode())

    def _is_token(self, given: bytes) -> bool:
        return self.token is not None and hmac.compare_digest(given, self.token.encode())

    def _welcome(self, token: str) -> HttpAnswer:
        """Keep the token in a cookie, and out of the address that the browser remembers.

        Ports of one machine share their cookies, so the name is another one for each token.
        """
        name = f"loco_{hashlib.blake2s(token.encode(), digest_size=4).hexdigest()}"
        cookie = f"Set-Cookie: {name}={token}; Path=/; HttpOnly; SameSite=Lax"
        return HttpAnswer(303, headers=("Location: /", cookie))


def _tokens(head: bytes) -> list[bytes]:
    cookies = [each for line in _COOKIES.findall(head) for each in line.split(b";")]
    kept = [each.partition(b"=")[2].strip() for each in cookies]
    return [*(given.strip() for given in _BEARER.findall(head)), *kept]


def _is_local(host: str) -> bool:
    """Whether nobody elsewhere can make a name like this lead here."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return "." not in host
    return True


# --- the server -----------------------------------------------------------------------------------


async def serve(
    where: HostPort, site: Site, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve until cancelled.

    `nursery.start` returns the URL of the metrics, or raises EndpointUnavailable.
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
    await trio.serve_listeners(clients_of(site).answer, listeners)


def clients_of(site: Site) -> Clients:
    async def converse(stream: trio.SocketStream) -> None:
        with trio.move_on_after(ANSWER_S):
            head = await read_until(stream, b"\r\n\r\n", MAX_HEADER_BYTES)
            if not head:
                return
            answer = site.answer(head, is_here=_is_here(stream))
            await stream.send_all(answer.to_bytes(head_only=head.startswith(b"HEAD ")))
            with trio.move_on_after(1):  # let the answer arrive before the connection is reset
                await stream.send_eof()
                await stream.receive_some(1)

    return Clients(converse)


def _is_here(stream: trio.SocketStream) -> bool:
    address = ipaddress.ip_address(stream.socket.getpeername()[0].partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
