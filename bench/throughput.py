"""How many tokens per second does the trainer train, beside a plain loop, and how busy is the chip?

Two loops train the same model from the same weights on the same tokens (throughput_loops.py), in
one precision, with one micro-batch, both copies in the device's memory:

    ours     the trainer's inner step: one flat vector for weights and gradients, fused AdamW on it,
             clipping on it; numbers are read a step later. Without what a round adds (snapshot,
             coding, the move of the slow weights: bench/overlap.py)
    plain    the transformers model, torch.optim.AdamW (fused), clip_grad_norm_

and in between a large matrix product is timed, in the same precision: that is the *peak*, what this
machine gave at that time, not what its maker says. In each turn all three run one after the other,
the order of the loops changing from turn to turn. Medians over the turns; `of plain` and MFU are
medians of the turns' own ratios, so that a machine that others use too does not favour one.

MFU = tokens/s * FLOPs per token / peak. FLOPs of a token are those of the model alone, forward and
backward (PaLM, arXiv 2204.02311, appendix B): 6 for each weight of a matrix product (the output
layer's among them, tied or not; the embedding's look-up is none) and 12 L d T for attention, as if
it were not causal. What is computed twice, as in checkpointing, would not count.

Our loop trains with AdamW, and in a row of its own with Muon; the plain one keeps AdamW.
`optimizer` is the share of a step of ours that clipping and the optimizer take, and `at full batch`
what that would be with the preset's own batch, where it is cut: forward and backward grow with the
batch, the optimizer does not.

On a CPU seconds are the processor's and not the clock's, so that other programs on the machine do
not count, and the C library keeps freed memory as the trainer's does (child_process.py).

Presets are those of `loco-peer new`. On a GPU they are whole; on a CPU all but `demo` are cut to
CPU_LAYERS layers, CPU_CONTEXT tokens, CPU_BATCH sequences and CPU_VOCABULARY tokens, and keep their
widths. Tokens are random.

    python -m bench.throughput [--device cpu|cuda] [--preset NAME ...] [--optimizer NAME ...]
        [--full] [--json FILE]
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np
import torch
from transformers import LlamaConfig

from peer.cli.new import OPTIMIZERS, PRESETS, preset_spec
from peer.training.child_process import MALLOC
from peer.training.device import choose_device, choose_precision
from peer.training.model import initial_module, model_config
from peer.training.step import starting_micro_batch
from protocol.run.run_spec import RunSpec

from .report import Goal, Report, Row, options
from .throughput_loops import Blocks, OurLoop, PlainLoop, Way, fit_together, matmul

CPU_LAYERS: Final = 2
CPU_CONTEXT: Final = 128
CPU_BATCH: Final = 2
CPU_VOCABULARY: Final = 2048
CPU_WHOLE: Final = ("demo",)
VOCABULARIES: Final = {"demo": 256}
GPT2_VOCABULARY: Final = 50257
WARM_UPS: Final = 2
LEAST_OF_PLAIN: Final = 0.98
MOST_OF_STEP: Final = 0.03
"""Share of a step that the optimizer may take on a GPU."""


@dataclass(frozen=True, slots=True)
class Size:
    """How long is measured.

    Attributes:
        steps: of a loop in a turn.
        matrix: rows of the product that stands for the peak; it is done `products` times.
    """

    turns: int
    steps: int
    matrix: int
    products: int


SIZES: Final = {
    ("cpu", False): Size(turns=9, steps=1, matrix=1536, products=4),
    ("cpu", True): Size(turns=25, steps=4, matrix=2048, products=8),
    ("cuda", False): Size(turns=5, steps=5, matrix=8192, products=20),
    ("cuda", True): Size(turns=25, steps=10, matrix=8192, products=50),
}


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds of one turn."""

    ours_s: float
    plain_s: float
    peak_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """What was done in a turn: tokens by each loop, FLOPs of a token, FLOPs of the product."""

    tokens: int
    flops_per_token: float
    peak_flops: float


