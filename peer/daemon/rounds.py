"""The outer loop: one round after another, through one trainer's life after another.

`RoundLoop` starts trainers, opens and closes rounds, follows the swarm's pace, validates, and ends
the run. What is exchanged with the other peers, and when, differs by the way of averaging:

    pair_rounds.py       NoLoCo: one vector per round, with one partner
    fragment_rounds.py   Streaming DiLoCo: fragments, each at its own moment, with all

What it promises:

- A dead trainer costs at most the round it was in: the next life loads the slow weights and goes on
  with the newest round.
- Nobody writes the slow weights while they are validated.
"""

import math
from abc import ABC, abstractmethod
from typing import Final

import trio

from peer.exception_groups import leaves
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.observe.status import PeerState
from peer.rejoin import JoinAgain, addresses_of
from peer.training.messages import (
    CloseRound,
    Evaluate,
    Evaluated,
    Failed,
    Load,
    Progress,
    Ready,
    RoundClosed,
    Stop,
    SyncEvent,
    TrainerCommand,
    TrainerEvent,
    TrainRound,
)
from peer.training.ports import Float32Vector, StartTrainer, Trainer, TrainerDied
from protocol.errors import LocoError
from protocol.rounds import is_left_behind, is_lost, next_round
from protocol.run_spec import RunSpec
from protocol.view import Member, View

from .facts import Facts
from .pace import Pace
from .shares import DataShares

MAX_FAILURES_IN_A_ROW: Final = 5
"""Trainer lives that close no round before we give up."""
RESTART_PAUSE_S: Final = 1.0
SPEED_SMOOTHING: Final = 0.3
MAX_VALIDATION_SHARE: Final = 0.1
"""Of a peer's time. A slow one validates less often than the run asks for: it has to keep up."""


class TrainingImpossible(LocoError):
    """The trainer fails again and again; the message says how."""


