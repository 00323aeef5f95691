"""Is averaging in the way of training?

Two answers.

Speed. A real trainer process, on a core of its own, trains the demo's model. Beside it two peers
(bench/exchange_peer.py, each with a p2pd of its own, on the other cores) exchange vectors of
VECTOR_BYTES with each other, one after another without a pause. Tokens per second with and
without them, in turns; medians. It shows what is left to share when cores are not: caches, memory,
the kernel.

Pause. At the boundary of a round the trainer takes a snapshot, codes it and digests it, and later
applies the move of the slow weights; for that long it does not train. Timed on the trainer's own
code (peer/training/fragments.py), one thread, and given as a share of a round of ROUND_S.

    python -m bench.overlap [--full] [--json FILE]
"""

import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import psutil
import torch
import trio

from bench.children import Child, start_child
from bench.report import Goal, Report, options
from peer.codec import get_codec
from peer.training.child_process import SpareChild, spare_child
from peer.training.corpus.folder import prepare_corpus
from peer.training.fragments import FragmentDeltas
from peer.training.messages import Failed, Load, RoundClosed, TrainerSettings, TrainRound
from peer.training.model import FlatModel
from peer.training.ports import Trainer
from peer.training.process import ProcessTrainer, create_model, trainer_starter
from peer.training.shared import CodeRegions, SharedVector, code_memory
from protocol.fragment.fragments import Fragment
from protocol.run.run_spec import RunSpec
from protocol.trainer_messages import ONE_CHUNK, FragmentSent, Merge

VECTOR_BYTES: Final = 64 * 10**6
ROUND_S: Final = 30.0
LEAST_SPEED: Final = 0.97
LARGEST_PAUSE: Final = 0.01
PEER_ID: Final = "bench"
MEMBERS: Final = ((PEER_ID, 1),)
PAUSED_PARAMETERS: Final = 64 * 2**20
FULL_PAUSED_PARAMETERS: Final = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: how long is looked.

    Attributes:
        turns: rounds with exchanges, and as many without.
        inner_steps: of a round.
        parameters: of the vector whose pause is timed.
    """

    turns: int
    inner_steps: int
    parameters: int


SHORT: Final = Setting(turns=7, inner_steps=40, parameters=PAUSED_PARAMETERS)
FULL: Final = Setting(turns=21, inner_steps=100, parameters=FULL_PAUSED_PARAMETERS)


def main() -> None:
    arguments = options(__doc__).parse_args()
    setting = FULL if arguments.full else SHORT
    found = Report("overlap", "The trainer beside exchanges, and its pause at the boundary")
    found.settings = {"turns": setting.turns, "inner_steps": setting.inner_steps}
    trio.run(measure_speed, setting, found)
    measure_pause(setting, found)
    found.publish(arguments.json)


# --- speed ----------------------------------------------------------------------------------------
async def measure_speed(setting: Setting, found: Report) -> None:
    """Tokens per second, with and without exchanges beside."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("bench.overlap needs two cores: one is the trainer's own")
    with tempfile.TemporaryDirectory(prefix="loco") as folder:
        psutil.Process().cpu_affinity(cores[:-1])  # children are born so
        arguments = (folder, str(VECTOR_BYTES))
        async with (
            start_child("bench.exchange_peer", *arguments, "a") as a,
            start_child("bench.exchange_peer", *arguments, "b") as b,
            open_trainer(Path(folder), cores[-1]) as trainer,
        ):
            pair = ExchangingPair(a, b)
            await pair.connect()
            rates = await _in_turns(trainer, pair, setting)
        psutil.Process().cpu_affinity(cores)
    alone, beside = (statistics.median(rates[kind]) for kind in ("alone", "beside"))
    for kind, rate in (("alone", alone), ("beside exchanges", beside)):
        found.rows.append(
            {"what": f"steps per second, {kind}", "value": rate, "share": rate / alone}
        )
    found.notes.append(f"{pair.exchanges} exchanges of {VECTOR_BYTES / 1e6:.0f} MB meanwhile")
    found.goals.append(Goal("speed beside exchanges", beside / alone, at_least=LEAST_SPEED))


class ExchangingPair:
    """Two peers that can exchange vectors without a pause."""

    def __init__(self, a: Child, b: Child) -> None:
        self._a, self._b = a, b
        self._ids: tuple[str, str] = ("", "")
        self.exchanges = 0

    async def connect(self) -> None:
        """Let them know each other, and exchange once."""
        hello = await self._b.ask("hello")
        self._ids = (await self._a.ask("hello"))["peer_id"], hello["peer_id"]
        await self._a.ask("connect", peer_id=hello["peer_id"], addresses=hello["addresses"])
        await self._exchange()

    async def go_on(self, stop: trio.Event) -> None:
        """Exchange until told to stop; the one under way is finished."""
        while not stop.is_set():
            await self._exchange()

    async def _exchange(self) -> None:
        self.exchanges += 1
        async with trio.open_nursery() as nursery:
            for child, other in ((self._a, self._ids[1]), (self._b, self._ids[0])):
                ask = partial(child.ask, "gossip", round=self.exchanges, peer_id=other)
                nursery.start_soon(ask)


