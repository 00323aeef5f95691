"""The process beneath a trainer: started ahead of its task, told what to do, and ended.

A child takes seconds to import torch and the models. It is told its task (settings, and the
descriptors of its memory) over its socket and not by its command line, so it can be started before
there is one. The daemon starts a `SpareChild` first of all; that makes a founder's initial weights,
and becomes the first trainer.
"""

import array
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, Self

from peer.runtime.child_process import ChildProcess

from .messages import Begin, TrainerSettings
from .pipe import FROM_TRAINER
from .ports import TrainerDied

PROGRAM: Final = "peer.training.child"
SPIN_COUNT: Final = "3000"
"""Turns for which a thread of torch's loops spins before it sleeps; some 10 us. libgomp's default
is milliseconds: beside one other busy process all threads wait for the one that lost its core,
hundreds of times in a step, and steps took up to 80 times as long (docs/log.md)."""

MALLOC: Final = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""glibc keeps what a step frees for the next one. Gradients of a step are freed as they are added
to the flat vector, and returned to the kernel the pages came back one fault at a time: up to 8% of
a step (docs/log.md). The first is the most that glibc takes, where its own rule ends; blocks above
it are still returned."""


class TrainerChild(ChildProcess):
    title = "the trainer"
    died = TrainerDied
    decoder = FROM_TRAINER

    @classmethod
    async def start(cls, threads: int) -> Self:
        """Run the program; the caller closes it. 0 threads leave their number to torch."""
        return await cls.run(PROGRAM, environment=_environment(threads))

    async def begin(self, task: str, settings: TrainerSettings, descriptors: Sequence[int]) -> None:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())
        await self.send(Begin(task, settings, len(descriptors)), rights)


def _environment(threads: int) -> dict[str, str]:
    environment = {
        **MALLOC,
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if "OMP_WAIT_POLICY" not in environment:  # what users ask for themselves, they get
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


class SpareChild:
    """A child that waits for the first task that comes; later ones start their own."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._child: TrainerChild | None = None

    async def start(self) -> None:
        self._child = await TrainerChild.start(self._threads)

    async def take(self) -> TrainerChild:
        """The spare child, or a new one; the caller closes it, or puts it back."""
        child = self._child
        if child is None or child.process.poll() is not None:
            await self.aclose()
            child = await TrainerChild.start(self._threads)
        self._child = None
        return child

    def put_back(self, child: TrainerChild) -> None:
        assert self._child is None
        self._child = child

    async def aclose(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.aclose()


@asynccontextmanager
async def spare_child(threads: int) -> AsyncIterator[SpareChild]:
    """A child that has imported everything when the first task comes."""
    spare = SpareChild(threads)
    await spare.start()
    try:
        yield spare
    finally:
        await spare.aclose()
