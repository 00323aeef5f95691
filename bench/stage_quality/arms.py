"""The arms of the study of training over stages.

`skip` is the reference: a microbatch visits stage 0 and three of five relay stages, in ascending
order, and boundaries travel in bf16. All arms but the opponents change one factor of it:

    opponents     full visits all stages; full-same-clock does so for as long as `skip` takes;
                  small has four stages and visits all: as many layers for each token as `skip`
    violations    cc1 skips stage 0's layers as any other's (embedding and head stay where they are:
                  no path can leave them out); cc2 uses stages 1 and 2 twice as often as 4 and 5;
                  cc3 visits its stages in any order
    mended        full-every-10: every tenth iteration skips nothing
    boundaries    int8
    delay         late: gradients are those of the weights one update ago (PipeDream-2BW)

Apart from these ten: `global-clip` clips by the norm of the whole gradient, where the others'
stages clip each by its own; `skip` and `late` are trained at half the learning rate, too, and
`late` at a quarter of it, with less momentum, and with gradients at the weights that one more
update like the last would give (`foretold`: SpecTrain, arXiv 1809.02839), this at half the rate as
well; and four arms have several replicas of each stage, and visit all stages: their microbatches
stay in one column or take a replica of each stage at random, with and without averaging in pairs
inside a stage every H steps (NoLoCo with the run spec's defaults, in fp32, waited for). They have a
sequence in a microbatch, and as many tokens in a step as the others.

All others train at one learning rate, and on the same blocks in the same order wherever they have
as many steps and one column.
"""

from dataclasses import dataclass
from typing import Final, Literal

from .settings import COLUMNS, STAGES, VISITED

Routes = Literal["turns", "skip-first", "unequal", "any-order"]
Mixing = Literal["columns", "random"]


@dataclass(frozen=True, slots=True)
class StageArm:
    """One way to train over stages.

    Attributes:
        stages: of the model, a layer each.
        visited: by a microbatch, stage 0 among them.
        routes: which stages, and in which order.
        full_every: every so many iterations, one visits all; 0 is never.
        codec: of what travels between stages.
        late: updates that a gradient's weights are behind, 0 or 1.
        foretold: late gradients are those of weights that are extrapolated by one update.
        beta1: AdamW's momentum; None is the run spec's.
        global_clip: clip by the norm of the whole gradient.
        clock_of: train as long as that arm takes, on the simulated machines; None: as many steps.
        rate_of: learning rate, in the setting's.
        columns: replicas of each stage, data peers among them.
        mixing: which replica of a stage a microbatch takes.
        gossip: replicas of a stage are averaged in pairs.
    """

    name: str
    stages: int = STAGES
    visited: int = VISITED
    routes: Routes = "turns"
    full_every: int = 0
    codec: str = "bf16"
    late: int = 0
    foretold: bool = False
    beta1: float | None = None
    global_clip: bool = False
    clock_of: str | None = None
    rate_of: float = 1.0
    columns: int = 1
    mixing: Mixing = "columns"
    gossip: bool = False


FULL: Final = "full"
SKIP: Final = "skip"
SAME_CLOCK: Final = "full-same-clock"
SMALL: Final = "small"
VIOLATIONS: Final = ("cc1", "cc2", "cc3")
_MAIN: Final = (
    StageArm(SKIP),
    StageArm(FULL, visited=STAGES),
    StageArm(SAME_CLOCK, visited=STAGES, clock_of=SKIP),
    StageArm(SMALL, stages=VISITED),
    StageArm("full-every-10", full_every=10),
    StageArm("late", late=1),
    StageArm("int8", codec="int8"),
    StageArm("cc1", routes="skip-first"),
    StageArm("cc2", routes="unequal"),
    StageArm("cc3", routes="any-order"),
)
_BESIDE: Final = (
    StageArm("global-clip", global_clip=True),
    StageArm("skip-rate-half", rate_of=0.5),
    StageArm("late-rate-half", late=1, rate_of=0.5),
    StageArm("late-rate-quarter", late=1, rate_of=0.25),
    StageArm("late-less-momentum", late=1, beta1=0.5),
    StageArm("late-foretold", late=1, foretold=True),
    StageArm("late-foretold-rate-half", late=1, foretold=True, rate_of=0.5),
)
_COLUMNS: Final = tuple(
    StageArm(
        f"{mixing}-{'gossip' if gossip else 'apart'}",
        visited=STAGES,
        columns=COLUMNS,
        mixing=mixing,
        gossip=gossip,
    )
    for gossip in (True, False)
    for mixing in ("columns", "random")
)
ARMS: Final = {arm.name: arm for arm in (*_MAIN, *_BESIDE, *_COLUMNS)}
MAIN_ARMS: Final = tuple(arm.name for arm in _MAIN)
QUICK_ARMS: Final = (SKIP, FULL, SAME_CLOCK, SMALL)
"""What a minute is enough for."""
DECIDING_ARMS: Final = (SKIP, FULL, SMALL, SAME_CLOCK, "int8", "full-every-10")
"""Arms that decide how a run should be set up: they are trained with three seeds."""
