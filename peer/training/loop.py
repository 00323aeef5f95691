"""The inner loop of the trainer process: does with torch what the round machine says.

Commands are taken between two steps, without waiting while there is something to train. The numbers
of a step are looked at when the next one has been launched: until then a GPU computes while we
prepare that.

Where a piece of the corpus is not here, the loop says so, and waits for a command: `PiecesHere`, or
any other, which is obeyed as always.
"""

import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from peer.codec import get_codec
from protocol.run.run_spec import RunSpec
from protocol.schedule.data_plan import DataPlan
from protocol.trainer_messages import Merge, TrainerTime, Tried, Try

from . import messages
from .corpus.blocks import Corpus, PieceCorpus
from .device import is_out_of_memory
from .fragments import FragmentDeltas, FragmentSnapshots, regions_of, values_of, written_for_a_while
from .model import FlatModel
from .optimizer import FlatOptimizer
from .ports import NonFinite
from .round_machine import Action, ReadNumbers, RoundMachine, TrainStep, Wait
from .shared import CodeRegions, map_vector
from .step import Stepper, StepResult
from .sync import TimeSpent, sync_of
from .tensor_file import keep_weights, take_over_weights


class InnerStepper(Protocol):
    """Takes inner steps, of a whole model (step.py) or of a stage (stages/steppers.py)."""

    optimizer: FlatOptimizer

    @property
    def reads_blocks(self) -> bool:
        """Whether it trains on tokens; if not, it is given none."""

    def step(self, blocks_BT: npt.NDArray[np.int64], learning_rate: float) -> StepResult:
        """Train on [B, T+1] tokens."""

    def loss_of(self, blocks_BT: npt.NDArray[np.int64]) -> float | None:
        """Mean loss, nats per token; None where it cannot be measured."""


class Channel(Protocol):
    """Commands in, events out."""

    def next_command(self, *, wait: bool) -> messages.TrainerCommand | None:
        """The next command; None when there is none and `wait` is false."""

    def emit(self, event: messages.Said) -> None: ...