class RoundLoop(ABC):
    """Runs the rounds of one peer; see the top of the file.

    Args:
        slow_P: the slow weights, which trainers start from.
    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        facts: Facts,
        view: View,
        shares: DataShares,
        slow_P: Float32Vector,
        start_trainer: StartTrainer,
        events: EventLog,
    ) -> None:
        self._spec = spec
        self._facts = facts
        self._view = view
        self._shares = shares
        self._slow_P = slow_P
        self._start_trainer = start_trainer
        self._events = events
        self._trainer: Trainer | None = None
        self._nursery: trio.Nursery | None = None
        self._quota = spec.sync.inner_steps
        self._pace = Pace(spec.sync.inner_steps, facts)
        self._next_round = facts.round
        self._jumped = False
        self._evaluated = trio.Event()
        self._evaluated.set()
        self._validate_from_s = -math.inf
        self._micro_batch_cap: int | None = None
        self._failures_in_a_row = 0
        self.finished = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} round={self._facts.round} quota={self._quota}>"

    # --- what the ways of averaging differ in -----------------------------------------------------
    @property
    @abstractmethod
    def _version(self) -> int:
        """Of the slow weights; 0 is a founder's first."""

    @property
    @abstractmethod
    def _num_rounds(self) -> int:
        """All rounds, those without training at the end among them."""

    @abstractmethod
    def _on_ready(self, ready: Ready) -> None:
        """A trainer has started; it has nothing loaded."""

    @abstractmethod
    def _on_opened(self, round_: int) -> None:
        """A round has begun."""

    @abstractmethod
    def _on_progress(self) -> None:
        """The facts tell how far the round is."""

    @abstractmethod
    async def _on_closed(self, closed: RoundClosed, following: int, *, jumped: bool) -> None:
        """A round is closed: see to it that its work is averaged, and that `following` is opened.

        Args:
            jumped: it was given up for a newer one.
        """

    @abstractmethod
    async def _on_event(self, event: SyncEvent) -> None:
        """An event of averaging."""

    @abstractmethod
    async def _on_death(self) -> None:
        """The trainer is gone: end what needs one."""

    @abstractmethod
    def _check_end(self) -> None:
        """Raises JoinAgain when we have missed how the run ended."""

    @abstractmethod
    async def wait_settled(self) -> None:
        """Wait until no exchange is under way that is worth waiting for."""

    # --- lives of the trainer ---------------------------------------------------------------------
    async def run(self) -> None:
        """Train until the run is over.

        Raises:
            TrainingImpossible
        """
        while not self.finished:
            self._facts.now_doing("starting the trainer")
            try:
                async with self._start_trainer(self._slow_P, self._micro_batch_cap) as trainer:
                    await self._live(trainer)
            except* TrainerDied as died:
                await self._buried(str(leaves(died)[0]))

    async def _live(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._evaluated.set()
        try:
            ready = await trainer.receive()
            if isinstance(ready, Failed):
                raise self._death(ready)
            assert isinstance(ready, Ready)
            self._started(ready)
            self._on_ready(ready)
            await trainer.send(Load(self._version))
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                try:
                    if self._version == 0:  # a founder's first weights
                        self._check_lost(self._next_round)
                    first = max([self._next_round, *self._heard_rounds()])
                    nursery.start_soon(self._open_or_finish, first)  # it may wait for an event
                    while not self.finished:
                        await self._take(await trainer.receive())
                except TrainerDied:
                    if not self.finished:
                        self._evaluated.set()  # nobody is left to answer
                        await self._on_death()
                        raise
        finally:
            self._trainer = self._nursery = None

    def _started(self, ready: Ready) -> None:
        facts = self._facts
        if ready.layout_digest != facts.layout_digest:
            raise TrainingImpossible("the trainer's model has another layout than the run's")
        facts.parameters, facts.alone_steps_per_s = ready.parameters, ready.steps_per_s
        facts.steps_per_s = facts.steps_per_s or ready.steps_per_s
        self._micro_batch_cap = ready.micro_batch
        if facts.training_since_s is None:
            facts.training_since_s = trio.current_time()
        self._events.emit(
            EventName.TRAINER_STARTED,
            device=ready.device,
            precision=ready.precision,
            parameters=ready.parameters,
            micro_batch=ready.micro_batch,
            steps_per_s=ready.steps_per_s,
        )

    async def _buried(self, why: str) -> None:
        self._facts.restarts[_death_reason(why)] += 1
        self._events.emit(EventName.TRAINER_DIED, reason=_death_reason(why), detail=why)
        self._failures_in_a_row += 1
        if self._failures_in_a_row > MAX_FAILURES_IN_A_ROW:
            raise TrainingImpossible(
                f"the trainer failed {self._failures_in_a_row} times without closing a round: {why}"
            )
        self._facts.now_doing(f"restarting the trainer: {why}")
        await trio.sleep(RESTART_PAUSE_S * (self._failures_in_a_row - 1))

    def _death(self, failed: Failed) -> TrainerDied:
        if failed.reason == "out_of_memory" and self._micro_batch_cap is not None:
            self._micro_batch_cap = max(1, self._micro_batch_cap // 2)
        return TrainerDied(f"{failed.reason}: {failed.detail}")

    # --- events of the trainer --------------------------------------------------------------------
    async def _take(self, event: TrainerEvent) -> None:
        match event:
            case Progress():
                self._progressed(event)
            case RoundClosed():
                await self._closed(event)
            case Evaluated():
                self._validated(event)
            case Failed():
                raise self._death(event)
            case Ready():
                pass
            case _:
                await self._on_event(event)

    def _progressed(self, progress: Progress) -> None:
        facts = self._facts
        if progress.round != facts.round:
            return
        facts.fraction = progress.steps / max(1, self._quota)
        facts.train_loss = progress.loss
        if progress.step_s > 0:
            speed = 1 / progress.step_s
            facts.steps_per_s += SPEED_SMOOTHING * (speed - facts.steps_per_s)
        self._on_progress()
        self._check_lost(facts.round)
        if not self._jumped and is_left_behind(facts.round, self._heard_rounds()):
            self._jumped = True
            self.close_early(facts.round)

    def _validated(self, event: Evaluated) -> None:
        facts = self._facts
        facts.validation_loss, facts.validation_round = event.loss, event.round
        self._validate_from_s = trio.current_time() + event.seconds / MAX_VALIDATION_SHARE
        self._events.emit(
            EventName.VALIDATED, round=event.round, loss=event.loss, seconds=event.seconds
        )
        self._evaluated.set()

    # --- opening and closing rounds ---------------------------------------------------------------
    def close_early(self, round_: int) -> None:
        """Ask the trainer to close this round: a partner is waiting, or the swarm is far ahead."""
        self._send_soon(CloseRound(round_))

    def _send_soon(self, command: TrainerCommand) -> None:
        """Send it, if there is a trainer."""
        if self._trainer is not None and self._nursery is not None:
            self._nursery.start_soon(send_quietly, self._trainer, command)

    def _others(self) -> list[Member]:
        """Who else trains; but for those who say they are past the end, where nobody can be."""
        training = self._view.members_training(trio.current_time())
        return [m for m in training if m.progress.round < self._num_rounds]

    def _check_lost(self, own_round: int) -> None:
        """Raises JoinAgain when our weights are of another time than the swarm's."""
        if is_lost(own_round, self._heard_rounds()):
            addresses = addresses_of(self._view.members_training(trio.current_time()))
            if addresses:
                raise JoinAgain(addresses, f"round {own_round} is far behind the swarm's")

    def _heard_rounds(self) -> list[int]:
        return [m.progress.round for m in self._others()]

    async def _open(self, round_: int) -> None:
        assert self._trainer is not None
        facts, training = self._facts, self._others()
        final = round_ >= self._spec.total_rounds
        self._quota = 0 if final else self._pace.quota(round_, training)
        members = self._shares.now(training)
        self._next_round = facts.round = round_
        facts.fraction, self._jumped = 0.0, False
        facts.now_doing("training", PeerState.TRAINING)
        self._events.emit(
            EventName.ROUND_OPENED, round=round_, quota=self._quota, members=len(members)
        )
        await self._trainer.send(
            TrainRound(round_, self._quota, members, facts.epoch, facts.position)
        )
        self._on_opened(round_)

    async def _closed(self, closed: RoundClosed) -> None:
        self._failures_in_a_row = 0
        self._note_closed(closed)
        following = self._next_round = next_round(closed.round, self._heard_rounds())
        await self._on_closed(closed, following, jumped=self._jumped)

    def _note_closed(self, closed: RoundClosed) -> None:
        facts = self._facts
        facts.epoch, facts.position = closed.epoch, closed.position
        facts.tokens += closed.tokens
        facts.inner_steps += closed.steps
        if closed.steps:
            facts.train_loss = closed.loss
        self._events.emit(
            EventName.ROUND_CLOSED,
            round=closed.round,
            steps=closed.steps,
            tokens=closed.tokens,
            loss=closed.loss,
            seconds=closed.seconds,
        )

    async def _open_or_finish(self, round_: int) -> None:
        if round_ < self._num_rounds:
            await self._open(round_)
        else:
            await self._finish()

    async def _finish(self) -> None:
        assert self._trainer is not None
        self._check_end()
        facts = self._facts
        facts.fraction = 1.0
        await self._evaluated.wait()
        await self._evaluate(self._trainer, facts.round)
        await self._evaluated.wait()
        if facts.validation_round != facts.round:
            return  # the trainer died over it; its next life comes here again
        self.finished = True
        await self._trainer.send(Stop())
        self._events.emit(
            EventName.RUN_FINISHED,
            round=facts.round,
            step=facts.step,
            validation_loss=facts.validation_loss,
        )
        facts.now_doing("the run is over; serving its state", PeerState.FINISHED)

    def _join_the_finished(self) -> None:
        """Raises JoinAgain if there are peers that have ended the run without us."""
        alive = self._view.alive(trio.current_time())
        addresses = addresses_of(m for m in alive if m.progress.state == PeerState.FINISHED)
        if addresses:
            raise JoinAgain(addresses, "it came too late for the final averaging")

    def _validation_due(self, round_: int) -> bool:
        due = round_ % self._spec.sync.validate_every == 0
        return due and trio.current_time() >= self._validate_from_s

    async def _evaluate(self, trainer: Trainer, round_: int) -> None:
        self._evaluated = trio.Event()
        await trainer.send(Evaluate(round_))


async def send_quietly(trainer: Trainer, command: TrainerCommand) -> None:
    """Send, and do not mind if the trainer is gone."""
    try:
        await trainer.send(command)
    except TrainerDied:
        pass  # whoever waits for its events learns of it


def _death_reason(why: str) -> str:
    """One word for the metrics: what the trainer said of itself, else how it went."""
    said = why.partition(":")[0]
    if said in ("out_of_memory", "non_finite", "error"):
        return said
    return "hung" if said.endswith("hung") else "died"
