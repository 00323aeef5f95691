"""A join under load: what a newcomer that fetches a large state costs those that train.

Four real daemons on this machine average in pairs; a fifth, with an empty home, joins them and
fetches a state of 32M parameters, 128 MB (without outer momentum, fp32). Three parts of one run,
one after another:

    quiet      nothing else
    joining    from the newcomer's start until it trains
    control    a process that only multiplies, for as long and with as much of the processors as the
               newcomer took

For each peer and part, out of its event log: steps per second, and `blocked`, the share of the time
between the ends of two rounds in which the trainer did not train (it codes, digests, merges, or
waits). Peers and newcomer share the cores, so steps are slower while somebody joins; the control
says how much of that is the machine's.

    python -m bench.join_load [--full] [--json FILE]

Goals: blocked rises by less than 0.03 of the time from `quiet` to `joining`; steps per second in
`joining` are at least 0.97 of those in `control`. `--full` takes longer parts.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import psutil
import tomlkit

from peer.observe.event_names import EventName

from .gossip_report import Event, Window
from .real_peers import HERE, RealPeer, has_averaged, now_s, started
from .report import Goal, Report, Row, options

PEERS: Final = 4
INNER_STEPS: Final = 10
MODEL: Final = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_layers": 10,
    "num_heads": 8,
    "context_length": 64,
}
SMALL_MODEL: Final = {**MODEL, "hidden_size": 128, "intermediate_size": 384, "num_layers": 4}
LISTEN: Final = "127.0.0.1:0"
QUIET_S: Final = 90.0
FULL_QUIET_S: Final = 300.0
SETTLED_S: Final = 420.0
TRAINS_S: Final = 420.0
SLICE_S: Final = 0.05
MOST_BLOCKED: Final = 0.03
LEAST_SPEED: Final = 0.97
DIGITS: Final = 4
FIGURES: Final = ("blocked", "steps_per_s")
"""The figures of a part that goals are about."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the run, and what a peer did in it.

    Attributes:
        blocked: share of the time in which the trainer did not train.
    """

    name: str
    seconds: float
    rounds: int
    steps_per_s: float
    blocked: float

    def row(self, peer: str) -> Row:
        """A line of the table."""
        return {
            "peer": peer,
            "part": self.name,
            "seconds": round(self.seconds),
            "rounds": self.rounds,
            "steps/s": round(self.steps_per_s, DIGITS),
            "blocked": round(self.blocked, DIGITS),
        }


@dataclass(frozen=True, slots=True)
class Newcomer:
    """What the fifth peer took.

    Attributes:
        window: from its start until it trained.
        cores: that it and its trainer kept busy, on average.
    """

    window: Window
    cores: float


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--smoke", action="store_true", help="a small model, half a minute a part")
    arguments = parser.parse_args()
    model = SMALL_MODEL if arguments.smoke else MODEL
    quiet_s = QUIET_S / 3 if arguments.smoke else FULL_QUIET_S if arguments.full else QUIET_S
    report = Report("join_load", "A newcomer fetches a large state from those that train")
    logs, windows, newcomer = run(run_toml(model), quiet_s)
    parts = [[part_of(name, log, window) for name, window in windows.items()] for log in logs]
    report.settings = {"model": model, "inner_steps": INNER_STEPS, "cores": psutil.cpu_count()}
    report.rows = [part.row(f"{n}") for n, each in enumerate(parts) for part in each]
    report.goals = goals(parts)
    joined = f"the newcomer trained after {newcomer.window.seconds:.0f} s"
    report.notes = [f"{joined}, in which it kept {newcomer.cores:.2f} cores busy"]
    report.publish(arguments.json)


def run_toml(model: dict[str, int]) -> str:
    """The run; it does not end by itself, and validates hardly ever."""
    tree = {
        "name": "join-load",
        "model": model,
        "data": {"validation_blocks": 8},
        "optimizer": {"learning_rate": 1e-3, "schedule": "constant"},
        "training": {"total_steps": 10**6, "batch_size": 1},
        "sync": {"inner_steps": INNER_STEPS, "validate_every": 10**4},
    }
    return tomlkit.dumps(tree)


def run(spec: str, quiet_s: float) -> tuple[list[list[Event]], dict[str, Window], Newcomer]:
    """The three parts; the logs of the four, the parts' windows, and the newcomer."""
    with tempfile.TemporaryDirectory(prefix="loco") as name:
        folder = Path(name)
        (run_toml := folder / "run.toml").write_text(spec)
        peers = [RealPeer(folder / f"peer{n}", HERE, list) for n in range(PEERS)]
        with started(peers, run_toml, lambda _: LISTEN):
            for peer in peers:
                peer.wait_until(partial(has_averaged, peer, 2), "averaged twice", SETTLED_S)
            quiet = _pass(peers, quiet_s)
            newcomer = _join(
                RealPeer(folder / "newcomer", HERE, list), peers[0].ready()["addresses"][0]
            )
            time.sleep(quiet_s / 6)  # its leaving is over, and rounds have their length again
            with busy(newcomer.cores):
                control = _pass(peers, newcomer.window.seconds)
            logs = [peer.events() for peer in peers]
    return logs, {"quiet": quiet, "joining": newcomer.window, "control": control}, newcomer


