"""The length of this peer's own rounds, where the run leaves it open (`inner_steps = "auto"`).

A round is as long as averages take (protocol/gossip/round_length.py): the exchange and the outer
step here, the pause of the trainer that merges, and what this process and p2pd take of processors
that the trainer would use. The trainer says how much of them it gets in a second.

A peer alone has nobody's line to fill, so its rounds are nominal ones. But a joiner takes our state
after the last round, and a peer that trains finds us when a round ends. So a round that was begun
alone ends when a peer comes, and again when that peer begins to train: once each in a peer's life,
and not before it is as long as a first round among others, so that one that comes and goes, or says
it does, costs little.
"""

from typing import Final

import trio

from peer.facts import PeerState
from peer.observe.event_names import EventName
from peer.rounds.services import Services
from peer.runtime import PeerId
from peer.training.messages import RoundClosed
from protocol.gossip.round_length import (
    FIRST_INNER_STEPS,
    AveragingCpu,
    ProcessorUse,
    RoundLength,
    wished,
)
from protocol.membership.view import View
from protocol.outcomes import SkipReason

from .exchange_session import Averaged, AverageEnded

COMPANY: Final = (PeerState.DOWNLOADING, PeerState.TRAINING)
"""States of those that want something of our next state: to begin with it, or to average with."""


_Visit = tuple[PeerId, int, str]
"""A life of a peer, by its incarnation, in a state in which it wants something of us."""


class OwnLength:
    """Writes `facts.chosen_inner_steps`."""

    def __init__(self, services: Services, view: View) -> None:
        self._length = RoundLength()
        self._facts, self._events = services.facts, services.events
        self._view, self._work, self._network = view, services.work, services.network
        self._averaging_cpu = AveragingCpu()
        self._alone = False
        self._welcomed: frozenset[_Visit] = frozenset()
        self._nominal_step_s = 0.0
        self._on_the_line: tuple[int, PeerId, float, float] | None = None
        self._facts.chosen_inner_steps = self._length.inner_steps

    def next(self, nominal_step_s: float, *, alone: bool) -> int:
        """H of the round that begins now, in which a nominal step takes us so long."""
        self._nominal_step_s, self._alone = nominal_step_s, alone
        if alone:
            lives = {(member.peer_id, member.incarnation) for member in self._view.members()}
            before = {visit for visit in self._welcomed if visit[:2] in lives}
            self._welcomed = self._company() | before
        return self._facts.inner_steps_per_round if alone else self._length.inner_steps

    def is_outgrown(self, steps: int) -> bool:
        """Whether the round in training was begun alone, and a peer has come since."""
        is_long = self._alone and steps >= FIRST_INNER_STEPS
        return is_long and not self._company() <= self._welcomed

    def _company(self) -> frozenset[_Visit]:
        members = self._view.alive(trio.current_time())
        visits = ((m.peer_id, m.incarnation, m.progress.state) for m in members)
        return frozenset(visit for visit in visits if visit[-1] in COMPANY)

    def paired(self) -> None:
        """A partner was found, and an exchange begins."""
        self._averaging_cpu.begin(self._spent())

    def exchanged(self, ended: AverageEnded, apply_s: float, closed: RoundClosed) -> None:
        """An exchange and its outer step are over."""
        own, outcome = ended.own, ended.outcome
        is_told = isinstance(outcome, Averaged) or outcome.reason is SkipReason.DEADLINE
        self._on_the_line = None
        if outcome.partner_id is None:
            return
        # Also of one that came to nothing: else it would be taken for what is taken always.
        taken_s, trained_s = self._averaging_cpu.end(self._spent()), closed.processor_s
        if is_told and not own.final:
            lost_s = taken_s * closed.seconds / trained_s if trained_s > 0 else 0.0
            self._on_the_line = own.round, outcome.partner_id, ended.exchange_s + apply_s, lost_s

    def merged(self, pause_s: float) -> None:
        """The trainer has taken the average over."""
        last, self._on_the_line = self._on_the_line, None
        if last is None or not self._nominal_step_s:
            return
        round_, partner_id, line_s, lost_s = last
        before, length = self._length.inner_steps, self._length
        if length.averaged(partner_id, wished(line_s, pause_s + lost_s, self._nominal_step_s)):
            self._facts.chosen_inner_steps = length.inner_steps
            self._events.emit(
                EventName.ROUND_LENGTH_CHANGED,
                round=round_,
                inner_steps=length.inner_steps,
                before=before,
            )

    def _spent(self) -> ProcessorUse:
        time = self._work.processor_time(self._network.statistics().p2pd_pid)
        return ProcessorUse(trio.current_time(), time.taken_s, time.idle_s)