def cut(spec: RunSpec) -> RunSpec:
    """A preset as it is measured on a CPU."""
    tree = spec.model_dump()
    tree["model"]["num_layers"] = min(spec.model.num_layers, CPU_LAYERS)
    tree["model"]["context_length"] = min(spec.model.context_length, CPU_CONTEXT)
    tree["training"]["batch_size"] = min(spec.training.batch_size, CPU_BATCH)
    return RunSpec.model_validate(tree)


def flops_per_token(config: LlamaConfig, context_length: int) -> float:
    """Operations of one step, forward and backward (see the top of the file)."""
    width, heads = config.hidden_size, config.num_attention_heads
    head_width = width // heads
    keys = 2 * width * (config.num_key_value_heads or heads) * head_width
    layer = 2 * width * width + keys + 3 * width * config.intermediate_size
    weights = config.num_hidden_layers * layer + config.vocab_size * width
    attention = 12 * config.num_hidden_layers * width * context_length
    return float(6 * weights + attention)


@dataclass(frozen=True, slots=True)
class Share:
    """The optimizer's share of a step: as measured, and with the preset's own batch."""

    measured: float
    at_full_batch: float


def share_of(optimizer_s: float, step_s: float, times_the_batch: float) -> Share:
    """See the top of the file."""
    others_s = max(0.0, step_s - optimizer_s)
    whole_s = optimizer_s + others_s * times_the_batch
    return Share(optimizer_s / max(step_s, optimizer_s), optimizer_s / whole_s)


def rows_of(preset: str, parameters: int, turns: Sequence[Turn], work: Work) -> list[Row]:
    """A row for each loop."""
    peak = statistics.median(work.peak_flops / turn.peak_s for turn in turns)
    of_plain = statistics.median(turn.plain_s / turn.ours_s for turn in turns)
    rows: list[Row] = []
    for name, seconds, share in (
        ("ours", [turn.ours_s for turn in turns], of_plain),
        ("plain", [turn.plain_s for turn in turns], 1.0),
    ):
        tokens_per_s = statistics.median(work.tokens / each for each in seconds)
        flops = work.tokens * work.flops_per_token
        mfu = statistics.median(
            flops / each * turn.peak_s / work.peak_flops
            for each, turn in zip(seconds, turns, strict=True)
        )
        rows.append(
            {
                "preset": preset,
                "M parameters": parameters / 1e6,
                "loop": name,
                "tokens/s": tokens_per_s,
                "of plain": share,
                "MFU": mfu,
                "peak GFLOP/s": peak / 1e9,
            }
        )
    return rows


def measure(
    preset: str, optimizer: str, device: torch.device, size: Size, *, compile: bool
) -> list[Row]:
    """Both loops of one preset.

    Raises:
        torch.OutOfMemoryError: the device has no room for two copies with one sequence.
    """
    whole = preset_spec(preset, optimizer=optimizer)
    spec, vocabulary = whole, VOCABULARIES.get(preset, GPT2_VOCABULARY)
    if device.type == "cpu" and preset not in CPU_WHOLE:
        spec, vocabulary = cut(spec), min(vocabulary, CPU_VOCABULARY)
    batches = _batches(spec, vocabulary, size.steps)
    way = Way(device, choose_precision(spec.training.precision, device), compile)
    start = starting_micro_batch(spec.training.micro_batch, spec.training.batch_size, 0)
    module = initial_module(spec, vocabulary)
    parameters = sum(each.numel() for each in module.parameters())
    plain = PlainLoop(module, spec, way, start)
    ours = OurLoop(initial_module(spec, vocabulary), spec, way, start)
    peak = matmul(way, size.matrix, size.products)
    fit_together([plain, ours], batches[0])
    clock_s = time.process_time if device.type == "cpu" else time.perf_counter
    turns = take_turns(
        lambda: ours.run(batches), lambda: plain.run(batches), peak, size.turns, clock_s
    )
    work = Work(
        tokens=size.steps * spec.tokens_per_step,
        flops_per_token=flops_per_token(model_config(spec, vocabulary), spec.model.context_length),
        peak_flops=2.0 * size.matrix**3 * size.products,
    )
    optimizer_s = statistics.median(
        seconds_of(lambda: ours.run_optimizer(size.steps), clock_s) for _ in range(size.turns)
    )
    step_s = statistics.median(turn.ours_s for turn in turns)
    share = share_of(optimizer_s, step_s, whole.tokens_per_step / spec.tokens_per_step)
    told = f"{preset}, {optimizer}, {way.precision}, {ours.micro_batch} at once"
    ours_row, plain_row = rows_of(told, parameters, turns, work)
    return [
        {**ours_row, "optimizer": share.measured, "at full batch": share.at_full_batch},
        {**plain_row, "optimizer": None, "at full batch": None},
    ]


