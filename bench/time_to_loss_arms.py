"""One arm of bench/time_to_loss.py: its hosts, from start to the losses of what they trained.

    python -m bench.time_to_loss_arms FOLDER

FOLDER/task.json says what to do (Task); FOLDER/found.json says what came of it.

Each host is a network namespace behind a line of its own (bench/router) and has a processor of its
own, which all that it runs shares; router and this process have another. When all hosts could
train, the clock begins: hosts that train over gloo are told so, and the trainers of daemons, which
were stopped (SIGSTOP) as soon as they had started, go on.

Losses are measured after the clock has ended. Hosts over gloo write their weights down between two
steps. The slow weights of a daemon, which are what it would export, are read from its memory
without its doing anything.
"""

import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import psutil
import torch
import trio

from demo.plan import to_toml
from peer.training.corpus.blocks import open_file
from peer.training.model import FlatModel, initial_module
from peer.training.optimizer import inner_optimizer
from peer.training.step import Stepper
from protocol.run.run_spec import RunSpec

from .children import start_command
from .link_table import Link, LinkTable
from .real_peers import COMMAND, HERE, READY_S, PeerFailed, RealPeer, now_s, started, trainers_of
from .router.network import RoutedNetwork, routed_network

OURS: Final = {"pairs": "noloco", "fragments": "diloco"}
"""Arms of real daemons, and their way of averaging."""
RIVALS: Final = ("ddp", "ddp-bf16", "diloco", "alone")
ARMS: Final = (*OURS, *RIVALS)
DELAY_S: Final = 0.04
BUFFER_BYTES: Final = 1 << 25
"""Largest window of TCP: three times what the fastest line has in flight."""
MOST_BATCHES: Final = 32
MOST_WARMUP: Final = 60
JUDGED_BLOCKS: Final = 128
JUDGED_AT_ONCE: Final = 64
LATE_S: Final = 15.0
"""A step that has begun in time may last so long."""
START_POLL_S: Final = 0.01
SLOW_WEIGHTS: Final = "loco-slow-weights"
TRAINER_STARTED: Final = "TrainerStarted"
TRAINER_DIED: Final = "TrainerDied"
AVERAGED: Final = ("RoundAveraged", "FragmentReturned")
Vector = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class Task:
    """The work of one arm.

    Attributes:
        spec: of the run, as plain values.
        corpus: file of all tokens.
        seconds: from the moment when all hosts can train.
        sample_s: time between two looks at the weights.
        accumulate: batches of DDP's step; 0 is as many as the line takes.
        inner_steps: H of DiLoCo over gloo.
        cores: of each host.
        line_cores: of router and measurement.
    """

    arm: str
    mbit_per_s: float
    seed: int
    rate: float
    hosts: int
    seconds: float
    sample_s: float
    accumulate: int
    inner_steps: int
    spec: Mapping[str, Any]
    corpus: str
    vocabulary: int
    folder: str
    cores: Sequence[int]
    line_cores: Sequence[int]

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def warmup_of(steps: float) -> int:
    """Warm-up of a run of so many steps."""
    return min(MOST_WARMUP, int(steps) // 10)


def most_batches(step_s: float, sum_s: float) -> int:
    """Batches that take the processor as long as their sum takes the line."""
    return min(MOST_BATCHES, max(1, round(sum_s / step_s)))


def lines_of(task: Task) -> LinkTable:
    """Each host sends over a line of this rate, wherever to."""
    rate = 1e6 * task.mbit_per_s
    hosts = range(task.hosts)
    links = {(a, b): Link(DELAY_S, rate) for a in hosts for b in hosts if a != b}
    return LinkTable(links, [rate] * task.hosts)


@contextmanager
def network_of(task: Task) -> Iterator[RoutedNetwork]:
    """Raises NetworkFailed."""
    with routed_network(lines_of(task)) as network:
        for host in range(task.hosts):
            for buffer in ("tcp_rmem", "tcp_wmem"):
                network.set(host, f"net/ipv4/{buffer}", f"4096 131072 {BUFFER_BYTES}")
        yield network


def command_on(task: Task, network: RoutedNetwork, host: int, command: Sequence[str]) -> list[str]:
    """The command that runs the given one on a host, on its processor."""
    return network.command(host, ["taskset", "-c", f"{task.cores[host]}", *command])


# --- over gloo ------------------------------------------------------------------------------------
async def run_rivals(task: Task, network: RoutedNetwork) -> dict[str, Any]:
    """Train for the time of the task."""
    module = [sys.executable, "-m", "bench.time_to_loss_rival", f"{task.folder}/task.json"]
    hosts = range(1 if task.arm == "alone" else task.hosts)
    answers: dict[int, dict[str, Any]] = {}
    async with AsyncExitStack() as stack:
        children = [
            await stack.enter_async_context(
                start_command(
                    f"{task.arm} {host}",
                    command_on(task, network, host, [*module, f"{host}"]),
                )
            )
            for host in hosts
        ]

        async def ask(host: int, what: str) -> None:
            answers[host] = await children[host].ask(what, address=network.address(0))

        async def ask_all(what: str) -> list[dict[str, Any]]:
            async with trio.open_nursery() as nursery:
                for host in hosts:
                    nursery.start_soon(ask, host, what)
            return [answers[host] for host in hosts]

        chosen = await ask_all("prepare")
        before = network.statistics()
        await ask_all("train")
        await trio.sleep(task.seconds)
        router = line_figures(before, network.statistics(), task.seconds)
        reports = await ask_all("report")
        with trio.move_on_after(LATE_S):
            while not _have_ended(task, reports):
                await trio.sleep(0.2)
                reports = await ask_all("report")
    steps = [each["steps"] for each in reports]
    batches = chosen[0]["accumulate"]
    return {
        "samples": [sample for each in reports for sample in each["samples"]],
        "steps": steps,
        "batches": sum(steps) * batches,
        "averages": [each["sums"] for each in reports],
        "summing_s": [each["summing_s"] for each in reports],
        "head_start_steps": [0 for _ in hosts],
        "router": router,
        **chosen[0],
    }


def _have_ended(task: Task, reports: Sequence[Mapping[str, Any]]) -> bool:
    judged = reports[:1] if task.arm.startswith("ddp") else reports
    return all(each["samples"] and each["samples"][-1]["s"] >= task.seconds for each in judged)


def line_figures(before: Any, after: Any, seconds: float) -> dict[str, Any]:
    """The router's work meanwhile, and its cost."""
    packets = max(1, after.packets - before.packets)
    sent = sum(after.sent_bytes.values()) - sum(before.sent_bytes.values())
    return {
        "core_share": (after.cpu_s - before.cpu_s) / seconds,
        "late_ms": 1e3 * (after.late_s - before.late_s) / packets,
        "dropped": after.dropped - before.dropped,
        "refused": after.refused - before.refused,
        "sent_mbytes": sent / 1e6,
    }


# --- ours -----------------------------------------------------------------------------------------
def run_ours(task: Task, network: RoutedNetwork) -> dict[str, Any]:
    """Let four daemons train for the time of the task."""
    folder = Path(task.folder)
    spec_path = folder / "run.toml"
    spec_path.write_text(to_toml(RunSpec.model_validate(task.spec)))
    peers = [
        RealPeer(
            folder / f"peer{host}",
            HERE,
            lambda command, host=host: command_on(task, network, host, command),
            program=(str(loco_peer(folder)),),
            environment={
                "LOCO_DATA": task.corpus,
                "LOCO_CHECKPOINT_EVERY": "0",
                "PYTHONPATH": os.environ["PYTHONPATH"],
            },
        )
        for host in range(task.hosts)
    ]
    with ThreadPoolExecutor(task.hosts) as pool, ExitStack() as stack:
        stopped = [pool.submit(_stopped_trainer, peer) for peer in peers]
        stack.enter_context(started(peers, spec_path, lambda host: f"{network.address(host)}:0"))
        trainers = [each.result() for each in stopped]
        time.sleep(1.0)  # until what they have said is written
        head_start = [peer.status()["step"] for peer in peers]
        before, began_s, began = network.statistics(), now_s(), time.perf_counter()
        for trainer in trainers:
            trainer.send_signal(signal.SIGCONT)
        samples = _watch(task, peers, began)
        router = line_figures(before, network.statistics(), task.seconds)
        steps = [_steps_of(peer, began_s) for peer in peers]
        averages = [_count(peer, AVERAGED, began_s) for peer in peers]
        deaths = sum(_count(peer, (TRAINER_DIED,), 0.0) for peer in peers)
        lengths = [peer.status().get("chosen_inner_steps") for peer in peers]
    return {
        "samples": samples,
        "steps": steps,
        "batches": sum(steps),
        "averages": averages,
        "head_start_steps": head_start,
        "trainers_died": deaths,
        "router": router,
        "warmup_steps": task.spec["optimizer"]["warmup_steps"],
        "inner_steps": lengths,
    }


def loco_peer(folder: Path) -> Path:
    """The command of a user; where the package is not installed, the same few lines."""
    if COMMAND.exists():
        return COMMAND
    path = folder / "loco-peer"
    path.write_text("import sys\n\nfrom peer.cli import main\n\nsys.exit(main())\n")
    return path


def _stopped_trainer(peer: RealPeer) -> psutil.Process:
    """Stop its trainer as soon as there is one that could train."""
    end_s = time.monotonic() + 2 * READY_S
    while not any(event["event"] == TRAINER_STARTED for event in peer.events()):
        if peer.exit_code() is not None or time.monotonic() > end_s:
            raise PeerFailed(f"{peer.home.root} started no trainer")
        time.sleep(START_POLL_S)
    daemon = peer.daemon()
    for trainer in trainers_of(daemon) if daemon else []:
        trainer.send_signal(signal.SIGSTOP)
        return trainer
    raise PeerFailed(f"{peer.home.root} has no process that trains")


def _watch(task: Task, peers: Sequence[RealPeer], began: float) -> list[dict[str, Any]]:
    """Look at all slow weights again and again."""
    samples = []
    for number in range(1, round(task.seconds / task.sample_s) + 1):
        time.sleep(max(0.0, began + number * task.sample_s - time.perf_counter()))
        vectors = [_slow_weights(peer) for peer in peers]
        passed_s = time.perf_counter() - began
        for host, weights_P in enumerate(vectors):
            path = Path(task.folder) / f"{number:03d}-replica-{host}.npy"
            np.save(path, weights_P)
            samples.append({"s": passed_s, "number": number, "kind": "replica", "path": str(path)})
    return samples


def _slow_weights(peer: RealPeer) -> Vector:
    """A copy of what lies in the daemon's memory, in which an outer step may be under way."""
    peer.check("while it was watched")
    daemon = peer.daemon()
    assert daemon is not None, "it has not ended"
    for link in Path(f"/proc/{daemon.pid}/fd").iterdir():
        if SLOW_WEIGHTS in str(link.readlink()):
            return np.fromfile(link, np.float32)
    raise PeerFailed(f"{peer.home.root}: no {SLOW_WEIGHTS} among the daemon's files")


def _steps_of(peer: RealPeer, since_s: float) -> int:
    """Inner steps of the rounds that were closed since."""
    closed = (e for e in peer.events() if e["event"] == "RoundClosed" and e["time"] >= since_s)
    return sum(event["steps"] for event in closed)


def _count(peer: RealPeer, names: Sequence[str], since_s: float) -> int:
    return sum(e["event"] in names and e["time"] >= since_s for e in peer.events())


# --- losses ---------------------------------------------------------------------------------------
def curve_of(
    samples: Sequence[Mapping[str, Any]], loss_of: Callable[[Vector], float]
) -> list[dict[str, float]]:
    """For each look: the mean loss of the replicas, that of their mean, and DiLoCo's outer one."""
    looks: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for sample in samples:
        looks[sample["number"]].append(sample)
    curve = []
    for number in sorted(looks):
        replicas = [each for each in looks[number] if each["kind"] == "replica"]
        vectors = [np.load(each["path"]) for each in replicas]
        own = [loss_of(weights_P) for weights_P in vectors]
        point = {
            "s": float(np.mean([each["s"] for each in replicas])),
            "own": float(np.mean(own)),
            "mean": loss_of(np.mean(vectors, axis=0)) if len(vectors) > 1 else own[0],
        }
        for each in looks[number]:
            if each["kind"] == "outer":
                point["outer"] = loss_of(np.load(each["path"]))
        curve.append(point)
    return curve


class Judge:
    """Measures the loss of the run's held-out blocks."""

    def __init__(self, task: Task) -> None:
        spec = RunSpec.model_validate(task.spec)
        corpus = open_file(Path(task.corpus), spec.model.context_length, JUDGED_BLOCKS)
        self._blocks_BT = corpus.validation_blocks(JUDGED_BLOCKS)
        self._model = FlatModel(initial_module(spec, task.vocabulary), torch.device("cpu"))
        optimizer = inner_optimizer(self._model, spec.optimizer, "fp32")
        self._stepper = Stepper(self._model, optimizer, "fp32", JUDGED_AT_ONCE)

    def loss_of(self, weights_P: Vector) -> float:
        """Nats per token."""
        self._model.theta_P.copy_(torch.from_numpy(weights_P))
        return self._stepper.loss_of(self._blocks_BT)


def main(folder: Path) -> None:
    """Run the arm in this folder."""
    task = Task.read(folder / "task.json")
    os.sched_setaffinity(0, task.line_cores)
    with network_of(task) as network:
        ours = task.arm in OURS
        found = run_ours(task, network) if ours else trio.run(run_rivals, task, network)
    os.sched_setaffinity(0, {*task.cores, *task.line_cores})
    torch.set_num_threads(len({*task.cores}))
    samples = found.pop("samples")
    found["curve"] = curve_of(samples, Judge(task).loss_of)
    for sample in samples:
        Path(sample["path"]).unlink()
    (folder / "found.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
