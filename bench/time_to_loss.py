"""Held-out loss against wall time on four hosts with thin lines: what a user picks by.

    python -m bench.time_to_loss --out FOLDER [--lines 20 100 1000] [--arms A B] [--seconds 120]
        [--seeds 0 1 2] [--rates 1.2e-2] [--accumulate 0] [--at-once 3]

Each host has one processor and a line of its own (20, 100 or 1000 Mbit/s, 40 ms one way). All train
the demo's model (0.886M parameters) on the demo's text, 8 sequences a step, with Muon at a constant
rate after a warm-up of a tenth of the arm's own steps, 60 at most:

    pairs       real daemons and p2pd (`loco-peer start` and `join`) that average in pairs, int8,
                H is "auto", as the demo does
    fragments   the same, fragments among all four, H = 10, as `make demo METHOD=diloco`
    ddp         torch's DistributedDataParallel over gloo, fp32; as many batches to a step as take
                the processor as long as their sum takes the line (--accumulate 0), or so many
    ddp-bf16    the same, gradients travel in bf16
    diloco      DiLoCo over gloo that waits: H = 30, fp32, Nesterov 0.7/0.9
    alone       one host, nothing is sent

The clock of an arm begins when all its hosts could train (time_to_loss_arms.py), and measuring
takes nothing of it: weights are looked at while it runs, `--samples` times, and judged afterwards,
all by the same code on the same held-out blocks. Two losses are told: the mean of the replicas'
own, and that of the mean of their weights, which `loco-peer export --swarm` writes. Between two
averages the replicas of `diloco` are apart, too; `outer` is the loss of its outer weights.

`--rates` are Muon's; AdamW's, for embeddings and norms, is the sixth part, as in the preset. Each
arm is made once for each line, seed and rate; with several rates the table shows the best. So it
does with other keys of [sync], by calls of their own: `--sync inner_steps=4 codec=int8-diff`.

An arm takes a processor for each host and one for the lines: 16 bear `--at-once 3`. Where there are
fewer, hosts share them, and the figures say nothing. An arm takes about half a minute more than
`--seconds`. Lines are shaped by a process (bench/router), for all arms alike, as kernels often
cannot delay packets (no sch_netem): that takes root, `ip`, `taskset` and /dev/net/tun. What is
missing is said before anything runs; `--check` does no more than that.

FOLDER/results.jsonl gets a line for each arm, line, seed and rate as soon as it is there; what was
made before is not made again. FOLDER/ARM-... has the logs.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import torch

from demo.plan import Plan
from peer.training.child_process import MALLOC, SPIN_COUNT
from peer.training.corpus.folder import KeptCorpus, prepare_corpus
from peer.training.model import FlatModel, initial_module
from peer.training.optimizer import inner_optimizer
from peer.training.step import Stepper, measure_steps_per_s
from protocol.run.run_spec import RunSpec

from .gossip_links_real import commit_of
from .real_peers import HERE
from .report import Goal, Report, Row, machine
from .router.network import congestion_control, missing
from .router.tun import DEVICE
from .time_to_loss_arms import ARMS, DELAY_S, OURS, RIVALS, Task, warmup_of

HOSTS: Final = 4
PROCESSORS: Final = HOSTS + 1
LINES_MBIT: Final = (20.0, 100.0, 1000.0)
RATE: Final = 1.2e-2
RATE_RATIO: Final = 6.0
"""Muon's rate over AdamW's, in the demo."""
INNER_STEPS: Final = 30
VALIDATION_BLOCKS: Final = 8
"""For the first round, which is always validated: no more than what a step trains."""
NEVER: Final = 10**6
RESULTS: Final = "results.jsonl"
WRONG_USAGE: Final = 2
OF_MEAN: Final = "of the mean"
TO_DDP: Final = "s to DDP's end"
MOST_AHEAD_MBIT: Final = 100.0
LEVEL: Final = 0.03
"""Nats: smaller gaps between single runs mean nothing."""
PATIENCE_S: Final = 400.0
"""For start, end and judgement of an arm, on a busy machine."""


@dataclass(frozen=True, slots=True)
class Made:
    """The name of a line of the results.

    Attributes:
        sync: keys of [sync] that differ from the demo's, `KEY=VALUE` with blanks between.
    """

    arm: str
    mbit_per_s: float
    seed: int
    rate: float
    seconds: float
    accumulate: int
    sync: str = ""

    @property
    def folder(self) -> str:
        """Name of its folder."""
        told = (self.arm, f"{self.mbit_per_s:g}", self.seed, f"{self.rate:g}", self.accumulate)
        return "-".join(map(str, (*told, *self.sync.split())))


def wanted(chosen: argparse.Namespace) -> list[Made]:
    """All that is to be made; arms that send nothing, or sum nothing, are not made twice."""
    found: dict[Made, None] = {}
    for seed in chosen.seeds:
        for mbit_per_s in chosen.lines:
            for arm in chosen.arms:
                for rate in chosen.rates:
                    for accumulate in chosen.accumulate if arm.startswith("ddp") else [0]:
                        line = chosen.lines[0] if arm == "alone" else mbit_per_s
                        sync = " ".join(chosen.sync) if arm in OURS else ""
                        made = Made(arm, line, seed, rate, chosen.seconds, accumulate, sync)
                        found[made] = None
    return list(found)


def spec_of(made: Made, steps_per_s: float) -> RunSpec:
    """The demo's run, at a constant rate and without an end; hardly anything is validated."""
    tree = Plan(made.seed, method=OURS.get(made.arm, "noloco")).swarm_spec().model_dump()
    tree["name"] = "time-to-loss"
    tree["data"]["validation_blocks"] = VALIDATION_BLOCKS
    tree["optimizer"] |= {
        "schedule": "constant",
        "learning_rate": made.rate / RATE_RATIO,
        "warmup_steps": warmup_of(made.seconds * steps_per_s),
    }
    tree["optimizer"]["muon"]["learning_rate"] = made.rate
    tree["training"]["total_steps"] = NEVER
    tree["training"]["precision"] = "fp32"
    tree["sync"]["validate_every"] = NEVER
    for key_value in made.sync.split():
        key, _, value = key_value.partition("=")
        tree["sync"][key] = int(value) if value.isdecimal() else value
    return RunSpec.model_validate(tree)


