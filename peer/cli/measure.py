"""`loco-peer measure`: this machine's row for the table that `loco-peer plan` reads.

It times the trainer's own step on random tokens, without averages and daemon. Sequences at a time
are doubled while they fit and a step stays short. The time of the run's whole batch follows: the
optimizer is timed by itself, because it works once however large the batch is.
"""

import csv
import io
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import psutil
import torch

from peer.options.config import ConfigError
from peer.process.bottom_line import shown
from peer.training.device import Precision, choose_device, choose_precision, is_out_of_memory
from peer.training.model import FlatModel, initial_module
from peer.training.optimizer import inner_optimizer
from peer.training.step import Stepper, fit_micro_batch, largest_power_of_two
from protocol.pipeline.question import TRAINING_PER_FORWARD
from protocol.pipeline.tables import OPTIONAL_PEER_COLUMNS, PEER_COLUMNS, USUAL_SLOTS
from protocol.run.needs import parameters_of, vocabulary_of
from protocol.run.run_spec import RunSpec
from protocol.schedule.progress import TaskProgress, Tell, nobody

PARTS_OF_TIME: Final = 8
"""A step is doubled while it takes less than this part of the given time."""
COLUMNS: Final = ("peer", "location", "compute_s", "slots", "price_per_hour", "memory_gb")


@dataclass(frozen=True, slots=True)
class Measured:
    """The speed of one machine, alone.

    Attributes:
        sequences: that went through the model at once.
        forward_s: of one microbatch of the run's through the whole model.
        memory_bytes: of the device.
    """

    device: str
    precision: Precision
    sequences: int
    tokens_per_s: float
    forward_s: float
    memory_bytes: int


