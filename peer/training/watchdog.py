"""How long a trainer may stay silent before it counts as hung.

Rules:
    1. Until `Ready`, `START_TIMEOUT_S`: importing, building and compiling report nothing.
    2. While it has something to do (a round to train, a validation, a move to apply), it speaks
       within some steps of its own speed: a fixed floor, for machines that are suspended or swap,
       and many times its measured step time.
    3. With nothing to do it may be silent forever. So it may while it may be waiting for us: a
       fragment is in flight or yielded, and we have not sent `Merge` or `Amend` (in streaming
       gossip no fragment is waited for); or it misses pieces of the corpus, and we have not sent
       `PiecesHere`; or it is at the end of the run, and its last move is not applied.
"""

import math
from typing import Final

from protocol.run.run_spec import RunSpec

from .messages import (
    Amend,
    Applied,
    Apply,
    Evaluate,
    Evaluated,
    FragmentSent,
    Load,
    Merge,
    Progress,
    Ready,
    RoundClosed,
    TrainerCommand,
    TrainerEvent,
    TrainRound,
    Yielded,
)
from .piece_messages import PiecesHere, PiecesMissing
from .schedule import total_steps_of

START_TIMEOUT_S: Final = 900.0
"""Longest time to import, build, compile and calibrate."""
SILENCE_FLOOR_S: Final = 60.0
SILENCE_STEPS: Final = 50
"""Every step longer than 0.2 s is reported, so this many without a word are a hang."""


class Watchdog:
    """Follows the conversation, and says what silence is normal."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._step, self._total_steps = 0.0, math.inf
        self._waits_for_fragments = spec.sync.diloco is not None
        self._evaluation_steps = spec.data.validation_blocks / spec.training.batch_size
        self._ready = False
        self._slowest_step_s = 0.0
        self._open_rounds = 0
        self._unapplied = 0
        self._owed = 0
        self._awaited: set[int] = set()
        self._misses_pieces = False

    @property
    def silence_bound_s(self) -> float:
        """Longest normal silence from now on; infinite when there is nothing to do."""
        if not self._ready:
            return START_TIMEOUT_S
        at_end = self._step >= self._total_steps
        waits_for_apply = self._unapplied and (at_end or not self._spec.sync.overlap)
        may_wait = self._misses_pieces or self._awaited or waits_for_apply
        training = self._open_rounds > 0 and not may_wait
        if not training and not self._owed:
            return math.inf
        return SILENCE_FLOOR_S + self._slowest_step_s * (SILENCE_STEPS + self._evaluation_steps)

    def sent(self, command: TrainerCommand) -> None:
        """A command is on its way down."""
        match command:
            case Load():
                self._open_rounds = self._unapplied = 0
                self._step = 0.0
                self._awaited.clear()
                self._misses_pieces = False
            case PiecesHere():
                self._misses_pieces = False
            case TrainRound():
                self._open_rounds += 1
                self._total_steps = total_steps_of(self._spec, command)
            case Apply() | Evaluate():
                self._owed += 1
            case Merge(fragment=fragment) | Amend(fragment=fragment):
                self._awaited.discard(fragment)

    def received(self, event: TrainerEvent) -> None:
        """An event came up."""
        match event:
            case Ready():
                self._ready = True
                self._slowest_step_s = 1 / max(event.steps_per_s, 1e-6)
            case Progress(step=step):
                self._slowest_step_s = max(self._slowest_step_s, event.step_s)
                self._step = step
            case PiecesMissing():
                self._misses_pieces = True
            case RoundClosed():
                self._open_rounds = max(0, self._open_rounds - 1)
                self._unapplied = int(event.slot is not None)
            case FragmentSent(fragment=fragment) | Yielded(fragment=fragment):
                if self._waits_for_fragments:
                    self._awaited.add(fragment)
            case Applied():
                self._unapplied = 0
                self._owed = max(0, self._owed - 1)
            case Evaluated():
                self._owed = max(0, self._owed - 1)
