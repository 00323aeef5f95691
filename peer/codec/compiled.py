"""Loops compiled for this processor by numba, at the speed of memory; without numba, none.

Coding takes eight of torch's operations, each a pass over memory; a compiled loop makes one. It
does the same correctly rounded IEEE operations in the same order (LLVM fuses no multiplication and
addition unless told to), so its bytes are those of the plain path, its reference and fallback.

Rules:

- numba is imported when a vector of `COMPILED_FROM` values or more is first coded, or when a codec
  has gone over `COMPILED_AFTER` values in shorter ones: short runs and commands never wait for it.
- Machine code is kept beside the source, or in the user's cache where that is read-only, or not at
  all, by processor and by the time of the kernel's own file: after a change of another file alone
  (this one, `__init__.py` or `codecs.py`), `make clean`. Several processes may write it: files are
  replaced whole.
- If anything fails (no numba, one that does not know this numpy), the plain path is taken, and
  `loops_named` says why.
- Threads are our own, as many as torch would use: numba's pool either aborts when two threads call
  it, or spins against torch's.
- Chunks of work have one size whatever the number of threads, so sums come out the same.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Final, TypeVar, cast

import torch

Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])

COMPILED_FROM: Final = 4 * 1024 * 1024
"""Values of a vector from which on loading numba (about a second) is worth it: the plain path takes
some 8 ms longer a round."""
COMPILED_AFTER: Final = 2**28
"""Values of shorter vectors after which it is worth it too: the plain path has taken half a second
longer by then, in 30 averages of a million parameters."""
CHUNK_BLOCKS: Final = 8 * 1024
"""Blocks that a thread takes at once: 4 MB of fp32, which take far longer than handing over."""

_failures: Final[dict[str, str]] = {}


@cache
def kernels_of(module: str) -> ModuleType | None:
    """A module of kernels, compiled; None where numba does not work."""
    try:
        return import_module(module)
    except Exception as error:  # noqa: BLE001  # numba, llvmlite, LLVM: whatever it was, there is another way
        _failures[module] = f"{type(error).__name__}: {error}".partition("\n")[0]
        return None


def loops_named(module: str) -> str:
    """`compiled` where a module's kernels can be loaded; else `plain`, and why."""
    return "compiled" if kernels_of(module) else f"plain: {_failures[module]}"


def kernel(signature: str) -> Callable[[Function], Function]:
    """Compile the decorated function for `signature` at once, or load what was compiled before."""
    import numba

    def compile_now(function: Function) -> Function:
        settings: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}
        try:
            compiled = numba.njit(signature, cache=True, **settings)(function)
        except (RuntimeError, OSError):  # nowhere to keep it
            compiled = numba.njit(signature, **settings)(function)
        return cast("Function", compiled)

    return compile_now


def helper(*, any_order: bool = False, as_text: bool = False) -> Callable[[Function], Function]:
    """Compile the decorated function into the kernels that call it.

    Args:
        any_order: sums within this function may be added up in the fastest order.
        as_text: inline it before types are inferred. A loop whose index is an argument plus
            something needs it: an argument might be negative, and the loop is not vectorized.
    """
    import numba

    def mark(function: Function) -> Function:
        settings: dict[str, Any] = {"error_model": "numpy"}
        settings["fastmath"] = {"reassoc"} if any_order else False
        settings["inline"] = "always" if as_text else "never"
        return cast("Function", numba.njit(**settings)(function))

    return mark


def in_chunks(work: Callable[[int, int], Result], num_blocks: int) -> list[Result]:
    """The results of `work(first, last)` for each chunk of blocks first .. last - 1, in order.

    `work` must release the interpreter's lock, as kernels do, to run in parallel.
    """
    starts = range(0, num_blocks, CHUNK_BLOCKS)
    results: dict[int, Result] = {}
    left = iter(starts)  # one `next` is one step of the interpreter: no lock is needed

    def take_chunks() -> None:
        for first in left:
            results[first] = work(first, min(first + CHUNK_BLOCKS, num_blocks))

    threads = min(len(starts), torch.get_num_threads())
    helpers = [_pool().submit(take_chunks) for _ in range(threads - 1)]
    take_chunks()
    for helper in helpers:
        helper.result()
    return [results[first] for first in starts]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="codec")
