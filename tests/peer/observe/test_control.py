"""The control socket: asks and answers, and what goes wrong."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from peer.observe import control
from peer.observe.control import (
    MAX_CONNECTIONS,
    ControlFailed,
    NoDaemon,
    ask,
    serve_control,
)
from protocol.errors import LocoError
from protocol.limits import MAX_HEADER_BYTES


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="loco-test-") as folder:
        yield Path(folder) / "control.sock"


async def echo(arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments


async def fail(arguments: dict[str, Any]) -> dict[str, Any]:
    raise LocoError("cannot do that now")


async def hang(arguments: dict[str, Any]) -> dict[str, Any]:
    await trio.sleep_forever()
    return {}


def no_bug(request: str, bug: Exception) -> None:
    raise AssertionError(f"{request}: {bug}")


HANDLERS = {"echo": echo, "fail": fail, "hang": hang}


@pytest.mark.parametrize(
    ("raised", "sentence", "is_bug"),
    [
        (OSError(28, "No space left on device", "/home/x"), "No space left on device", False),
        (OverflowError("too large"), "a bug in loco-peer: OverflowError: too large", True),
        (ExceptionGroup("", [KeyError("a")]), "a bug in loco-peer: ExceptionGroup", True),
    ],
)
async def test_a_request_that_fails_ends_alone(
    path: Path, nursery: trio.Nursery, raised: Exception, sentence: str, is_bug: bool
) -> None:
    async def break_down(arguments: dict[str, Any]) -> dict[str, Any]:
        raise raised

    told: list[tuple[str, Exception]] = []

    def tell(request: str, bug: Exception) -> None:
        told.append((request, bug))

    handlers = {**HANDLERS, "break": break_down}
    await nursery.start(serve_control, path, handlers, tell)
    with pytest.raises(ControlFailed, match=sentence):
        await ask(path, "break")
    assert told == ([("break", raised)] if is_bug else [])
    assert await ask(path, "echo", n=3) == {"n": 3}


async def raw(path: Path, data: bytes) -> bytes:
    async with await trio.open_unix_socket(str(path)) as stream:
        await stream.send_all(data)
        answer = b""
        async for chunk in stream:
            answer += chunk
        return answer


async def test_a_request_is_answered(path: Path, nursery: trio.Nursery) -> None:
    await nursery.start(serve_control, path, HANDLERS, no_bug)
    assert await ask(path, "echo", n=3) == {"n": 3}
    assert path.stat().st_mode & 0o777 == 0o600


async def test_an_error_of_ours_reaches_the_client_as_a_sentence(
    path: Path, nursery: trio.Nursery
) -> None:
    await nursery.start(serve_control, path, HANDLERS, no_bug)
    with pytest.raises(ControlFailed, match="cannot do that now"):
        await ask(path, "fail")
    assert await ask(path, "echo") == {}


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\n",
        b"[]\n",
        b'{"request": "destroy"}\n',
        b'{"request": []}\n',
        b"[" * (MAX_HEADER_BYTES - 1) + b"\n",
    ],
    ids=["no JSON", "a list", "unknown", "no name", "nested too deep"],
)
async def test_what_nobody_knows_is_told(path: Path, nursery: trio.Nursery, data: bytes) -> None:
    await nursery.start(serve_control, path, HANDLERS, no_bug)
    assert b"unknown request; known are echo, fail, hang" in await raw(path, data)
    assert await ask(path, "echo") == {}


async def test_a_reply_that_no_json_can_hold_is_a_bug_that_ends_alone(
    path: Path, nursery: trio.Nursery
) -> None:
    async def reply_with_a_set(arguments: dict[str, Any]) -> dict[str, Any]:
        return {"peers": {"a", "b"}}

    told: list[str] = []
    handlers = {**HANDLERS, "odd": reply_with_a_set}
    await nursery.start(serve_control, path, handlers, lambda request, _: told.append(request))
    with pytest.raises(ControlFailed, match="a bug in loco-peer: TypeError"):
        await ask(path, "odd")
    assert told == ["odd"]
    assert await ask(path, "echo") == {}


async def test_a_request_that_is_too_long_ends_its_connection(
    path: Path, nursery: trio.Nursery
) -> None:
    await nursery.start(serve_control, path, HANDLERS, no_bug)
    try:
        pad = b"x" * MAX_HEADER_BYTES
        assert await raw(path, b'{"request": "echo", "pad": "' + pad + b'"}\n') == b""
    except trio.BrokenResourceError:
        pass
    assert await ask(path, "echo") == {}


async def test_a_client_that_goes_away_harms_nobody(path: Path, nursery: trio.Nursery) -> None:
    await nursery.start(serve_control, path, HANDLERS, no_bug)
    for data in (b"", b'{"req', b'{"request": "echo"}\n'):
        stream = await trio.open_unix_socket(str(path))
        if data:
            await stream.send_all(data)
        await stream.aclose()
    assert await ask(path, "echo") == {}


async def test_connections_are_bounded(path: Path, nursery: trio.Nursery) -> None:
    await nursery.start(serve_control, path, HANDLERS, no_bug)
    held = [await trio.open_unix_socket(str(path)) for _ in range(MAX_CONNECTIONS)]
    for stream in held:
        await stream.send_all(b'{"request": "hang"}\n')
    await trio.testing.wait_all_tasks_blocked()
    with pytest.raises(ControlFailed, match="ended before"):
        await ask(path, "echo")
    for stream in held:
        await stream.aclose()


async def test_a_stale_socket_is_replaced(path: Path, nursery: trio.Nursery) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(NoDaemon):
        await ask(path, "echo")
    await nursery.start(serve_control, path, HANDLERS, no_bug)
    assert await ask(path, "echo") == {}


async def test_no_daemon_is_said(path: Path) -> None:
    with pytest.raises(NoDaemon):
        await ask(path, "echo")


async def test_a_daemon_that_does_not_answer_is_said(
    path: Path, nursery: trio.Nursery, autojump_clock
) -> None:
    await nursery.start(serve_control, path, HANDLERS, no_bug)
    with pytest.raises(ControlFailed, match="'hang' within 3 s"):
        await ask(path, "hang", timeout_s=3)


async def test_a_daemon_that_ends_is_said(path: Path) -> None:
    async def client() -> None:
        with pytest.raises(ControlFailed, match="ended before"):
            await ask(path, "hang")

    async with trio.open_nursery() as clients, trio.open_nursery() as daemon:
        await daemon.start(serve_control, path, HANDLERS, no_bug)
        clients.start_soon(client)
        await trio.testing.wait_all_tasks_blocked()
        daemon.cancel_scope.cancel()
    assert not path.exists()


async def test_the_answer_to_leave_gets_out(path: Path) -> None:
    """The handler stops the daemon: its answer still arrives."""
    async with trio.open_nursery() as nursery:
        daemon = await nursery.start(_daemon_that_leaves, path)
        assert await ask(path, "leave") == {"leaving": True}
        assert daemon.cancel_called


async def _daemon_that_leaves(path: Path, *, task_status=trio.TASK_STATUS_IGNORED) -> None:
    with trio.CancelScope() as scope:

        async def leave(arguments: dict[str, Any]) -> dict[str, Any]:
            scope.cancel()
            return {"leaving": True}

        async with trio.open_nursery() as nursery:
            await nursery.start(control.serve_control, path, {"leave": leave}, no_bug)
            task_status.started(scope)