# --- running --------------------------------------------------------------------------------------
def cores_of(slot: int, cores: Sequence[int], at_once: int) -> tuple[list[int], list[int]]:
    """Processors of the hosts, and of the line, of an arm in this slot; shared where too few."""
    own = [cores[(slot * PROCESSORS + number) % len(cores)] for number in range(PROCESSORS)]
    spare = cores[at_once * PROCESSORS :]
    return own[:HOSTS], sorted({own[HOSTS], *spare})


class Study:
    """Makes lines of results, several at once."""

    def __init__(self, out: Path, corpus: KeptCorpus, steps_per_s: float, at_once: int) -> None:
        self._out, self._corpus, self._steps_per_s = out, corpus, steps_per_s
        self._at_once, self._samples = at_once, 12
        self._slots: SimpleQueue[int] = SimpleQueue()
        for slot in range(at_once):
            self._slots.put(slot)
        self._cores = sorted(os.sched_getaffinity(0))
        self._writing = threading.Lock()
        self._common = {
            "command": [Path(sys.argv[0]).stem, *sys.argv[1:]],
            "commit": commit_of(HERE),
            "machine": machine(),
            "congestion_control": congestion_control(),
            "at_once": at_once,
            "alone_steps_per_s": steps_per_s,
        }

    def make(self, all_wanted: Sequence[Made], samples: int) -> None:
        """Make what is not there yet."""
        self._samples = samples
        there = {key_of(line) for line in read_results(self._out)}
        with ThreadPoolExecutor(self._at_once) as pool:
            list(pool.map(self._make, [each for each in all_wanted if each not in there]))

    def _make(self, made: Made) -> None:
        slot = self._slots.get()
        try:
            self._run(made, slot)
        finally:
            self._slots.put(slot)

    def _run(self, made: Made, slot: int) -> None:
        folder = self._out / made.folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        task = self._task(made, folder, slot)
        task.write(folder / "task.json")
        with (folder / "log").open("wb") as log:
            try:
                subprocess.run(
                    [sys.executable, "-m", "bench.time_to_loss_arms", str(folder)],
                    cwd=HERE,
                    env=environment(),
                    stdout=log,
                    stderr=log,
                    timeout=made.seconds + PATIENCE_S,
                    check=True,
                )
            except subprocess.SubprocessError as error:
                print(f"{made.folder} failed: {error}; see {folder / 'log'}", flush=True)
                return
        found = json.loads((folder / "found.json").read_text())
        line = asdict(made)
        line["time"] = datetime.now(UTC).isoformat(timespec="seconds")
        line["cores"] = [list(task.cores), list(task.line_cores)]
        if "accumulate" in found:
            found["batches_a_step"] = found.pop("accumulate")
        with self._writing, (self._out / RESULTS).open("a") as results:
            results.write(json.dumps({**line, **found, **self._common}) + "\n")
        last = found["curve"][-1] if found["curve"] else {}
        print(made.folder, last, found["steps"], flush=True)

    def _task(self, made: Made, folder: Path, slot: int) -> Task:
        cores, line_cores = cores_of(slot, self._cores, self._at_once)
        tokens = self._corpus.whole
        assert tokens is not None, "it was made here"
        return Task(
            arm=made.arm,
            mbit_per_s=made.mbit_per_s,
            seed=made.seed,
            rate=made.rate,
            hosts=HOSTS,
            seconds=made.seconds,
            sample_s=made.seconds / self._samples,
            accumulate=made.accumulate,
            inner_steps=INNER_STEPS,
            spec=spec_of(made, self._steps_per_s).model_dump(mode="json", exclude_none=True),
            corpus=str(tokens),
            vocabulary=self._corpus.manifest.vocabulary_size,
            folder=str(folder),
            cores=cores,
            line_cores=line_cores,
        )


