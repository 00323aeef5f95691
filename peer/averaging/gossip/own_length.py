"""The length of our own rounds, chosen by what averages take (protocol/gossip/round_length.py).

What an average took is known in two parts: the exchange and the outer step here, and the pause of
the trainer when that has merged it.

A peer alone has nobody's line to fill, so its rounds are nominal ones. But what a joiner takes is
our state after the last round, and a peer that trains finds us when a round ends. So a round that
was begun alone ends when a peer comes, and again when that begins to train: once each in a peer's
life, and not before it is as long as a first round among others, so that one that comes and goes,
or says it does, costs little.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import trio

from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.observe.facts import Facts
from peer.observe.status import PeerState
from peer.ports import PeerId
from protocol.gossip.round_length import FIRST_INNER_STEPS, RoundLength, TimedAverage
from protocol.membership.view import View

COMPANY: Final = (PeerState.DOWNLOADING, PeerState.TRAINING)
"""States of those that want something of our next state: to begin with it, or to average with."""


class _Visit(NamedTuple):
    """A life of a peer, in a state in which it wants something of us."""

    peer_id: PeerId
    incarnation: int
    state: str


@dataclass(frozen=True, slots=True)
class _OnTheLine:
    """What is known of an average that the trainer has not merged."""

    round: int
    partner_id: PeerId
    line_s: float


class OwnLength:
    """Writes `facts.chosen_inner_steps`.

    Args:
        view: of those whom we average with.
    """

    def __init__(self, facts: Facts, events: EventLog, view: View) -> None:
        self._length = RoundLength()
        self._facts = facts
        self._events = events
        self._view = view
        self._steps = 0
        self._alone = False
        self._welcomed: frozenset[_Visit] = frozenset()
        self._nominal_step_s = 0.0
        self._last: _OnTheLine | None = None
        facts.chosen_inner_steps = self._length.inner_steps

    def next(self, nominal_step_s: float, *, alone: bool) -> int:
        """H of the round that begins now. Nobody's line is filled by a peer that is alone.

        Args:
            nominal_step_s: how long a nominal step takes us in it.
        """
        self._nominal_step_s = nominal_step_s
        self._steps = 0
        self._alone = alone
        if alone:
            self._welcomed = self._company() | self._still_there(self._welcomed)
        return self._facts.inner_steps_per_round if alone else self._length.inner_steps

    def progressed(self, steps: int) -> None:
        """The round in training is so far."""
        self._steps = steps

    @property
    def is_outgrown(self) -> bool:
        """Whether the round in training was begun alone, and somebody has come since."""
        if not self._alone or self._steps < FIRST_INNER_STEPS:
            return False
        return not self._company() <= self._welcomed

    def _company(self) -> frozenset[_Visit]:
        members = self._view.alive(trio.current_time())
        visits = (_Visit(m.peer_id, m.incarnation, m.progress.state) for m in members)
        return frozenset(visit for visit in visits if visit.state in COMPANY)

    def _still_there(self, visits: frozenset[_Visit]) -> frozenset[_Visit]:
        """Those of lives that may go on."""
        lives = {(member.peer_id, member.incarnation) for member in self._view.members()}
        return frozenset(v for v in visits if (v.peer_id, v.incarnation) in lives)

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
