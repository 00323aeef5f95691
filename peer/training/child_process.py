"""The process beneath a trainer: started ahead of its task, told what to do, and ended.

A child takes seconds to import torch and the models. It is told its task (settings, and the
descriptors of its memory) over its socket and not by its command line, so it can be started before
there is one. The daemon starts a `SpareChild` first of all; that makes a founder's initial weights,
and becomes the first trainer.
"""

import array
import fcntl
import os
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import IO, Final, Self

import trio

from protocol.trainer_messages import TrainerMessage

from .messages import MAX_FAILURE_CHARS, Begin, Said, TrainerSettings
from .pipe import FROM_TRAINER, READ_BYTES, FrameDecoder, PipeError, encode
from .ports import TrainerDied

PROGRAM: Final = "peer.training.child"
STOP_GRACE_S: Final = 1.0
"""Time a trainer has to end by itself after `Stop`; it is killed then."""
MAX_STDERR_BYTES: Final = 1 << 20
SPIN_COUNT: Final = "3000"
"""Turns for which a thread of torch's loops spins before it sleeps; some 10 us. libgomp's default
is milliseconds: beside one other busy process all threads wait for the one that lost its core,
hundreds of times in a step, and steps took up to 80 times as long (docs/log.md)."""


class TrainerChild:
    """A child process with a socket pair, and the file that takes its standard error."""

    def __init__(self, process: trio.Process, stream: trio.SocketStream, stderr: IO[bytes]) -> None:
        self.process = process
        self._stream = stream
        self._stderr = stderr
        self._frames = FrameDecoder(FROM_TRAINER)
        self._received: deque[Said] = deque()
        self._sending = trio.Lock()

    @classmethod
    async def start(cls, threads: int) -> Self:
        """Run the program; the caller closes it. 0 threads leave their number to torch."""
        ours, theirs = socket.socketpair()
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        try:
            fcntl.fcntl(stderr, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)
            with theirs:
                process = await trio.lowlevel.open_process(
                    [sys.executable, "-m", PROGRAM, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    pass_fds=(theirs.fileno(),),
                    env=_environment(threads),
                )
        except BaseException:
            ours.close()
            stderr.close()
            raise
        return cls(process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)), stderr)

    async def begin(self, task: str, settings: TrainerSettings, descriptors: Sequence[int]) -> None:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())
        await self.send(Begin(task, settings, len(descriptors)), rights)

    async def send(self, message: TrainerMessage, *rights: tuple[int, int, bytes]) -> None:
        """Send a message, and descriptors with its first byte. Raises TrainerDied."""
        frame = encode(message)
        try:
            async with self._sending:
                sent_bytes = await self._stream.socket.sendmsg([frame], rights)
                await self._stream.send_all(memoryview(frame)[sent_bytes:])
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise await self.death() from error

    async def receive(self) -> Said:
        while not self._received:
            try:
                data = await self._stream.receive_some(READ_BYTES)
                self._received.extend(self._frames.feed(data))
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise await self.death() from error
            except PipeError as error:
                raise TrainerDied(f"the trainer said something else: {error}") from error
            if not data:
                raise await self.death()
        self._bound_stderr()
        return self._received.popleft()

    async def death(self) -> TrainerDied:
        """How the child ended, in a sentence."""
        with trio.move_on_after(STOP_GRACE_S):
            status = await self.process.wait()
            if status < 0:
                return TrainerDied(f"the trainer was killed by signal {-status}")
            return TrainerDied(f"the trainer exited with {status}{self._last_words()}")
        return TrainerDied("the trainer closed its socket but did not end")

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()

    async def aclose(self) -> None:
        """Kill the process if it still runs, and collect it."""
        with trio.CancelScope(shield=True):
            self.kill()
            await self.process.wait()
            await trio.aclose_forcefully(self._stream)
            self._stderr.close()

    def _last_words(self) -> str:
        size_bytes = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size_bytes - MAX_FAILURE_CHARS))
        said = self._stderr.read().decode(errors="replace").strip()
        return f": {said}" if said else ""

    def _bound_stderr(self) -> None:
        # The child appends, so after a cut it goes on at the file's start.
        if os.fstat(self._stderr.fileno()).st_size > MAX_STDERR_BYTES:
            os.ftruncate(self._stderr.fileno(), 0)


def _environment(threads: int) -> dict[str, str]:
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if "OMP_WAIT_POLICY" not in environment:  # what users ask for themselves, they get
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


class SpareChild:
    """A child that waits for the first task that comes; later ones start their own."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._child: TrainerChild | None = None

    async def start(self) -> None:
        self._child = await TrainerChild.start(self._threads)

    async def take(self) -> TrainerChild:
        """The spare child, or a new one; the caller closes it, or puts it back."""
        child = self._child
        if child is None or child.process.poll() is not None:
            await self.aclose()
            child = await TrainerChild.start(self._threads)
        self._child = None
        return child

    def put_back(self, child: TrainerChild) -> None:
        assert self._child is None
        self._child = child

    async def aclose(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.aclose()


@asynccontextmanager
async def spare_child(threads: int) -> AsyncIterator[SpareChild]:
    """A child that has imported everything when the first task comes."""
    spare = SpareChild(threads)
    await spare.start()
    try:
        yield spare
    finally:
        await spare.aclose()
