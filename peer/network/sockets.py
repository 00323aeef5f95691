"""Where the unix sockets between the daemon and its p2pd lie, and whether they are in use.

A unix socket's path has at most 107 bytes, so they cannot stand in the home: they lie in the
runtime directory, named by a hash of the identity file's path, the same for every start.
"""

import hashlib
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import trio

from .p2pd_process import P2pdFailed

OLD_P2PD_EXIT_S: Final = 5.0
"""How long a p2pd whose daemon was killed gets to notice."""
LOOK_AGAIN_S: Final = 0.1
LISTEN_BACKLOG: Final = 128


def runtime_directory() -> Path:
    """Where this user's sockets live.

    `$XDG_RUNTIME_DIR/loco-peer`, else a private folder in the temporary directory.

    Raises:
        P2pdFailed: the folder belongs to somebody else.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    usable = base and Path(base).is_dir() and os.access(base, os.W_OK)
    folder = (
        Path(base, "loco-peer")
        if base and usable
        else Path(tempfile.gettempdir(), f"loco-peer-{os.getuid()}")
    )
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise P2pdFailed(
            f"{folder} must belong to you alone: run 'chmod 700 {folder}', or set XDG_RUNTIME_DIR"
        )
    return folder


def socket_paths(identity_path: Path, runtime_dir: Path) -> tuple[Path, Path]:
    """The paths of control socket and listener, the same for every start with this identity."""
    name = hashlib.blake2b(os.fsencode(identity_path.resolve()), digest_size=8).hexdigest()
    return runtime_dir / f"{name}.p2pd", runtime_dir / f"{name}.in"


async def wait_until_unused(control_path: Path) -> None:
    """Wait until no p2pd answers at the control socket.

    A p2pd whose daemon was killed goes by itself; one that stays belongs to a daemon that lives.

    Raises:
        P2pdFailed: one stays.
    """
    with trio.move_on_after(OLD_P2PD_EXIT_S):
        while True:
            try:
                await (await trio.open_unix_socket(str(control_path))).aclose()
            except OSError:
                return
            await trio.sleep(LOOK_AGAIN_S)
    raise P2pdFailed(
        f"another daemon uses this identity (its p2pd answers on {control_path}): stop it first"
    )


@asynccontextmanager
async def listen_at(path: Path) -> AsyncIterator[trio.SocketListener]:
    """A listener on a unix socket at `path`, which is removed afterwards."""
    path.unlink(missing_ok=True)
    listener = trio.socket.socket(trio.socket.AF_UNIX)
    try:
        await listener.bind(str(path))
        listener.listen(LISTEN_BACKLOG)
        yield trio.SocketListener(listener)
    finally:
        listener.close()
        path.unlink(missing_ok=True)
