"""The home directory: a peer's identity, its run, and what it continues from.

    identity.key      the peer's Ed25519 key (mode 0600)
    founder.key       of a founder: the key that signs for the run (mode 0600)
    run.json          the one run that this home belongs to: run id, founder, run spec, signature
    known_peers       who answered at HOST:PORT, a line each (kept_files.py)
    ports.json        the ports of last time, kept so that addresses told to others stay true
    incarnation       how often this home was started
    admission         what lets this peer in: its secret, its pass, statements (kept_files.py; 0600)
    expert            of a run with experts: the name of the one that this home trains
    next-part         the stage of a pipeline, or the expert, that the next start goes over to, once
    successor         run id and address of the run that the home has followed, or is about to
    peer.toml         optional configuration, written by the user
    neighbours.json   peers that were linked recently (kept_files.py)
    checkpoints/      what the run goes on from (checkpoints.py)
    old-runs/         what belonged to runs before this one, by run id; `moving` is on its way there
    state/  cache/    weights for joiners; blobs by digest
    track/            curves that other programs keep here (--track)
    log/events.jsonl  the event log
    lock              held by the daemon for as long as it lives; names its pid and control socket

Rules:
- One daemon per home: it holds `flock` on `lock`, which the kernel drops however it dies. A process
  that takes its place (peer/process/rejoin.py) is handed the lock: between the two, commands find
  the home in use.
- One run per home: `bind_run` refuses another run.
- Keys, weights, the lock and `admission`, which holds secrets, are the owner's alone (mode 0600);
  other files follow the umask, inside a directory that is the owner's alone. A home of ours that
  everybody can write to is refused: who replaces a key or `peer.toml` has the peer.
- Every file is replaced atomically and durably: a crash leaves the old or the new.
- Sockets lie in the runtime directory, named by a hash of the home, because a unix path has room
  for 107 bytes. Where somebody else has taken that name, they lie in a directory of another name.
  `lock` names them, so that a client finds them wherever they are.
"""

import errno
import fcntl
import itertools
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import blake3

from peer.runtime.files import PRIVATE_FILE, replace_file
from protocol.address.multiaddr import MAX_UNIX_PATH_BYTES
from protocol.errors import RemoteProtocolError, Unusable
from protocol.run.layout import is_part
from protocol.run.signed_spec import SignedSpec

LONGEST_SOCKET_NAME_BYTES: Final = 24
"""Bound for file names in the runtime directory."""
PRIVATE_DIRECTORY: Final = 0o700
_HANDED_ON: Final = "_LOCO_LOCK"
"""Environment variable: the descriptor of a lock that is held, for `exec` alone."""


class HomeError(Unusable): ...


class HomeInUse(HomeError):
    def __init__(self, root: Path, pid: int | None) -> None:
        holder = f"the daemon with pid {pid}" if pid else "another daemon"
        super().__init__(
            f"{root} is in use by {holder}; stop it ('loco-peer leave'),"
            " or give this one a --home of its own"
        )


class OtherRun(HomeError): ...


def parse_run(data: bytes) -> SignedSpec:
    """The run of a `run.json`, verified. Raises ValueError."""
    try:
        fields = json.loads(data)
        signed = SignedSpec(
            fields["spec"].encode(),
            bytes.fromhex(fields["founder"]),
            bytes.fromhex(fields["signature"]),
        )
        signed.verify(fields["run_id"])
    except (ValueError, KeyError, TypeError, AttributeError, RemoteProtocolError) as error:
        raise ValueError(str(error)) from error
    return signed


def run_file(signed: SignedSpec) -> bytes:
    """The bytes of `run.json`, for `parse_run`."""
    fields = {
        "run_id": signed.run_id,
        "founder": signed.founder_public_key.hex(),
        "spec": signed.spec_bytes.decode(),
        "signature": signed.signature.hex(),
    }
    return json.dumps(fields, indent=1).encode()


