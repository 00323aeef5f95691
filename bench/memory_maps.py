"""The memory of a process, sorted into kinds from /proc/PID/smaps. Linux only.

A page that several processes map belongs to each of them in part: PSS (proportional set size) adds
up to what is really there. For one peer that is the wrong sum in two ways, so two figures are kept:

    pss   shared pages in proportion, but for the memory that the daemon shares with its trainer:
          that is counted once, and wholly on the daemon's account
    alone each page in full: what the daemon would need with nobody to share libraries with (RSS)

Kinds:

    slow weights, codes   memfds, shared with the trainer
    vectors               private mappings of at least half a vector of codes: the outer momentum,
                          the partner's codes, and whatever copy of a vector there may be
    heap                  other memory without a file: Python's objects, machine code, stacks
    a library             its files as far as they are mapped and touched, data included
    p2pd                  all of that process
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

KIB: Final = 1024


class Kind(StrEnum):
    """Kinds of mappings, by what they hold."""

    SLOW_WEIGHTS = "slow weights"
    CODES = "code slots"
    VECTORS = "vectors"
    HEAP = "heap"
    TORCH = "torch"
    NUMBA = "numba"
    OTHER_FILES = "other files"
    P2PD = "p2pd"


SHARED_WITH_TRAINER: Final = (Kind.SLOW_WEIGHTS, Kind.CODES)
_NAMED: Final = {
    "/memfd:loco-slow-weights": Kind.SLOW_WEIGHTS,
    "/memfd:loco-codes": Kind.CODES,
    "/torch/": Kind.TORCH,
    "/llvmlite/": Kind.NUMBA,
    "/numba/": Kind.NUMBA,
}


@dataclass(frozen=True, slots=True)
class Area:
    """One mapping of a process.

    Attributes:
        name: its file, a name in brackets, or empty.
    """

    name: str
    rss_bytes: int
    pss_bytes: int

    def kind(self, vector_bytes: int) -> Kind:
        """The kind of the mapping; a vector is at least so long."""
        for part, kind in _NAMED.items():
            if part in self.name:
                return kind
        if self.name.startswith("/"):
            return Kind.OTHER_FILES
        is_vector = not self.name and self.rss_bytes >= vector_bytes
        return Kind.VECTORS if is_vector else Kind.HEAP


@dataclass(frozen=True, slots=True)
class Held:
    """Memory of one peer at one moment, in bytes by kind; see the top of the file."""

    pss: dict[Kind, int]
    alone: dict[Kind, int]

    @property
    def pss_bytes(self) -> int:
        return sum(self.pss.values())

    @property
    def alone_bytes(self) -> int:
        return sum(self.alone.values())


def areas_of(smaps: Iterable[str]) -> Iterator[Area]:
    """The mappings in the lines of an smaps file."""
    name, sizes = "", dict[str, int]()
    for line in smaps:
        words = line.split(maxsplit=5)
        if not words[0].endswith(":"):
            if sizes:
                yield Area(name, sizes["Rss:"] * KIB, sizes["Pss:"] * KIB)
            name, sizes = (words[5].strip() if len(words) > 5 else ""), {}
        elif words[0] in ("Rss:", "Pss:"):
            sizes[words[0]] = int(words[1])
    if sizes:
        yield Area(name, sizes["Rss:"] * KIB, sizes["Pss:"] * KIB)


def held(daemon: Iterable[Area], p2pd: Iterable[Area], code_bytes: int) -> Held:
    """Memory that daemon and p2pd hold, where a vector's codes take `code_bytes`."""
    pss, alone = dict.fromkeys(Kind, 0), dict.fromkeys(Kind, 0)
    for area in daemon:
        kind = area.kind(code_bytes // 2)
        alone[kind] += area.rss_bytes
        pss[kind] += area.rss_bytes if kind in SHARED_WITH_TRAINER else area.pss_bytes
    for area in p2pd:
        alone[Kind.P2PD] += area.rss_bytes
        pss[Kind.P2PD] += area.pss_bytes
    return Held(pss, alone)


def areas_of_process(pid: int) -> list[Area]:
    """The mappings of a process now; none when it is gone."""
    try:
        with Path(f"/proc/{pid}/smaps").open() as smaps:
            return list(areas_of(smaps))
    except (FileNotFoundError, ProcessLookupError):
        return []


def take_highest_rss_bytes(pid: int) -> int:
    """The most that a process held since the last call, by the kernel's own count; 0 when gone.

    It sees what lies between two samples too.
    """
    process = Path(f"/proc/{pid}")
    try:
        lines = (process / "status").read_text().splitlines()
        (process / "clear_refs").write_text("5")  # begins the count anew, and nothing else
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * KIB for line in lines if line.startswith("VmHWM:")), 0)
