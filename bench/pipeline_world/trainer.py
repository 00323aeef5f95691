"""The trainer with stated compute: `python -m bench.pipeline_world.trainer SOCKET_FD`.

It is the trainer of the daemon (peer/training), but that `StageCompute` is another one: it sleeps
for as long as STATED says that work takes, passes boundaries on as they are, and adds no gradient.
Its slots are those that paths are planned with; there is no graph to measure.
Each piece of work is a line of JSON in the file that STATED names.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TextIO
from unittest import mock

import torch

from peer.training.child import __main__ as trainer
from peer.training.device import Precision
from peer.training.shared import SLOTS
from peer.training.stages import build
from peer.training.stages.compute import StageCompute
from peer.training.stages.module import StageModule

STATED: Final = "STATED_COMPUTE"
"""Environment variable: JSON, seconds by kind of work, and `log`, a file."""
LOSS: Final = 1.0


class StatedCompute(StageCompute):
    """See the top of the file."""

    def __init__(self, module: StageModule, device: torch.device, precision: Precision) -> None:
        super().__init__(module, device, precision)
        stated = json.loads(os.environ[STATED])
        self._log: TextIO = Path(stated.pop("log")).open("a", buffering=1)  # noqa: SIM115 - for life
        self._seconds: dict[str, float] = stated
        self._boundary_bTD: dict[int, torch.Tensor] = {}
        self._width = module.config.hidden_size

    def holds(self, microbatch: int) -> bool:
        return microbatch in self._boundary_bTD

    def forget(self, microbatch: int) -> None:
        self._boundary_bTD.pop(microbatch, None)

    def embed(self, microbatch: int, tokens_bT: torch.Tensor) -> torch.Tensor:
        with self._working("forward", microbatch):
            shape = tokens_bT.shape[0], tokens_bT.shape[1] - 1, self._width
            self._boundary_bTD[microbatch] = torch.ones(shape)
            return self._boundary_bTD[microbatch]

    def produced(self, microbatch: int) -> torch.Tensor:
        return self._boundary_bTD[microbatch]

    def forward(self, microbatch: int, given_bTD: torch.Tensor) -> torch.Tensor:
        with self._working("forward", microbatch):
            self._boundary_bTD[microbatch] = given_bTD
            return given_bTD

    def finish(self, microbatch: int, given_bTD: torch.Tensor) -> tuple[float, torch.Tensor]:
        with self._working("loss", microbatch):
            return LOSS, given_bTD

    def is_finished(self, microbatch: int) -> bool:
        return False

    def backward(
        self, microbatch: int, gradient_bTD: torch.Tensor, *, adds: bool = True
    ) -> torch.Tensor | None:
        with self._working("backward", microbatch):
            self.forget(microbatch)
            return gradient_bTD

    def add_weights(self) -> None:
        """Nothing: a backward is stated as one piece of work."""

    @contextmanager
    def _working(self, kind: str, microbatch: int) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        time.sleep(max(0.0, began_s + self._seconds[kind] - time.monotonic()))
        piece = {"kind": kind, "number": microbatch, "start_s": began_s, "end_s": time.monotonic()}
        print(json.dumps(piece), file=self._log)


def main() -> int:
    """Be a child of the daemon. Returns the exit status."""
    with (
        mock.patch.object(build, "StageCompute", StatedCompute),
        mock.patch.object(build, "measured_slots", return_value=(SLOTS, True)),
    ):
        return trainer.main()


if __name__ == "__main__":
    sys.exit(main())
