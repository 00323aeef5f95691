"""Sizes on which daemon and trainer agree: of boundaries, and of the memory for them."""

from math import prod
from typing import Final

from protocol.run.codecs import CODECS
from protocol.run.run_spec import RunSpec

SLOTS: Final = 4
"""Microbatches that a machine holds at once."""
KEPT_SLOTS: Final = 2 * SLOTS
"""Gradients that have been sent and are kept until they are passed on."""
RING_SLOTS: Final = 2 * SLOTS + KEPT_SLOTS
"""Slots of a ring, each way: a boundary may wait while others of its microbatch are under way."""


def boundary_shape(spec: RunSpec) -> tuple[int, int, int]:
    """Sequences of a microbatch, tokens, and width of the model."""
    return spec.microbatch_sequences, spec.model.context_length, spec.model.hidden_size


def boundary_bytes(spec: RunSpec) -> int:
    """Bytes of one boundary of a run, coded."""
    return CODECS[spec.pipeline.codec].code_bytes(prod(boundary_shape(spec)))
