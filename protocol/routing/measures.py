"""What a peer measures of its links and of its own work, and when that is worth telling others.

Theory. A sample of a transfer is the time that the line needs, and whatever else was in the way:
another transfer, a busy processor. Nothing makes a sample too short, so of the last WINDOW samples
the lower quartile is taken; of work, whose times spread both ways, the median. Bad luck and single
outliers move neither.

Hysteresis. A vector is told again only when a value has moved by more than CHANGE from what was
told last, and by more than LEAST_US; so noise of a quarter moves nothing. The time on the line is
judged together with the round trip: it is the difference of two times, and noise of these is much
for a short one. A value that was unknown is told at once. At least TELL_EVERY_S lie between two
vectors.

What is known of a peer goes when it is gone.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from protocol.limits import MAX_LINKS
from protocol.pipeline.problem import US_PER_S

from .vectors import MAX_US, LinkTimes, LinkVector, WorkTimes

WINDOW: Final = 32
"""Samples of which the quartile or median counts."""
ENOUGH: Final = 3
"""Samples before which nothing is told."""
CHANGE: Final = 0.4
"""A value that has moved by more than this part is told again."""
LEAST_US: Final = 1000
"""Times that have moved by less are not, whatever part that is."""
TELL_EVERY_S: Final = 5.0
WORK: Final = WorkTimes.__struct_fields__
LEAST_LINE_S: Final = 20e-6
"""No boundary is taken to be on the line for less."""


class Samples:
    """The last WINDOW samples of one time, in seconds."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=WINDOW)

    def add(self, seconds: float) -> None:
        """One more sample."""
        self._last.append(seconds)

    def at(self, part: float) -> float | None:
        """The quantile; None while there are too few samples."""
        if len(self._last) < ENOUGH:
            return None
        return sorted(self._last)[int(part * (len(self._last) - 1))]


@dataclass(slots=True)
class _LinkSamples:
    """Times of one link: there and back, and of a boundary on the line, either way."""

    rtt: Samples = field(default_factory=Samples)
    out: Samples = field(default_factory=Samples)
    back: Samples = field(default_factory=Samples)


class Measures:
    """See the top of the file. All times are seconds.

    Attributes:
        forward: what microbatches take through the stage.
        backward: what their gradients do.
        loss: of head and loss, there and back.
    """

    def __init__(self) -> None:
        self._links: dict[str, _LinkSamples] = {}
        self.forward, self.backward, self.loss = Samples(), Samples(), Samples()
        self._told: LinkVector | None = None
        self._told_s = 0.0

    # --- samples ----------------------------------------------------------------------------------
    def round_trip(self, peer_id: str, seconds: float) -> None:
        """Something small went to a peer and came back."""
        if link := self._link(peer_id):
            link.rtt.add(seconds)

    def sent(self, peer_id: str, seconds: float) -> float | None:
        """A boundary went to a peer: from its first byte until it was told that all are there.

        Without the way of what is small: the first byte there, and the receipt back. Returns how
        long one occupies the line; None while that is not known.
        """
        link = self._link(peer_id)
        if link is None:
            return None
        link.out.add(max(LEAST_LINE_S, seconds - (link.rtt.at(0.25) or 0.0)))
        return link.out.at(0.25)

    def received(self, peer_id: str, seconds: float) -> None:
        """A boundary came from a peer: from its first byte until all of it was there."""
        if link := self._link(peer_id):
            link.back.add(max(LEAST_LINE_S, seconds))

    def line_s(self, peer_id: str) -> float | None:
        """How long a boundary to this peer occupies the line; None while that is not known."""
        link = self._links.get(peer_id)
        return None if link is None else link.out.at(0.25)

    def keep(self, peer_ids: Iterable[str]) -> None:
        """Forget all others."""
        there = set(peer_ids)
        for gone in self._links.keys() - there:
            del self._links[gone]

    # --- what is told -----------------------------------------------------------------------------
    def work(self) -> WorkTimes:
        """What a microbatch takes here."""
        return WorkTimes(
            *(_whole(samples.at(0.5)) for samples in (self.forward, self.backward, self.loss))
        )

    def links(self) -> tuple[LinkTimes, ...]:
        """The links, by peer id."""
        return tuple(
            LinkTimes(
                peer_id, *(_whole(times.at(0.25)) for times in (link.rtt, link.out, link.back))
            )
            for peer_id, link in sorted(self._links.items())
        )

    def vector(
        self, peer_id: str, incarnation: int, stage: int, slots: int, now_s: float
    ) -> LinkVector | None:
        """What is to be told from now on; None when what was told still stands."""
        before = self._told
        if before is not None and now_s - self._told_s < TELL_EVERY_S:
            return None
        number = 1 if before is None else before.number + 1
        now = LinkVector(peer_id, incarnation, number, stage, slots, self.work(), self.links())
        if before is not None and not _has_moved(before, now):
            return None
        self._told, self._told_s = now, now_s
        return now

    def _link(self, peer_id: str) -> _LinkSamples | None:
        if peer_id not in self._links and len(self._links) < MAX_LINKS:
            self._links[peer_id] = _LinkSamples()
        return self._links.get(peer_id)


def _whole(seconds: float | None) -> int:
    return 0 if seconds is None else min(MAX_US, max(1, round(seconds * US_PER_S)))


def _has_moved(before: LinkVector, now: LinkVector) -> bool:
    """Whether any value has moved too far to be left as it was told."""
    then, there = ({link.peer_id: link for link in each.links} for each in (before, now))
    if then.keys() != there.keys() or before.slots != now.slots:
        return True
    pairs = [(getattr(before.work, each), getattr(now.work, each)) for each in WORK]
    for peer_id, link in there.items():
        pairs += zip(_moves(then[peer_id]), _moves(link), strict=True)
    return any(map(_differs, *zip(*pairs, strict=True)))


def _moves(link: LinkTimes) -> tuple[int, int, int]:
    """What a link takes there and back, and with a boundary either way; 0 is unknown."""
    return (
        link.rtt_us,
        link.out_us and link.rtt_us + link.out_us,
        link.in_us and link.rtt_us + link.in_us,
    )


def _differs(before_us: int, now_us: int) -> bool:
    """Whether two values are further apart than CHANGE, seen from the smaller one."""
    less, more = sorted((before_us, now_us))
    return more > 0 and (less == 0 or (more > (1 + CHANGE) * less and more - less > LEAST_US))
