"""How much memory does a peer take beside its trainer, and does it grow?

**A peer's memory.** Two real peers (`loco-peer start`, `join`) train a Llama on a few tokens per
step, two steps per round, so that rounds are mostly exchange. Daemon and p2pd are looked at every
SAMPLE_S (memory_maps.py), and the kernel keeps count of the highest RSS in between; what counts is
the most that they held, while a joiner takes the state (its own and its source's) and over averaged
rounds. With P parameters (fp32: 4 P bytes) a daemon cannot do without

    phi 4 P | delta 4 P | the partner's codes 1.016 P | two code slots 2.03 P    = 2.76 * 4 P

so the bound of 3.5 * 4 P + 450 MB has room for the interpreter, torch, hivemind, numba and p2pd,
but for no further fp32 vector.

**Growth** over thousands of small rounds, half of them failing: memory_soak.py.
"""

import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import psutil
import trio

from demo.plan import to_toml
from demo.processes import open_peers
from peer.codec import get_codec
from peer.observe.event_names import EventName
from peer.state.home import Home
from protocol.run.run_spec import RunSpec

from .memory_maps import Held, Kind, areas_of_process, held, take_highest_rss_bytes
from .memory_soak import soak
from .report import Goal, Report, Row, options

MB: Final = 1e6
SAMPLE_S: Final = 0.25
OF_PARAMETERS: Final = 3.5
BESIDE_BYTES: Final = 450 * MB
FIRST_ROUNDS: Final = 2
"""Rounds that the founder trains alone, so that it has compiled what it needs."""
ROUNDS_TIMEOUT_S: Final = 900.0


