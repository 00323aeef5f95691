"""Times of microbatches at one peer: on lines, in queues, and in the trainer.

The trainer does one thing at a time, so a piece of work began when it was delivered, or when the
trainer was done with the piece before, whichever was later. Nothing is asked of the trainer for it.
"""

from typing import Final

from peer.observe.pipeline_facts import PipelineFacts, Spent
from protocol.microbatch.core import Command
from protocol.microbatch.trainer_messages import Drop, Filled
from protocol.routing.measures import Measures, Samples
from protocol.wire.stage_messages import Leg

HALF: Final = 0.5


class Stopwatch:
    """See the top of the file. Feeds the measures that are told, and the facts that are shown.

    Args:
        has_loss: whether head and loss are ours, as a data peer's are.
    """

    def __init__(self, measures: Measures, facts: PipelineFacts, *, has_loss: bool) -> None:
        self.measures = measures
        self._facts = facts
        self._has_loss = has_loss
        self._delivered: dict[tuple[str, int], float] = {}
        self._gradients: dict[int, float] = {}
        self._idle_since_s = 0.0
        self._began_s: float | None = None
        self._returned_s = 0.0
        self._iterations = Samples()

    # --- the trainer ------------------------------------------------------------------------------
    def restarted(self, now_s: float) -> None:
        """The trainer is a new one."""
        self._delivered.clear()
        self._gradients.clear()
        self._began_s, self._idle_since_s = None, now_s

    def told(self, command: Command, now_s: float) -> None:
        """The trainer is told something: it is given a boundary, or is to forget a microbatch."""
        if isinstance(command, Filled):
            self._delivered[command.leg, command.number] = now_s
        elif isinstance(command, Drop):
            self._delivered.pop((Leg.FORWARD, command.number), None)
            self._delivered.pop((Leg.BACKWARD, command.number), None)
            self._gradients.pop(command.number, None)

    def begun(self, now_s: float) -> None:
        """An iteration has begun, at a data peer."""
        self._began_s = self._idle_since_s = now_s

    def produced(self, leg: str, number: int, now_s: float) -> None:
        """The trainer has made a boundary."""
        given = Leg.FORWARD if self._has_loss and leg == Leg.BACKWARD else leg
        worked_s = self._worked_s(given, number, now_s)
        if leg == Leg.FORWARD:
            self.measures.worked_forward(worked_s)
        elif leg == Leg.BACKWARD and self._has_loss:
            self.measures.worked_loss(worked_s)
        elif leg == Leg.BACKWARD:
            self._gradients[number] = worked_s

    def returned(self, number: int, now_s: float) -> None:
        """The trainer has added a gradient."""
        worked_s = self._worked_s(Leg.BACKWARD, number, now_s)
        self.measures.worked_backward(worked_s + self._gradients.pop(number, 0.0))
        self._returned_s = now_s

    def stepped(self) -> None:
        """The iteration is over: it has lasted until the last gradient was in."""
        if self._began_s is not None and self._returned_s > self._began_s:
            self._iterations.add(self._returned_s - self._began_s)
            self._facts.iteration_s = self._iterations.at(HALF)
        self._began_s = None

    def _worked_s(self, leg: str, number: int, now_s: float) -> float:
        began_s = max(self._idle_since_s, self._delivered.pop((leg, number), 0.0))
        self._idle_since_s = now_s
        self._facts.spent_s[Spent.COMPUTING] += now_s - began_s
        return now_s - began_s

    # --- lines ------------------------------------------------------------------------------------
    def asked(self, elapsed_s: float, waited_s: float) -> None:
        """A boundary that was ready had its credit after so long; its offer waited for a slot."""
        waited_s = min(waited_s, elapsed_s)
        self._facts.spent_s[Spent.WAITING] += waited_s
        self._facts.spent_s[Spent.SENDING] += elapsed_s - waited_s

    def sent(self, peer_id: str, elapsed_s: float) -> None:
        """A boundary has gone to a peer, which has said so."""
        self._facts.spent_s[Spent.SENDING] += elapsed_s
        self.measures.sent(peer_id, elapsed_s)