class InnerLoop:
    """Runs the trainer's side of the conversation in messages.py."""

    def __init__(
        self,
        spec: RunSpec,
        peer_id: str,
        corpus: Corpus | PieceCorpus,
        stepper: InnerStepper,
        values: FragmentSnapshots | FragmentDeltas,
        channel: Channel,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._spec = spec
        self._corpus = corpus
        self._stepper = stepper
        self._values, self._model, self._slow_P = values, values.model, values.slow_P
        self._channel = channel
        self._clock_s = clock_s
        self._ledger = TimeSpent(clock_s)
        self._validation_BT = corpus.validation_blocks(spec.data.validation_blocks)
        self._drawn = np.random.default_rng(list(peer_id.encode()))
        self._events: deque[messages.TrainerEvent] = deque()
        self._round_machine = RoundMachine(
            spec,
            peer_id,
            DataPlan(spec.seed, corpus.num_blocks, corpus.piece_blocks),
            sync_of(spec, values, self._events.append, self._ledger),
            self._events,
        )
        self._processor_s = time.process_time()
        self._launched: tuple[TrainStep, StepResult] | None = None
        self._told_missing: tuple[int, ...] = ()

    def ready(
        self, precision: str, micro_batch: int, steps_per_s: float, *, measures: bool = False
    ) -> messages.Ready:
        layout, device = self._model.layout, self._model.device
        codec = get_codec(self._spec.sync.codec, part_of=layout.padded_parameters)
        return messages.Ready(
            device=str(device),
            precision=precision,
            micro_batch=micro_batch,
            steps_per_s=steps_per_s,
            shapes=tuple((entry.name, entry.shape) for entry in layout.entries),
            loops=codec.loops_for(layout.padded_parameters, self._model.theta_P.device),
            measures=measures,
            notes=self._new_notes(),
        )

    def _new_notes(self) -> tuple[str, ...]:
        notes, self._model.notes = tuple(self._model.notes), []
        return notes

    def run(self) -> None:
        """Obey and train until `Stop`. Raises NonFinite, WrongCommand, and torch's errors."""
        while not isinstance(action := self._next_action(), messages.Stop):
            match action:
                case ReadNumbers():
                    self._read_numbers()
                case messages.Evaluate():
                    with self._ledger.on(TrainerTime.MEASURE):
                        self._evaluate(action)
                case Try():
                    with self._ledger.on(TrainerTime.MEASURE):
                        self._try(action)
                case messages.Keep():
                    with self._ledger.on(TrainerTime.KEEP):
                        self._keep(action)
                case _:
                    self._go_on(action)

    def _next_action(self) -> Action:
        action = self._round_machine.next_action(self._clock_s())
        if notes := self._new_notes():
            self._channel.emit(messages.StepChosen(notes))
        while self._events:
            event = self._events.popleft()
            if isinstance(event, messages.TrainerProgress | messages.RoundClosed):
                event = replace(event, spent_s=self._ledger.taken())
            if isinstance(event, messages.RoundClosed):
                before_s, self._processor_s = self._processor_s, time.process_time()
                event = replace(event, processor_s=self._processor_s - before_s)
            self._channel.emit(event)
        return action

    def _go_on(self, action: TrainStep | Wait) -> None:
        """Obey if a command has come, else train."""
        if isinstance(action, Wait):
            self._obey(self._awaited(TrainerTime.STALLED))
        elif (command := self._channel.next_command(wait=False)) is not None:
            self._obey(command)
        else:
            blocks = self._blocks()
            if missing := self._corpus.missing(blocks):
                self._wait_for(missing)
            else:
                self._train(action, blocks)

    def _blocks(self) -> npt.NDArray[np.int64]:
        if not self._stepper.reads_blocks:
            return np.empty(0, np.int64)
        return self._round_machine.blocks()

    def _wait_for(self, missing: tuple[int, ...]) -> None:
        """Say once what is not here, and obey the command that comes next."""
        self._read_numbers()
        if missing != self._told_missing:
            self._channel.emit(messages.PiecesMissing(missing))
            self._told_missing = missing
        self._obey(self._awaited(TrainerTime.DATA))

    def _awaited(self, into: TrainerTime) -> messages.TrainerCommand:
        with self._ledger.on(into):
            command = self._channel.next_command(wait=True)
        assert command is not None
        return command

    def _obey(self, command: messages.TrainerCommand) -> None:
        if isinstance(command, messages.PiecesHere):
            self._told_missing = ()
            return
        if isinstance(command, Merge):
            self._read_numbers()  # the time until the step is done is the step's, not the pause's
        self._round_machine.obey(command, self._clock_s())
        if isinstance(command, messages.Load):
            self._stepper.optimizer.reset()
            self._launched = None
            if command.kept is not None:
                self._model.moved = True
                path, optimizer = Path(command.kept), self._stepper.optimizer
                self._round_machine.own_steps = take_over_weights(
                    path, self._model.theta_P, optimizer, self._say_alive
                )

    def _keep(self, order: messages.Keep) -> None:
        error, theta_P, optimizer = None, self._model.theta_P, self._stepper.optimizer
        own_steps = self._round_machine.own_steps
        try:
            keep_weights(Path(order.path), theta_P, optimizer, own_steps, self._say_alive)
        except OSError as failed:
            error = str(failed)
        self._round_machine.kept(error)

    def _say_alive(self) -> None:
        """A large file on a slow disk takes longer than a silence that means a hang."""
        self._channel.emit(messages.Waiting())

    def _evaluate(self, order: messages.Evaluate) -> None:
        """Measure with the slow weights in place."""
        started_s = self._clock_s()
        theta_P, aside_P = self._model.theta_P, self._model.gradient_P
        aside_P.copy_(theta_P)  # the gradient is idle between two steps
        with written_for_a_while(self._model):
            try:
                theta_P.copy_(self._slow_P)
                loss, log_probs = self._measured(order)
            finally:
                theta_P.copy_(aside_P)
                aside_P.zero_()
        self._round_machine.measured(
            messages.Evaluated(order.round, loss, self._clock_s() - started_s, log_probs)
        )

    def _measured(self, order: messages.Evaluate) -> tuple[float | None, bytes]:
        if not order.sequences:
            return self._stepper.loss_of(self._validation_BT), b""
        assert isinstance(self._stepper, Stepper), "a stage has no log-probabilities of its own"
        tokens = np.frombuffer(order.tokens, "<u4").reshape(order.sequences, -1)
        told_BT = self._stepper.log_probs_of(tokens.astype(np.int64))
        return -float(told_BT.mean(dtype=np.float64)), told_BT.astype("<f4").tobytes()

    def _try(self, order: Try) -> None:
        """Measure with the fragment merged and without, on some held-out blocks of our choice."""
        started_s = self._clock_s()
        try:
            gain = self._gain(order)
        except RuntimeError as error:
            together = isinstance(self._stepper, Stepper) and self._stepper.measures_together
            if together or not is_out_of_memory(error):
                raise
            gain = None
        self._round_machine.measured(
            Tried(order.fragment, order.cycle, gain, self._clock_s() - started_s)
        )

    def _gain(self, order: Try) -> float | None:
        assert isinstance(self._values, FragmentDeltas)
        count = min(order.blocks, len(self._validation_BT))
        chosen = self._drawn.choice(len(self._validation_BT), count, replace=False)
        blocks_BT = self._validation_BT[chosen]
        before = self._stepper.loss_of(blocks_BT)
        with self._values.merged(order.fragment):
            after = self._stepper.loss_of(blocks_BT)
        return None if before is None or after is None else before - after

    def _train(self, step: TrainStep, blocks: npt.NDArray[np.int64]) -> None:
        started_s = self._clock_s()
        blocks_BT = self._corpus.blocks(blocks)
        launched = step, self._stepper.step(blocks_BT, step.learning_rate)
        launched_s = self._clock_s()
        self._read_numbers()
        self._launched = launched
        self._round_machine.stepped(step, self._clock_s(), launched_s - started_s)

    def _read_numbers(self) -> None:
        """Look at the numbers of the launched step, if there is one. Raises NonFinite."""
        launched, self._launched = self._launched, None
        if launched is None:
            return
        started_s, (step, result) = self._clock_s(), launched
        try:
            loss, norm = result.settled()
        except NonFinite as error:
            raise NonFinite(f"round {step.round}, step {step.steps + 1}: {error}") from error
        self._round_machine.numbers_known(loss, norm, self._clock_s() - started_s)


def inner_loop(
    settings: messages.TrainerSettings,
    memory: tuple[int, int],
    corpus: Corpus | PieceCorpus,
    model: FlatModel,
    stepper: InnerStepper,
    channel: Channel,
) -> InnerLoop:
    """The loop on memory that the daemon shares: descriptors of slow weights, and of codes."""
    spec = settings.run_spec()
    with warnings.catch_warnings():
        # torch has no read-only tensors; the mapping itself is, so a write would end the process,
        # not harm the daemon.
        warnings.filterwarnings("ignore", message=".*not writable.*")
        slow_P = torch.from_numpy(map_vector(memory[0]))
    if slow_P.numel() != model.layout.padded_parameters:
        raise ValueError(
            f"slow weights of {slow_P.numel()} values for {model.layout.padded_parameters}"
        )
    regions = CodeRegions(memory[1], regions_of(spec, model.layout), writable=True)
    values = values_of(spec, model, slow_P, regions)
    return InnerLoop(spec, settings.peer_id, corpus, stepper, values, channel)
