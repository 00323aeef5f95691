"""Arms in which some peers are slower than the others.

    equal           theta of both counts for a half, whatever number of steps is in it
    tokens          theta counts by the tokens trained in this round: w_j = q_j / (q_i + q_j)
    normalised      each peer sends phi + (H / q) (theta - phi): its move, as long as the median's
    waiting         every peer does all H steps, and the pair waits for the slower of the two
    waiting-often   the same with rounds of H / 4: as many rounds as the others in the same time
    without         the slow peers stay away

A round is H steps of a peer of speed 1. In the first three a peer of speed s does s H steps of it,
as the daemon's quotas say (protocol/schedule/rounds.py). Where peers wait, everybody meets the
slowest sooner or later, since partners are drawn anew in each round; so all train at its pace, and
their schedule is stretched to end with the others' time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from protocol.schedule.rounds import whole_steps

from .arms import Arm
from .pace import in_lowest_terms

Pooling = Literal["equal", "tokens", "normalised"]
SLOW: Final = (0.5, 0.25)
"""Speeds of the slow peers, the last of the replicas; the others have 1."""


@dataclass(frozen=True, slots=True)
class UnequalArm(Arm):
    """A way to average peers of unequal speed.

    Attributes:
        pooling: what of a peer's weights goes into the mean of a pair.
        slow: speeds of the last replicas.
        waits: all replicas train at the pace of the slowest.
        leaves_out: replicas that do not take part: so many of the last.
    """

    pooling: Pooling = "equal"
    slow: tuple[float, ...] = SLOW
    waits: bool = False
    leaves_out: int = 0

    @property
    def step_time(self) -> int:
        return round(1 / min(self.slow)) if self.waits else 1

    def nodes(self, replicas: int) -> int:
        return replicas - self.leaves_out

    def speeds(self, replicas: int) -> list[float]:
        """Speeds of all replicas that take part, in steps per step of the median."""
        return [*[1.0] * (self.nodes(replicas) - len(self.slow)), *self.slow]

    def quotas(self, inner_steps: int, replicas: int) -> list[int]:
        speeds = self.speeds(replicas)
        if self.waits:
            return [inner_steps] * len(speeds)
        return [whole_steps(inner_steps, speed, speeds) for speed in speeds]

    def votes(self, steps: Sequence[int]) -> list[int]:
        return in_lowest_terms(steps) if self.pooling == "tokens" else [1] * len(steps)

    def stretch(self, steps: int, inner_steps: int) -> float:
        return inner_steps / steps if self.pooling == "normalised" else 1.0


REFERENCE: Final = "equal"
"""The arm that does what the daemon does."""
_MAIN: Final = (
    UnequalArm(REFERENCE),
    UnequalArm("tokens", pooling="tokens"),
    UnequalArm("normalised", pooling="normalised"),
    UnequalArm("waiting", waits=True),
    UnequalArm("waiting-often", waits=True, rounds_of=0.25),
    UnequalArm("without", slow=(), leaves_out=len(SLOW)),
)
OUTER_STEPS: Final = {"-alpha-0": (0.0, 0.7), "-plain": (0.0, 1.0)}
"""Other outer steps, alpha and beta, by how the names of their arms end: momentum multiplies the
length of a step, and the poolings differ in that length, so their order may depend on it."""
_CHECK: Final = tuple(
    replace(arm, name=arm.name + ending, alpha=alpha, beta=beta)
    for ending, (alpha, beta) in OUTER_STEPS.items()
    for arm in _MAIN[:4]
)
MAIN_ARMS: Final = tuple(arm.name for arm in _MAIN)
ARMS: Final = {arm.name: arm for arm in (*_MAIN, *_CHECK)}
