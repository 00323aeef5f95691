"""What came of averaging in pairs: figures of each peer, out of its event log.

The same for real daemons and for a simulated swarm: what goes in is the parsed lines of each log
(names and fields as docs/events.md lists them), a window of time, and H; what comes out is plain
numbers.

The figure that counts is `exchanged`: completed exchanges * H / nominal steps. It is 1 for a peer
that averages once for each H nominal steps of the run, as NoLoCo's theory has it, however rounds
are cut; a round that is trained for longer, skipped, or jumped over lowers it. Beside it stands
`averaged`, the share of settled rounds that ended with a partner, which says nothing of rounds that
were left out.

Times are those of the log's own stamps (`time`, the swarm's clock): an event counts if it was
written in the window. An exchange counts when it ends.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from peer.observe.event_names import EventName

Event = Mapping[str, Any]
QUANTILES: Final = (0.1, 0.5, 0.9)


@dataclass(frozen=True, slots=True)
class Window:
    """What is looked at, in seconds of the events' `time`."""

    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    def part(self, events: Iterable[Event]) -> list[Event]:
        """The events in it."""
        return [event for event in events if self.begin_s <= event["time"] < self.end_s]


@dataclass(frozen=True, slots=True)
class PeerFigures:
    """One peer, in one window.

    Attributes:
        seconds: of the window.
        nominal_steps: that the peer's place in the run has moved.
        steps: inner steps trained in rounds that were closed.
        exchanges: averaged rounds, by partner.
        skipped: rounds by the reason for which they were not averaged.
        refused: proposals of this peer, by the reason for which others refused them.
        round_s: lengths of the closed rounds, from the trainer's begin to its close.
        exchange_s: lengths of the completed exchanges.
        alone_steps_per_s: of the trainer when it started; None if that is not in the log.
    """

    peer: str
    inner_steps: int
    seconds: float
    nominal_steps: float
    steps: int
    exchanges: Mapping[str, int]
    skipped: Mapping[str, int]
    refused: Mapping[str, int]
    round_s: Sequence[float]
    exchange_s: Sequence[float]
    alone_steps_per_s: float | None

    @property
    def num_exchanges(self) -> int:
        return sum(self.exchanges.values())

    @property
    def exchanged(self) -> float:
        """Exchanges for each H nominal steps."""
        due = self.nominal_steps / self.inner_steps
        return self.num_exchanges / due if due > 0 else 0.0

    @property
    def averaged(self) -> float:
        """Share of settled rounds."""
        settled = self.num_exchanges + sum(self.skipped.values())
        return self.num_exchanges / settled if settled else 0.0

    @property
    def exchange_share(self) -> float:
        """Part of the time in which an exchange that completed was under way."""
        return sum(self.exchange_s) / self.seconds

    @property
    def steps_per_s(self) -> float:
        """Trained within the window."""
        return self.steps / self.seconds

    @property
    def speed_share(self) -> float | None:
        """Speed beside that of the trainer alone, when it started."""
        return self.steps_per_s / self.alone_steps_per_s if self.alone_steps_per_s else None

    def to_json(self) -> dict[str, Any]:
        """Plain values, with what follows from them."""
        return {
            "peer": self.peer,
            "exchanged": self.exchanged,
            "averaged": self.averaged,
            "nominal_steps": self.nominal_steps,
            "steps": self.steps,
            "exchanges": dict(self.exchanges),
            "skipped": dict(self.skipped),
            "refused": dict(self.refused),
            "round_s": quantiles(self.round_s),
            "exchange_s": quantiles(self.exchange_s),
            "exchange_share": self.exchange_share,
            "steps_per_s": self.steps_per_s,
            "alone_steps_per_s": self.alone_steps_per_s,
            "speed_share": self.speed_share,
        }


def peer_figures(
    peer: str,
    events: Iterable[Event],
    window: Window,
    inner_steps: int,
    nominal_steps: float | None = None,
) -> PeerFigures:
    """Read one peer's log.

    Args:
        events: the whole log; what lies before the window tells the trainer's speed.
        inner_steps: H.
        nominal_steps: as the peer's status told them; None takes them from the rounds it opened.
    """
    of_all = list(events)
    within = window.part(of_all)
    started = _named(of_all, EventName.TRAINER_STARTED)
    averaged = _named(within, EventName.ROUND_AVERAGED)
    closed = _named(within, EventName.ROUND_CLOSED)
    skipped = _named(within, EventName.ROUND_SKIPPED)
    refused = _named(within, EventName.PROPOSAL_REFUSED)
    if nominal_steps is None:
        nominal_steps = inner_steps * _rounds_opened(within)
    return PeerFigures(
        peer=peer,
        inner_steps=inner_steps,
        seconds=window.seconds,
        nominal_steps=nominal_steps,
        steps=sum(event["steps"] for event in closed),
        exchanges=Counter(str(event["partner"]) for event in averaged),
        skipped=Counter(str(event["reason"]) for event in skipped),
        refused=Counter(str(event["reason"]) for event in refused),
        round_s=[event["seconds"] for event in closed],
        exchange_s=[event["seconds"] for event in averaged],
        alone_steps_per_s=started[-1]["steps_per_s"] if started else None,
    )


def pair_counts(peers: Sequence[PeerFigures]) -> dict[tuple[str, str], int]:
    """Exchanges of every two peers, those that never met among them.

    The two may have counted differently, by one at either end of the window: the larger counts.
    """
    return {
        (a.peer, b.peer): max(a.exchanges.get(b.peer, 0), b.exchanges.get(a.peer, 0))
        for index, a in enumerate(peers)
        for b in peers[index + 1 :]
    }


def together(peers: Sequence[PeerFigures]) -> PeerFigures:
    """All peers as one: sums, and the lengths of all of them side by side."""
    alone = [each.alone_steps_per_s for each in peers if each.alone_steps_per_s]
    return PeerFigures(
        peer="all",
        inner_steps=peers[0].inner_steps,
        seconds=sum(each.seconds for each in peers),
        nominal_steps=sum(each.nominal_steps for each in peers),
        steps=sum(each.steps for each in peers),
        exchanges=_sum(each.exchanges for each in peers),
        skipped=_sum(each.skipped for each in peers),
        refused=_sum(each.refused for each in peers),
        round_s=[length_s for each in peers for length_s in each.round_s],
        exchange_s=[length_s for each in peers for length_s in each.exchange_s],
        alone_steps_per_s=statistics.fmean(alone) if alone else None,
    )


def quantiles(values: Sequence[float]) -> dict[str, float | None]:
    """At 10, 50 and 90%, the nearest value; None without any."""
    ordered = sorted(values)
    return {
        f"{share:.0%}": ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        if ordered
        else None
        for share in QUANTILES
    }


def told(counts: Mapping[str, int]) -> str:
    """The largest first: `deadline 12, jumped 3`."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count}" for name, count in ordered) or "none"


def told_quantiles(values: Sequence[float]) -> str:
    """`2.3/3.7/5.0`."""
    return "/".join("-" if each is None else f"{each:.2g}" for each in quantiles(values).values())


def _named(events: Iterable[Event], name: EventName) -> list[Event]:
    return [event for event in events if event["event"] == name]


def _rounds_opened(within: Sequence[Event]) -> int:
    opened = [event["round"] for event in _named(within, EventName.ROUND_OPENED)]
    return opened[-1] - opened[0] if opened else 0


def _sum(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total
