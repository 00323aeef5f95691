"""What `loco-peer doctor` sees of this machine itself."""

import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from peer.observe.findings import Finding, Health
from protocol.names import size_text

CONTAINER_MARKS: Final = (Path("/.dockerenv"), Path("/run/.containerenv"))
MIN_DISK_BYTES: Final = 5e9
MIN_MEMORY_BYTES: Final = 2e9
SHOWN_PACKAGES: Final = ("loco-peer", "torch", "hivemind", "numpy")


def machine_findings(home: Path) -> Iterator[Finding]:
    """Versions, p2pd, disk, memory, GPU."""
    yield _versions()
    yield _p2pd()
    yield disk_finding(home, shutil.disk_usage(_existing(home)).free)
    yield _memory()
    yield _gpu()


def in_container() -> bool:
    """Whether we run in one, as its files (Docker, Podman) or its variables (Kubernetes) say."""
    return "KUBERNETES_SERVICE_HOST" in os.environ or any(map(Path.exists, CONTAINER_MARKS))


def _versions() -> Finding:
    found = [f"Python {platform.python_version()}"]
    for name in SHOWN_PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            cure = "install it again: pip install -c constraints.txt ."
            return Finding("versions", Health.ILL, f"{name} is not installed", cure)
    return Finding("versions", Health.WELL, ", ".join(found))


def _p2pd() -> Finding:
    from peer.network.p2pd_process import P2pdFailed, bundled_binary

    try:
        return Finding("p2pd", Health.WELL, str(bundled_binary()))
    except P2pdFailed as error:
        return Finding("p2pd", Health.ILL, str(error))


def disk_finding(home: Path, free_bytes: float) -> Finding:
    """Whether the home has room for a corpus and a state."""
    says = f"{size_text(free_bytes)} free in {home}"
    if free_bytes >= MIN_DISK_BYTES:
        return Finding("disk", Health.WELL, says)
    cure = "free some, or choose another disk with --home; a state takes 8 bytes per parameter"
    return Finding("disk", Health.ILL, says, cure)


def _memory() -> Finding:
    import psutil

    free = psutil.virtual_memory().available
    says = f"{size_text(free)} of memory free"
    if free >= MIN_MEMORY_BYTES:
        return Finding("memory", Health.WELL, says)
    cure = "end other programs; the daemon needs 8 bytes per parameter beside the trainer, and more"
    return Finding("memory", Health.ILL, says, cure)


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        cure = "if it has a GPU: install its driver, and a torch that is built for CUDA"
        return Finding("GPU", Health.NOTE, "torch finds none: it will train on the CPU", cure)
    seen = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        seen.append(f"cuda:{index} {name}, {size_text(free)} of {size_text(total)} free")
    return Finding("GPU", Health.WELL, "; ".join(seen))


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if each.exists())
