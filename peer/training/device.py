"""The device and the precision that training computes in."""

import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Literal

import psutil
import torch

Precision = Literal["fp32", "bf16"]
ACTIVATION_SHARES: Final = {"cpu": 0.25, "cuda": 0.8}
"""Parts of the free memory for activations; running out of a CPU's kills other processes."""


def choose_device(name: str) -> torch.device:
    """`auto` is the first CUDA device if there is one, else the CPU. Raises ValueError."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"no such device: {name!r}; use auto, cpu or cuda[:N]") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported; use auto, cpu or cuda[:N]")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} is not here: {_cuda_devices()}")
    return device


def devices_of(gpus: str | None, device: str | None) -> tuple[str, ...]:
    """The devices that `--gpus` names, beside what `--device` says. Raises ValueError."""
    if gpus is None:
        return ()
    if device == "cpu":
        if not gpus.isdecimal():
            raise ValueError("--device cpu has no GPUs to choose from; give a number of processes")
        return ("cpu",) * int(gpus)
    if device not in (None, "cuda"):
        raise ValueError(f"--device {device} is one device; leave one of the two options out")
    count = torch.cuda.device_count()
    if gpus == "all":
        gpus = str(count)
    wanted = list(range(int(gpus)) if gpus.isdecimal() else map(int, gpus.split(",")))
    if not wanted or max(wanted) >= count:
        raise ValueError(_cuda_devices())
    return tuple(f"cuda:{index}" for index in wanted)


def _cuda_devices() -> str:
    """The CUDA devices that there are, and what to do about it."""
    count = torch.cuda.device_count()
    if count:
        return f"there are {count} CUDA devices; use cuda:0 to cuda:{count - 1}"
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA; install one with it, or use cpu"
    return "torch finds no CUDA device; see whether nvidia-smi shows one, or use cpu"


def free_memory(device: torch.device, ranks: int = 1) -> int:
    """Free memory for one of these ranks, which share that of a CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available) // ranks


def activation_memory(device: torch.device, later: int = 0) -> int:
    """The share of free memory that a step may take; `later` bytes of it go to other things."""
    return int((free_memory(device) - later) * ACTIVATION_SHARES[device.type])


def choose_precision(setting: str, device: torch.device) -> Precision:
    """`auto` is bf16 on a GPU that computes in it, without emulation."""
    if setting == "auto":
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return "bf16" if native else "fp32"
    return "bf16" if setting == "bf16" else "fp32"


def has_compiler() -> bool:
    """Whether there is a C compiler, with which torch.compile makes the callers of its kernels."""
    return any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")))


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """Compute in bf16 where that is the precision; weights stay fp32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


OUT_OF_MEMORY: Final = ("can't allocate memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
"""Words of torch's CPU allocator, of CUDA where torch's own allocator was not asked (a context,
pinned memory), and of CUDA's libraries, which take memory of their own."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
