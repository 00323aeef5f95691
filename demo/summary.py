"""What the demo found out: `summary.json`, and the same for people."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from peer.observe.status import Status
from protocol.membership.group import WHOLE_MODEL
from protocol.names import short_id
from protocol.run.layout import DATA_STAGE, stage_of_part

from .reading import Point, Reading
from .table import human_bytes

REQUIRED_GAIN_NATS: Final = 0.03
"""Gain over the one alone that is expected of every peer; with less the four have lost."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A peer at the end of its run; see `finished`.

    Attributes:
        rounds, averaged, skipped: rounds that it closed, and how they ended; with fragments, its
            sends.
        parameters: of the part of the model that it holds.
        has_data: whether it trains on data of its own; a relay of a pipeline does not.
        ranks: processes that it trains in.
    """

    peer_id: str
    parameters: int
    rounds: int
    averaged: int
    skipped: dict[str, int]
    has_data: bool
    tokens: int
    validation_loss: float
    averaging_bytes: int
    total_bytes: int
    ranks: int = 1


def finished(reading: Reading, parameters: int) -> Finished:
    """The last word of a peer whose run is over; it holds so many parameters."""
    status = reading.status or Status()
    assert status.peer_id is not None
    assert status.validation_loss is not None
    skipped = {str(reason): count for reason, count in status.outcomes.skipped.items() if count}
    return Finished(
        peer_id=status.peer_id,
        parameters=parameters,
        rounds=status.outcomes.averaged + sum(skipped.values()),
        averaged=status.outcomes.averaged,
        skipped=skipped,
        has_data=stage_of_part(status.part or WHOLE_MODEL) in (None, DATA_STAGE),
        tokens=status.tokens or 0,
        validation_loss=status.validation_loss,
        averaging_bytes=reading.carried.averaging_bytes,
        total_bytes=reading.carried.total_bytes,
        ranks=status.ranks or 1,
    )


def median_tokens(peers: Sequence[Finished]) -> int:
    """Tokens of the median peer that has data."""
    return round(statistics.median(peer.tokens for peer in peers if peer.has_data))


def tokens_until(curve: Sequence[Point], loss: float, tokens: int) -> int | None:
    """Tokens after which a validation curve is first down at this loss; None if it never is.

    Args:
        curve: losses by step, up to the end of the run.
        tokens: of the whole run, spread evenly over its steps.
    """
    place = next((at for at, point in enumerate(curve) if point.loss <= loss), None)
    if place is None:
        return None
    point = curve[place]
    step = point.step
    if place:  # between two validations the curve is taken to be straight
        before = curve[place - 1]
        step -= (point.step - before.step) * (loss - point.loss) / (before.loss - point.loss)
    return round(tokens * step / curve[-1].step)


@dataclass(frozen=True, slots=True)
class Summary:
    """The end of the demo.

    Attributes:
        sends_per_round: parts in which a peer sends its weights in one round.
        lone_curve: validation losses of the peer alone.
    """

    peers: Sequence[Finished]
    alone: Finished
    sends_per_round: int = 1
    lone_curve: Sequence[Point] = ()

    @property
    def bytes_per_parameter_per_round(self) -> float | None:
        """Bytes written to average, over parameters times averaged rounds."""
        averaged = sum(peer.parameters * peer.averaged for peer in self.peers)
        sent = sum(peer.averaging_bytes for peer in self.peers)
        return sent * self.sends_per_round / averaged if averaged else None

    @property
    def gain_nats(self) -> float:
        """Gain of the worst peer over the one alone."""
        return self.alone.validation_loss - self._worst_loss

    @property
    def lone_tokens_needed(self) -> int | None:
        """Tokens after which the one alone was as good as the worst of the four; None if never."""
        return tokens_until(self.lone_curve, self._worst_loss, self.alone.tokens)

    @property
    def _worst_loss(self) -> float:
        return max(peer.validation_loss for peer in self.peers)

    @property
    def won(self) -> bool:
        """Whether averaging was worth it."""
        return self.gain_nats >= REQUIRED_GAIN_NATS

    def to_json(self) -> dict[str, Any]:
        """The content of `summary.json`."""
        skipped: Counter[str] = Counter()
        for peer in self.peers:
            skipped.update(peer.skipped)
        return {
            "peers": [
                {
                    "peer_id": peer.peer_id,
                    "has_data": peer.has_data,
                    "ranks": peer.ranks,
                    "rounds": peer.rounds,
                    "tokens": peer.tokens,
                    "validation_loss": peer.validation_loss,
                }
                for peer in self.peers
            ],
            "alone": {
                "tokens": self.alone.tokens,
                "validation_loss": self.alone.validation_loss,
                "tokens_for_the_same_loss": self.lone_tokens_needed,
            },
            "gain_nats": self.gain_nats,
            "won": self.won,
            "outcomes": {
                "averaged": sum(peer.averaged for peer in self.peers),
                "skipped": dict(skipped),
            },
            "bytes_per_parameter_per_round": self.bytes_per_parameter_per_round,
            "total_bytes": sum(peer.total_bytes for peer in self.peers),
        }

    def describe(self) -> list[str]:
        """Lines for people."""
        tree = self.to_json()
        reasons = ", ".join(f"{why} {n}" for why, n in tree["outcomes"]["skipped"].items())
        ratio = self.bytes_per_parameter_per_round
        sent = human_bytes(tree["total_bytes"])
        per_round = "no" if ratio is None else f"{ratio:.4f}"
        parameters = f"{self.alone.parameters:,} parameters"
        return [
            f"{'':16} {'validation loss':>16} {'tokens':>12} {'rounds':>8}",
            *(_line(f"peer {short_id(peer.peer_id)}", peer) for peer in self.peers),
            _line("one peer alone", self.alone),
            self._verdict(),
            *self._tokens_compared(),
            f"rounds: {tree['outcomes']['averaged']} averaged; skipped: {reasons or 'none'}",
            f"{parameters}; {per_round} bytes per parameter and averaged round",
            f"{sent} sent in all",
        ]

    def _verdict(self) -> str:
        if self.won:
            return f"every peer beats the one alone, by {self.gain_nats:.3f} nats or more"
        return (
            f"THE FOUR LOSE: not every peer beats the one alone by {REQUIRED_GAIN_NATS} nats; "
            f"the worst is {abs(self.gain_nats):.3f} {'worse' if self.gain_nats < 0 else 'better'}"
        )

    def _tokens_compared(self) -> list[str]:
        """Nothing where the one alone never was as good: the gain says that already."""
        saw, needed = self.alone.tokens, self.lone_tokens_needed
        if needed is None:
            return []
        tokens = f"{needed:,} of the {saw:,} tokens that it saw"
        return [f"the one alone needs {tokens} to be as good as the worst of them"]


def _line(name: str, peer: Finished) -> str:
    box = f"  in {peer.ranks} processes" if peer.ranks > 1 else ""
    return f"{name:16} {peer.validation_loss:16.4f} {peer.tokens:12,} {peer.rounds:8,}{box}"
