"""The trainer as a child process: the real Trainer port.

    with SharedVector(padded_parameters) as slow:
        start = trainer_starter(settings, slow)
        async with start(slow.array, None) as trainer:
            ready = await trainer.receive()

A life begins with `Ready` or ends with `TrainerDied`. A trainer dies with the block, with the
daemon (its socket ends), and when it stays silent for longer than its own speed explains.

Nothing here imports torch's models: what a model looks like, and a founder's initial weights, come
from short children of the same kind (`inspect_model`, `initialise_weights`).
"""

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Final, get_args

import trio

from protocol.layout import Layout
from protocol.run_spec import RunSpec

from . import pipe
from .messages import FragmentSent, Ready, RoundClosed, Stop, TrainerCommand, TrainerEvent
from .ports import Float32Vector, StartTrainer, Trainer, TrainerDied
from .settings import TrainerSettings
from .shared import CodeRegions, SharedVector, code_memory, regions_of_run
from .watchdog import START_TIMEOUT_S, Watchdog

STOP_GRACE_S: Final = 1.0
"""Time a trainer has to end by itself after `Stop`; it is killed then."""
STDERR_TAIL_BYTES: Final = 2000
"""Last part of standard error that goes into the message of a death."""
MAX_STDERR_BYTES: Final = 1 << 20
"""Standard error is cut when it is longer."""
_READ_BYTES: Final = 65536
_EVENTS: Final = get_args(TrainerEvent)


@dataclass(frozen=True, slots=True)
class TrainerStatistics:
    """What one life of a trainer has done."""

    process_id: int
    commands: int
    events: int
    silence_bound_s: float


class _Child:
    """A child process with a socket pair, and the file that takes its standard error."""

    def __init__(self, process: trio.Process, stream: trio.SocketStream, stderr: IO[bytes]) -> None:
        self.process = process
        self._stream = stream
        self._stderr = stderr
        self._decoder = pipe.Decoder()
        self._received: deque[pipe.Message] = deque()
        self._sending = trio.Lock()

    async def send(self, message: pipe.Message) -> None:
        """Raises TrainerDied."""
        try:
            async with self._sending:
                await self._stream.send_all(pipe.encode(message))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise await self.death() from error

    async def receive(self) -> pipe.Message:
        """Raises TrainerDied."""
        while not self._received:
            try:
                data = await self._stream.receive_some(_READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise await self.death() from error
            if not data:
                raise await self.death()
            try:
                self._received.extend(self._decoder.feed(data))
            except pipe.PipeError as error:
                raise TrainerDied(
                    f"the trainer said something that is no message: {error}"
                ) from error
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
        """End the process, whatever it does."""
        if self.process.returncode is None:
            self.process.kill()

    async def aclose(self) -> None:
        """Kill the process if it still runs, and collect it."""
        with trio.CancelScope(shield=True):
            self.kill()
            await self.process.wait()
            await trio.aclose_forcefully(self._stream)

    def _last_words(self) -> str:
        size_bytes = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size_bytes - STDERR_TAIL_BYTES))
        said = self._stderr.read().decode(errors="replace").strip()
        return f": {said}" if said else ""

    def _bound_stderr(self) -> None:
        # The child appends, so after a cut it goes on at the file's start.
        if os.fstat(self._stderr.fileno()).st_size > MAX_STDERR_BYTES:
            os.ftruncate(self._stderr.fileno(), 0)


