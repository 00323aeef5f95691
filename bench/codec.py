"""Coding at the speed of memory: encode, decode, validate and the outer step beside memcpy.

What counts: bytes of fp32 per second, those that go into `encode`, come out of `decode`, are stood
for by the codes that `validate` reads, or lie in phi for the outer step (a pair, gamma = beta). For
memcpy (torch's `copy_` of fp32 to fp32) it is the bytes copied. Per value, a memcpy moves 8 bytes
of memory, or 12 where the processor fetches a line before it overwrites it; decode 5 or 9, encode 5
or 6; a step in a pair 18 (phi and delta read and written, two codes read). So a step that is bound
by memory alone reaches 0.44 to 0.67 of memcpy by this count, and coding may pass it.

How: one vector, larger than any cache, with one thread and with two. All operations take turns,
memcpy among them, and medians are compared. "plain" is the way of torch's own operations,
without numba.

hivemind's 8-bit codecs fail with the numpy of this project (hivemind 1.1.12 turns arrays into
scalars, which numpy 2.4 refuses), so another interpreter runs them (`bench/hivemind_codecs.py`),
where memcpy is timed too; the ratios to memcpy are compared. To make that interpreter:

    python3.11 -m venv OTHER
    OTHER/bin/python -m pip install hivemind==1.1.12 "numpy<2.3" bitsandbytes

(bitsandbytes is for `BlockwiseQuantization`; without it `Uniform8BitQuantization` is timed alone.)

    python -m bench.codec [--full] [--json FILE] [--hivemind-python OTHER/bin/python]
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch

from bench import report
from peer.averaging.gossip.outer_step import NolocoFactors, outer_step
from peer.codec import Codec, compiled, get_codec
from peer.codec.codecs import Int8Codec
from protocol.run.ways import CODECS

FULL_VALUES: Final = 64 * 1024 * 1024
SHORT_VALUES: Final = 16 * 1024 * 1024
FULL_TURNS: Final = 15
SHORT_TURNS: Final = 7
THREADS: Final = (1, 2)
OF_MEMCPY: Final = 0.5
TIMES_HIVEMIND: Final = 5.0
MEMCPY: Final = ("memcpy", "copy")
Operation = Callable[[], object]
Operations = dict[tuple[str, str], Operation]


def main() -> None:
    parser = report.options(__doc__)
    parser.add_argument(
        "--hivemind-python", type=Path, metavar="FILE", help="interpreter with hivemind, see source"
    )
    arguments = parser.parse_args()
    values = FULL_VALUES if arguments.full else SHORT_VALUES
    turns = FULL_TURNS if arguments.full else SHORT_TURNS
    found = report.Report(
        "codec",
        "GB/s of fp32, medians; memcpy: GB/s copied, in the same turns",
        {"values": values, "turns": turns, "vector_mb": 4 * values / 1e6},
    )
    for threads in THREADS:
        found.rows += cpu_rows(values, turns, threads)
    if torch.cuda.is_available():
        found.rows += rows(_operations(values, torch.device("cuda")), values, turns, "cuda", None)
    _add_goals(found)
    if arguments.hivemind_python:
        for threads in THREADS:
            theirs = hivemind_rows(arguments.hivemind_python, values, turns, threads)
            _add_hivemind_goals(found, theirs, threads)
            found.rows += theirs
    found.publish(arguments.json)


def cpu_rows(values: int, turns: int, threads: int) -> list[report.Row]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return rows(_operations(values, torch.device("cpu")), values, turns, "cpu", threads)
    finally:
        torch.set_num_threads(before)


def rows(
    operations: Operations, values: int, turns: int, device: str, threads: int | None
) -> list[report.Row]:
    """One row per operation, each beside memcpy."""
    seconds = medians_s(operations, turns, device)
    return [
        row(device, threads, *name, 4e-9 * values / took_s, 4e-9 * values / seconds[MEMCPY])
        for name, took_s in seconds.items()
    ]


def row(
    device: str, threads: int | None, codec: str, operation: str, gb_per_s: float, memcpy: float
) -> report.Row:
    return {
        "device": device,
        "threads": threads,
        "codec": codec,
        "operation": operation,
        "GB/s": gb_per_s,
        "of memcpy": gb_per_s / memcpy,
    }


def medians_s(operations: Operations, turns: int, device: str) -> dict[tuple[str, str], float]:
    """Median time of each operation; all take turns, after one turn that does not count."""
    times_s: dict[tuple[str, str], list[float]] = {name: [] for name in operations}
    for turn in range(turns + 1):
        for name, operation in operations.items():
            took_s = _timed_s(operation, device)
            if turn:
                times_s[name].append(took_s)
    return {name: statistics.median(times) for name, times in times_s.items()}


def _timed_s(operation: Operation, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start_s = time.perf_counter()
    operation()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start_s


def _operations(values: int, device: torch.device) -> Operations:
    generator = torch.Generator().manual_seed(0)
    x_P = torch.randn(values, generator=generator).mul_(0.02).to(device)
    out_P = torch.empty_like(x_P)
    operations: Operations = {MEMCPY: lambda: out_P.copy_(x_P)}
    for name in CODECS:
        codec = get_codec(name)
        codes = torch.empty(codec.code_bytes(values), dtype=torch.uint8, device=device)
        codec.encode(x_P, codes)
        operations |= _of_codec(codec, x_P, codes, out_P)
    return operations | _of_int8(x_P, out_P)


def _of_codec(
    codec: Codec, x_P: torch.Tensor, codes: torch.Tensor, out_P: torch.Tensor
) -> Operations:
    return {
        (codec.name, "encode"): lambda: codec.encode(x_P, codes),
        (codec.name, "decode"): lambda: codec.decode(codes, out_P),
        (codec.name, "validate"): lambda: codec.validate(codes),
    }


def _of_int8(x_P: torch.Tensor, out_P: torch.Tensor) -> Operations:
    """The plain way of encode and decode, and the outer step both ways."""
    codec, plain = get_codec("int8"), Int8Codec()
    codes = torch.empty(codec.code_bytes(x_P.numel()), dtype=torch.uint8, device=x_P.device)
    codec.encode(x_P, codes)
    phi_P, delta_P, pair = x_P.clone(), torch.zeros_like(x_P), [codes, codes.clone()]
    factors = NolocoFactors(alpha=0.5, beta=0.7, gamma=0.7)

    def step() -> None:
        outer_step(phi_P, delta_P, pair, codec, factors)

    def plain_step() -> None:
        with mock.patch.object(compiled, "COMPILED_FROM", sys.maxsize):
            step()

    return {
        ("int8", "outer step"): step,
        ("int8 plain", "encode"): lambda: plain.encode_blocks(x_P, *plain.split(codes)),
        ("int8 plain", "decode"): lambda: plain.decode_blocks(*plain.split(codes), 0, out_P),
        ("int8 plain", "outer step"): plain_step,
    }


def hivemind_rows(python: Path, values: int, turns: int, threads: int) -> list[report.Row]:
    """Rows that `bench/hivemind_codecs.py` finds, run by that interpreter."""
    script = Path(__file__).with_name("hivemind_codecs.py")
    command = [
        str(python),
        "-W",
        "ignore",
        str(script),
        str(values),
        str(max(3, turns // 3)),
        str(threads),
    ]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    memcpy = found["memcpy_gb_per_s"]
    return [
        row("cpu", threads, f"hivemind {codec['name']}", operation, codec[operation], memcpy)
        for codec in found["codecs"]
        for operation in ("encode", "decode")
    ]


def _add_goals(found: report.Report) -> None:
    for entry in list(found.rows):
        if entry["codec"] == "int8" and entry["operation"] in {"encode", "decode"}:
            what = f"int8 {entry['operation']} of memcpy, {_where(entry)}"
            found.goals.append(report.Goal(what, entry["of memcpy"], at_least=OF_MEMCPY))


def _add_hivemind_goals(found: report.Report, theirs: list[report.Row], threads: int) -> None:
    for entry in list(found.rows):
        operation = entry["operation"]
        ours = entry["codec"] == "int8" and operation in {"encode", "decode"}
        if ours and entry["device"] == "cpu" and entry["threads"] == threads:
            best = max(their["of memcpy"] for their in theirs if their["operation"] == operation)
            what = f"int8 {operation} over hivemind's best, each over memcpy, {_where(entry)}"
            times = entry["of memcpy"] / best
            found.goals.append(report.Goal(what, times, at_least=TIMES_HIVEMIND))


def _where(entry: report.Row) -> str:
    return entry["device"] if entry["threads"] is None else f"{entry['threads']} threads"


if __name__ == "__main__":
    main()