def measure_machine(
    spec: RunSpec,
    device_name: str | None,
    seconds: float,
    tell: Tell = nobody,
    *,
    clock_s: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Time the trainer's step for so many seconds.

    Raises:
        ConfigError: the device is not here, or has no room for one sequence.
        InvalidRunSpec: the model is a checkpoint's, which is not read here.
    """
    parameters_of(spec)
    try:
        device = choose_device(device_name or "auto")
    except ValueError as error:
        raise ConfigError(f"--device {device_name}: {error}") from error
    precision = choose_precision(spec.training.precision, device)
    tell(TaskProgress("making the model"))
    module = initial_module(spec, vocabulary_of(spec))
    end = 0 if spec.data.mask_documents else None
    model = FlatModel(module, device, compile=spec.training.compile, document_end=end)
    stepper = Stepper(model, inner_optimizer(model, spec.optimizer, precision), precision, 1)
    trial = _Trial(spec, model, stepper, tell, clock_s)
    try:
        sequences, step_s = trial.widest(seconds)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise ConfigError(f"{device}: not even one sequence of this model fits") from error
        raise
    optimizer_s = min(trial.optimizer_s(), step_s)
    batch = spec.training.batch_size
    whole_s = (step_s - optimizer_s) * batch / sequences + optimizer_s
    tokens_per_s = batch * spec.model.context_length / whole_s
    microbatch = min(spec.microbatch_sequences, batch) * spec.model.context_length
    forward_s = microbatch / tokens_per_s / TRAINING_PER_FORWARD
    return Measured(
        str(device), precision, sequences, tokens_per_s, forward_s, _memory_bytes(device)
    )


@dataclass(frozen=True, slots=True)
class _Trial:
    spec: RunSpec
    model: FlatModel
    stepper: Stepper
    tell: Tell
    clock_s: Callable[[], float]

    def widest(self, seconds: float) -> tuple[int, float]:
        """Sequences at once, and the median seconds of such a step."""
        end_s, size = self.clock_s() + seconds, 1
        most = largest_power_of_two(self.spec.training.batch_size)
        self.tell(TaskProgress("the first step" + ", which compiles" * self.model.is_compiled))
        fit_micro_batch(self.stepper, self._blocks(size))
        step_s = self._step_s(size)
        while size < most and step_s < seconds / PARTS_OF_TIME:
            self.tell(TaskProgress(f"{2 * size} sequences at once"))
            try:
                self._step_s(2 * size)
                step_s = self._step_s(2 * size)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                torch.cuda.empty_cache()
                if self.stepper.fewest < 2 * size or not self.model.recompute():
                    break
            else:
                size *= 2
        found = [step_s]
        while (left_s := end_s - self.clock_s()) > 0:
            self.tell(TaskProgress("timing steps", seconds - left_s, seconds, ""))
            found.append(self._step_s(size))
        return size, float(np.median(found))

    def optimizer_s(self) -> float:
        step = self.stepper.optimizer.step
        return min(self._timed(lambda: float(step(self._rate))) for _ in range(3))

    @property
    def _rate(self) -> float:
        return self.spec.optimizer.learning_rate

    def _blocks(self, size: int) -> npt.NDArray[np.int64]:
        shape = size, self.spec.model.context_length + 1
        draws = np.random.default_rng(self.spec.seed)
        return draws.integers(0, vocabulary_of(self.spec), shape, dtype=np.int64)

    def _step_s(self, size: int) -> float:
        blocks, self.stepper.micro_batch = self._blocks(size), size
        return self._timed(lambda: float(self.stepper.step(blocks, self._rate).loss))

    def _timed(self, task: Callable[[], float]) -> float:
        began_s = self.clock_s()
        task()  # its number is read, so a GPU is done
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return self.clock_s() - began_s


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def row_of(measured: Measured, name: str | None, location: str, price: str) -> dict[str, str]:
    return {
        "peer": name or socket.gethostname(),
        "location": location,
        "compute_s": f"{measured.forward_s:.4g}",
        "slots": str(USUAL_SLOTS),
        "price_per_hour": price,
        "memory_gb": f"{measured.memory_bytes / 1e9:.1f}",
    }


def add_row(path: Path, row: dict[str, str]) -> None:
    """Add a line to a table, or make the table.

    Raises ConfigError: the table has other columns, or cannot be written.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        rows = [n for n, line in enumerate(lines) if line.strip() and not line.startswith("#")]
        columns = [each.strip() for each in lines[rows[0]].split(",")] if rows else list(COLUMNS)
        known = {*PEER_COLUMNS, *OPTIONAL_PEER_COLUMNS}
        if not {"peer", "price_per_hour"} <= set(columns) <= known:
            raise ConfigError(
                f"{path}: its first line must name peer, location and price_per_hour, and may name"
                f" {', '.join(sorted(known - {'peer', 'location', 'price_per_hour'}))}; it is"
                f" {lines[rows[0]]}"
            )
        if not rows:
            lines.append(",".join(columns))
        elif "compute_s" not in columns:  # a table of cards by name
            columns.append("compute_s")
            for number in rows:
                lines[number] += ",compute_s" if number == rows[0] else ","
        path.write_text("\n".join([*lines, line_of(row, columns)]) + "\n", encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def line_of(row: dict[str, str], columns: list[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow([row.get(column, "") for column in columns])
    return text.getvalue()


def show_measured(
    spec: RunSpec,
    device: str | None,
    threads: int | None,
    seconds: float,
    row: tuple[str | None, str, str],
    peers: Path | None,
) -> None:
    """Measure, and print the row or add it to a table. Raises ConfigError, InvalidRunSpec."""
    if threads is not None:
        torch.set_num_threads(threads)
    with shown("measuring") as tell:
        measured = measure_machine(spec, device, seconds, tell)
    filled = row_of(measured, *row)
    print(
        f"# {spec.name} on {measured.device} in {measured.precision},"
        f" {torch.get_num_threads()} threads: {measured.tokens_per_s:,.0f} tokens/s alone, with"
        f" {measured.sequences} sequences at once"
    )
    if peers is not None:
        add_row(peers, filled)
        print(f"added to {peers}: {line_of(filled, list(COLUMNS))}")
        return
    print(",".join(COLUMNS), line_of(filled, list(COLUMNS)), sep="\n")
