"""The demo's peers: real daemons, each in a home of its own, each under a keeper (keeper.py)."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import trio

from peer.state.home import Home

from . import keeper
from .reading import EventFollower, Reading, read_peer

READY_TIMEOUT_S: Final = 300.0
"""Time from starting a peer until others can join: importing takes long on a busy machine."""
STOP_TIMEOUT_S: Final = keeper.GRACE_S + 10.0
PEER_GRACE_S: Final = 4.0
LAST_WORDS_BYTES: Final = 2000
MAX_READY_LINE_BYTES: Final = 64 * 1024


class PeerFailed(Exception):
    """A peer of the demo ended, or never got ready; the message holds its last words."""


def console_script() -> Path:
    """`loco-peer` of the environment that runs us."""
    return Path(sys.executable).with_name("loco-peer")


@dataclass(slots=True)
class RunningPeer:
    """One daemon under its keeper.

    Attributes:
        ready: what it printed as soon as others could join.
    """

    name: str
    home: Home
    log: Path
    process: trio.Process
    events: EventFollower
    ready: dict[str, Any]

    async def read(self) -> Reading:
        """Read what the peer says of itself now.

        Raises:
            PeerFailed: it ended.
        """
        if self.process.poll() is not None:
            raise self.failure(f"ended with exit status {self.process.returncode}")
        return await read_peer(self.name, self.home, self.events)

    def failure(self, what: str) -> PeerFailed:
        """The sentence for people, with the end of the peer's log."""
        said = self.log.read_bytes()[-LAST_WORDS_BYTES:].decode(errors="replace").strip()
        return PeerFailed(f"{self.name} {what}; see {self.log}\n{said}")


class Peers:
    """Starts peers, and ends them all together. Use `open_peers`."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder = folder
        self._device = device
        self._keepers: list[trio.Process] = []

    async def start(self, name: str, command: Sequence[str], threads: int = 1) -> RunningPeer:
        """Start `loco-peer COMMAND` with a home of its own, and wait until others can join.

        Raises:
            PeerFailed: it ended before that, or took too long.
        """
        home = Home(self._folder / name)
        log = self._folder / f"{name}.log"
        arguments = [*command, "--home", str(home.root), "--listen", "127.0.0.1:0"]
        arguments += ["--threads", str(threads), "--device", self._device, "--json-ready"]
        arguments += ["--grace", str(PEER_GRACE_S)]
        with log.open("wb") as stderr:
            process = await self._keep([str(console_script()), *arguments], stderr)
        peer = RunningPeer(name, home, log, process, EventFollower(home.event_log_path), {})
        peer.ready = await _ready_line(peer)
        return peer

    async def _keep(self, command: Sequence[str], stderr: IO[bytes]) -> trio.Process:
        process = await trio.lowlevel.open_process(
            [sys.executable, keeper.__file__, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
            env=_environment(),
        )
        self._keepers.append(process)
        return process

    async def stop(self) -> None:
        """End every peer, and wait until each is gone with all it started."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + STOP_TIMEOUT_S):
            for process in self._keepers:
                if process.stdin is not None:
                    await trio.aclose_forcefully(process.stdin)
            for process in self._keepers:
                await process.wait()
                if process.stdout is not None:
                    await trio.aclose_forcefully(process.stdout)
        self._keepers.clear()


def _environment() -> dict[str, str]:
    """Our environment, without settings that would make the demo's peers join another run."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LOCO_")}


async def _ready_line(peer: RunningPeer) -> dict[str, Any]:
    assert peer.process.stdout is not None
    line = b""
    with trio.move_on_after(READY_TIMEOUT_S):
        while not line.endswith(b"\n") and len(line) < MAX_READY_LINE_BYTES:
            chunk = await peer.process.stdout.receive_some()
            if not chunk:
                raise peer.failure("ended before others could join")
            line += chunk
    if not line.endswith(b"\n"):
        raise peer.failure(f"was not ready within {READY_TIMEOUT_S:.0f} s")
    ready: dict[str, Any] = json.loads(line)
    return ready


@asynccontextmanager
async def open_peers(folder: Path, device: str = "cpu") -> AsyncIterator[Peers]:
    """Peers with homes in `folder`, gone when the block ends."""
    peers = Peers(folder, device)
    try:
        yield peers
    finally:
        await peers.stop()
