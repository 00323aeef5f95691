"""The arms of the study: ways in which N replicas train together.

`noloco` is the paper's method with its defaults (alpha 0.5, beta = gamma = 0.7, pairs, blocking,
fp32). Each arm below it changes one factor, but for two ladders:

    comparison      ddp, noloco, diloco, diloco-2h, none
    explanation     ddp, plain-all-h1, plain-all, plain, noloco: from averaged gradients to averaged
                    weights in each step, then every H steps, then in pairs, then outer momentum

All train the same tokens in the same order, from the same weights, at the same learning rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from peer.averaging.noloco import Factors

Group = Literal["gradients", "pairs", "all", "nobody"]
"""Who averages: the gradients of all in each step, weights in random pairs, of all, or never."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train together.

    Attributes:
        rounds_of: length of a round, in the setting's H; 0 is a round of one step.
        code: what travels, by its name in exchange.py.
        delay: share of a round after which the others' vectors arrive; training goes on meanwhile.
    """

    name: str
    group: Group = "pairs"
    alpha: float = 0.5
    beta: float = 0.7
    rounds_of: float = 1.0
    code: str = "fp32"
    delay: float = 0.0

    @property
    def factors(self) -> Factors:
        """Those of the outer step; gamma = beta, as in the paper's code."""
        return Factors(self.alpha, self.beta, self.beta)

    def inner_steps(self, setting_inner_steps: int) -> int:
        """H of this arm."""
        return max(1, round(self.rounds_of * setting_inner_steps))

    def delay_steps(self, setting_inner_steps: int) -> int:
        """Steps trained between the close of a round and its outer step."""
        return round(self.delay * self.inner_steps(setting_inner_steps))

    # --- what peers of unequal speed change (unequal.py) ------------------------------------------
    @property
    def step_time(self) -> int:
        """How long an inner step takes, in the setting's steps."""
        return 1

    def nodes(self, replicas: int) -> int:
        """How many of the setting's replicas take part."""
        return replicas

    def quotas(self, inner_steps: int, replicas: int) -> list[int]:
        """Inner steps of each replica in a round of `inner_steps`."""
        return [inner_steps] * self.nodes(replicas)

    def votes(self, steps: Sequence[int]) -> list[int]:
        """For how many each member of a group counts, by the steps of all in this round."""
        return [1] * len(steps)

    def stretch(self, _steps: int, _inner_steps: int) -> float:
        """By what the move of a replica since its phi is multiplied before it is sent."""
        return 1.0


REFERENCE: Final = "noloco"
"""What one factor is changed of, and what codes are compared with: it exchanges fp32."""

_STUDY: Final = (
    Arm("ddp", "gradients"),
    Arm(REFERENCE),
    Arm("diloco", "all", alpha=0.3),
    Arm("diloco-2h", "all", alpha=0.3, rounds_of=2),
    Arm("none", "nobody"),
    Arm("plain", alpha=0.0, beta=1.0),
    Arm("plain-all", "all", alpha=0.0, beta=1.0),
    Arm("plain-all-h1", "all", alpha=0.0, beta=1.0, rounds_of=0),
    Arm("int8", code="int8"),
    Arm("bf16", code="bf16"),
    Arm("modulo8", code="modulo8"),
    Arm("modulo4", code="modulo4"),
    Arm("overlap", delay=0.2),
    Arm("alpha-0", alpha=0.0),
    Arm("alpha-0.3", alpha=0.3),
    Arm("alpha-0.8", alpha=0.8),
    Arm("beta-0.5", beta=0.5),
    Arm("beta-1", beta=1.0),
    Arm("h-half", rounds_of=0.5),
    Arm("h-double", rounds_of=2),
)
_EXTRA: Final = (
    Arm("int4", code="int4"),
    Arm("fp32-4h", rounds_of=4),
    Arm("int8-overlap", code="int8", delay=0.2),
)

ARMS: Final = {arm.name: arm for arm in (*_STUDY, *_EXTRA)}
STUDY_ARMS: Final = tuple(arm.name for arm in _STUDY)
"""What runs unless arms are named; the rest: a code too coarse, which shows that the comparison can
see one; fp32 at int8's bytes; and what the run spec has by default."""
CODE_ARMS: Final = (REFERENCE, "bf16", "int8", "modulo8", "modulo4", "int4")
"""What is run in a late phase."""
