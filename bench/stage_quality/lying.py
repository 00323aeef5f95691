"""A pipeline one of whose relays lies, with the checks of its data peers (protocol/microbatch).

Each data peer judges by itself, as over peers: it draws which of its microbatches are checked, has
the copies computed without a gradient, and sends no more through those that it leaves out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from bench.quality.world import World
from peer.codec import codes_as_tensor, get_codec, relative_distance
from peer.training.stages.compute import StageCompute
from protocol.microbatch.checks import Checks
from protocol.wire.stage_messages import Microbatch, Path

from .arms import StageArm
from .pipeline import Pipeline
from .routes import Columns
from .stage import Stage

LIAR: Final = (2, 1)
"""Stage and column."""


class LyingCompute(StageCompute):
    """Sends its activations negated: of the usual size, in training and in copies alike."""

    def forward(self, microbatch: int, given_bTD: torch.Tensor) -> torch.Tensor:
        return -super().forward(microbatch, given_bTD)

    def score_through(self, given_bTD: torch.Tensor) -> torch.Tensor:
        return -super().score_through(given_bTD)


@dataclass(slots=True)
class Found:
    """What the checks of one run have found.

    Attributes:
        microbatches: that came to the loss.
        copies: that were sent for checks.
        left_out: who, and how many microbatches of its data peer that had taken.
        distances: the nearest two of each check.
    """

    microbatches: int = 0
    copies: int = 0
    left_out: list[tuple[str, int]] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)


class SoundColumns(Columns):
    """Columns without those that a data peer leaves out."""

    def __init__(self, arm: StageArm, seed: int, checks: Sequence[Checks]) -> None:
        super().__init__(arm, seed)
        self._checks, self._count = checks, arm.columns

    def replica(self, iteration: int, number: int, stage: int, origin: int) -> int:
        found = super().replica(iteration, number, stage, origin)
        if stage and self._checks[origin].left_out([name_of(stage, found)], 0.0):
            return (found + 1 + number % (self._count - 1)) % self._count
        return found


class LyingPipeline(Pipeline):
    """A relay lies from the beginning, if `lies`, and data peers check, if `checked`."""

    def __init__(
        self, world: World, arm: StageArm, batch_size: int, *, lies: bool, checked: bool
    ) -> None:
        super().__init__(world, arm, batch_size)
        self.found = Found()
        seeds = [f"{world.spec.seed}/{origin}" for origin in range(arm.columns)]
        self._checks = [Checks(seed if checked else None) for seed in seeds]
        self.columns = SoundColumns(arm, world.spec.seed, self._checks)
        self._codec = get_codec(arm.codec)
        self._taken = [0] * arm.columns
        self._names = {
            id(replica): name_of(stage, column)
            for stage, replicas in enumerate(self.stages)
            for column, replica in enumerate(replicas)
        }
        if lies:
            liar = self.stages[LIAR[0]][LIAR[1]]
            liar.compute = LyingCompute(liar.module, world.device, world.precision)

    def at_loss(
        self, origin: int, number: int, relays: Sequence[Stage], boundary_bTD: torch.Tensor
    ) -> None:
        self.found.microbatches += 1
        self._taken[origin] += 1
        path = Path(
            tuple(self._names[id(relay)] for relay in relays), tuple(range(1, len(relays) + 1))
        )
        every = tuple(
            tuple(map(self._names.__getitem__, map(id, replicas))) for replicas in self.stages[1:]
        )
        checks = self._checks[origin]
        out = checks.left_out([name for stage in every for name in stage], 0.0)
        sound = tuple(tuple(name for name in stage if name not in out) for stage in every)
        drawn = checks.draw(Microbatch(str(origin), self.iteration, number), path, sound)
        if drawn is None:
            return
        check, copies = drawn
        self.found.copies += len(copies)
        given_bTD = self.stages[0][origin].compute.produced(number)
        outputs = [boundary_bTD, *(self._through(copy, given_bTD) for copy in copies)]
        for copied, output_bTD in zip((path, *copies), outputs, strict=True):
            check.outputs[copied.relays[check.place]] = self._codes(output_bTD)
        codes = [codes_as_tensor(each) for each in check.outputs.values()]
        distances = [
            relative_distance(one, other, self._codec, boundary_bTD.numel())
            for i, one in enumerate(codes)
            for other in codes[i + 1 :]
        ]
        self.found.distances.append(min(distances))
        differing = checks.judge(check, distances, 0.0)
        if differing is not None and differing.left_out:
            self.found.left_out.append((str(differing.odd), self._taken[origin]))

    def _through(self, path: Path, boundary_bTD: torch.Tensor) -> torch.Tensor:
        by_name = {self._names[id(r)]: r for replicas in self.stages for r in replicas}
        for name in path.relays:
            boundary_bTD = by_name[name].compute.score_through(self.carried(boundary_bTD))
        return self.carried(boundary_bTD)

    def _codes(self, boundary_bTD: torch.Tensor) -> bytes:
        codes = torch.empty(self._codec.code_bytes(boundary_bTD.numel()), dtype=torch.uint8)
        self._codec.encode(boundary_bTD.detach().contiguous().view(-1), codes)
        return codes.numpy().tobytes()


def name_of(stage: int, column: int) -> str:
    return f"{stage}.{column}"
