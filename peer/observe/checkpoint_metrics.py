"""How checkpoints end, and the metrics that say so."""

from collections.abc import Iterator, Mapping
from enum import StrEnum

from prometheus_client.metrics_core import Metric

from .families import counter_by, gauge


class CheckpointOutcome(StrEnum):
    """How a checkpoint ended."""

    WRITTEN = "written"
    FAILED = "failed"
    """The disk refused, or the trainer died over it."""
    COPIED = "copied"
    """To `--checkpoint-upload`."""
    NOT_COPIED = "not_copied"


def checkpoint_metrics(
    outcomes: Mapping[CheckpointOutcome, int], age_s: float | None
) -> Iterator[Metric]:
    """The metrics.

    Args:
        age_s: since the last one was on the disk; None before the first.
    """
    yield counter_by(
        "outcome",
        "loco_checkpoints",
        "Checkpoints of this peer, by how they ended.",
        CheckpointOutcome,
        outcomes,
    )
    yield gauge("loco_checkpoint_age_seconds", "Since the last checkpoint was on the disk.", age_s)