def seconds_of(
    task: Callable[[], object], clock_s: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds that a task takes."""
    began_s = clock_s()
    task()
    return clock_s() - began_s


def take_turns(
    ours: Callable[[], object],
    plain: Callable[[], object],
    peak: Callable[[], object],
    turns: int,
    clock_s: Callable[[], float] = time.perf_counter,
) -> list[Turn]:
    """Time the three, one after the other; who goes first changes."""

    def seconds(task: Callable[[], object]) -> float:
        return seconds_of(task, clock_s)

    for _ in range(WARM_UPS):
        for task in (ours, plain, peak):
            task()
    found = []
    for number in range(turns):
        first, second = (ours, plain) if number % 2 == 0 else (plain, ours)
        first_s, peak_s, second_s = seconds(first), seconds(peak), seconds(second)
        ours_s, plain_s = (first_s, second_s) if number % 2 == 0 else (second_s, first_s)
        found.append(Turn(ours_s, plain_s, peak_s))
    return found


def _batches(spec: RunSpec, vocabulary: int, count: int) -> list[Blocks]:
    draws = np.random.default_rng(spec.seed)
    shape = (spec.training.batch_size, spec.model.context_length + 1)
    return [draws.integers(0, vocabulary, shape, dtype=np.int64) for _ in range(count)]


def main() -> None:
    """Measure and publish."""
    if not MALLOC.keys() <= os.environ.keys():  # the C library reads them once
        told = [sys.executable, "-m", "bench.throughput", *sys.argv[1:]]
        os.execve(sys.executable, told, {**MALLOC, **os.environ})  # noqa: S606 - itself
    parser = options(__doc__)
    parser.add_argument("--device", default="auto", help="cpu, cuda or cuda:N")
    parser.add_argument("--preset", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS)
    parser.add_argument("--threads", type=int, help="of torch on a CPU")
    parser.add_argument("--compile", action="store_true", help="torch.compile in both loops")
    chosen = parser.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    device = choose_device(chosen.device)
    size = SIZES[device.type, chosen.full]
    report = Report("throughput", f"The trainer's inner step beside a plain loop, {device}")
    report.settings = {
        "device": str(device),
        "threads": torch.get_num_threads(),
        "turns": size.turns,
        "steps": size.steps,
        "compile": chosen.compile,
        "optimizer": chosen.optimizer,
        "cut": device.type == "cpu",
    }
    for preset, optimizer in product(chosen.preset, chosen.optimizer):
        rows = measure(preset, optimizer, device, size, compile=chosen.compile)
        report.rows += rows
        if optimizer == "adamw":  # else the plain loop does something else
            what = f"tokens/s of the plain loop's, {preset}"
            report.goals.append(Goal(what, rows[0]["of plain"], at_least=LEAST_OF_PLAIN))
        if device.type == "cuda":
            what = f"the share of a step of {optimizer}, {preset}"
            report.goals.append(Goal(what, rows[0]["optimizer"], at_most=MOST_OF_STEP))
    report.notes.append("The peak is that of a large matrix product on this machine, in turns.")
    report.publish(chosen.json)


if __name__ == "__main__":
    main()