def environment() -> dict[str, str]:
    """The surroundings of all arms: what a daemon gives its trainer."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    ours = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": SPIN_COUNT, "PYTHONPATH": path}
    return {**MALLOC, **os.environ, **ours}


def speed_alone(spec: RunSpec, corpus: KeptCorpus) -> float:
    """Inner steps per second on one processor."""
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, sorted(before)[:1])
    torch.set_num_threads(1)
    module = initial_module(spec, corpus.manifest.vocabulary_size)
    model = FlatModel(module, torch.device("cpu"))
    optimizer = inner_optimizer(model, spec.optimizer, "fp32")
    stepper = Stepper(model, optimizer, "fp32", spec.training.batch_size)
    blocks_BT = corpus.open().validation_blocks(spec.training.batch_size)
    found = measure_steps_per_s(stepper, blocks_BT)
    os.sched_setaffinity(0, before)
    torch.set_num_threads(threads)
    return found


# --- what came of it ------------------------------------------------------------------------------
def read_results(out: Path) -> Iterator[dict[str, Any]]:
    """All lines that were made."""
    with contextlib.suppress(FileNotFoundError), (out / RESULTS).open() as file:
        yield from map(json.loads, file)


def key_of(line: Mapping[str, Any]) -> Made:
    """The name of this line."""
    return Made(**{name: line[name] for name in Made.__dataclass_fields__})


def best_of(point: Mapping[str, float]) -> float:
    """The lower of the losses of the mean weights that the arm has."""
    return min(point["mean"], point.get("outer", point["mean"]))


def seconds_to(curve: Sequence[Mapping[str, float]], loss: float) -> float | None:
    """When the mean weights first were so good, between two looks; None: never."""
    before: Mapping[str, float] | None = None
    for point in curve:
        if best_of(point) <= loss:
            if before is None:
                return point["s"]
            share = (best_of(before) - loss) / (best_of(before) - best_of(point))
            return before["s"] + share * (point["s"] - before["s"])
        before = point
    return None


def rows_of(lines: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each arm on each line, at the rate (and batches) that ended best over the seeds."""
    rows: list[Row] = []
    for mbit_per_s in sorted({line["mbit_per_s"] for line in lines}):
        here = [line for line in lines if line["mbit_per_s"] == mbit_per_s and line["curve"]]
        best = {arm: best_lines([line for line in here if line["arm"] == arm]) for arm in ARMS}
        of_ddp = [each for arm, each in best.items() if arm.startswith("ddp") and each]
        target = min(map(last_loss, of_ddp), default=None)
        rows += [row_of(arm, each, target) for arm, each in best.items() if each]
    return rows


