"""The final averaging of one peer: when it begins, with whom, and when it is over.

The plan and its rules are in protocol/gossip/final_averaging.py. Each of its meetings is a round
without steps: the trainer's snapshot is what is averaged. The loss of our replica is measured
before it, that of the mean after it (by the round loop).
"""

from typing import Final, Protocol

import trio

from peer.averaging.gossip.company import Company
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.observe.facts import Facts
from peer.ports import PeerId
from peer.process.rejoin import join_the_finished
from peer.rounds.validation import Validation
from peer.rounds.way import TrainerLine
from protocol.gossip.final_averaging import (
    MIN_WAIT_S,
    WAIT_ROUNDS,
    Meeting,
    meetings,
    roster_digest,
)
from protocol.membership.view import View

RANDOM: Final = None
"""The meeting of a round that is averaged with whoever is free."""


class Meetings(Protocol):
    """What holds the planned meetings: `FinalMeetings`, or those of all fragments.

    Attributes:
        disagreements: meetings left out because the partner sees another roster than we.
    """

    @property
    def disagreements(self) -> int: ...

    def begin(self, roster: str) -> None:
        """From now on the roster with this digest is ours."""


class FinalRounds:
    """See the top of the file.

    Args:
        wanted: whether the run ends with one.
        wait_rounds: nominal rounds for which the others are waited for.

    Attributes:
        meeting: the planned one that the next round is for; None for a random partner.
        has_begun: the training is over.
    """

    def __init__(
        self,
        *,
        wanted: bool,
        facts: Facts,
        view: View,
        company: Company,
        held: Meetings,
        validation: Validation,
        events: EventLog,
        wait_rounds: float = WAIT_ROUNDS,
    ) -> None:
        self._wanted = wanted
        self._wait_rounds = wait_rounds
        self._facts = facts
        self._view = view
        self._company = company
        self._held = held
        self._validation = validation
        self._events = events
        self._planned: list[Meeting] = []
        self._num_random = 0
        self._is_alone = False
        self._averaged_before = 0
        self.meeting: Meeting | None = RANDOM
        self.has_begun = False

    async def goes_on(self, line: TrainerLine) -> bool:
        """Whether there is one more meeting; `meeting` tells which. The first call plans them.

        Raises:
            JoinAgain: the others have ended the run without us.
        """
        if not self.has_begun:
            await self._begin(line)
        if self._planned:
            self.meeting = self._planned.pop(0)
            return True
        self.meeting = RANDOM
        if self._num_random < self._is_alone + self._held.disagreements:
            self._num_random += 1
            return True
        self._check_end()
        return False

    async def _begin(self, line: TrainerLine) -> None:
        await self._validation.wait_idle()
        await self._validation.begin(line, self._facts.round)
        await self._validation.wait_idle()
        facts = self._facts
        facts.replica_loss, facts.ended = facts.validation_loss, True
        self._averaged_before = facts.averaged
        self._company.announce(None)
        if self._wanted:
            facts.now_doing("waiting for the others to finish training")
            await self._plan()
        self.has_begun = True

    async def _plan(self) -> None:
        roster = await self._roster()
        self._planned = list(meetings(roster, self._facts.peer_id))
        self._held.begin(roster_digest(roster))
        self._is_alone = not self._planned  # then phi becomes theta
        self._events.emit(EventName.FINAL_AVERAGING, peers=len(roster), meetings=len(self._planned))

    async def _roster(self) -> list[PeerId]:
        """All that take part: those that have ended when all have, or when we wait no longer."""
        with trio.move_on_after(self._wait_s()):
            while self._company.present(ended=False) or self._is_cut_off():
                await self._company.changed()
        return [self._facts.peer_id, *self._company.present(ended=True)]

    def _is_cut_off(self) -> bool:
        """Whether there were others, and we see nobody: then links may come back."""
        now_s = trio.current_time()
        return bool(self._view.members()) and not self._view.alive(now_s)

    def _wait_s(self) -> float:
        """How long the others may take to end: a peer that is further behind is not waited for."""
        return max(MIN_WAIT_S, self._wait_rounds * self._facts.round_s)

    def _check_end(self) -> None:
        """Raises JoinAgain if others have ended the run, and we were in none of their meetings."""
        if not self._wanted or self._facts.averaged > self._averaged_before:
            return
        join_the_finished(self._view.alive(trio.current_time()))
