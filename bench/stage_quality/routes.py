"""Which stages the microbatches of an iteration visit, in which order, and where.

A route names the stages whose layers a microbatch goes through, stage 0 among them where it goes
through its layers. Embedding, last norm and head are at stage 0 and in every route.

    turns         all choices of so many relay stages in turn, so that each is used alike
    any-order     the same choices of stages in any order at all, drawn anew for each microbatch
    unequal       ten fixed choices: of ten microbatches, stages 1 and 2 train eight each, stage 3
                  six, stages 4 and 5 four each
    skip-first    all choices of four of the six stages in turn, stage 0 as any other
"""

from itertools import combinations
from typing import Final

import numpy as np

from .arms import StageArm
from .settings import STAGES, VISITED

Route = tuple[int, ...]

_LEFT_OUT: Final = ((4, 5),) * 3 + ((3, 4), (3, 4), (1, 4), (3, 5), (1, 5), (2, 5), (2, 3))
"""What the unequal choices leave out: stages 1 and 2 twice, 3 four times, 4 and 5 six times."""
_FIRST: Final = 1883
"""The turn that iteration 0 begins with: any will do, and this one gave the published figures."""


class Routes:
    """Routes of one data peer; the draws follow from the seed."""

    def __init__(self, arm: StageArm, seed: int) -> None:
        self._arm = arm
        self._random = np.random.default_rng([seed, 5])

    def of_iteration(self, iteration: int, microbatches: int) -> list[Route]:
        """A route for each microbatch."""
        arm = self._arm
        if arm.full_every and iteration % arm.full_every == 0:
            return [tuple(range(arm.stages))] * microbatches
        if arm.routes == "skip-first":
            return self._any_stages(iteration, microbatches)
        if arm.routes == "unequal":
            return [self._unequal(number) for number in range(microbatches)]
        choices = list(combinations(range(1, arm.stages), arm.visited - 1))
        first = _FIRST + iteration
        turns = range(first, first + microbatches)
        return [(0, *self._ordered(choices[turn % len(choices)])) for turn in turns]

    def _ordered(self, relays: Route) -> Route:
        if self._arm.routes == "any-order":
            return tuple(self._random.permutation(relays).tolist())
        return relays

    def _unequal(self, number: int) -> Route:
        left_out = _LEFT_OUT[number % len(_LEFT_OUT)]
        return tuple(stage for stage in range(STAGES) if stage not in left_out)

    def _any_stages(self, iteration: int, microbatches: int) -> list[Route]:
        choices = list(combinations(range(STAGES), VISITED))
        shuffled = np.random.default_rng(0).permutation(len(choices))
        first = iteration * microbatches
        return [
            choices[shuffled[number % len(choices)]]
            for number in range(first, first + microbatches)
        ]


class Columns:
    """Which replica of each stage a microbatch takes.

    At random: for each place in the step and each stage a permutation of the replicas is drawn, so
    that all work alike (NoLoCo, arXiv 2506.10911).
    """

    def __init__(self, arm: StageArm, seed: int) -> None:
        self._arm, self._seed = arm, seed

    def replica(self, iteration: int, number: int, stage: int, origin: int) -> int:
        """The replica of this stage that the data peer's microbatch of that number visits."""
        if self._arm.mixing == "columns" or stage == 0:
            return origin
        draws = np.random.default_rng([self._seed, iteration, number, stage])
        return int(draws.permutation(self._arm.columns)[origin])