def best_lines(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The seeds of the setting whose last mean loss is lowest."""
    settings: dict[tuple[float, int, str], list[Mapping[str, Any]]] = {}
    for line in lines:
        setting = line["rate"], line["accumulate"], line["sync"]
        settings.setdefault(setting, []).append(line)
    return min(settings.values(), key=last_loss, default=[])


def last_loss(lines: Sequence[Mapping[str, Any]]) -> float:
    """The loss of the mean weights in the end, mean of the seeds."""
    return statistics.fmean(best_of(line["curve"][-1]) for line in lines)


def row_of(arm: str, lines: Sequence[Mapping[str, Any]], target: float | None) -> Row:
    """One arm on one line; `target` is the loss with which the better DDP ends there."""
    ends = [line["curve"][-1] for line in lines]
    times = [None if target is None else seconds_to(line["curve"], target) for line in lines]
    reached = [each for each in times if each is not None]
    return {
        "Mbit/s": lines[0]["mbit_per_s"],
        "arm": arm,
        "rate": lines[0]["rate"],
        "sync": lines[0]["sync"],
        "seeds": len(lines),
        "s": statistics.fmean(end["s"] for end in ends),
        "own loss": statistics.fmean(end["own"] for end in ends),
        OF_MEAN: last_loss(lines),
        TO_DDP: statistics.fmean(reached) if len(reached) == len(times) else None,
        "steps of a host": statistics.fmean(line["steps"][0] for line in lines),
        "batches a step": statistics.fmean(line.get("batches_a_step", 1) for line in lines),
        "averages": statistics.fmean(line["averages"][0] for line in lines),
        "router's core": statistics.fmean(line["router"]["core_share"] for line in lines),
        "late ms": statistics.fmean(line["router"]["late_ms"] for line in lines),
    }


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """Ahead of all others at 20 and 100 Mbit/s, level at 1000, and soon where DDP ends."""
    goals = []
    for mbit_per_s in sorted({row["Mbit/s"] for row in rows}):
        here = [row for row in rows if row["Mbit/s"] == mbit_per_s]
        ours = [row for row in here if row["arm"] in OURS]
        others = [row for row in here if row["arm"] in RIVALS and row["arm"] != "alone"]
        if not (ours and others):
            continue
        gap = min(row[OF_MEAN] for row in ours) - min(row[OF_MEAN] for row in others)
        most = LEVEL if mbit_per_s > MOST_AHEAD_MBIT else 0.0
        goals.append(
            Goal(f"loss less the best other's at {mbit_per_s:g} Mbit/s", gap, at_most=most)
        )
        ends = [row["s"] for row in here if row["arm"].startswith("ddp")]
        passed = [row[TO_DDP] for row in ours if row[TO_DDP] is not None]
        if mbit_per_s == MOST_AHEAD_MBIT and ends and passed:
            times = max(ends) / min(passed)
            goals.append(Goal("times sooner where DDP ends, 100 Mbit/s", times, at_least=5.0))
    return goals


# --- the command ----------------------------------------------------------------------------------
def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for everything")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--lines", nargs="+", type=float, default=list(LINES_MBIT), metavar="MBIT")
    parser.add_argument("--seconds", type=float, default=120.0, help="of training, of each arm")
    parser.add_argument("--samples", type=int, default=12, help="looks at the weights")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--rates", nargs="+", type=float, default=[RATE], help="Muon's")
    parser.add_argument(
        "--accumulate", nargs="+", type=int, default=[0], help="batches of DDP's step; 0: by itself"
    )
    parser.add_argument(
        "--sync", nargs="+", default=[], metavar="KEY=VALUE", help="of [sync], for real daemons"
    )
    parser.add_argument("--at-once", type=int, default=1, help="arms that run at the same time")
    parser.add_argument("--check", action="store_true", help="say what can be measured here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")
    return parser.parse_args(arguments)


def faults(chosen: argparse.Namespace) -> Iterator[str]:
    """Why nothing can be measured here, or not so, in sentences."""
    at_once = chosen.at_once
    try:
        for made in wanted(chosen):
            spec_of(made, 1.0)
    except ValueError as error:
        yield f"no run can be made of these options: {error}"
    if (reason := missing()) is not None:
        cure = "; mkdir -p /dev/net && mknod /dev/net/tun c 10 200" if str(DEVICE) in reason else ""
        yield f"hosts with lines of their own are needed: {reason}{cure}"
    if shutil.which("taskset") is None:
        yield "there is no taskset (package util-linux), which gives each host its processor"
    if at_once < 1:
        yield f"--at-once {at_once}: at least one arm runs"


def describe(at_once: int) -> str:
    """How lines are shaped and processors shared, in a sentence."""
    cores, needed = len(os.sched_getaffinity(0)), at_once * PROCESSORS
    shared = "" if cores >= needed else "; HOSTS SHARE THEM, so the figures say nothing"
    return (
        f"lines are shaped by bench/router, a process, for all arms alike ({1e3 * DELAY_S:g} ms one"
        f" way); {cores} processors for {needed}{shared}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and publish.

    Args:
        arguments: of the command line; None are the process's own.
    """
    chosen = options(arguments)
    if found := list(faults(chosen)):
        print("\n".join(f"time_to_loss: {each}" for each in found), file=sys.stderr)
        sys.exit(WRONG_USAGE)
    print(describe(chosen.at_once), flush=True)
    if chosen.check:
        return
    out = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    all_wanted = wanted(chosen)
    spec = spec_of(all_wanted[0], 1.0)
    corpus = prepare_corpus(spec, out / "cache")
    study = Study(out, corpus, speed_alone(spec, corpus), chosen.at_once)
    study.make(all_wanted, chosen.samples)
    report = Report("time_to_loss", "Loss after the same time on four hosts with thin lines")
    lines = [line for line in read_results(out) if line["seconds"] == chosen.seconds]
    report.rows = rows_of(lines)
    report.goals = goals_of(report.rows)
    report.settings = {"seconds": chosen.seconds, "delay_s": DELAY_S, "hosts": HOSTS}
    report.publish(chosen.json)
    if len({key_of(line) for line in lines} & {*all_wanted}) < len(all_wanted):
        sys.exit("time_to_loss: some arms failed, as said above")


if __name__ == "__main__":
    main()
