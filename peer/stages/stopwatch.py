"""Times of microbatches at one peer: on lines, in queues, and in the trainer.

The trainer does one thing at a time, so a piece of work began when it was delivered, or when the
trainer was done with the piece before, whichever was later. Nothing is asked of the trainer for it.
"""

from typing import Final

from peer.facts import PipelineFacts, Spent
from protocol.microbatch.trip import Leg
from protocol.routing.measures import Measures, Samples

HALF: Final = 0.5


class Stopwatch:
    """See the top of the file. Feeds the measures that are told, and the facts that are shown.

    Args:
        has_loss: whether head and loss are ours, as a data peer's are.
    """

    def __init__(self, measures: Measures, facts: PipelineFacts, *, has_loss: bool) -> None:
        self._measures = measures
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

    def delivered(self, leg: str, number: int, now_s: float) -> None:
        """The trainer has been given a boundary."""
        self._delivered[leg, number] = now_s

    def dropped(self, number: int) -> None:
        """The trainer has been told to forget a microbatch."""
        self._delivered.pop((Leg.FORWARD, number), None)
        self._delivered.pop((Leg.BACKWARD, number), None)
        self._gradients.pop(number, None)

    def begun(self, now_s: float) -> None:
        """An iteration has begun, at a data peer."""
        self._began_s = self._idle_since_s = now_s

    def produced(self, leg: str, number: int, now_s: float) -> None:
        """The trainer has made a boundary."""
        given = Leg.FORWARD if self._has_loss and leg == Leg.BACKWARD else leg
        worked_s = self._worked_s(given, number, now_s)
        if leg == Leg.FORWARD:
            self._measures.worked_forward(worked_s)
        elif leg == Leg.BACKWARD and self._has_loss:
            self._measures.worked_loss(worked_s)
        elif leg == Leg.BACKWARD:
            self._gradients[number] = worked_s

    def returned(self, number: int, now_s: float) -> None:
        """The trainer has added a gradient."""
        worked_s = self._worked_s(Leg.BACKWARD, number, now_s)
        self._measures.worked_backward(worked_s + self._gradients.pop(number, 0.0))
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

    def line_s(self, peer_id: str) -> float | None:
        """How long a boundary to this peer occupies the line; None while that is not known."""
        return self._measures.line_s(peer_id)

    def sent(self, peer_id: str, elapsed_s: float) -> None:
        """A boundary has gone to a peer, which has said so."""
        self._facts.spent_s[Spent.SENDING] += elapsed_s
        self._measures.sent(peer_id, elapsed_s)

    def received(self, peer_id: str, elapsed_s: float) -> None:
        """A boundary has come from a peer, so long after its first byte."""
        self._measures.received(peer_id, elapsed_s)
