"""A child process of the daemon, with a socket pair between them (child_frames.py)."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from typing import IO, Any, ClassVar, Final, Self

import msgspec
import trio

from .child_frames import MAX_FAILURE_CHARS, READ_BYTES, ChildDied, FrameDecoder, PipeError, encode

STOP_GRACE_S: Final = 1.0
"""Time a child has to end by itself when it was asked to, or has closed its socket."""
MAX_STDERR_BYTES: Final = 1 << 20
OUT_OF_MEMORY: Final = (
    ", as the system does where memory runs out (dmesg says so; a container's limit may be too low)"
)


class ChildProcess:
    """A child process with a socket pair, and the file that takes its standard error.

    Attributes:
        title: its name in sentences.
        died: what is raised when it is gone.
        decoder: of what it says.
    """

    title: ClassVar[str]
    died: ClassVar[type[ChildDied]] = ChildDied
    decoder: ClassVar[msgspec.msgpack.Decoder[Any]]

    def __init__(self, process: trio.Process, stream: trio.SocketStream, stderr: IO[bytes]) -> None:
        self.process = process
        self._stream = stream
        self._stderr = stderr
        self._frames = FrameDecoder(self.decoder)
        self._received: deque[Any] = deque()
        self._sending = trio.Lock()
        self._killed_because = ""

    @classmethod
    async def run(cls, program: str, *arguments: str, environment: Mapping[str, str]) -> Self:
        """Run a module of ours, which is told its socket and the arguments; the caller closes it.

        With -P the folder in which a user happens to be, a clone for instance, is no source of it.

        Raises:
            OSError: it cannot be run.
        """
        ours, theirs = socket.socketpair()
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        try:
            fcntl.fcntl(stderr, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)
            with theirs:
                process = await trio.lowlevel.open_process(
                    [sys.executable, "-P", "-m", program, str(theirs.fileno()), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    pass_fds=(theirs.fileno(),),
                    env=environment,
                )
        except BaseException:
            ours.close()
            stderr.close()
            raise
        return cls(process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)), stderr)

    async def send(self, message: msgspec.Struct, *rights: tuple[int, int, bytes]) -> None:
        """Send a message, and descriptors with its first byte. Raises what it is to raise."""
        frame = encode(message)
        try:
            async with self._sending:
                sent_bytes = await self._stream.socket.sendmsg([frame], rights)
                await self._stream.send_all(memoryview(frame)[sent_bytes:])
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise await self.death() from error

    async def receive(self) -> Any:
        while not self._received:
            try:
                data = await self._stream.receive_some(READ_BYTES)
                self._received.extend(self._frames.feed(data))
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise await self.death() from error
            except PipeError as error:
                raise self.died(f"{self.title} said something else: {error}") from error
            if not data:
                raise await self.death()
        self._bound_stderr()
        return self._received.popleft()

    async def death(self) -> ChildDied:
        """How the child ended, in a sentence."""
        if self._killed_because:
            return self.died(f"{self.title} {self._killed_because}")
        with trio.move_on_after(STOP_GRACE_S):
            status = await self.process.wait()
            said = self._last_words() if status >= 0 else ""
            return self.died(f"{self.title} {how_it_ended(status)}{said}")
        return self.died(f"{self.title} closed its socket but did not end")

    def kill(self, because: str = "") -> None:
        """Kill it; the reason is told by those who wait for it."""
        self._killed_because = self._killed_because or because
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
        if self._stderr.closed:
            return ""  # whoever still waits to send outlives `aclose` by a moment
        size_bytes = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size_bytes - MAX_FAILURE_CHARS))
        said = self._stderr.read().decode(errors="replace").strip()
        return f": {said}" if said else ""

    def _bound_stderr(self) -> None:
        # The child appends, so after a cut it goes on at the file's start.
        if os.fstat(self._stderr.fileno()).st_size > MAX_STDERR_BYTES:
            os.ftruncate(self._stderr.fileno(), 0)


def how_it_ended(status: int) -> str:
    if status >= 0:
        return f"exited with {status}"
    return f"was killed by signal {-status}{OUT_OF_MEMORY if status == -signal.SIGKILL else ''}"
