"""The final averaging of one peer: when it begins, with whom, and when it is over.

The plan and its rules are in protocol/gossip/final_averaging.py. Each meeting is a round without
steps: the trainer's snapshot is averaged. The loss of our replica is measured before the first, and
that of the mean after the last (by the round loop).

Of the two sides of a meeting one asks until the other has come to the same meeting; the other waits
to be asked. A proposal that comes before its turn is held (at most MAX_HELD_PROPOSALS). The
waiting side may wait in vain, because a partner with another roster has another plan. So it also
asks from time to time, and the refusal tells it why.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from peer.network.conversation import Conversation
from peer.observe.event_names import EventName
from peer.observe.events import Events
from peer.process.rejoin import join_the_finished
from peer.rounds.validation import Validation
from peer.rounds.way import AveragingParts, Candidates, TrainerLine
from peer.runtime import PeerId, Stream
from protocol.errors import LocoError, Refused
from protocol.gossip.final_averaging import MIN_WAIT_S, Meeting, meetings, roster_digest
from protocol.gossip.matchmaking import MAX_EXCHANGE_ROUNDS, WAIT_ROUNDS
from protocol.limits import MAX_HELD_PROPOSALS
from protocol.outcomes import RefusalReason, SkipReason
from protocol.wire.messages import Propose
from protocol.wire.versions import GOSSIP

from .exchange_session import Averaged, AverageEnded, OwnVector, RoundOutcome, Skipped
from .exchanges import Exchanges, HeldProposal, note_refused


class FinalRounds:
    """Plans the meetings of the final averaging.

    Args:
        waits_for_exchanges: where peers choose the length of their rounds, the others are waited
            for as long as an exchange may last.

    Attributes:
        meeting: the planned one that the next round is for; None for a random partner.
        has_begun: the training is over, and the meetings are planned.
    """

    def __init__(
        self, parts: AveragingParts, validation: Validation, *, waits_for_exchanges: bool
    ) -> None:
        self._wanted = parts.spec.sync.final_averaging
        self._facts, self._events = parts.services.facts, parts.services.events
        self._view = parts.held.view
        self._candidates = parts.candidates_of(0)
        self._validation = validation
        self._wait_rounds = MAX_EXCHANGE_ROUNDS if waits_for_exchanges else WAIT_ROUNDS
        self._planned: list[Meeting] = []
        self._num_random = 0
        self._is_alone = False
        self._averaged_before = 0
        self.meeting: Meeting | None = None
        self.has_begun = False

    async def goes_on(self, line: TrainerLine, attended: "Sequence[FinalMeetings]") -> bool:
        """Whether there is one more meeting; `meeting` tells which. The first call plans them.

        Raises:
            JoinAgain: the others have ended the run without us.
        """
        if not self.has_begun:
            await self._begin(line, attended)
        if self._planned:
            self.meeting = self._planned.pop(0)
            return True
        self.meeting = None
        disagreements = max(each.disagreements for each in attended)
        if self._num_random < self._is_alone + disagreements:
            self._num_random += 1
            return True
        if self._wanted and self._facts.averaged == self._averaged_before:
            join_the_finished(self._view.alive(trio.current_time()))
        return False

    async def _begin(self, line: TrainerLine, attended: "Sequence[FinalMeetings]") -> None:
        await self._validation.wait_idle()
        await self._validation.begin(line, self._facts.round)
        await self._validation.wait_idle()
        facts = self._facts
        facts.replica_loss, facts.training_averaged = facts.validation_loss, True
        self._averaged_before = facts.averaged
        self._candidates.announce(None)
        if self._wanted:
            facts.now_doing("waiting for the others to finish training")
            await self._plan(attended)
        self.has_begun = True

    async def _plan(self, attended: "Sequence[FinalMeetings]") -> None:
        roster = await self._roster()
        self._planned = list(meetings(roster, self._facts.peer_id))
        for each in attended:
            each.begin(roster_digest(roster))
        self._is_alone = not self._planned  # then phi becomes theta
        self._events.emit(EventName.FINAL_AVERAGING, peers=len(roster), meetings=len(self._planned))

    async def _roster(self) -> list[PeerId]:
        """The peers that take part: those that have ended when all have, or our wait is over."""
        # How long the others may take to end: a peer that is further behind is not waited for.
        wait_s = max(MIN_WAIT_S, self._wait_rounds * self._facts.round_s)
        with trio.move_on_after(wait_s):
            while self._candidates.present(ended=False) or self._is_cut_off():
                await self._candidates.changed()
        return [self._facts.peer_id, *self._candidates.present(ended=True)]

    def _is_cut_off(self) -> bool:
        """Whether there were others, and we see nobody: then links may come back."""
        now_s = trio.current_time()
        return bool(self._view.members()) and not self._view.alive(now_s)


RETRY_S: Final = 1.0
"""Between two tries to reach a partner, and two looks whether one that should call is there."""


@dataclass(slots=True)
class _Call(HeldProposal):
    """A proposal for a planned meeting.

    Attributes:
        over: set when nothing more comes of it.
        outcome: of the exchange; None where there was none.
    """

    over: trio.Event = field(default_factory=trio.Event)
    outcome: RoundOutcome | None = None


class FinalMeetings:
    """The planned meetings of one fragment. `Gossip` hands over proposals that belong to them.

    Attributes:
        disagreements: meetings left out because the partner sees another roster than we.
    """

    def __init__(self, exchanges: Exchanges, *, candidates: Candidates, events: Events) -> None:
        self._exchanges = exchanges
        self._candidates = candidates
        self._events = events
        self._roster: str | None = None
        self._number = 0
        self._calls: dict[PeerId, _Call] = {}
        self._called = trio.Event()
        self.disagreements = 0

    def begin(self, roster: str) -> None:
        self._roster, self._number = roster, 0
        for call in self._calls.values():
            if call.proposal.roster != roster:
                call.refuse(RefusalReason.OTHER_ROSTER)

    async def meet(self, own: OwnVector, meeting: Meeting, wait_s: float) -> AverageEnded:
        """Exchange vectors with the partner of a planned meeting.

        Args:
            own: our contribution; its payload must lie still until this returns.
            wait_s: how long the partner may take to come, and then the exchange.
        """
        packed = replace(own, packed=await self._exchanges.packer.packed(own.payload))
        began_s = trio.current_time()
        self._number = meeting.number
        outcome: RoundOutcome = Skipped(SkipReason.DEADLINE, meeting.partner)
        with trio.move_on_after(wait_s) as patience:
            outcome = await self._hold(packed, meeting, wait_s, patience)
        self._number = meeting.number + 1
        seconds = trio.current_time() - began_s
        exchanged = isinstance(outcome, Averaged)
        return AverageEnded(own, outcome, *((0.0, seconds) if exchanged else (seconds, 0.0)))

    async def _hold(
        self, own: OwnVector, meeting: Meeting, wait_s: float, patience: trio.CancelScope
    ) -> RoundOutcome:
        """Ask the partner, or wait to be asked, until there was an exchange or can be none."""
        partner, until_s = meeting.partner, patience.deadline
        while partner in self._candidates.present(ended=True):
            call = self._calls.get(partner)
            if call is not None and call.proposal.meeting == meeting.number:
                patience.deadline = math.inf  # an exchange ends by itself
                call.accept(own, wait_s)
                await call.over.wait()
                if call.outcome is not None:
                    return call.outcome
                patience.deadline = until_s
            elif meeting.asks or not await self._is_called():
                if (outcome := await self._ask(own, meeting, wait_s, patience)) is not None:
                    return outcome
                if meeting.asks:
                    await trio.sleep(RETRY_S)
        return Skipped(SkipReason.PARTNER_LOST, partner)

    async def _is_called(self) -> bool:
        with trio.move_on_after(RETRY_S):
            await self._called.wait()
            return True
        return False

    async def _ask(
        self, own: OwnVector, meeting: Meeting, wait_s: float, patience: trio.CancelScope
    ) -> RoundOutcome | None:
        """Ask once; None where that may be done again. A partner that should ask us refuses."""
        partner, exchanges = meeting.partner, self._exchanges
        proposal = exchanges.agreement.proposal(own, roster=self._roster, meeting=meeting.number)
        try:
            stream = await exchanges.network.open_stream(partner, GOSSIP)
            async with Conversation(stream) as talk:
                answer = await exchanges.ask(talk, proposal)
                patience.deadline = math.inf
                return await exchanges.lead(talk, own, answer, wait_s)
        except Refused as refused:
            is_other = refused.reason is RefusalReason.OTHER_ROSTER
            if meeting.asks or is_other:
                note_refused(self._events, own.round, partner, refused.reason, refused.sentence)
            self.disagreements += is_other
            is_over = meeting.asks and refused.reason is not RefusalReason.TOO_MANY
            return Skipped(SkipReason.NO_PARTNER, partner) if is_over or is_other else None
        except LocoError as error:
            if meeting.asks:
                note_refused(self._events, own.round, partner, "unreachable", str(error))
            return None

    async def called(self, talk: Conversation, stream: Stream, proposal: Propose) -> None:
        """Hold a proposal for a meeting until its turn, then until it is over."""
        peer_id = stream.remote_peer_id
        if (refusal := self._reason_to_refuse(peer_id, proposal)) is not None:
            sentence = f"meeting {proposal.meeting} is not possible with me: {refusal}"
            await talk.refuse(refusal, sentence)
            return
        call = self._calls[peer_id] = _Call(proposal)
        self._called.set()
        self._called = trio.Event()
        try:
            try:
                await call.wait_decided(stream, on_gone=lambda: None)
            finally:
                del self._calls[peer_id]
            if call.refusal is not None:
                await call.send_refusal(talk)
            elif call.own is not None:
                call.outcome = Skipped(SkipReason.LEAVING, peer_id)
                call.outcome = await self._exchanges.accept(
                    talk, proposal, call.own, call.exchange_s
                )
        finally:
            call.over.set()

    def _reason_to_refuse(self, peer_id: PeerId, proposal: Propose) -> RefusalReason | None:
        if self._roster is not None and proposal.roster != self._roster:
            return RefusalReason.OTHER_ROSTER
        if peer_id > self._exchanges.network.peer_id:  # with the same roster, it is we who ask
            return RefusalReason.BUSY
        if self._roster is not None and proposal.meeting < self._number:
            return RefusalReason.AHEAD
        full = peer_id in self._calls or len(self._calls) >= MAX_HELD_PROPOSALS
        return RefusalReason.TOO_MANY if full else None
