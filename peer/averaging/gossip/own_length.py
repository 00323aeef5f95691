"""The length of our own rounds, chosen by what averages take (protocol/gossip/round_length.py).

What an average took is known in two parts: the exchange and the outer step here, and the pause of
the trainer when that has merged it.
"""

from dataclasses import dataclass

from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.observe.facts import Facts
from peer.ports import PeerId
from protocol.gossip.round_length import RoundLength, TimedAverage


@dataclass(frozen=True, slots=True)
class _OnTheLine:
    """What is known of an average that the trainer has not merged."""

    round: int
    partner_id: PeerId
    line_s: float


class OwnLength:
    """Writes `facts.chosen_inner_steps`."""

    def __init__(self, facts: Facts, events: EventLog) -> None:
        self._length = RoundLength()
        self._facts = facts
        self._events = events
        self._nominal_step_s = 0.0
        self._last: _OnTheLine | None = None
        facts.chosen_inner_steps = self._length.inner_steps

    def __repr__(self) -> str:
        return f"<OwnLength {self._length!r}>"

    def next(self, nominal_step_s: float, *, alone: bool) -> int:
        """H of the round that begins now. Nobody's line is filled by a peer that is alone.

        Args:
            nominal_step_s: how long a nominal step takes us in it.
        """
        self._nominal_step_s = nominal_step_s
        return self._facts.inner_steps_per_round if alone else self._length.inner_steps

    def exchanged(self, round_: int, partner_id: PeerId, line_s: float) -> None:
        """This round's exchange and outer step are over, and took so long."""
        self._last = _OnTheLine(round_, partner_id, line_s)

    def merged(self, round_: int, pause_s: float) -> None:
        """The trainer has taken this round's average over, and stood still for so long."""
        last, self._last = self._last, None
        if last is None or last.round != round_ or not self._nominal_step_s:
            return
        before, length = self._length.inner_steps, self._length
        average = TimedAverage(last.partner_id, last.line_s, pause_s, self._nominal_step_s)
        if length.averaged(average):
            self._facts.chosen_inner_steps = length.inner_steps
            self._events.emit(
                EventName.ROUND_LENGTH_CHANGED,
                round=round_,
                inner_steps=length.inner_steps,
                before=before,
            )
