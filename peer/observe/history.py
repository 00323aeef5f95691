"""How a run went here, from the start of this daemon: points for curves.

A point is made of one sample, at first. When the points are too many, each two become one, and
later points are made of twice as many samples: the whole life is always there, the longer it is
the coarser. What is not known in a sample does not count in its point.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

from peer.runtime import NetworkStatistics

from .status import Status

SAMPLE_EVERY_S: Final = 2.0
MOST_POINTS: Final = 2000

COLUMNS: Final = (
    "up_s",
    "step",
    "train_loss",
    "validation_loss",
    "peers_loss",
    "best_loss",
    "worst_loss",
    "tokens_per_s",
    "swarm_tokens_per_s",
    "sent_bytes_per_s",
    "received_bytes_per_s",
    "averaged_share",
    "peers",
)
"""`peers_loss` is the mean validation loss of all peers that tell theirs, this one among them."""

Point = tuple[float | None, ...]


class History:
    """Args: most_points is even."""

    def __init__(self, most_points: int = MOST_POINTS) -> None:
        self._most_points = most_points
        self._points: list[Point] = []
        self._samples: list[Point] = []
        self._samples_per_point = 1
        self._before: tuple[float, int, int] | None = None

    def note(self, status: Status, carried: NetworkStatistics) -> None:
        """Take a sample; SAMPLE_EVERY_S is a good time after the last one."""
        self._samples.append((*_known(status), *self._line(status, carried), *_company(status)))
        if len(self._samples) < self._samples_per_point:
            return
        self._points.append(_mean(self._samples))
        self._samples.clear()
        if len(self._points) >= self._most_points:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_mean(pair) for pair in pairs]
            self._samples_per_point *= 2

    def to_json(self) -> dict[str, Any]:
        """The columns by name; the last point may be of fewer samples."""
        points = [*self._points, *([_mean(self._samples)] if self._samples else [])]
        columns = zip(*points, strict=True) if points else ((),) * len(COLUMNS)
        told = {name: list(column) for name, column in zip(COLUMNS, columns, strict=True)}
        return {"every_s": self._samples_per_point * SAMPLE_EVERY_S, **told}

    def _line(self, status: Status, carried: NetworkStatistics) -> Point:
        """Bytes per second since the last sample, sent and received."""
        sent, received = (sum(of.values()) for of in (carried.sent_bytes, carried.received_bytes))
        before, self._before = self._before, (status.up_s or 0.0, sent, received)
        if before is None or self._before[0] <= before[0]:
            return (None, None)
        seconds = self._before[0] - before[0]
        return ((sent - before[1]) / seconds, (received - before[2]) / seconds)


def _known(status: Status) -> Point:
    told = [peer.validation_loss for peer in status.peers]
    losses = _numbers([status.validation_loss, *told])
    return (
        status.up_s,
        status.step,
        status.train_loss,
        status.validation_loss,
        sum(losses) / len(losses) if losses else None,
        min(losses, default=None),
        max(losses, default=None),
        status.tokens_per_s,
        status.swarm_tokens_per_s,
    )


def _company(status: Status) -> Point:
    return (status.outcomes.recent_share, len(status.peers))


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _mean(points: Sequence[Point]) -> Point:
    return tuple(_mean_of(column) for column in zip(*points, strict=True))


def _mean_of(values: Sequence[float | None]) -> float | None:
    """Six digits of it: the eye sees no more, and the page is shorter."""
    known = _numbers(values)
    return float(f"{sum(known) / len(known):.6g}") if known else None
