"""The machines of a storm: a home each, on a disk of its own that can be full, and one daemon.

The disk is a tmpfs, so a full one says ENOSPC as any disk does. That takes root.
"""

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil
import trio

from bench.real_peers import RealPeer
from peer.facts import PeerState
from peer.observe.control import ask
from protocol.errors import LocoError

DISK_MB: Final = 192
"""Room for all that a home has, and what a checkpoint wants to be free beside it."""
FILLER: Final = "filler"
BLOCK_BYTES: Final = (1 << 20, 1 << 12)
CHECKPOINT_EVERY_S: Final = 2
STATUS_S: Final = 2.0
DOWN: Final = "down"
SILENT: Final = "silent"
"""It runs, and does not answer yet."""
IN_THE_RUN: Final = frozenset({PeerState.TRAINING, PeerState.FINISHED})


def missing() -> str | None:
    """Why there can be no disks here; None if there can."""
    if os.geteuid() != 0:
        return "disks that can be full are mounted by root"
    return None if shutil.which("mount") else "there is no command mount"


class Machine:
    """One home with its daemon, to be killed and started."""

    def __init__(self, folder: Path, checkout: Path) -> None:
        self.name = folder.name
        self.peer = RealPeer(folder, checkout, lambda command: command)

    def enter(self, *arguments: str) -> None:
        """Start it the first time; it keeps its port."""
        often = ("--checkpoint-every", f"{CHECKPOINT_EVERY_S}")
        self.peer.start(*arguments, *often, listen="127.0.0.1:0")

    def start(self) -> None:
        """Go on with the run of the home, as its user would after a reboot; needs no address."""
        if not self.running:
            self.enter("start")

    @property
    def running(self) -> bool:
        """Whether there is a daemon."""
        return self.peer.is_there

    def state(self) -> str:
        """The word of its status, or that there is none."""
        if not self.running:
            return DOWN
        with suppress(LocoError, OSError, trio.TooSlowError):
            return str(trio.run(_status, self.peer)["state"])
        return SILENT

    def finished(self) -> bool:
        """Whether it says that the run is over."""
        return self.state() == PeerState.FINISHED

    def kill(self) -> None:
        """kill -9 of the daemon; what it has started ends with it."""
        self.peer.signal(signal.SIGKILL)
        self.peer.wait_gone()

    def stop(self) -> None:
        """SIGTERM, until it has ended; killed if it does not."""
        self.peer.signal(signal.SIGTERM)
        try:
            self.peer.wait_gone()
        except subprocess.TimeoutExpired:
            self.kill()

    # --- its disk -------------------------------------------------------------------------------
    def fill_disk(self) -> None:
        """Leave no byte of it."""
        with (self.peer.home.root / FILLER).open("ab", buffering=0) as filler:
            for size in BLOCK_BYTES:
                try:
                    while filler.write(bytes(size)) == size:
                        pass
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def make_room(self) -> None:
        """Take away what filled it."""
        (self.peer.home.root / FILLER).unlink(missing_ok=True)


async def _status(peer: RealPeer) -> dict[str, object]:
    with trio.fail_after(STATUS_S):
        return await ask(peer.home.control_socket, "status")


def lose_power(machines: Sequence[Machine]) -> None:
    """kill -9 of every process of all of them, daemons first."""
    families = [machine.peer.family() for machine in machines if machine.running]
    daemons = [machine.peer.daemon() for machine in machines]
    for process in (*filter(None, daemons), *(each for family in families for each in family)):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    for machine in machines:
        machine.peer.wait_gone()


@contextmanager
def disks(folders: Sequence[Path]) -> Iterator[None]:
    """A disk for the home of each folder."""
    mounted = list[Path]()
    try:
        for folder in folders:
            home = folder / "home"
            home.mkdir(parents=True)
            kind = ("-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=700")
            subprocess.run([_command("mount"), *kind, "storm", str(home)], check=True)
            mounted.append(home)
        yield
    finally:
        for home in mounted:
            subprocess.run([_command("umount"), "--lazy", str(home)], check=False)


def _command(name: str) -> str:
    return shutil.which(name) or name