async def _in_turns(
    trainer: Trainer, pair: ExchangingPair, setting: Setting
) -> dict[str, list[float]]:
    """Steps per second of each round, by what went on beside it."""
    rates: dict[str, list[float]] = {"alone": [], "beside": []}
    await _train_round(trainer, 0, setting.inner_steps)  # warms up
    for turn in range(setting.turns):
        rates["alone"].append(await _train_round(trainer, 2 * turn + 1, setting.inner_steps))
        stop = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.go_on, stop)
            rates["beside"].append(await _train_round(trainer, 2 * turn + 2, setting.inner_steps))
            stop.set()
    return rates


async def _train_round(trainer: Trainer, round_: int, inner_steps: int) -> float:
    """Steps per second of one round."""
    start_step = float(round_ * inner_steps)
    await trainer.send(TrainRound(round_, inner_steps, MEMBERS, 0, 0, start_step, 1.0))
    while not isinstance(event := await trainer.receive(), RoundClosed):
        if isinstance(event, Failed):
            raise SystemExit(f"the trainer failed: {event.detail}")
        if isinstance(event, FragmentSent):
            cycle = event.cycle
    await trainer.send(Merge(0, cycle, ONE_CHUNK, ()))
    return event.steps / event.seconds


@asynccontextmanager
async def open_trainer(folder: Path, core: int) -> AsyncIterator[Trainer]:
    """A real trainer of the demo's model, on this core alone."""
    spec = RunSpec.model_validate({"training": {"total_steps": 10**6, "batch_size": 8}})
    corpus = await trio.to_thread.run_sync(prepare_corpus, spec, folder)
    settings = TrainerSettings(
        spec=spec.to_bytes(),
        peer_id=PEER_ID,
        corpus_path=str(corpus.folder),
        vocabulary_size=corpus.manifest.vocabulary_size,
        device="cpu",
        threads=1,
    )
    weights = folder / "weights.f32"
    async with spare_child(settings.threads) as spare:
        layout = (await create_model(settings, weights, spare)).layout
    with SharedVector(layout.padded_parameters) as slow:
        slow.array[:] = np.fromfile(weights, "<f4")
        async with trainer_starter(settings, slow, SpareChild(settings.threads))(
            slow.array, None
        ) as trainer:
            assert isinstance(trainer, ProcessTrainer)
            await trainer.receive()  # Ready
            _pin(trainer.process_id, core)
            await trainer.send(Load())
            yield trainer


def _pin(process_id: int, core: int) -> None:
    """Pin every thread of the process to one core."""
    for thread in psutil.Process(process_id).threads():
        os.sched_setaffinity(thread.id, [core])


# --- pause ----------------------------------------------------------------------------------------
def measure_pause(setting: Setting, found: Report) -> None:
    """Seconds that the trainer does not train at a boundary."""
    module = torch.nn.Module()
    module.register_parameter("theta", torch.nn.Parameter(torch.randn(setting.parameters)))
    model = FlatModel(module, torch.device("cpu"))
    codec = get_codec("int8")
    child = CodeRegions(code_memory(), (codec.code_bytes(setting.parameters),), writable=True)
    whole = Fragment(0, ((0, model.theta_P.numel()),), ())
    deltas = FragmentDeltas(model, model.theta_P.clone(), child, codec, [whole])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    take_s, apply_s = [], []
    for round_ in range(setting.turns):
        began_s = time.perf_counter()
        deltas.send(0, round_)
        taken_s = time.perf_counter()
        deltas.merge(0)
        take_s.append(taken_s - began_s)
        apply_s.append(time.perf_counter() - taken_s)
    torch.set_num_threads(threads)
    parts = {"snapshot, encode, digest": take_s, "decode, apply": apply_s}
    medians = {what: statistics.median(times_s) for what, times_s in parts.items()}
    size = f"{setting.parameters / 1e6:.0f}M parameters"
    for what, seconds in medians.items():
        name = f"pause, seconds: {what} ({size})"
        found.rows.append({"what": name, "value": seconds, "share": seconds / ROUND_S})
    pause = sum(medians.values()) / ROUND_S
    goal = f"pause of {size} as a share of a round of {ROUND_S:.0f} s"
    found.goals.append(Goal(goal, pause, at_most=LARGEST_PAUSE))


if __name__ == "__main__":
    main()
