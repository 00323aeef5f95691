"""How a run went here, from the start of this daemon: points for curves.

A point is made of one sample, at first. When the points are too many, each two become one, and
later points are made of twice as many samples: the whole life is always there, the longer it is
the coarser. What is not known in a sample does not count in its point.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from peer.runtime import NetworkStatistics

from .status import Status

SAMPLE_EVERY_S: Final = 2.0
MOST_POINTS: Final = 2000

Point = Mapping[str, float | None]


class History:
    """What status said since the start, in at most `most_points` points, an even number."""

    def __init__(self, most_points: int = MOST_POINTS) -> None:
        self._most_points = most_points
        self._points: list[Point] = []
        self._samples: list[Point] = []
        self._samples_per_point = 1
        self._before: tuple[float, int, int] | None = None

    def note(self, status: Status, carried: NetworkStatistics) -> None:
        """Take a sample; SAMPLE_EVERY_S is a good time after the last one."""
        self._samples.append(_sample(status, *self._line(status, carried)))
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
        told = {name: [point[name] for point in points] for name in _sample(Status(), None, None)}
        return {"every_s": self._samples_per_point * SAMPLE_EVERY_S, **told}

    def _line(
        self, status: Status, carried: NetworkStatistics
    ) -> tuple[float | None, float | None]:
        """Bytes per second since the last sample, sent and received."""
        sent, received = (sum(of.values()) for of in (carried.sent_bytes, carried.received_bytes))
        before, self._before = self._before, (status.up_s or 0.0, sent, received)
        if before is None or self._before[0] <= before[0]:
            return (None, None)
        seconds = self._before[0] - before[0]
        return ((sent - before[1]) / seconds, (received - before[2]) / seconds)


def _sample(status: Status, sent_per_s: float | None, received_per_s: float | None) -> Point:
    """Losses of peers are those of all that tell theirs, this one among them."""
    losses = _numbers([status.validation_loss, *(peer.validation_loss for peer in status.peers)])
    return {
        "up_s": status.up_s,
        "step": status.step,
        "train_loss": status.train_loss,
        "validation_loss": status.validation_loss,
        "peers_loss": sum(losses) / len(losses) if losses else None,
        "best_loss": min(losses, default=None),
        "worst_loss": max(losses, default=None),
        "tokens_per_s": status.tokens_per_s,
        "swarm_tokens_per_s": status.swarm_tokens_per_s,
        "sent_bytes_per_s": sent_per_s,
        "received_bytes_per_s": received_per_s,
        "averaged_share": status.outcomes.recent_share,
        "peers": len(status.peers),
    }


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _mean(points: Sequence[Point]) -> Point:
    return {name: _mean_of([point[name] for point in points]) for name in points[0]}


def _mean_of(values: Sequence[float | None]) -> float | None:
    """Six digits of it: the eye sees no more, and the page is shorter."""
    known = _numbers(values)
    return float(f"{sum(known) / len(known):.6g}") if known else None