@dataclass(frozen=True, slots=True)
class Size:
    """A Llama with the byte tokenizer."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int

    def spec(self) -> RunSpec:
        """A run of tiny batches and short rounds that does not end."""
        tree = {
            "name": "memory",
            "model": {
                "hidden_size": self.hidden_size,
                "intermediate_size": self.intermediate_size,
                "num_layers": self.num_layers,
                "num_heads": self.num_heads,
                "context_length": 16,
            },
            "data": {"validation_blocks": 1},
            "optimizer": {"learning_rate": 1e-4, "warmup_steps": 0, "schedule": "constant"},
            "training": {"total_steps": 1_000_000, "batch_size": 1, "micro_batch": 1},
            "sync": {"inner_steps": 2, "validate_every": 1_000_000},
        }
        return RunSpec.model_validate(tree)

    @property
    def parameters(self) -> int:
        """Number of parameters, without those of norms and embeddings."""
        matrices = 4 * self.hidden_size + 3 * self.intermediate_size
        return self.num_layers * self.hidden_size * matrices

    @property
    def bound_bytes(self) -> float:
        """Bytes that a peer of that size may take."""
        return OF_PARAMETERS * 4 * self.parameters + BESIDE_BYTES


SIZES: Final = {
    13: Size(512, 1376, 4, 8),
    64: Size(768, 2048, 9, 12),
    256: Size(1280, 3456, 13, 20),
}
"""Sizes by millions of parameters."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment at which a peer held the most.

    Attributes:
        held: in the largest sample.
        highest_bytes: RSS of daemon and p2pd, each at its highest by the kernel's count.
    """

    held: Held
    highest_bytes: int


class Watched:
    """One peer, looked at from outside.

    Attributes:
        home: where its event log lies.
    """

    def __init__(self, folder: Path, name: str, parameters: int) -> None:
        self.home = Home(folder / name)
        self.name = name
        self._held_most: Held | None = None
        self._code_bytes = get_codec("int8").code_bytes(parameters // 128 * 128)

    def take_peak(self) -> Peak:
        """The most that it held since the last call."""
        held_most, self._held_most = self._held_most, None
        assert held_most is not None, f"{self.name} was never seen"
        pids = [pid for daemon in self._daemons() for pid in (daemon.pid, *_p2pds(daemon))]
        return Peak(held_most, sum(map(take_highest_rss_bytes, pids)))

    def look(self) -> None:
        """Sample once; nothing, while it is not there."""
        try:
            for daemon in self._daemons():
                areas = [area for pid in _p2pds(daemon) for area in areas_of_process(pid)]
                now = held(areas_of_process(daemon.pid), areas, self._code_bytes)
                if self._held_most is None or now.alone_bytes > self._held_most.alone_bytes:
                    self._held_most = now
        except psutil.NoSuchProcess:
            pass

    def _daemons(self) -> list[psutil.Process]:
        home = str(self.home.root)
        keepers = [k for k in psutil.Process().children() if home in k.cmdline()]
        return [daemon for keeper in keepers for daemon in keeper.children()]

    def count(self, name: EventName) -> int:
        """How often this event was written to the event log."""
        try:
            return self.home.event_log_path.read_bytes().count(f'"{name}"'.encode())
        except FileNotFoundError:
            return 0


def _p2pds(daemon: psutil.Process) -> list[int]:
    return [child.pid for child in daemon.children() if child.name() == "p2pd"]


@asynccontextmanager
async def watching(peers: list[Watched]) -> AsyncIterator[None]:
    """Look at the peers again and again until the block ends."""

    async def look_on() -> None:
        while True:
            for peer in peers:
                await trio.to_thread.run_sync(peer.look)
            await trio.sleep(SAMPLE_S)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look_on)
        yield
        nursery.cancel_scope.cancel()


async def peaks_of(size: Size, averaged_rounds: int) -> dict[str, Peak]:
    """The most that each of two peers held, while the second one joined and in rounds together."""
    peaks: dict[str, Peak] = {}
    with tempfile.TemporaryDirectory(prefix="loco") as name:
        folder = Path(name)
        spec = folder / "run.toml"
        spec.write_text(to_toml(size.spec()))
        founder, joiner = (Watched(folder, peer, size.parameters) for peer in ("founder", "joiner"))
        async with open_peers(folder) as peers, watching([founder, joiner]):
            ready = (await peers.start("founder", ["start", str(spec)])).ready
            await _until(lambda: founder.count(EventName.ROUND_CLOSED) >= FIRST_ROUNDS)
            founder.take_peak()
            await peers.start("joiner", ["join", "--bootstrap", ready["addresses"][-1]])
            peaks["source, joining"] = founder.take_peak()
            peaks["joiner, joining"] = joiner.take_peak()
            await _until(
                lambda: all(
                    peer.count(EventName.ROUND_AVERAGED) >= averaged_rounds
                    for peer in (founder, joiner)
                )
            )
            peaks["source, rounds"] = founder.take_peak()
            peaks["joiner, rounds"] = joiner.take_peak()
    return peaks


def _rows(peaks: Mapping[str, tuple[Size, Peak]]) -> Iterator[Row]:
    """The table: a column for each peer and phase."""
    lines: dict[str, Callable[[Size, Peak], float]] = {
        "PSS": lambda _, peak: peak.held.pss_bytes / MB,
        "each page in full": lambda _, peak: peak.held.alone_bytes / MB,
        "between samples too": lambda _, peak: peak.highest_bytes / MB,
        "of the bound": lambda size, peak: peak.highest_bytes / size.bound_bytes,
        **{f"- {kind}": partial(_kind_mb, kind) for kind in Kind},
    }
    for line, figure in lines.items():
        yield {"": line, **{name: figure(*peak) for name, peak in peaks.items()}}


def _kind_mb(kind: Kind, _: Size, peak: Peak) -> float:
    return peak.held.alone[kind] / MB


def _goal(name: str, size: Size, peak: Peak) -> Goal:
    what = f"{name}: MB at most, each page in full"
    return Goal(what, peak.highest_bytes / MB, at_most=size.bound_bytes / MB)


async def _until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(ROUNDS_TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - another process cannot set our events
            await trio.sleep(SAMPLE_S)


def main() -> None:
    """Measure and publish."""
    parser = options(__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", choices=list(SIZES), help="millions")
    parser.add_argument("--rounds", type=int, help="of the soak; 0 for none")
    chosen = parser.parse_args()
    full: bool = chosen.full
    sizes: list[int] = chosen.sizes if chosen.sizes is not None else [64, 256] if full else [64]
    averaged_rounds = 12 if full else 8
    rounds: int = chosen.rounds if chosen.rounds is not None else 10_000 if full else 2_000
    report = Report(
        "memory",
        "Daemon and p2pd of a peer when they held the most; MB (kinds: each page in full)",
        {"sizes": sizes, "averaged_rounds": averaged_rounds, "soak_rounds": rounds},
    )
    peaks = {
        f"{millions}M {who}": (SIZES[millions], peak)
        for millions in sizes
        for who, peak in trio.run(peaks_of, SIZES[millions], averaged_rounds).items()
    }
    report.rows.extend(_rows(peaks))
    report.goals.extend(_goal(name, size, peak) for name, (size, peak) in peaks.items())
    growth = Report("memory-growth", "A peer after so many rounds, half of them failing")
    if rounds:
        trio.run(soak, growth, rounds)
    if sizes:
        report.publish(chosen.json)
    if rounds:
        growth.publish(chosen.json and chosen.json.with_stem(chosen.json.stem + "-growth"))


if __name__ == "__main__":
    main()
