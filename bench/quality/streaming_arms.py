"""The arms of the study of streaming DiLoCo, one factor changed at a time.

`streaming` is the run spec's default: fragments of two blocks and one of what is in no block, tau
1, merge 1/2, int8, lr 0.4 and momentum 0.9. `plain` is DiLoCo without any of it: the whole model at
once, waited for, taken over as it is, in fp32.

All train the same number of tokens per step, from the same weights, at the same inner learning
rate: with more replicas each has a smaller batch, as in the paper (arXiv 2501.18512, table 6).
"""

from dataclasses import dataclass
from typing import Final, Literal

from protocol.fragment.fragments import Pattern
from protocol.run.sections import DilocoSection

Group = Literal["all", "gradients", "nobody"]


@dataclass(frozen=True, slots=True)
class StreamingArm:
    """One way to train together.

    Attributes:
        group: whose weights are averaged by the outer step: all, or nobody; or the gradients of all
            in each step, without an outer step.
        replicas_of: replicas, in the setting's number.
        inner_steps: H; None is the setting's.
        code: codec of what travels.
        heavy_ball: v moves phi, without Nesterov's look ahead.
    """

    name: str
    group: Group = "all"
    replicas_of: float = 1.0
    inner_steps: int | None = None
    fragments: Pattern = "strided"
    blocks_per_fragment: int = 2
    overlap_steps: int = 1
    merge: float = 0.5
    code: str = "int8"
    heavy_ball: bool = False

    @property
    def diloco(self) -> DilocoSection:
        """The arm in the run spec's words; the outer rate and momentum are its defaults."""
        return DilocoSection(
            fragments=self.fragments,
            blocks_per_fragment=self.blocks_per_fragment,
            overlap_steps=self.overlap_steps,
            merge=self.merge,
        )


def _plain(name: str, inner_steps: int | None = None) -> StreamingArm:
    return StreamingArm(
        name, inner_steps=inner_steps, fragments="whole", overlap_steps=0, merge=0.0, code="fp32"
    )


PLAIN: Final = "plain"
PLAIN_H100: Final = "plain-h100"
DEFAULT: Final = "streaming"

_ARMS: Final = (
    StreamingArm("ddp", "gradients"),
    _plain(PLAIN),
    StreamingArm(DEFAULT),
    StreamingArm("none", "nobody"),
    StreamingArm("m2", replicas_of=0.5),
    StreamingArm("m8", replicas_of=2.0),
    _plain(PLAIN_H100, inner_steps=100),
    StreamingArm("h100", inner_steps=100),
    StreamingArm("whole", fragments="whole"),
    StreamingArm("blocks-1", blocks_per_fragment=1),
    StreamingArm("tau-0", overlap_steps=0),
    StreamingArm("tau-5", overlap_steps=5),
    StreamingArm("tau-10", overlap_steps=10),
    StreamingArm("merge-0", merge=0.0),
    StreamingArm("fp32", code="fp32"),
    StreamingArm("int4", code="int4"),
    StreamingArm("heavy-ball", heavy_ball=True),
)
STREAMING_ARMS: Final = {arm.name: arm for arm in _ARMS}
