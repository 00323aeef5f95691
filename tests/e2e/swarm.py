"""Real peers for tests: processes of the command line, watched from outside, all gone at the end.

A test sees what a user sees: `status`, the event log, metrics, stdout, stderr, the exit code. There
is one way to wait, `within`: it looks at such a thing again and again, within a bound. `wait_until`
fails when the bound is passed, and shows what every peer said last.

One swarm serves many tests, since a peer takes seconds to start. A test says how many peers it
needs (`Swarm.at_least`); those that earlier tests killed are replaced then. So no test needs
another to have run before it.
"""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import time
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

from peer.observe.event_names import EventName
from peer.state.home import Home

T = TypeVar("T")
Event = dict[str, Any]

WAIT_S: Final = 60.0
"""For what takes a moment on an idle machine."""
START_S: Final = 120.0
"""For a peer to train, several starting at once on a busy machine."""
POLL_S: Final = 0.02
NUM_ROUNDS_ALONE: Final = 3
"""What the founder of the tests' common swarm trains before anybody else comes."""
SHOWN_BYTES: Final = 2500
MARK: Final = "E2E_SWARM"
"""Environment variable that all processes of one swarm carry."""
COMMAND: Final = Path(sys.executable).parent / "loco-peer"

INNER_STEPS: Final = 150
"""Of a round: about a second."""
RUN_SPEC: Final = f"""
name = "e2e"

[model]
hidden_size = 32
intermediate_size = 64
num_layers = 1
num_heads = 2
context_length = 32

[data]
validation_blocks = 4

[optimizer]
warmup_steps = 5

[training]
total_steps = 1000000
batch_size = 4

[sync]
inner_steps = {INNER_STEPS}
"""


def within(condition: Callable[[], T], seconds: float, poll_s: float = POLL_S) -> T:
    """The first truthy answer of `condition`, or the last one when there is none in time."""
    deadline_s = time.monotonic() + seconds
    while not (answer := condition()) and time.monotonic() < deadline_s:
        time.sleep(poll_s)
    return answer


def wait_until(
    condition: Callable[[], T],
    what: str,
    *,
    timeout_s: float = WAIT_S,
    poll_s: float = POLL_S,
    peers: Iterable["Peer"] = (),
) -> T:
    """The first truthy answer of `condition`. Fails when there is none in time, showing `peers`."""
    answer = within(condition, timeout_s, poll_s)
    if not answer:
        shown = "\n".join(peer.report() for peer in peers)
        raise AssertionError(f"not within {timeout_s:.0f} s: {what}\n{shown}")
    return answer


