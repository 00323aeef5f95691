"""Sizes on which daemon and trainer agree: of boundaries, and of the memory for them."""

from math import prod
from typing import Final

from protocol.run.codecs import CODECS
from protocol.run.run_spec import RunSpec

SLOTS: Final = 4
"""Microbatches that a machine is taken to hold at once, where its memory is not known."""
MIN_SLOTS: Final = 2
MAX_SLOTS: Final = 8
"""More would hide longer ways than the internet has, and cost memory for boundaries."""
RING_PER_SLOT: Final = 4
"""Slots of a ring, each way, for each: a boundary may wait while others of its microbatch are under
way, and twice as many gradients are kept after they have been sent
(protocol/microbatch/mending.py).
"""


def boundary_shape(spec: RunSpec) -> tuple[int, int, int]:
    """Sequences of a microbatch, tokens, and width of the model."""
    return spec.microbatch_sequences, spec.model.context_length, spec.model.hidden_size


def boundary_bytes(spec: RunSpec) -> int:
    """Bytes of one boundary of a run, coded."""
    return CODECS[spec.pipeline.codec].code_bytes(prod(boundary_shape(spec)))