@contextlib.asynccontextmanager
async def _child(
    task: str, settings: TrainerSettings, descriptors: Mapping[str, int]
) -> AsyncIterator[_Child]:
    """Run `python -m peer.training TASK`; it is gone when the block ends."""
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryFile() as stderr:
        fcntl.fcntl(stderr, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)
        with theirs:
            passed = {"socket": theirs.fileno(), **descriptors}
            options = [part for name, fd in passed.items() for part in (f"--{name}", str(fd))]
            process = await trio.lowlevel.open_process(
                [sys.executable, "-m", "peer.training", task, *options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=tuple(passed.values()),
                env=_environment(settings.threads),
            )
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        child = _Child(process, stream, stderr)
        try:
            await child.send(settings)
            yield child
        finally:
            await child.aclose()


def _environment(threads: int) -> dict[str, str]:
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


class ProcessTrainer:
    """One life of a trainer process. See `peer.training.ports.Trainer`."""

    def __init__(
        self, child: _Child, map_regions: Callable[[Ready], CodeRegions], watchdog: Watchdog
    ) -> None:
        self._child = child
        self._map_regions = map_regions
        self._regions: CodeRegions | None = None
        self._watchdog = watchdog
        self._patience = trio.CancelScope()
        self._commands = 0
        self._events = 0

    def __repr__(self) -> str:
        return f"<ProcessTrainer {self._child.process.pid}, {self._regions!r}>"

    @property
    def process_id(self) -> int:
        """Of the child."""
        return self._child.process.pid

    async def send(self, command: TrainerCommand) -> None:
        """Raises TrainerDied."""
        self._watchdog.sent(command)
        # Whoever waits in `receive` began to when there was, perhaps, nothing to do.
        self._patience.deadline = trio.current_time() + self._watchdog.silence_bound_s
        self._commands += 1
        await self._child.send(command)

    async def receive(self) -> TrainerEvent:
        """The next event.

        Raises:
            TrainerDied: the process ended, or stayed silent for too long (it is then killed).
        """
        bound_s = self._watchdog.silence_bound_s
        self._patience = trio.CancelScope(deadline=trio.current_time() + bound_s)
        with self._patience as scope:
            message = await self._child.receive()
        if scope.cancelled_caught:
            self._child.kill()
            raise TrainerDied(
                f"the trainer hung: no word from it for {self._watchdog.silence_bound_s:.0f} s"
            )
        if not isinstance(message, _EVENTS):
            raise TrainerDied(f"the trainer sent a {type(message).__name__}")
        event: TrainerEvent = message
        self._events += 1
        self._watchdog.received(event)
        match event:
            case Ready():
                self._regions = self._map_regions(event)
            case RoundClosed(round=round_, slot=int(slot), digest=str(digest)):
                self._check(slot, round_, digest)
            case FragmentSent():
                self._check(event.fragment, event.cycle, event.digest)
        return event

    def _check(self, region: int, round_: int, digest: str) -> None:
        header = self._regions.header(region) if self._regions else None
        if header is None or (header.round, header.digest) != (round_, digest):
            raise TrainerDied(f"region {region} holds {header}, not what {round_} sent")

    def codes(self, slot: int) -> memoryview:
        """Codes of the snapshot in `slot`, valid until the slot is written again."""
        assert self._regions is not None
        return self._regions.codes(slot)

    def fragment_codes(self, fragment: int) -> memoryview:
        """Codes of the fragment's last send, valid until its next one."""
        assert self._regions is not None
        return self._regions.codes(fragment)

    def statistics(self) -> TrainerStatistics:
        """What this life has done so far."""
        return TrainerStatistics(
            self.process_id, self._commands, self._events, self._watchdog.silence_bound_s
        )


def trainer_starter(
    settings: TrainerSettings, slow: SharedVector, directory: Path | None = None
) -> StartTrainer:
    """The StartTrainer of real life.

    Args:
        settings: what the child is told; its cap of the micro-batch is set at each start.
        slow: the slow weights; every start must be given `slow.array`.
        directory: where memory without a name is made on systems without memfd.
    """
    spec = settings.run_spec()

    @contextlib.asynccontextmanager
    async def start(vector: Float32Vector, micro_batch_cap: int | None) -> AsyncIterator[Trainer]:
        if vector.ctypes.data != slow.array.ctypes.data or vector.size != slow.array.size:
            raise ValueError("the trainer can only start on the shared slow weights")
        told = replace(settings, micro_batch_cap=micro_batch_cap or 0)
        codes_fd = code_memory(0, directory)
        try:
            descriptors = {"slow": slow.read_only_fd, "codes": codes_fd}
            async with _child("train", told, descriptors) as child:
                yield ProcessTrainer(child, partial(_regions, spec, codes_fd), Watchdog(spec))
                await _stop(child)
        finally:
            os.close(codes_fd)

    return start


def _regions(spec: RunSpec, fd: int, ready: Ready) -> CodeRegions:
    layout = Layout.from_shapes(dict(ready.shapes))
    return CodeRegions(fd, regions_of_run(spec, layout), writable=False)


async def _stop(child: _Child) -> None:
    """Ask the child to end, and give it a moment."""
    with trio.move_on_after(STOP_GRACE_S), contextlib.suppress(TrainerDied):
        await child.send(Stop())
        await child.process.wait()


async def create_model(settings: TrainerSettings, weights_path: Path) -> tuple[Layout, str]:
    """Make a run's initial weights, as its founder does, in a short child.

    Args:
        weights_path: where they go, as one flat vector of fp32 values.

    Returns:
        The layout of that vector, and the model's config.json.

    Raises:
        TrainerDied: the child failed; the message holds its last words.
    """
    with weights_path.open("wb") as file:
        message = await _ask("create", settings, {"weights": file.fileno()})
    if not isinstance(message, pipe.ModelCreated):
        raise TrainerDied(f"the trainer sent a {type(message).__name__}")
    return Layout.from_shapes(dict(message.shapes)), message.config


async def _ask(
    task: str, settings: TrainerSettings, descriptors: Mapping[str, int]
) -> pipe.Message:
    """The one answer of a short child."""
    answer: pipe.Message | None = None
    with trio.move_on_after(START_TIMEOUT_S):
        async with _child(task, settings, descriptors) as child:
            answer = await child.receive()
    if answer is None:
        raise TrainerDied(f"'{task}' took longer than {START_TIMEOUT_S:.0f} s")
    return answer
