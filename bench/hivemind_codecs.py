"""hivemind's 8-bit codecs beside memcpy, run by an interpreter of its own (`bench/codec.py`).

    OTHER/bin/python bench/hivemind_codecs.py VALUES TURNS THREADS

It imports nothing of this project. The last line of its output is JSON. An incompatible numpy can
make hivemind answer with nonsense, so what comes out is compared with what went in.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from hivemind.compression import (
    BlockwiseQuantization,
    CompressionInfo,
    Uniform8BitQuantization,
)

LARGEST_ERROR: Final = 0.03
"""Root mean square of the error over that of the values; both are about half of it."""


def main(values: int, turns: int, threads: int) -> None:
    torch.set_num_threads(threads)
    x_P = torch.randn(values, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    out_P = torch.empty_like(x_P)
    codecs = [Uniform8BitQuantization()]
    try:
        import bitsandbytes  # noqa: F401

        codecs.append(BlockwiseQuantization())
    except ImportError:
        pass
    found = [_measured(codec, x_P, turns) for codec in codecs]
    memcpy = _gb_per_s(lambda: out_P.copy_(x_P), values, 3 * turns)
    print(json.dumps({"memcpy_gb_per_s": memcpy, "codecs": found}))


def _measured(codec: Any, x_P: torch.Tensor, turns: int) -> dict[str, Any]:
    message = codec.compress(x_P, CompressionInfo.from_tensor(x_P))
    error = float((codec.extract(message) - x_P).norm() / x_P.norm())
    if not error <= LARGEST_ERROR:
        raise RuntimeError(f"{type(codec).__name__} decodes with an error of {error:.3g}")
    values = x_P.numel()
    return {
        "name": type(codec).__name__.removesuffix("Quantization"),
        "error": error,
        "encode": _gb_per_s(
            lambda: codec.compress(x_P, CompressionInfo.from_tensor(x_P)), values, turns
        ),
        "decode": _gb_per_s(lambda: codec.extract(message), values, turns),
    }


def _gb_per_s(operation: Callable[[], object], values: int, turns: int) -> float:
    times_s = []
    for _ in range(turns):
        start_s = time.perf_counter()
        operation()
        times_s.append(time.perf_counter() - start_s)
    return 4e-9 * values / statistics.median(times_s)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:4]))