class Peer:
    """One `loco-peer start` or `join`, from its first breath to its exit code.

    Args:
        prefix: a command that runs the peer elsewhere, without a process of its own.
        outputs: descriptors that take stdout and stderr; the second is a terminal, and the peer's.
        cwd: the folder in which it is started.
    """

    def __init__(
        self,
        home: Path,
        *arguments: str,
        environment: Mapping[str, str],
        listen: str = "127.0.0.1:0",
        prefix: Sequence[str] = (),
        outputs: tuple[int, int] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.home = Home(home)
        self.name = home.name
        home.mkdir(exist_ok=True)
        self._stdout, self._stderr = home / "stdout", home / "stderr"
        take_terminal = partial(fcntl.ioctl, 2, termios.TIOCSCTTY, 0)
        options = ["--home", str(home), "--listen", listen, "--json-ready", "--threads", "1"]
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*prefix, str(COMMAND), *arguments, *options, "--device", "cpu"],
                stdin=subprocess.DEVNULL,
                stdout=outputs[0] if outputs else stdout,
                stderr=outputs[1] if outputs else stderr,
                env={**environment, "OMP_NUM_THREADS": "1"},
                cwd=cwd,
                start_new_session=True,
                preexec_fn=take_terminal if outputs else None,  # noqa: PLW1509 - one ioctl
            )
        self._log_bytes = 0
        self._events: list[Event] = []
        with suppress(FileNotFoundError):  # of an earlier life of this home
            self._log_bytes = self.home.event_log_path.stat().st_size

    def __repr__(self) -> str:
        return f"<Peer {self.name} pid {self.process.pid}>"

    # --- what it says -------------------------------------------------------------------------
    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def process_started_s(self) -> float:
        """Unix time, by the right clock."""
        return psutil.Process(self.process.pid).create_time()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text(errors="replace")

    def report(self) -> str:
        """For a failure: how it is, and its last words."""
        log = self.home.event_log_path
        said = log.read_text()[-SHOWN_BYTES:] if log.exists() else "nothing"
        return (
            f"--- {self.name}: exit code {self.process.poll()}\n"
            f"stderr: ...{self.stderr[-SHOWN_BYTES:]}\nevents: ...{said}"
        )

    def events(self, *names: EventName) -> list[Event]:
        """Everything in the event log since this life began; of these names, if any are given."""
        with suppress(FileNotFoundError), self.home.event_log_path.open("rb") as log:
            log.seek(self._log_bytes)
            complete, newline, _ = log.read().rpartition(b"\n")
            self._log_bytes += len(complete) + len(newline)
            self._events += [json.loads(line) for line in complete.splitlines()]
        return [event for event in self._events if not names or event["event"] in names]

    def ask(self, request: str) -> dict[str, Any]:
        """What the daemon answers on its control socket."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(WAIT_S)
            try:
                connection.connect(str(self.home.control_socket))
            except (FileNotFoundError, ConnectionRefusedError) as error:
                raise AssertionError(f"it answers nothing: {error}\n{self.report()}") from error
            connection.sendall(json.dumps({"request": request}).encode() + b"\n")
            with connection.makefile("rb") as answer:
                tree = json.loads(answer.readline())
        reply: dict[str, Any] = tree["reply"]
        return reply

    def status(self) -> dict[str, Any]:
        return self.ask("status")

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        with urllib.request.urlopen(self.ready()["metrics"], timeout=WAIT_S) as page:
            lines = page.read().decode().splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        values = [
            float(line.rpartition(" ")[2])
            for line in lines
            if line.partition("{")[0].partition(" ")[0] == name
            and all(label in line for label in wanted)
        ]
        assert values, f"no metric {name} with {labels}"
        return sum(values)

    # --- waiting ------------------------------------------------------------------------------
    def wait_for(self, what: str, condition: Callable[[], T], timeout_s: float = WAIT_S) -> T:
        """The first truthy answer of `condition`; fails at once when this peer ends."""

        def look() -> T:
            answer = condition()
            assert answer or self.running, f"it ended before: {what}\n{self.report()}"
            return answer

        return wait_until(look, f"{self.name}: {what}", timeout_s=timeout_s, peers=[self])

    def ready(self) -> dict[str, Any]:
        """The line of --json-ready."""
        line = self.wait_for("the ready line", self._ready_line, START_S)
        tree: dict[str, Any] = json.loads(line)
        return tree

    @property
    def has_been_ready(self) -> bool:
        return bool(self._ready_line())

    def _ready_line(self) -> bytes:
        line, newline, _ = self._stdout.read_bytes().partition(b"\n")
        return line if newline else b""

    @property
    def peer_id(self) -> str:
        peer_id: str = self.ready()["peer_id"]
        return peer_id

    @property
    def address(self) -> str:
        """A full multiaddr to join by."""
        address: str = self.ready()["addresses"][-1]
        return address

    def wait_event(
        self,
        name: EventName,
        timeout_s: float = WAIT_S,
        *,
        after: int = 0,
        **fields: object,
    ) -> Event:
        """The first such event after the first `after` events of this life."""

        def found() -> Event | None:
            wanted = {"event": name, **fields}
            self.events()
            for event in self._events[after:]:
                if all(event.get(key) == value for key, value in wanted.items()):
                    return event
            return None

        event = self.wait_for(f"{name} {fields or ''}", found, timeout_s)
        assert event is not None
        return event

    def wait_averaging(self, times: int = 1, timeout_s: float = START_S) -> None:
        """Until it has averaged that many times from now on."""
        all_averaging([self], times, timeout_s)

    def wait_exit(self, timeout_s: float = WAIT_S) -> int:
        """Its exit code."""
        wait_until(lambda: not self.running, f"{self.name} ends", timeout_s=timeout_s, peers=[self])
        return int(self.process.wait())

    # --- its processes ------------------------------------------------------------------------
    def processes(self) -> list[psutil.Process]:
        """The daemon, then its children."""
        if not self.running:
            return []
        daemon = psutil.Process(self.process.pid)
        return [daemon, *daemon.children(recursive=True)]

    def p2pd(self) -> psutil.Process:
        return self._child("p2pd")

    def trainer(self) -> psutil.Process:
        return self._child("peer.training")

    def _child(self, word: str) -> psutil.Process:
        child = self._found(word)
        assert child is not None, f"{self.name} has no {word} now\n{self.report()}"
        return child

    def _found(self, word: str) -> psutil.Process | None:
        for child in self.processes()[1:]:
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if any(word in part for part in child.cmdline()):
                    return child
        return None

    def signal_all(self, number: signal.Signals) -> None:
        """Daemon, p2pd and trainer at once, as when the machine is gone."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        """kill -9 of everything."""
        self.signal_all(signal.SIGKILL)
        self.process.wait()


def all_averaging(peers: Sequence[Peer], times: int = 1, timeout_s: float = START_S) -> None:
    """Until each of them has averaged that many times from now on; they do so side by side."""
    enough = {peer: len(peer.events(EventName.ROUND_AVERAGED)) + times for peer in peers}
    for peer in peers:
        peer.wait_for(
            f"{times} more averaged rounds",
            partial(has_said, peer, EventName.ROUND_AVERAGED, enough[peer]),
            timeout_s,
        )


def has_said(peer: Peer, name: EventName, times: int) -> bool:
    """Whether there are so many events of this name."""
    return len(peer.events(name)) >= times


def sees_none(peer: Peer, peer_ids: Collection[str]) -> bool:
    """Whether it has no link with any of them."""
    return not peer_ids or all(told["peer_id"] not in peer_ids for told in peer.status()["peers"])


def none_blamed(peers: Sequence[Peer]) -> None:
    """Assert that honest peers hold nothing against each other, whatever has happened to them."""
    for peer in peers:
        assert peer.metric("loco_peer_faults_total") == 0, peer.report()


@contextmanager
def ending(peer: Peer) -> Iterator[Peer]:
    """A peer that is gone when the block ends, whatever happens in it."""
    try:
        yield peer
    finally:
        peer.kill()


class Swarm:
    """All peers of a session of tests, in one folder; `close` ends every process of theirs."""

    def __init__(self, folder: Path, run_spec: str = RUN_SPEC) -> None:
        self._folder = folder
        self._run_spec = run_spec
        self._sockets = tempfile.mkdtemp(prefix="e2e-")
        self._mark = folder.as_posix()
        self.started: list[Peer] = []

    def __repr__(self) -> str:
        return f"<Swarm {self.started}>"

    @property
    def environment(self) -> dict[str, str]:
        """Of every process."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LOCO_")}
        return kept | {MARK: self._mark, "XDG_RUNTIME_DIR": self._sockets}

    def with_site(self, folder: Path, code: str) -> dict[str, str]:
        """An environment in which every Python process runs `code` first: the machine is so."""
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(code)
        path = [str(folder), *filter(None, [self.environment.get("PYTHONPATH")])]
        return self.environment | {"PYTHONPATH": os.pathsep.join(path)}

    def folder(self, name: str) -> Path:
        return self._folder / name

    def launch(self, name: str, *arguments: str, **options: Any) -> Peer:
        """A peer with the home `name`; who has lived in it before is not minded."""
        peer = Peer(
            self.folder(name),
            *arguments,
            environment=options.pop("environment", self.environment),
            **options,
        )
        self.started.append(peer)
        return peer

    def found(self, rounds_alone: int = 1, **options: Any) -> Peer:
        """A new run, and the peer that founds it, when it has trained so many rounds."""
        spec = self.folder("run.toml")
        spec.write_text(self._run_spec)
        founder = self.launch(f"founder{len(self.started)}", "start", str(spec), **options)
        founder.wait_event(EventName.ROUND_OPENED, START_S, round=rounds_alone)
        return founder

    def join(self, via: Peer | str, name: str | None = None, **options: Any) -> Peer:
        """A new peer, which enters by `via`."""
        address = via if isinstance(via, str) else via.address
        name = name or f"peer{len(self.started)}"
        return self.launch(name, "join", "--bootstrap", address, **options)

    @property
    def founder(self) -> Peer:
        """The last peer that founded a run."""
        return [peer for peer in self.started if peer.name.startswith("founder")][-1]

    @property
    def members(self) -> list[Peer]:
        """The peers of the swarm that run now, oldest home first."""
        names = [peer.name for peer in self.started]
        running = [peer for peer in self.started if peer.running]
        return sorted(running, key=lambda peer: names.index(peer.name))

    def at_least(self, num_peers: int) -> list[Peer]:
        """All peers, that many at least, each of which has averaged if they are several.

        New ones join through the youngest. Those of earlier tests are forgotten.
        """
        via = self.members[-1] if self.members else self.found()
        while len(self.members) < num_peers:
            self.join(via)
        peers = self.members
        gone = [peer for peer in self.started if not peer.running and peer.has_been_ready]
        gone_ids = {peer.peer_id for peer in gone} - {peer.peer_id for peer in peers}
        for peer in peers:
            if len(peers) > 1:
                peer.wait_event(EventName.ROUND_AVERAGED, START_S)
            peer.wait_for("none that is gone", partial(sees_none, peer, gone_ids))
        return peers

    def loco(self, *arguments: str, timeout_s: float = WAIT_S) -> subprocess.CompletedProcess[str]:
        """A command that ends by itself."""
        return subprocess.run(
            [str(COMMAND), *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=self.environment,
        )

    def survivors(self) -> list[psutil.Process]:
        """Every process of this swarm, whoever its parent is now."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if (
                    process.environ().get(MARK) == self._mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def close(self) -> None:
        """Leave nothing behind."""
        for peer in self.started:
            peer.kill()
        for process in self.survivors():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        wait_until(lambda: not self.survivors(), "all processes are gone")
        shutil.rmtree(self._sockets, ignore_errors=True)


@contextmanager
def open_swarm(folder: Path, run_spec: str = RUN_SPEC) -> Iterator[Swarm]:
    """A swarm that is gone when the block ends, whoever ends the tests, as a time limit does."""
    swarm = Swarm(folder, run_spec)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield swarm
    finally:
        swarm.close()
        signal.signal(signal.SIGTERM, before)


def free_port() -> int:
    """A TCP port of loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def port_of(address: str) -> int:
    """The port in a multiaddr."""
    parts = address.split("/")
    return int(parts[parts.index("tcp") + 1])


def rounds_behind(peer: Peer, others: Sequence[Peer]) -> float:
    """From where it is to the furthest of the others, in nominal steps over those of a round.

    Peers number their rounds each for itself; what they share is the nominal step. They are asked
    one after the other, the peer in question last.
    """
    furthest = max(int(other.status()["step"]) for other in others)
    return (furthest - int(peer.status()["step"])) / INNER_STEPS


def skips(peer: Peer, since: int = 0) -> list[Event]:
    """Rounds that it skipped, after its first `since` events."""
    seen = peer.events()[since:]
    return [event for event in seen if event["event"] == EventName.ROUND_SKIPPED]


def nothing_broke(peers: list[Peer], seen: dict[Peer, int], *strangers: str) -> None:
    """Nobody lost a link, a trainer or a process since it had said so much."""
    for peer in peers:
        for event in peer.events()[seen[peer] :]:
            assert event["event"] not in (EventName.TRAINER_DIED, EventName.NETWORK_RESTARTED)
            if event["event"] == EventName.PEER_LOST:
                assert event["remote"] in strangers, peer.report()
        assert peer.running, peer.report()
        assert "Traceback" not in peer.stderr, peer.report()
