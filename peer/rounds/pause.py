"""A pause that the user of this machine asked for: between two rounds, for as long as they like.

Rules
  1. The round under way is finished and averaged first, so what was trained is not lost.
  2. A paused peer keeps its weights, links and trainer, and serves state and data to others. It
     says `paused` in its beats: so it is nobody's partner, owns no chunk, has no share of the data,
     and nobody waits for it (`members_training` of a view knows those that train alone).
  3. It goes on with its weights where the others are by then; if these are too old to be averaged
     (protocol/schedule/rounds.py, rule 5), or the run has ended without it, it joins again.
  4. After the training there is no pause: final averages are planned with all that are there.
"""

from collections.abc import Awaitable, Callable

import trio

from peer.facts import PeerState
from peer.observe.event_names import EventName
from peer.process.rejoin import JoinAgain, can_be_joined
from protocol.errors import LocoError
from protocol.membership.view import View, known_positions, trusted
from protocol.schedule.data_plan import DataPlan
from protocol.schedule.rounds import middle

from .services import Services


class PauseRefused(LocoError):
    """This peer cannot be paused, or resumed, as it is; the message says why."""


class Pause:
    def __init__(self, services: Services, view: View, plan: DataPlan) -> None:
        self._facts, self._events = services.facts, services.events
        self._view, self._plan = view, plan
        self._resumed = trio.Event()
        self._resumed.set()

    @property
    def is_wanted(self) -> bool:
        return not self._resumed.is_set()

    def begin(self) -> None:
        """Rest after the round under way. Raises PauseRefused."""
        if self.is_wanted:
            state = "paused" if self._facts.state is PeerState.PAUSED else "about to pause"
            raise PauseRefused(f"this peer is {state} already")
        held = self._facts.held
        if held is not None and self._facts.holds_stage:
            raise PauseRefused(
                f"this peer holds {held.group.part}, which others need in each step; let it leave"
            )
        if self._facts.state is not PeerState.TRAINING:
            raise PauseRefused(f"this peer trains no rounds now, it is {self._facts.state}")
        self._resumed = trio.Event()

    def end(self) -> None:
        """Go on. Raises PauseRefused."""
        if not self.is_wanted:
            raise PauseRefused("this peer is not paused")
        self._resumed.set()

    async def rest(self, settled: Callable[[], Awaitable[None]]) -> bool:
        """Wait until training may go on. Returns whether there was a pause.

        Args:
            settled: waits for averages under way.

        Raises:
            JoinAgain: the others have ended the run meanwhile.
        """
        if not self.is_wanted:
            return False
        facts, began_s = self._facts, trio.current_time()
        await settled()
        facts.now_doing("paused; `loco-peer resume` continues", PeerState.PAUSED)
        self._events.emit(EventName.TRAINING_PAUSED, round=facts.round, step=facts.step)
        await self._resumed.wait()
        self._check_ended()
        self._take_position()
        facts.now_doing("training", PeerState.TRAINING)
        seconds = trio.current_time() - began_s
        self._events.emit(EventName.TRAINING_RESUMED, step=facts.step, seconds=seconds)
        return True

    def _check_ended(self) -> None:
        """Raises JoinAgain when the others have come to the end of the training."""
        now_s = trio.current_time()
        states = (PeerState.TRAINING, PeerState.FINISHED)
        there = [each for each in self._view.alive(now_s) if each.progress.state in states]
        spec, step = self._facts.spec, self._facts.step
        assert spec is not None
        at = middle([member.progress.step for member in trusted(there, now_s)], step)
        if at >= spec.total_steps_at(at) and can_be_joined(there):
            raise JoinAgain("the run has ended while this peer was paused")

    def _take_position(self) -> None:
        """Go on in the data where the others are, as a joiner does."""
        now_s = trio.current_time()
        told = known_positions(self._view.members_training(now_s), now_s)
        own = (self._facts.epoch, self._facts.position)
        self._facts.epoch, self._facts.position = max(own, self._plan.start_position(told))
