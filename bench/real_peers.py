"""Real daemons on hosts of a routed network, of this checkout or another.

Each is `loco-peer start` or `join` with a home of its own, in the namespace of its host, under the
demo's keeper, which ends it with all it has started when we are gone. Everything is read from
outside: the ready line, the control socket, the event log.

The daemon's code is that of a *checkout*, a folder with `peer` and `protocol` in it; the
environment (torch, hivemind) is ours.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psutil
import trio

from demo import keeper
from peer.observe.control import ask
from peer.observe.event_names import EventName
from peer.state.home import Home

from .gossip_report import Event
from .router.network import RoutedNetwork

HERE: Final = Path(__file__).resolve().parents[1]
"""The checkout of this file."""
COMMAND: Final = Path(sys.executable).parent / "loco-peer"
"""What a user runs. A daemon that joins again runs it once more, which -c would not bear."""
READY_S: Final = 240.0
"""Six interpreters that import torch at once on two cores."""
STOP_S: Final = keeper.GRACE_S + 10.0
POLL_S: Final = 0.25
PEER_GRACE_S: Final = 4.0
LAST_WORDS_BYTES: Final = 2000
TRAINER: Final = "peer.training.child"
"""The module that a process which trains runs."""
LEAST_SIGNAL_CODE: Final = 128
"""The keeper ends with the daemon's code; one below zero comes out modulo 256."""


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Every event of the current file, in order.

    Lines that are not whole JSON objects are passed over.

    Raises:
        FileNotFoundError
    """
    with path.open("rb") as file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event


class PeerFailed(Exception):
    """A daemon ended, or did not get so far in time; the message holds its last words."""


class RealPeer:
    """One daemon.

    Args:
        folder: for its home and what it says; removed by whoever made it.
        command: how it runs on its host.
        program: what python runs; the command line, if nothing else is said.
        environment: variables beside ours.
    """

    def __init__(
        self,
        folder: Path,
        checkout: Path,
        command: Callable[..., list[str]],
        *,
        program: Sequence[str] = (str(COMMAND),),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._checkout = checkout
        self._command = command
        self._program = program
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self.home = home_in(folder)

    def start(self, *arguments: str, listen: str) -> None:
        """Run `loco-peer ARGUMENTS`."""
        options = ["--home", str(self.home.root), "--listen", listen, "--device", "cpu"]
        options += ["--threads", "1", "--json-ready", "--grace", f"{PEER_GRACE_S}"]
        daemon = [sys.executable, *self._program, *arguments, *options]
        kept = [sys.executable, keeper.__file__, *self._command(daemon)]
        self._folder.mkdir(exist_ok=True)  # of an earlier life
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                kept,
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                cwd=self._checkout,
                env=_environment(self._checkout) | dict(self._environment),
            )

    def family(self) -> set[psutil.Process]:
        """Its keeper, and all processes that this has started."""
        assert self._process is not None, "it was started"
        kept = psutil.Process(self._process.pid)
        return {kept, *kept.children(recursive=True)}

    def daemon(self) -> psutil.Process | None:
        """The daemon itself; None when it has ended, or has not begun."""
        if self._process is None or self._process.poll() is not None:
            return None
        with suppress(psutil.NoSuchProcess):
            return next(iter(psutil.Process(self._process.pid).children()), None)
        return None

    @property
    def is_there(self) -> bool:
        """Whether its process has not ended, though the daemon may not have begun yet."""
        return self._process is not None and self._process.poll() is None

    def exit_code(self) -> int | None:
        """The daemon's, below zero where a signal ended it; None while there is one."""
        code = None if self._process is None else self._process.poll()
        return code - 256 if code is not None and code >= LEAST_SIGNAL_CODE else code

    def signal(self, number: signal.Signals) -> None:
        """Send the daemon a signal."""
        if (daemon := self.daemon()) is not None:
            with suppress(psutil.NoSuchProcess):
                daemon.send_signal(number)

    def hang_up(self) -> None:
        """SIGHUP to all that one terminal has started; the keeper does not mind."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGHUP)

    def said(self) -> str:
        """All of its stderr in this life."""
        return self._stderr.read_text(errors="replace") if self._stderr.exists() else ""

    @property
    def _stdout(self) -> Path:
        return self._folder / "stdout"

    @property
    def _stderr(self) -> Path:
        return self._folder / "stderr"

    def ready(self) -> dict[str, Any]:
        """The line of --json-ready. Raises PeerFailed."""
        self.wait_until(lambda: b"\n" in self._stdout.read_bytes(), "was ready", READY_S)
        tree: dict[str, Any] = json.loads(self._stdout.read_bytes().partition(b"\n")[0])
        return tree

    def events(self) -> list[Event]:
        """All of its log so far."""
        try:
            return list(read_events(self.home.event_log_path))
        except FileNotFoundError:
            return []

    def status(self) -> dict[str, Any]:
        """What it says of itself."""
        return trio.run(ask, self.home.control_socket, "status")

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float) -> None:
        """Raises PeerFailed."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            self.check(f"before it {what}")
            if time.monotonic() > deadline_s:
                raise self._failure(f"was running for {timeout_s:.0f} s before it {what}")
            time.sleep(POLL_S)

    def check(self, when: str) -> None:
        """Raises PeerFailed if it has ended."""
        if self._process is None or self._process.poll() is not None:
            raise self._failure(f"ended {when}")

    def _failure(self, what: str) -> PeerFailed:
        said = self._stderr.read_bytes()[-LAST_WORDS_BYTES:].decode(errors="replace").strip()
        return PeerFailed(f"{self._folder.name} {what}; its last words:\n{said}")

    def stop(self) -> None:
        """Ask it to end; `wait_gone` waits."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def wait_gone(self) -> None:
        """Until it has ended with all it started."""
        if self._process is not None:
            self._process.wait(STOP_S)
            self.stop()  # its pipe is not left open


def trainers_of(process: psutil.Process) -> list[psutil.Process]:
    """Those that train among all that it started, rank 0 first: that starts the others."""
    return [each for each in process.children(recursive=True) if TRAINER in each.cmdline()]


def home_in(folder: Path) -> Home:
    """The home of the daemon in this folder."""
    return Home(folder / "home")


@contextmanager
def real_swarm(
    network: RoutedNetwork, run_toml: str, folder: Path, checkout: Path
) -> Iterator[Sequence[RealPeer]]:
    """A daemon on each host, the founder on the first; they are ready to average.

    Raises:
        PeerFailed
    """
    spec = folder / "run.toml"
    spec.write_text(run_toml)
    peers = [
        RealPeer(folder / f"peer{host}", checkout, _on_host(network, host))
        for host in range(network.num_hosts)
    ]
    with started(peers, spec, lambda host: f"{network.address(host)}:0"):
        yield peers


@contextmanager
def started(peers: Sequence[RealPeer], spec: Path, listen: Callable[[int], str]) -> Iterator[None]:
    """Have the first found a run and the others join it, until they are ready to average.

    Args:
        listen: where the peer of this number does.

    Raises:
        PeerFailed
    """
    try:
        peers[0].start("start", str(spec), listen=listen(0))
        address = peers[0].ready()["addresses"][0]
        for number, peer in enumerate(peers[1:], start=1):
            peer.start("join", "--bootstrap", address, listen=listen(number))
        for peer in peers[1:]:
            peer.ready()
        yield
    finally:
        _stop_all(peers)


def has_averaged(peer: RealPeer, times: int) -> bool:
    """Whether it has averaged so often."""
    averaged = [event for event in peer.events() if event["event"] == EventName.ROUND_AVERAGED]
    return len(averaged) >= times


def now_s() -> float:
    """The time by which event logs are stamped."""
    return datetime.now(UTC).timestamp()


def _on_host(network: RoutedNetwork, host: int) -> Callable[..., list[str]]:
    return lambda command: network.command(host, command)


def _stop_all(peers: Sequence[RealPeer]) -> None:
    for peer in peers:
        peer.stop()
    for peer in peers:
        peer.wait_gone()


def _environment(checkout: Path) -> dict[str, str]:
    """Ours, with the checkout's code, and without settings of another run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOCO_")}
    return kept | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
