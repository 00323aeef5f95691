"""The outer loop: one round after another, through one trainer's life after another.

`RoundLoop` starts trainers, opens and closes rounds, follows the swarm's pace, validates, and ends
the run. Its way of averaging (way.py) decides what is exchanged with the other peers, and when.

- A dead trainer costs at most the round it was in: the next life loads the slow weights and goes on
  where the swarm is.
- A peer that is lost writes a checkpoint before it joins again: it lets go of its weights when
  others have given it a state that is verified, and goes on from its own where nobody does.
- Nobody writes the slow weights while they are validated.
- The next round is opened as soon as the way of averaging lets it, and never two at once.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy.typing as npt
import trio
from msgspec.structs import replace

from peer.facts import PeerState
from peer.observe.event_names import EventName
from peer.process.rejoin import JoinAgain, can_be_joined
from peer.training import messages
from peer.training.ports import StartTrainer, Trainer, TrainerDied
from protocol.errors import LocoError, leaves
from protocol.membership.view import Member, established, trusted
from protocol.microbatch.trainer_messages import Begun, Filled, Freed, GradientAdded, Stepped
from protocol.schedule.rounds import RoundPlan, is_lost, middle

from .domains import ToldLogProbs, told_by
from .pause import Pause
from .validation import Validation
from .way import AveragingParts, TrainerLine, Way

MAX_FAILURES_IN_A_ROW: Final = 5
"""Trainer lives that close no round before we give up."""
RESTART_PAUSE_S: Final = 1.0
SPEED_SMOOTHING: Final = 0.3


class TrainingImpossible(LocoError):
    """The trainer fails again and again; the message says how."""


class RoundLoop:
    """Runs the rounds of one peer; `start_trainer` starts one on the slow weights."""

    def __init__(
        self,
        parts: AveragingParts,
        way: Way,
        validation: Validation,
        start_trainer: StartTrainer,
    ) -> None:
        self._way = way
        self._validation, self._domains = validation, parts.domains
        self._start_trainer = partial(start_trainer, parts.slow_P)
        self._checkpoints, self._microbatches = parts.checkpoints, parts.microbatches
        self._shares, self._events = parts.shares, parts.services.events
        self._spec, self._facts, self._view = parts.amended, parts.services.facts, parts.held.view
        self._quota = self._inner_steps = parts.spec.sync.round_steps
        self._closes_early = self._joins_again = self._leaves = False
        self._most_members = 0
        self._parted_step: int | None = None
        self._line: TrainerLine | None = None
        self._micro_batch_cap: int | None = None
        self._failures_in_a_row = 0
        self.pause = Pause(parts.services, parts.held.view, parts.shares.plan)
        self.finished = False

    async def leave(self, trainer_until_s: float, until_s: float) -> None:
        """Begin no exchange; write the last checkpoint; then wait for exchanges under way."""
        self._leaves = True
        self._way.leave()
        await self._checkpoints.write_last(self._way, trainer_until_s)
        with trio.move_on_at(until_s):
            await self._way.wait_idle()

    async def score(self, tokens: npt.NDArray[Any]) -> ToldLogProbs | None:
        """Score a text with the slow weights, which must lie still; None: no trainer can tell.

        After the end of the run a trainer is started for it.
        """
        if self._line is not None:
            return await self._validation.score(self._line, self._facts.round, tokens)
        if not self.finished or self._domains is None:
            return None
        question = messages.Evaluate(self._facts.round, tokens.astype("<u4").tobytes(), 1)
        try:
            async with self._start_trainer(self._micro_batch_cap) as trainer:
                await trainer.receive()
                await trainer.send(question)
                answer = await trainer.receive()
        except TrainerDied:
            return None
        if not isinstance(answer, messages.Evaluated):
            return None
        return told_by(self._domains.stamp(), self._facts.step, answer.log_probs)

    # --- lives of the trainer ---------------------------------------------------------------------
    async def run(self) -> None:
        while not self.finished:
            self._facts.starts_trainer()
            try:
                async with self._start_trainer(self._micro_batch_cap) as trainer:
                    await self._live(trainer)
            except* TrainerDied as died:
                await self._note_death(str(leaves(died)[0]))

    async def _live(self, trainer: Trainer) -> None:
        self._joins_again, facts = False, self._facts
        ready = await trainer.receive()
        if isinstance(ready, messages.Failed):
            raise self._death(ready)
        assert isinstance(ready, messages.Ready)
        self._note_start(ready)
        async with trio.open_nursery() as nursery:
            line = TrainerLine(trainer, nursery)
            if self._microbatches is not None:
                self._microbatches.began(line)
            self._way.on_trainer_started(line, ready)
            self._checkpoints.on_trainer_started(line)
            load = self._checkpoints.load()
            await trainer.send(
                replace(load, step=facts.nominal_step, epoch=facts.epoch, position=facts.position)
            )
            if facts.round == 0:  # a founder's first weights
                self._check_lost(line)
            self._way.enter(self._pacemakers())
            self._line = line
            nursery.start_soon(self._open_next, line)
            try:
                while not self.finished:
                    await self._take(line, await trainer.receive())
            except TrainerDied:
                self._checkpoints.on_trainer_died()
                if not self.finished:
                    self._validation.forget()
                    await self._way.on_trainer_died()
                    raise
            finally:
                self._line = None
                self._validation.forget()  # whoever waits for a score holds the lock of the weights

    def _note_start(self, ready: messages.Ready) -> None:
        facts = self._facts
        if ready.layout.digest != facts.layout_digest:
            raise TrainingImpossible("the trainer's model has another layout than the run's")
        facts.parameters, facts.alone_steps_per_s = ready.layout.parameters, ready.steps_per_s
        facts.steps_per_s = facts.steps_per_s or ready.steps_per_s
        facts.loops["trainer"], facts.ranks = ready.loops, ready.ranks
        self._micro_batch_cap = newest = ready.micro_batch
        facts.micro_batches = (facts.micro_batches or (newest, newest))[0], newest
        if facts.training_since_s is None:
            facts.training_since_s = trio.current_time()
        self._events.emit(
            EventName.TRAINER_STARTED,
            device=ready.device,
            precision=ready.precision,
            parameters=facts.parameters,
            micro_batch=ready.micro_batch,
            steps_per_s=ready.steps_per_s,
            codec=ready.loops,
            ranks=ready.ranks,
        )
        self._tell_notes(ready.notes)

    def _tell_notes(self, notes: tuple[str, ...]) -> None:
        for note in notes:
            self._events.emit(EventName.STEP_CHOSEN, detail=note)

    async def _note_death(self, why: str) -> None:
        self._facts.count_death(_death_reason(why))
        self._events.emit(EventName.TRAINER_DIED, reason=_death_reason(why), detail=why)
        self._failures_in_a_row += 1
        if self._failures_in_a_row > MAX_FAILURES_IN_A_ROW:
            raise TrainingImpossible(
                f"the trainer failed {self._failures_in_a_row} times without closing a round: {why}"
            )
        self._facts.now_doing(f"restarting the trainer: {why}")
        await trio.sleep(RESTART_PAUSE_S * (self._failures_in_a_row - 1))

    def _death(self, failed: messages.Failed) -> TrainerDied:
        if failed.reason == "out_of_memory":  # one that was never ready has tried one sequence
            self._micro_batch_cap = (self._micro_batch_cap or 0) // 2
        return TrainerDied(f"{failed.reason}: {failed.detail}")

    # --- events of the trainer --------------------------------------------------------------------
    async def _take(self, line: TrainerLine, event: messages.TrainerEvent) -> None:
        match event:
            case messages.TrainerProgress():
                self._note_progress(line, event)
            case messages.RoundClosed():
                self._note_closed(event)
                line.nursery.start_soon(self._go_on, line, event)
            case messages.Evaluated():
                self._validation.ended(event)
            case messages.Kept():
                self._checkpoints.on_kept(event)
            case messages.Failed():
                raise self._death(event)
            case messages.PiecesMissing(pieces):
                line.nursery.start_soon(self._bring, line, pieces)
            case messages.Ready(notes=notes) | messages.StepChosen(notes):
                self._tell_notes(notes)
            case Begun() | Filled() | GradientAdded() | Freed() | Stepped():
                if self._microbatches is not None:
                    await self._microbatches.took(event)
            case _:
                await self._way.on_event(event)

    def _note_progress(self, line: TrainerLine, progress: messages.TrainerProgress) -> None:
        facts = self._facts
        facts.count_spent(progress.spent_s)
        if progress.round != facts.round:
            return
        facts.fraction = progress.steps / max(1, self._quota)
        facts.nominal_step = progress.step
        facts.train_loss, facts.gradient_norm = progress.loss, progress.gradient_norm
        if progress.step_s > 0:
            speed = 1 / progress.step_s
            facts.steps_per_s += SPEED_SMOOTHING * (speed - facts.steps_per_s)
        self._way.on_progress()
        self._check_lost(line)
        if not self._closes_early and self._way.closes_early(progress.steps, self._pacemakers()):
            self._closes_early = True
            line.nursery.start_soon(line.send, messages.CloseRound(facts.round))

    async def _bring(self, line: TrainerLine, pieces: tuple[int, ...]) -> None:
        """Bring the pieces of the corpus for which the trainer waits."""
        facts, started_s = self._facts, trio.current_time()
        facts.now_doing(f"waiting for {len(pieces)} pieces of the corpus")
        if self._shares.feed is not None:
            await self._shares.feed.bring(pieces)
        waited_s = trio.current_time() - started_s
        facts.corpus.waited_s += waited_s
        self._events.emit(EventName.PIECES_AWAITED, pieces=len(pieces), seconds=waited_s)
        facts.now_doing("training")
        await line.send(messages.PiecesHere())

    def _note_closed(self, closed: messages.RoundClosed) -> None:
        facts = self._facts
        facts.count_spent(closed.spent_s)
        self._failures_in_a_row = 0
        facts.epoch, facts.position = closed.epoch, closed.position
        facts.nominal_step = closed.step
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
            step=closed.step,
        )

    # --- opening and closing rounds ---------------------------------------------------------------
    def _others(self) -> list[Member]:
        """The others that train, except those that say they are past the end."""
        training = self._view.members_training(trio.current_time())
        return [m for m in training if m.progress.step <= self._spec.longest_steps]

    def _pacemakers(self) -> Sequence[Member]:
        """The training peers that set our pace.

        Nobody once we join again: the checkpoint must say which weights it has, so we do not jump.
        """
        if self._joins_again:
            return ()
        others, own_step, now_s = self._others(), self._facts.step, trio.current_time()
        if now_s < self._facts.stays_until_s:
            too_far = [is_lost(own_step, [m.progress.step], self._inner_steps) for m in others]
            others = [m for m, far in zip(others, too_far, strict=True) if not far]
        return established(others, now_s)

    def _check_lost(self, line: TrainerLine) -> None:
        """Join again when our weights are of another time than the swarm's, unless we leave."""
        if self._leaves:
            return
        others, own_step = self._pacemakers(), self._facts.step
        steps = [m.progress.step for m in trusted(others, trio.current_time())]
        lost = is_lost(own_step, steps, self._inner_steps)
        if lost and can_be_joined(others) and not self._joins_again:
            self._joins_again = True
            error = JoinAgain(
                f"step {own_step:,} is far behind the swarm's {int(middle(steps, 0)):,}"
                + self._loss(own_step),
            )
            line.nursery.start_soon(self._join_again, error)

    def _loss(self, own_step: int) -> str:
        """A sentence on our steps since some of the others were gone, which they may lack."""
        if self._parted_step is None:
            return ""
        return (
            f"; up to {own_step - self._parted_step:,} steps, trained apart from it, are given up"
        )

    async def _join_again(self, error: JoinAgain) -> None:
        if self._facts.round > 0:
            await self._checkpoints.write(self._way)
        raise error

    async def _go_on(self, line: TrainerLine, closed: messages.RoundClosed) -> None:
        """Average a closed round, as far as the next has to wait for that, and open the next."""
        if self._microbatches is not None:
            closed = replace(closed, step=self._microbatches.step_of(closed.step))
            self._facts.nominal_step = closed.step
        self._check_lost(line)  # before a jump to where the others are hides it
        await self._way.on_round_closed(closed, self._pacemakers())
        await self._checkpoints.between_rounds(self._way)
        await self._open_next(line)

    async def _open_next(self, line: TrainerLine) -> None:
        plan = None
        if not self._is_trained and await self.pause.rest(self._way.wait_idle):
            self._check_lost(line)
            if self._joins_again:
                return
            self._way.enter(self._pacemakers())
        if not self._facts.run_over:
            plan = self._way.next_round(self._pacemakers()) or await self._way.next_final_round()
        if plan is None:
            await self._finish(line)
        else:
            await self._open(line, plan)

    @property
    def _is_trained(self) -> bool:
        step = self._facts.nominal_step
        return self._facts.run_over or step >= self._spec.total_steps_at(step)

    async def _open(self, line: TrainerLine, plan: RoundPlan) -> None:
        facts = self._facts
        members = self._shares.now(self._others(), self._pacemakers())
        self._quota = plan.quota
        facts.round, facts.nominal_step = plan.round, plan.start_step
        if len(members) >= self._most_members:
            self._most_members, self._parted_step = len(members), None
        elif self._parted_step is None:
            self._parted_step = facts.step
        facts.fraction, self._closes_early = 0.0, False
        facts.now_doing("training", PeerState.TRAINING)
        self._events.emit(
            EventName.ROUND_OPENED,
            round=plan.round,
            quota=plan.quota,
            members=len(members),
            step=plan.start_step,
        )
        await line.send(
            messages.TrainRound(
                plan.round,
                plan.quota,
                members,
                facts.epoch,
                facts.position,
                plan.start_step,
                plan.stride,
                self._spec.total_steps_at(plan.start_step),
                self._spec.at_step(plan.start_step).optimizer.learning_rate,
            )
        )

    async def _finish(self, line: TrainerLine) -> None:
        facts = self._facts
        total_steps = self._spec.total_steps_at(facts.nominal_step)
        facts.fraction, facts.nominal_step = 1.0, float(total_steps)
        if self._microbatches is not None:
            await self._microbatches.wait_unneeded()
        await self._validation.wait_idle()
        before = self._validation.answers
        await self._validation.begin_all(line, facts.round)
        await self._validation.wait_idle()
        if self._validation.answers == before:
            return  # the trainer died over it; its next life comes here again
        facts.run_over = True
        await self._checkpoints.write(self._way)
        self.finished = True
        await line.trainer.send(messages.Stop())
        self._events.emit(
            EventName.RUN_FINISHED,
            round=facts.round,
            step=facts.step,
            validation_loss=facts.validation_loss,
            replica_loss=facts.replica_loss,
        )
        facts.now_doing("the run has ended; serving its state", PeerState.FINISHED)


def _death_reason(why: str) -> str:
    """The reason in one word, for the metrics."""
    said = why.partition(":")[0]
    if said in ("out_of_memory", "non_finite", "error", "unusable"):
        return said
    return "hung" if said.endswith("hung") else "died"
