"""Processes that a measurement starts, asks and stops: one line of JSON each way.

The child answers one question after another until its input ends; a child whose parent died ends
therefore as well. Several children can be asked at once.
"""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import trio

Answer = dict[str, Any]
Answerer = Callable[[Answer], Awaitable[Answer]]
STOP_S: Final = 10.0
READ_BYTES: Final = 65536


class ChildFailed(Exception):
    """A child ended, or could not do what it was asked; says what it was."""


class Child:
    """A running child. Made by `start_child`."""

    def __init__(self, name: str, process: trio.Process) -> None:
        self._name = name
        self._process = process
        self._lines = _Lines()

    @property
    def pid(self) -> int:
        """The process id of the child."""
        return self._process.pid

    async def ask(self, what: str, **details: Any) -> Answer:
        """Have something done, and wait for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        question = json.dumps({"what": what, **details}).encode()
        await self._process.stdin.send_all(question + b"\n")
        line = await self._lines.next_from(self._process.stdout)
        if line is None:
            raise ChildFailed(f"{self._name} ended while it was asked to {what}")
        answer: Answer = json.loads(line)
        if "failure" in answer:
            raise ChildFailed(f"{self._name} cannot {what}: {answer['failure']}")
        return answer


@asynccontextmanager
async def start_child(module: str, *arguments: str) -> AsyncIterator[Child]:
    """Run `python -m MODULE ARGUMENTS`; its input ends with the context."""
    name = " ".join((module, *arguments[-1:]))
    async with start_command(name, [sys.executable, "-m", module, *arguments]) as child:
        yield child


@asynccontextmanager
async def start_command(name: str, command: Sequence[str]) -> AsyncIterator[Child]:
    """Run a command that answers as `answer_parent` does; its input ends with the context."""
    process = await trio.lowlevel.open_process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield Child(name, process)
    finally:
        with trio.CancelScope(shield=True):
            assert process.stdin is not None
            await process.stdin.aclose()
            with trio.move_on_after(STOP_S):
                await process.wait()
            if process.poll() is None:
                process.kill()
                await process.wait()


async def answer_parent(answerers: Mapping[str, Answerer]) -> None:
    """In the child: answer questions until there are no more."""
    lines = _Lines()
    async with trio.lowlevel.FdStream(os.dup(0)) as questions:
        while (line := await lines.next_from(questions)) is not None:
            question = json.loads(line)
            try:
                answer = await answerers[question.pop("what")](question)
            except Exception as error:  # noqa: BLE001 - the parent is told, and decides
                answer = {"failure": repr(error)}
            print(json.dumps(answer), flush=True)


class _Lines:
    """Cuts lines out of a stream."""

    def __init__(self) -> None:
        self._rest = b""

    async def next_from(self, stream: trio.abc.ReceiveStream) -> bytes | None:
        while b"\n" not in self._rest:
            data = await stream.receive_some(READ_BYTES)
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line
