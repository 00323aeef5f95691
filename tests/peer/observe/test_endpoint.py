"""What is served over HTTP, to whom, and what keeps a browser from harm."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import trio

from peer.observe.control import MAX_CONNECTIONS
from peer.observe.endpoint import (
    EndpointUnavailable,
    HttpAnswer,
    Page,
    Site,
    clients_of,
    pages_of,
    serve,
)
from peer.observe.history import History
from peer.observe.status import Status
from peer.options.values import HostPort
from protocol.limits import ANSWER_S, MAX_HEADER_BYTES

TOKEN = "0123456789abcdef"


class Numbers:
    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def render(self) -> bytes:
        return b"loco_tokens_total 1000.0\n"


def snapshot(history: bool) -> dict[str, Any]:
    told = Status(peer_id="a").to_json() | {"log": ["<b>linked</b>"]}
    return told | {"history": History().to_json()} if history else told


def pages() -> dict[str, Page]:
    numbers: Any = Numbers()
    return pages_of(numbers, snapshot)


def ask(site: Site, line: str, *headers: str, here: bool = True) -> HttpAnswer:
    return site.answer("\r\n".join([line, *headers, "", ""]).encode(), is_here=here)


OPEN, GUARDED = Site(pages()), Site(pages(), token=TOKEN)


# --- what there is --------------------------------------------------------------------------------


def test_metrics_page_and_status_are_there() -> None:
    assert ask(OPEN, "GET /metrics HTTP/1.1").body == b"loco_tokens_total 1000.0\n"
    assert b"<title>" in ask(OPEN, "GET / HTTP/1.1").body
    whole, now = (ask(OPEN, f"GET /{name}.json HTTP/1.1") for name in ("status", "now"))
    assert whole.content_type == now.content_type == "application/json"
    assert json.loads(now.body) == snapshot(history=False)
    assert json.loads(whole.body) == snapshot(history=True)


def test_every_file_that_the_page_names_is_served_and_nothing_is_elsewhere() -> None:
    page = ask(OPEN, "GET / HTTP/1.1").body.decode()
    named = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len([name for name in named if name != "data:,"]) >= 4
    for name in named:
        assert name == "data:," or ask(OPEN, f"GET /{name} HTTP/1.1").status == 200
    assert "://" not in page


def test_all_that_the_script_fills_is_on_the_page() -> None:
    page, script = (ask(OPEN, f"GET /{name} HTTP/1.1").body.decode() for name in ("", "page.js"))
    filled = {*re.findall(r'(?:\$|fill|curve)\("(\w+)"', script)}
    assert {"matrix", "peers"} <= filled <= {*re.findall(r'id="(\w+)"', page)}


def test_our_script_makes_text_alone_of_what_peers_say() -> None:
    script = ask(OPEN, "GET /page.js HTTP/1.1").body.decode()
    assert (
        re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|://", script) == []
    )


def test_the_licence_of_what_is_not_ours_lies_beside_it() -> None:
    import peer.observe.endpoint as ours

    assert "MIT" in (ours._FOLDER / "uPlot-LICENSE").read_text()
    assert b"uPlot (v1.6.32)" in ask(OPEN, "GET /uPlot.iife.min.js HTTP/1.1").body[:100]


def test_no_answer_may_be_framed_kept_or_run_as_something_else() -> None:
    for path in ("/", "/status.json", "/metrics", "/nothing"):
        head = ask(OPEN, f"GET {path} HTTP/1.1").to_bytes(head_only=True)
        (policy,) = re.findall(rb"Content-Security-Policy: (.*)\r\n", head)
        assert b"default-src 'none'" in policy
        assert b"frame-ancestors 'none'" in policy
        assert b"unsafe" not in policy
        assert b"nosniff" in head
        assert b"no-store" in head


def test_a_page_that_cannot_be_made_is_an_error_page() -> None:
    def broken() -> bytes:
        raise RuntimeError("no numbers")

    answer = ask(Site({"/metrics": Page("text/plain", broken)}), "GET /metrics HTTP/1.1")
    assert (answer.status, answer.body) == (500, b"RuntimeError('no numbers')\n")


# --- who may read it ------------------------------------------------------------------------------


def test_without_a_token_another_machine_reads_metrics_alone() -> None:
    assert ask(OPEN, "GET /metrics HTTP/1.1", here=False).status == 200
    for path in ("/", "/status.json", "/now.json", "/page.js"):
        answer = ask(OPEN, f"GET {path} HTTP/1.1", here=False)
        assert answer.status == 403
        assert b"--metrics-token" in answer.body


@pytest.mark.parametrize("path", ["/", "/status.json", "/now.json", "/page.js", "/metrics", "/x"])
@pytest.mark.parametrize("here", [True, False])
def test_with_a_token_nothing_is_read_without_it(path: str, here: bool) -> None:
    def status(*headers: str) -> int:
        return ask(GUARDED, f"GET {path} HTTP/1.1", *headers, here=here).status

    good = 404 if path == "/x" else 200
    assert status(f"Authorization: Bearer {TOKEN}") == good
    assert status(f"authorization:bearer  {TOKEN} ") == good
    assert status(f"Cookie: a=b; loco_1={TOKEN}") == good
    for wrong in (TOKEN[:-1], TOKEN + "x", "", "x"):
        assert status(f"Authorization: Bearer {wrong}") == 401
        assert status(f"Cookie: loco_1={wrong}") == 401
    assert status() == 401
    assert status(f"Authorization: Basic {TOKEN}") == 401
    assert status(f"X: Authorization: Bearer {TOKEN}") == 401


def test_a_browser_brings_the_token_once_and_keeps_it_in_a_cookie() -> None:
    answer = ask(GUARDED, f"GET /?token={TOKEN} HTTP/1.1", here=False)
    assert answer.status == 303
    (cookie,) = [line for line in answer.headers if line.startswith("Set-Cookie: ")]
    assert "Location: /" in answer.headers
    assert cookie.endswith("; Path=/; HttpOnly; SameSite=Lax")
    kept = cookie.removeprefix("Set-Cookie: ").partition(";")[0]
    assert ask(GUARDED, "GET / HTTP/1.1", f"Cookie: {kept}", here=False).status == 200
    assert ask(GUARDED, "GET /?token=wrong HTTP/1.1").status == 401
    assert ask(GUARDED, f"GET /metrics?token={TOKEN} HTTP/1.1").status == 401
    assert ask(OPEN, "GET /?token= HTTP/1.1").status == 200


def test_the_token_is_not_shown() -> None:
    assert TOKEN not in repr(GUARDED)


def test_the_token_does_not_help_a_name_that_leads_here_from_elsewhere() -> None:
    name = "Host: rebound.example.net"
    assert ask(GUARDED, f"GET /?token={TOKEN} HTTP/1.1", name).status == 421


# --- the server -----------------------------------------------------------------------------------


@pytest.fixture
async def port(nursery: trio.Nursery) -> int:
    site = Site(pages(), ["peer.example.org"])
    url = await nursery.start(serve, HostPort("127.0.0.1", 0), site)
    assert url.startswith("http://127.0.0.1:")
    assert url.endswith("/metrics")
    return int(url.rsplit(":", 1)[1].removesuffix("/metrics"))


async def fetch(port: int, request: bytes) -> bytes:
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(request)
        answer = b""
        async for chunk in stream:
            answer += chunk
        return answer


async def test_the_page_is_served(port: int) -> None:
    answer = await fetch(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Type: text/plain; version=0.0.4" in head
    assert f"Content-Length: {len(body)}".encode() in head
    assert body == b"loco_tokens_total 1000.0\n"
    assert b"200 OK" in await fetch(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")


async def test_monitors_that_ask_for_the_head_get_it_alone(port: int) -> None:
    answer = await fetch(port, b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\n")
    assert b"Content-Length: 0" not in answer
    elsewhere = await fetch(port, b"HEAD /nothing HTTP/1.1\r\n\r\n")
    assert elsewhere.startswith(b"HTTP/1.1 404")
    assert elsewhere.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /metrics?x=1 HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /uPlot-LICENSE HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /metrics/../etc HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /../endpoint.py HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /metrics HTTP/1.1\r\nHost: 192.0.2.1:9464\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.1\r\nHost: [::1]:9464\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.1\r\nHost: peer-1:9464\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.1\r\nhost:Peer.Example.org:9464\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.1\r\nHost: rebound.example.net:9464\r\n\r\n", b"421"),
        (b"GET / HTTP/1.1\r\nHost: rebound.example.net:9464\r\n\r\n", b"421"),
        (b"GET /status.json HTTP/1.1\r\nhost:127.0.0.1.example.net\r\n\r\n", b"421"),
        (b"GET /metrics HTTP/1.1\r\nHost: com.\r\n\r\n", b"421"),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: y\r\nHost: a.net\r\n\r\n", b"421"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /metrics SMTP\r\n\r\n", b"400"),
        (b"\x00\xff" * 20 + b"\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * MAX_HEADER_BYTES, b"431"),
    ],
)
async def test_other_requests_are_told_so(port: int, request_bytes: bytes, status: bytes) -> None:
    assert (await fetch(port, request_bytes)).split(b" ")[1] == status
    assert b"200 OK" in await fetch(port, b"GET /metrics HTTP/1.1\r\n\r\n")


async def test_who_goes_away_harms_nobody(port: int) -> None:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    await stream.send_all(b"GET /met")
    await stream.aclose()
    assert b"200 OK" in await fetch(port, b"GET /metrics HTTP/1.1\r\n\r\n")


async def test_a_port_that_is_taken_is_said(port: int) -> None:
    with pytest.raises(EndpointUnavailable, match=f"127.0.0.1:{port}.*--metrics"):
        await serve(HostPort("127.0.0.1", port), OPEN)


class SilentClient:
    """A connection that sends nothing."""

    closed = False

    async def receive_some(self) -> bytes:
        await trio.sleep_forever()
        return b""

    async def aclose(self) -> None:
        self.closed = True


async def test_who_says_nothing_is_cut_off(autojump_clock) -> None:
    client: Any = SilentClient()
    before = trio.current_time()
    await clients_of(OPEN).answer(client)
    assert trio.current_time() - before == pytest.approx(ANSWER_S)
    assert client.closed


async def test_connections_are_bounded(autojump_clock) -> None:
    server = clients_of(OPEN)
    clients: list[Any] = [SilentClient() for _ in range(MAX_CONNECTIONS + 1)]
    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(server.answer, client)
        await trio.sleep(ANSWER_S / 2)
        assert [client.closed for client in clients].count(True) == 1


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("127.0.0.1", 200),
        ("::1", 200),
        ("::ffff:127.0.0.1", 200),
        ("fe80::1%eth0", 403),
        ("192.0.2.1", 403),
        ("::ffff:192.0.2.1", 403),
    ],
)
async def test_this_machine_is_told_by_the_address_that_asks(address: str, status: int) -> None:
    client: Any = OneQuestion(address)
    await clients_of(OPEN).answer(client)
    assert client.sent.split(b" ")[1] == str(status).encode()


class OneQuestion:
    """A connection from an address, that asks for the page."""

    def __init__(self, address: str) -> None:
        self.socket = self
        self.getpeername: Callable[[], tuple[str, int]] = lambda: (address, 1)
        self.sent = b""

    async def receive_some(self, *_: int) -> bytes:
        return b"GET / HTTP/1.1\r\n\r\n"

    async def send_all(self, data: bytes) -> None:
        self.sent += data

    async def send_eof(self) -> None:
        pass

    async def aclose(self) -> None:
        pass