def _owner_sentence(root: Path, error: OSError) -> str:
    """Advice about a folder of another user, as volumes of containers often are."""
    try:
        owner = next(each for each in (root, *root.parents) if each.exists()).stat().st_uid
    except OSError:
        return ""
    if error.errno not in (errno.EACCES, errno.EPERM) or owner == os.getuid():
        return ""
    return (
        f" it belongs to user {owner} and this is user {os.getuid()}: chown it to {os.getuid()}"
        f" (a pod: fsGroup: {os.getgid()}), or run as {owner} (docker run --user {owner});"
    )


def _is_private(path: Path) -> bool:
    """Whether this is a directory of ours that nobody else can enter."""
    about = path.lstat()
    ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()
    return ours and not about.st_mode & 0o077


class Home:
    """One home directory. Nothing is touched before `prepare`."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.identity_path = self.root / "identity.key"
        self.founder_key_path = self.root / "founder.key"
        self.run_path = self.root / "run.json"
        self.admission_path = self.root / "admission"
        self.ports_path = self.root / "ports.json"
        self.expert_path = self.root / "expert"
        self.next_part_path = self.root / "next-part"
        self.successor_path = self.root / "successor"
        self.incarnation_path = self.root / "incarnation"
        self.lock_path = self.root / "lock"
        self._lock = -1
        self._sockets: Path | None = None
        self.neighbours_path = self.root / "neighbours.json"
        self.known_peers_path = self.root / "known_peers"
        self.state_dir = self.root / "state"
        self.checkpoints_dir = self.root / "checkpoints"
        self.old_runs_dir = self.root / "old-runs"
        self._moving_dir = self.old_runs_dir / "moving"
        self.cache_dir = self.root / "cache"
        self.track_dir = self.root / "track"
        self.log_dir = self.root / "log"
        self.event_log_path = self.log_dir / "events.jsonl"

    def prepare(self) -> None:
        """Make the directories and check that they can be written. Raises HomeError."""
        try:
            for directory in (self.root, self.state_dir, self.cache_dir, self.log_dir):
                directory.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=directory):
                    pass
        except OSError as error:
            raise HomeError(
                f"the home {self.root} cannot be used: {error.strerror}"
                f" ({error.filename or self.root});{_owner_sentence(self.root, error)}"
                " give another one with --home or LOCO_HOME"
            ) from error
        about = self.root.stat()
        if about.st_uid == os.getuid() and about.st_mode & stat.S_IWOTH:
            raise HomeError(
                f"every user of this machine can write to the home {self.root}, and so replace its"
                f" keys: chmod o-w {self.root}"
            )

    # --- one daemon ---------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the home; call after `prepare`. Raises HomeInUse, HomeError."""
        handed_on = os.environ.pop(_HANDED_ON, "")
        try:
            descriptor = int(
                handed_on or os.open(self.lock_path, os.O_RDWR | os.O_CREAT, PRIVATE_FILE)
            )
            os.set_inheritable(descriptor, False)
        except OSError as error:
            raise HomeError(f"cannot open {self.lock_path}: {error.strerror}") from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise HomeInUse(self.root, self.holder().get("pid")) from error
            sockets = self._sockets = self._make_runtime_dir()
            control = str(sockets / "control.sock")
            about = {"pid": os.getpid(), "control": control, "since_s": time.monotonic()}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(about).encode(), 0)
            self._lock = descriptor
            try:
                if self._moving_dir.exists():
                    self._end_move()
                yield
            finally:
                os.ftruncate(descriptor, 0)
                shutil.rmtree(sockets, ignore_errors=True)
        finally:
            os.close(descriptor)

    def hand_on(self) -> None:
        """Let the program that this process is about to become hold the home from its start."""
        os.set_inheritable(self._lock, True)
        os.environ[_HANDED_ON] = str(self._lock)

    def in_use(self) -> bool:
        try:
            descriptor = os.open(self.lock_path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def held_s(self) -> float:
        """Seconds for which a daemon has held this home; 0 where that is not known."""
        since_s = self.holder().get("since_s")
        return max(0.0, time.monotonic() - since_s) if isinstance(since_s, float) else 0.0

    def holder(self) -> Mapping[str, Any]:
        """The holder's words: `pid`, `control` (its socket), `since_s`. Empty when unknown."""
        try:
            about = json.loads(self.lock_path.read_bytes())
        except (OSError, ValueError):
            return {}
        return about if isinstance(about, dict) else {}

    # --- where sockets live -------------------------------------------------------------------

    @property
    def runtime_dir(self) -> Path:
        """Directory for sockets, short enough for their names."""
        name = blake3.blake3(os.fsencode(self.root)).hexdigest(length=8)
        bases = (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp")  # noqa: S108
        for base in bases:
            if base and os.access(base, os.W_OK | os.X_OK):
                candidate = Path(base).absolute() / f"loco-{os.getuid()}-{name}"
                room = MAX_UNIX_PATH_BYTES - len(os.fsencode(candidate)) - 1
                if room >= LONGEST_SOCKET_NAME_BYTES:
                    return candidate
        raise HomeError("no directory with a short enough path for sockets; set XDG_RUNTIME_DIR")

    @property
    def sockets(self) -> Path:
        """Directory for sockets, private, for as long as the home is held."""
        assert self._sockets is not None
        return self._sockets

    def _make_runtime_dir(self) -> Path:
        """Make `runtime_dir`, or one of another name where that one is not ours."""
        path = self.runtime_dir
        try:
            with suppress(FileExistsError):
                path.mkdir(mode=PRIVATE_DIRECTORY)
            return (
                path
                if _is_private(path)
                else Path(tempfile.mkdtemp(prefix="loco-", dir=path.parent))
            )
        except OSError as error:
            raise HomeError(f"cannot make {path}: {error.strerror}") from error

    @property
    def control_socket(self) -> Path:
        """Path of the control socket: as the daemon said, else where it would be."""
        path = self.holder().get("control")
        return Path(path) if isinstance(path, str) else self.runtime_dir / "control.sock"

    # --- what is kept -------------------------------------------------------------------------

    def next_incarnation(self) -> int:
        """Count this start; 1 at the first.

        Raises HomeError: the counter is damaged. Begun anew, peers would ignore us as an old one.
        """
        text = read_small(self.incarnation_path)
        if text is not None and not text.strip().isdigit():
            raise HomeError(
                f"{self.incarnation_path} is damaged; write a number above all it ever held"
            )
        incarnation = int(text or 0) + 1
        replace_small(self.incarnation_path, b"%d\n" % incarnation)
        return incarnation

    def kept_port(self, purpose: str) -> int | None:
        port = self._kept_ports().get(purpose)
        return port if isinstance(port, int) and 0 < port < 1 << 16 else None

    def keep_port(self, purpose: str, port: int) -> None:
        replace_small(self.ports_path, json.dumps({**self._kept_ports(), purpose: port}).encode())

    def _kept_ports(self) -> dict[str, Any]:
        try:
            ports = json.loads(read_small(self.ports_path) or b"{}")
        except ValueError:
            return {}  # only a preference: other ports do as well
        return ports if isinstance(ports, dict) else {}

    def keep_expert(self, name: str) -> None:
        replace_small(self.expert_path, name.encode())

    def expert(self) -> str | None:
        """The expert that this home trains; None before the first, and where the run has none."""
        said = read_small(self.expert_path)
        return None if said is None else said.decode(errors="replace").strip()

    def go_over_to(self, part: str) -> None:
        replace_small(self.next_part_path, part.encode())

    def take_next_part(self) -> str:
        """The part to go over to, told once; empty where no move is under way."""
        said = read_small(self.next_part_path) or b""
        self.next_part_path.unlink(missing_ok=True)
        text = said.decode(errors="replace")
        return text if is_part(text) else ""

    def follow(self, run_id: str, address: str) -> None:
        replace_small(self.successor_path, f"{run_id} {address}\n".encode())

    def followed(self) -> tuple[str, str] | None:
        """Run id and address of the run that this home has followed, or is about to."""
        words = (read_small(self.successor_path) or b"").decode(errors="replace").split()
        return (words[0], words[1]) if len(words) == 2 else None

    def has_left(self, run_id: str) -> bool:
        return (self.old_runs_dir / run_id).exists()

    def run(self) -> SignedSpec | None:
        """The run of this home, verified; None before the first. Raises HomeError: damaged."""
        data = read_small(self.run_path)
        if data is None:
            return None
        try:
            return parse_run(data)
        except ValueError as error:
            raise HomeError(
                f"{self.run_path} is damaged ({error}); restore it or use another home"
            ) from error

    def bind_run(self, signed: SignedSpec) -> None:
        """Make this home one of that run, for good. Raises OtherRun."""
        present = self.run()
        if present is not None and present.run_id != signed.run_id:
            raise OtherRun(
                f"the home {self.root} belongs to run {present.run_id}, not to {signed.run_id};"
                " give this run a --home of its own, or change the run that is there with"
                " `loco-peer amend`"
            )
        replace_small(self.run_path, run_file(signed))

    def put_run_away(self, successor: SignedSpec | None = None) -> Path | None:
        """Make room for another run: move what belongs to this one to a folder of `old-runs`.

        The founder's key goes with it: one spec signed by one key is one run. Where a `successor`
        takes its place, the home is of one of the two whenever that is cut off: `locked` takes the
        files back, or lets them go. Returns the folder; None where there is no run. Raises
        HomeError.
        """
        signed = self.run()
        if signed is None:
            return None
        moving = self._moving_dir
        try:
            moving.mkdir(parents=True, exist_ok=True)
            for path in (
                self.checkpoints_dir,
                self.admission_path,
                self.neighbours_path,
                self.expert_path,
                self.founder_key_path,
                *([self.successor_path] if successor is None else []),
            ):
                if path.exists():
                    path.replace(moving / path.name)
            replace_file(moving / self.run_path.name, run_file(signed))
            if successor is None:
                self.run_path.unlink()
            else:
                replace_file(self.run_path, run_file(successor))
            return self._let_go(signed.run_id)
        except OSError as error:
            raise HomeError(f"cannot move the run's files to {moving}: {error.strerror}") from error

    def _end_move(self) -> None:
        """End what `put_run_away` had begun when it was cut off: `run.json` says which way."""
        try:
            moved = read_small(self._moving_dir / self.run_path.name)
            run, left = self.run(), None if moved is None else parse_run(moved)
            if left is not None and (run is None or run.run_id != left.run_id):
                self._let_go(left.run_id)
                return
            for path in self._moving_dir.iterdir():
                if path.name == self.run_path.name:
                    path.unlink()
                else:
                    path.replace(self.root / path.name)
            self._moving_dir.rmdir()
        except (OSError, ValueError) as error:
            raise HomeError(f"cannot end the move of {self._moving_dir}: {error}") from error

    def _let_go(self, run_id: str) -> Path:
        """Give a run's files their place, in which no run of that id was put away before."""
        names = (f"{run_id}-{again}" if again else run_id for again in itertools.count())
        place = next(each for name in names if not (each := self.old_runs_dir / name).exists())
        return self._moving_dir.rename(place)


def read_small(path: Path) -> bytes | None:
    """The content of a file; None where there is none. Raises HomeError."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise HomeError(f"cannot read {path}: {error.strerror}") from error


def replace_small(path: Path, data: bytes) -> None:
    """Raises HomeError."""
    try:
        replace_file(path, data)
    except OSError as error:
        raise HomeError(f"cannot write {path}: {error.strerror}") from error
