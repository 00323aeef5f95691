"""Times of microbatches at one peer: on lines, in queues, and in the trainer.

The trainer does one thing at a time, so a piece of work began when it was delivered, or when the
trainer was done with the piece before, whichever was later. Nothing is asked of the trainer for it.
"""

from peer.facts import MicrobatchTime, PipelineFacts
from protocol.microbatch import trainer_messages
from protocol.microbatch.core import Command
from protocol.routing.measures import Measures, Samples
from protocol.wire.stage_messages import Direction


class Stopwatch:
    """Feeds the measures that are told, and the facts that are shown.

    Args:
        has_loss: whether head and loss are ours, as a data peer's are.
    """

    def __init__(self, measures: Measures, facts: PipelineFacts, *, has_loss: bool) -> None:
        self.measures = measures
        self._facts = facts
        self._has_loss = has_loss
        self._delivered: dict[tuple[Direction, int], float] = {}
        self._gradients: dict[int, float] = {}
        self._idle_since_s = 0.0
        self._began_s: float | None = None
        self._returned_s = 0.0
        self._iterations = Samples()

    def restarted(self, now_s: float) -> None:
        self._delivered.clear()
        self._gradients.clear()
        self._began_s, self._idle_since_s = None, now_s

    def told(self, command: Command, now_s: float) -> None:
        if isinstance(command, trainer_messages.Filled):
            self._delivered[command.direction, command.number] = now_s
        elif isinstance(command, trainer_messages.Drop):
            self._delivered.pop((Direction.FORWARD, command.number), None)
            self._delivered.pop((Direction.BACKWARD, command.number), None)
            self._gradients.pop(command.number, None)

    def took(self, event: trainer_messages.StageEvent, now_s: float) -> None:
        match event:
            case trainer_messages.Filled(direction, number):
                self._produced(direction, number, now_s)
            case trainer_messages.GradientAdded(number):
                worked_s = self._worked_s(Direction.BACKWARD, number, now_s)
                self.measures.backward.add(worked_s + self._gradients.pop(number, 0.0))
                self._returned_s = now_s
            case trainer_messages.Begun():
                self._began_s = self._idle_since_s = now_s
            case trainer_messages.Stepped():
                # The iteration has lasted until the last gradient was in.
                if self._began_s is not None and self._returned_s > self._began_s:
                    self._iterations.add(self._returned_s - self._began_s)
                    self._facts.iteration_s = self._iterations.at(0.5)
                self._began_s = None

    def _produced(self, direction: Direction, number: int, now_s: float) -> None:
        is_loss = self._has_loss and direction is Direction.BACKWARD
        worked_s = self._worked_s(Direction.FORWARD if is_loss else direction, number, now_s)
        if direction is Direction.BACKWARD and not is_loss:
            self._gradients[number] = worked_s
        elif direction is not Direction.SCORE:
            (self.measures.loss if is_loss else self.measures.forward).add(worked_s)

    def _worked_s(self, direction: Direction, number: int, now_s: float) -> float:
        began_s = max(self._idle_since_s, self._delivered.pop((direction, number), 0.0))
        self._idle_since_s = now_s
        self._facts.spent_s[MicrobatchTime.COMPUTING] += now_s - began_s
        return now_s - began_s

    def asked(self, elapsed_s: float, waited_s: float) -> None:
        """A boundary that was ready had its credit after so long; its offer waited for a slot."""
        waited_s = min(waited_s, elapsed_s)
        self._facts.spent_s[MicrobatchTime.WAITING] += waited_s
        self._facts.spent_s[MicrobatchTime.SENDING] += elapsed_s - waited_s

    def sent(self, peer_id: str, elapsed_s: float) -> float | None:
        """A boundary has gone to a peer, which has said so. Returns what one takes on the line."""
        self._facts.spent_s[MicrobatchTime.SENDING] += elapsed_s
        return self.measures.sent(peer_id, elapsed_s)