def _pass(peers: Sequence[RealPeer], seconds: float) -> Window:
    begin_s = now_s()
    time.sleep(seconds)
    for peer in peers:
        peer.check("while it was watched")
    return Window(begin_s, now_s())


def _join(peer: RealPeer, address: str) -> Newcomer:
    begin_s = now_s()
    peer.start("join", "--bootstrap", address, listen=LISTEN)
    try:
        peer.ready()
        processes = peer.family()
        peer.wait_until(partial(_trains, peer), "trained", TRAINS_S)
        window = Window(begin_s, now_s())
        used_s = sum(_cpu_s(process) for process in processes | peer.family())
    finally:
        peer.stop()
        peer.wait_gone()
    return Newcomer(window, used_s / window.seconds)


def _trains(peer: RealPeer) -> bool:
    return EventName.ROUND_OPENED in {event["event"] for event in peer.events()}


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(sum(times[:4]))  # its own, and that of children that have ended


@contextmanager
def busy(cores: float) -> Iterator[None]:
    """So many cores are kept busy by processes that only count."""
    shares = [1.0] * int(cores) + [cores % 1.0]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=spin, args=(share,), daemon=True) for share in shares]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def spin(share: float) -> None:
    """Use this share of a core until killed."""
    done_s, began_s = 0.0, time.monotonic()
    while True:
        if done_s > share * (time.monotonic() - began_s):
            time.sleep(SLICE_S)
            continue
        before_s, until_s = time.process_time(), time.process_time() + SLICE_S
        while time.process_time() < until_s:
            pow(3, 10_000, 2**127 - 1)
        done_s += time.process_time() - before_s


def part_of(name: str, log: Sequence[Event], window: Window) -> Part:
    """What one peer did in one part: from the first end of a round in it to the last."""
    closed = [e for e in window.part(log) if e["event"] == EventName.ROUND_CLOSED]
    if not closed[1:]:
        return Part(name, window.seconds, len(closed), 0.0, float("nan"))
    seconds = closed[-1]["time"] - closed[0]["time"]
    trained_s = sum(event["seconds"] for event in closed[1:])
    steps = sum(event["steps"] for event in closed[1:])
    return Part(name, window.seconds, len(closed), steps / seconds, 1 - trained_s / seconds)


def goals(parts: Sequence[Sequence[Part]]) -> list[Goal]:
    """See the top of the file; means over the peers."""
    quiet, joining, control = (
        {key: statistics.fmean(getattr(part, key) for part in each) for key in FIGURES}
        for each in zip(*parts, strict=True)
    )
    rises = joining["blocked"] - quiet["blocked"]
    speed = joining["steps_per_s"] / control["steps_per_s"]
    return [
        Goal("blocked more while somebody joins, share of time", rises, at_most=MOST_BLOCKED),
        Goal("steps per second, beside a process as busy", speed, at_least=LEAST_SPEED),
    ]


if __name__ == "__main__":
    main()
