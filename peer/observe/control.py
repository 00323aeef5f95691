"""The control socket: how a command in another terminal speaks to the daemon of its home.

A connection carries one request and one reply, each one JSON object on a line. The unix socket lies
in a directory that only its owner can enter.

    -> {"request": "status", ...arguments}
    <- {"reply": {...}}   or   {"error": "sentence"}   or, of NotNow, {..., "not_now": true}

Rules:
- A killed daemon leaves its socket behind. The home's lock says that we are the only daemon, so the
  socket is replaced.
- A client can only end its own connection: length, time to ask (ANSWER_S) and number of connections
  are bounded. A request that fails, through a full disk or a bug, ends alone as well.
"""

import errno
import json
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import trio

from protocol.errors import LocoError
from protocol.limits import ANSWER_S, MAX_HEADER_BYTES

MAX_CONNECTIONS: Final = 16

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
TellBug = Callable[[str, Exception], None]
"""Takes the request's name, and what its handler has raised."""


class NoDaemon(LocoError):
    """No daemon answers on the control socket."""


class ControlFailed(LocoError):
    """The daemon answered with an error, or not in time."""


class NotNow(ControlFailed):
    """The daemon cannot do that now: it is starting, ending, or becoming a new process."""


async def serve_control(
    path: Path,
    handlers: Mapping[str, Handler],
    tell_bug: TellBug,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve requests until cancelled.

    Args:
        path: at most 107 bytes.
        handlers: by request name; each takes the request's arguments and returns the reply. A
            `LocoError` or `OSError` becomes the client's error. Cancel the nursery only after a
            handler returned.
        tell_bug: is told of a request that fails in any other way.
    """
    path.unlink(missing_ok=True)
    listening = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    async def converse(stream: trio.SocketStream) -> None:
        line = b""
        with trio.move_on_after(ANSWER_S):
            line = await read_until(stream, b"\n", MAX_HEADER_BYTES)
        if not line or len(line) > MAX_HEADER_BYTES:
            return
        answer = await _answer_to(line, handlers, tell_bug)
        # Shielded, so that the answer to "leave" gets out although the daemon goes down with it.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + ANSWER_S):
            await stream.send_all(answer)

    try:
        await listening.bind(str(path))
        path.chmod(0o600)
        listening.listen(MAX_CONNECTIONS)
        task_status.started()
        await trio.serve_listeners(Clients(converse).answer, [trio.SocketListener(listening)])
    finally:
        listening.close()
        path.unlink(missing_ok=True)


class Clients:
    """Clients of a local server: each ends its own connection alone, and they are few."""

    def __init__(self, converse: Callable[[trio.SocketStream], Awaitable[None]]) -> None:
        self._converse = converse
        self._connections = 0

    async def answer(self, stream: trio.SocketStream) -> None:
        self._connections += 1
        try:
            if self._connections <= MAX_CONNECTIONS:
                await self._converse(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client went away; nobody is left to tell
        finally:
            self._connections -= 1
            await trio.aclose_forcefully(stream)


async def _answer_to(line: bytes, handlers: Mapping[str, Handler], tell_bug: TellBug) -> bytes:
    try:
        arguments = json.loads(line)
        name = arguments.pop("request")
        handler = handlers[name]
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        known = ", ".join(sorted(handlers))
        return _line_of({"error": f"unknown request; known are {known}"})
    try:
        return _line_of({"reply": await handler(arguments)})
    except NotNow as error:
        return _line_of({"error": str(error), "not_now": True})
    except (LocoError, OSError) as error:
        return _line_of({"error": str(error)})
    except Exception as bug:  # noqa: BLE001 - a command that fails must not end the run
        tell_bug(name, bug)
        said = f"'{name}' failed, which is a bug in loco-peer: {type(bug).__name__}: {bug}"
        return _line_of({"error": said})


def _line_of(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer).encode() + b"\n"


async def read_until(stream: trio.SocketStream, end: bytes, max_bytes: int) -> bytes:
    """Read through `end`, or just past `max_bytes`; empty when the stream ended before."""
    data = bytearray()
    while end not in data and len(data) <= max_bytes:
        chunk = await stream.receive_some()
        if not chunk:
            return b""
        data += chunk
    return bytes(data)


async def ask(
    path: Path, request: str, *, timeout_s: float = ANSWER_S, **arguments: Any
) -> dict[str, Any]:
    """Ask the daemon whose control socket is at `path`. Raises NoDaemon, ControlFailed, NotNow."""
    try:
        stream = await trio.open_unix_socket(str(path))
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
        raise NoDaemon("no daemon is running in this home") from error
    except OSError as error:
        why = os.strerror(error.errno or errno.EIO)
        raise ControlFailed(f"cannot reach the daemon at {path}: {why}") from error
    async with stream:
        line = b""
        with trio.move_on_after(timeout_s) as scope:
            try:
                await stream.send_all(_line_of({"request": request, **arguments}))
                async for chunk in stream:
                    line += chunk
            except trio.BrokenResourceError:
                pass
    if scope.cancelled_caught:
        raise ControlFailed(f"the daemon did not answer '{request}' within {timeout_s:g} s")
    if not line.endswith(b"\n"):
        raise NotNow(f"the daemon ended before it answered '{request}'")
    answer = json.loads(line)
    if "error" in answer:
        raise (NotNow if answer.get("not_now") else ControlFailed)(answer["error"])
    reply: dict[str, Any] = answer["reply"]
    return reply
