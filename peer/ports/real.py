"""The real Disk, Work and Entropy."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import trio

from peer.state.home import PRIVATE_DIRECTORY, PRIVATE_FILE, replace_file
from protocol.errors import LocalProtocolError

T = TypeVar("T")
MAX_WORKERS: Final = 4
"""Threads that may do blocking work at once."""


def inside(path: Path) -> Path:
    """`path`, if it is a relative one that stays inside.

    Raises:
        LocalProtocolError
    """
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise LocalProtocolError(f"{path} is not a path inside the home")
    return path


class RealDisk:
    """Files under `root`; directories are made as needed."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __repr__(self) -> str:
        return f"<RealDisk {self._root}>"

    def read(self, path: Path) -> bytes:
        """Raises FileNotFoundError."""
        return (self._root / inside(path)).read_bytes()

    def write(self, path: Path, data: bytes) -> None:
        """Replace atomically and durably."""
        replace_file(self._made(path), data)

    def append_line(self, path: Path, line: bytes) -> None:
        """Append `line` and a newline in one write."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self._made(path), flags, PRIVATE_FILE)
        try:
            os.write(descriptor, line + b"\n")
        finally:
            os.close(descriptor)

    def _made(self, path: Path) -> Path:
        whole = self._root / inside(path)
        whole.parent.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        return whole


class RealWork:
    """Blocking work on threads of trio's, at most `MAX_WORKERS` at once.

    Cancelling waits for the function to return: it may still hold memory that the caller owns.
    """

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(MAX_WORKERS)

    def __repr__(self) -> str:
        return f"<RealWork {self._limiter.borrowed_tokens} of {MAX_WORKERS} threads at work>"

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """`function(*args)` on a thread."""
        return await trio.to_thread.run_sync(function, *args, limiter=self._limiter)


class RealEntropy:
    """The operating system's randomness."""

    def token_bytes(self, n: int) -> bytes:
        """`n` unpredictable bytes."""
        return os.urandom(n)
