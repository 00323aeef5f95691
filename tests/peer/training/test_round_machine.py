"""The round machine by itself: commands, steps and clock readings in, actions and events out."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.training.messages import (
    CloseRound,
    Evaluate,
    Evaluated,
    Keep,
    Kept,
    Load,
    RoundClosed,
    Stop,
    TrainerEvent,
    TrainerProgress,
    TrainRound,
)
from peer.training.ports import WrongCommand
from peer.training.round_machine import ReadNumbers, RoundData, RoundMachine, TrainStep, Wait
from peer.training.schedule import learning_rate
from protocol.run.run_spec import RunSpec, SyncSection, TrainingSection
from protocol.run.sections import OptimizerSection
from protocol.schedule.data_plan import DataPlan
from protocol.trainer_messages import Merge

H = 10
MEMBERS = (("me", 1), ("you", 3))
NUM_BLOCKS = 1000
BATCH = 4
SPEC = RunSpec(
    optimizer=OptimizerSection(warmup_steps=30),
    training=TrainingSection(batch_size=BATCH, total_steps=200),
    sync=SyncSection(inner_steps=H),
)


@dataclass
class FakeSync:
    """A way of averaging that does as the test says, and notes what it is told."""

    holds_training: bool = False
    holds_close: bool = False
    is_send_due: bool = False
    told: list[object] = field(default_factory=list)

    def load(self):
        self.told.append("load")

    def obey(self, command):
        self.told.append(command)

    def begin(self, order):
        self.told.append(("begin", order.round))

    def stepped(self, order, steps, tokens):
        self.told.append(("stepped", order.round, steps, tokens))

    def advance(self):
        if self.is_send_due:
            self.told.append("sent")
            self.is_send_due = False

    def close(self, order):
        self.told.append(("closed", order.round))


class Driver:
    """Does what the machine says: a step takes `step_s`; numbers are known one step later."""

    def __init__(self, step_s=1.0, *, loaded=True):
        self.sync = FakeSync()
        sync: Any = self.sync
        self.events: deque[TrainerEvent] = deque()
        self.machine = RoundMachine(SPEC, "me", DataPlan(SPEC.seed, NUM_BLOCKS), sync, self.events)
        self.step_s, self.now_s, self.own_steps = step_s, 0.0, 0
        self.awaits_numbers = False
        self.steps: list[TrainStep] = []
        if loaded:
            self.obey(Load())

    def obey(self, command):
        self.machine.obey(command, self.now_s)

    def order(self, round_, quota=4, start_step=None, place=(0, 0), stride=None):
        """A round; H nominal steps are done in its quota unless the stride says otherwise."""
        start_step = float(H * round_) if start_step is None else start_step
        stride = H / max(1, quota) if stride is None else stride
        self.obey(TrainRound(round_, quota, MEMBERS, place[0], place[1], start_step, stride))

    def next_action(self):
        """What comes next but for looking at numbers."""
        while isinstance(action := self.machine.next_action(self.now_s), ReadNumbers):
            assert self.awaits_numbers
            self.settle()
        return action

    def settle(self):
        if self.awaits_numbers:
            self.awaits_numbers = False
            self.machine.numbers_known(float(self.own_steps), 0.5, 0.0)

    def train(self, steps=10**6):
        """Steps, as long as there is something to train."""
        for _ in range(steps):
            if not isinstance(action := self.next_action(), TrainStep):
                return
            self.settle()
            self.now_s += self.step_s
            self.own_steps += 1
            self.steps.append(action)
            self.machine.stepped(action, self.now_s, self.step_s)
            self.awaits_numbers = True
        self.next_action()

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


# --- a round --------------------------------------------------------------------------------------
def test_a_round_closes_at_its_quota_and_the_next_begins_when_it_is_ordered():
    driver = Driver()
    assert driver.next_action() == Wait()
    driver.order(0)
    driver.train()
    (closed,) = driver.of(RoundClosed)
    assert (closed.round, closed.steps, closed.tokens) == (0, 4, 4 * SPEC.tokens_per_step)
    assert closed.loss == (1 + 2 + 3 + 4) / 4
    assert (closed.seconds, closed.step) == (4.0, H)
    assert driver.next_action() == Wait()
    driver.order(1)
    assert isinstance(driver.next_action(), TrainStep)


def test_an_order_that_waits_begins_with_the_close():
    driver = Driver()
    driver.order(0)
    driver.order(1)
    driver.train()
    assert [closed.round for closed in driver.of(RoundClosed)] == [0, 1]
    assert [(step.round, step.steps) for step in driver.steps] == [
        (round_, step) for round_ in range(2) for step in range(4)
    ]


def test_a_due_round_that_is_held_up_trains_on_at_rising_nominal_steps():
    driver = Driver()
    driver.sync.holds_close = True
    driver.order(3, quota=4, stride=2.25)
    driver.train(7)
    assert driver.of(RoundClosed) == []
    assert [step.nominal_step for step in driver.steps] == [30 + 2.25 * k for k in range(7)]
    assert [event.step for event in driver.of(TrainerProgress)] == [
        30 + 2.25 * k for k in range(1, 8)
    ]
    driver.sync.holds_close = False
    driver.next_action()
    (closed,) = driver.of(RoundClosed)
    assert (closed.steps, closed.step) == (7, 45.75)


def test_a_due_round_that_is_held_up_trains_to_the_end_of_the_run_and_no_further():
    driver = Driver(step_s=0.01)
    driver.sync.holds_close = True
    driver.obey(TrainRound(3, 4, MEMBERS, 0, 0, 30.0, 1.0, 36))
    driver.train(20)
    assert [step.nominal_step for step in driver.steps] == [30.0 + k for k in range(6)]
    assert driver.next_action() == Wait()
    assert driver.of(TrainerProgress)[-1].step == 36.0
    driver.sync.holds_close = False
    driver.next_action()
    (closed,) = driver.of(RoundClosed)
    assert (closed.steps, closed.step) == (6, 36.0)


def test_an_order_says_the_peak_and_the_end_of_the_schedule_for_its_round():
    driver = Driver()
    for round_, (total_steps, peak) in enumerate([(None, None), (500, 1.5), (None, None)]):
        order = TrainRound(round_, 2, MEMBERS, 0, 0, 100.0, 1.0, total_steps, peak)
        driver.obey(order)
        driver.train()
    changed = SPEC.optimizer.model_copy(update={"learning_rate": 1.5})
    sections = [(SPEC.optimizer, 200)] * 2 + [(changed, 500)] * 2 + [(SPEC.optimizer, 200)] * 2
    assert [step.learning_rate for step in driver.steps] == [
        learning_rate(section, 100.0 + own % 2, total, own)
        for own, (section, total) in enumerate(sections)
    ]


@pytest.mark.parametrize(("quota", "stride"), [(4, 0.75), (4, 5.5), (1, 20.0), (0, 20.0)])
def test_the_nominal_step_rises_by_the_stride_whatever_the_quota(quota, stride):
    driver = Driver()
    driver.order(0, quota=quota, start_step=12.25, stride=stride)
    driver.train()
    (closed,) = driver.of(RoundClosed)
    assert closed.step == 12.25 + stride * quota
    assert [step.nominal_step for step in driver.steps] == [
        12.25 + stride * own for own in range(quota)
    ]
    rates = [learning_rate(SPEC.optimizer, 12.25 + stride * k, 200, k) for k in range(quota)]
    assert [step.learning_rate for step in driver.steps] == rates


def test_what_holds_up_training_does_not_hold_up_commands():
    driver = Driver()
    driver.order(0)
    driver.sync.holds_training = True
    assert driver.next_action() == Wait()
    driver.obey(Merge(0, 7, (0,), ()))
    assert driver.sync.told[-1] == Merge(0, 7, (0,), ())
    driver.sync.holds_training = False
    assert isinstance(driver.next_action(), TrainStep)


@pytest.mark.parametrize("start_step", [0.0, 12.5])
def test_a_round_of_no_steps_closes_where_it_begins(start_step):
    driver = Driver()
    driver.sync.holds_close = True
    driver.order(0, quota=0, start_step=start_step, place=(2, 60))
    assert driver.next_action() == Wait()
    assert driver.of(RoundClosed) == []
    driver.sync.holds_close = False
    driver.next_action()
    (closed,) = driver.of(RoundClosed)
    assert (closed.steps, closed.loss, closed.step) == (0, 0.0, start_step)
    assert (closed.epoch, closed.position) == (2, 60)


@pytest.mark.parametrize(("steps_before", "steps"), [(0, 1), (3, 3)])
def test_a_round_closes_when_asked_to_but_not_without_a_step(steps_before, steps):
    driver = Driver()
    driver.order(0, quota=100)
    driver.train(steps_before)
    driver.obey(CloseRound(0))
    driver.train(10)
    driver.obey(CloseRound(0))
    assert [closed.steps for closed in driver.of(RoundClosed)] == [steps]


def test_to_be_asked_twice_does_not_put_the_close_off():
    driver = Driver()
    driver.sync.holds_close = True
    driver.order(0, quota=100)
    driver.train(3)
    driver.obey(CloseRound(0))
    driver.train(2)
    driver.obey(CloseRound(0))
    driver.sync.holds_close = False
    driver.next_action()
    assert [closed.steps for closed in driver.of(RoundClosed)] == [5]


# --- the learning rate ----------------------------------------------------------------------------
def test_after_each_load_the_learning_rate_comes_to_the_schedules():
    driver = Driver()
    for first in (5, 12):
        driver.obey(Load())
        driver.steps.clear()
        driver.order(first, quota=H)
        driver.order(first + 1, quota=H)
        driver.train()
        rates = [step.learning_rate for step in driver.steps]
        places = [step.nominal_step for step in driver.steps]
        assert places == [H * first + own for own in range(2 * H)]
        assert rates == [
            learning_rate(SPEC.optimizer, place, 200, own) for own, place in enumerate(places)
        ]
        scheduled = learning_rate(SPEC.optimizer, places[0], 200)
        assert rates[0] == pytest.approx(scheduled / 20)
        assert rates[-1] == learning_rate(SPEC.optimizer, places[-1], 200)


# --- numbers --------------------------------------------------------------------------------------
def test_before_something_is_sent_the_numbers_of_the_last_step_are_asked_for():
    driver = Driver(step_s=0.01)
    driver.order(0, quota=100)
    driver.train(1)
    assert driver.awaits_numbers
    driver.sync.is_send_due = True
    assert driver.machine.next_action(driver.now_s) == ReadNumbers()
    assert "sent" not in driver.sync.told
    driver.next_action()
    assert "sent" in driver.sync.told


def test_before_a_round_closes_the_numbers_of_the_last_step_are_asked_for():
    driver = Driver(step_s=0.01)
    driver.sync.holds_close = True
    driver.order(0, quota=1)
    driver.train(3)
    assert driver.awaits_numbers
    driver.sync.holds_close = False
    assert driver.machine.next_action(driver.now_s) == ReadNumbers()
    assert ("closed", 0) not in driver.sync.told
    driver.next_action()
    assert ("closed", 0) in driver.sync.told
    (closed,) = driver.of(RoundClosed)
    assert closed.loss == (1 + 2 + 3) / 3


# --- progress -------------------------------------------------------------------------------------
def test_progress_is_told_at_half_the_quota_and_now_and_then():
    driver = Driver(step_s=0.0625)
    driver.order(0, quota=20)
    driver.train()
    told = driver.of(TrainerProgress)
    assert [event.steps for event in told] == [4, 8, 10, 14, 18]
    assert [event.loss for event in told] == [2.5, 6.5, 9.5, 12.5, 16.5]
    assert [event.step for event in told] == [0.5 * event.steps for event in told]
    rates = [step.learning_rate for step in driver.steps]
    assert [event.learning_rate for event in told] == [rates[event.steps - 1] for event in told]
    assert {event.step_s for event in told} == {0.0625}
    assert {event.gradient_norm for event in told} == {0.5}


# --- data -----------------------------------------------------------------------------------------
@pytest.mark.slow
@settings(deadline=None)
@given(
    quotas=st.lists(st.integers(0, 8), min_size=1, max_size=3),
    place=st.tuples(st.integers(0, 3), st.integers(0, NUM_BLOCKS)),
)
def test_the_place_is_that_of_the_plan_whether_the_blocks_are_taken_or_not(quotas, place):
    plan = DataPlan(SPEC.seed, NUM_BLOCKS)
    reading = idle = place
    blocks = []
    for quota in quotas:
        reader, idler = (
            RoundData(plan, "me", BATCH, TrainRound(0, quota, MEMBERS, at[0], at[1], 0.0, 1.0))
            for at in (reading, idle)
        )
        for step in range(quota):
            blocks += list(reader.blocks(step))
        reading, idle = reader.after(quota), idler.after(quota)
        assert reading == idle
    if blocks:
        taken = plan.take(place[0], place[1], len(blocks), "me", MEMBERS)
        assert blocks == list(taken.blocks)
        assert reading == (taken.epoch, taken.position)
    else:
        assert reading == place


def test_the_machine_hands_out_the_blocks_of_each_step():
    driver = Driver()
    driver.order(0, quota=3, place=(0, 100))
    plan, blocks = DataPlan(SPEC.seed, NUM_BLOCKS), []
    for _ in range(3):
        driver.next_action()
        blocks += list(driver.machine.blocks())
        driver.train(1)
    taken = plan.take(0, 100, 3 * BATCH, "me", MEMBERS)
    assert blocks == list(taken.blocks)
    (closed,) = driver.of(RoundClosed)
    assert (closed.epoch, closed.position) == (taken.epoch, taken.position)


# --- validation and the end -----------------------------------------------------------------------
def test_validation_comes_before_training_and_is_told_when_it_is_done():
    driver = Driver()
    driver.order(0)
    driver.obey(Evaluate(5))
    assert driver.next_action() == driver.next_action() == Evaluate(5)
    driver.machine.measured(Evaluated(5, 1.0, 0.5))
    assert list(driver.events) == [Evaluated(5, 1.0, 0.5)]
    assert isinstance(driver.next_action(), TrainStep)


def test_stop_is_the_end():
    driver = Driver()
    driver.order(0)
    driver.obey(Stop())
    assert driver.next_action() == driver.next_action() == Stop()


# --- commands that make no sense ------------------------------------------------------------------
def order(round_, quota=4, members=MEMBERS):
    return TrainRound(round_, quota, members, 0, 0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("commands", "why"),
    [
        ([order(0)], "before Load"),
        ([Merge(0, 0, (0,), ())], "before Load"),
        ([CloseRound(0)], "not begun"),
        ([Load(), order(0, quota=-1)], "quota -1"),
        ([Load(), order(0, members=(("you", 1),))], "no member"),
        ([Load(), order(0), order(0)], "trained already"),
        ([Load(), order(1), order(0)], "trained already"),
        ([Load(), order(0), order(1), order(2)], "waits already"),
        ([Load(), order(0), order(1), CloseRound(1)], "not begun"),
        ([Load(), order(5), Load(), CloseRound(5)], "not begun"),
    ],
)
def test_commands_that_make_no_sense_are_refused(commands, why):
    driver = Driver(loaded=False)
    *fitting, wrong = commands
    for command in fitting:
        driver.obey(command)
    with pytest.raises(WrongCommand, match=why):
        driver.obey(wrong)


def test_load_forgets_the_round_the_order_and_the_step_under_way():
    driver = Driver()
    driver.order(7, quota=100)
    driver.order(8)
    driver.train(2)
    driver.obey(Load())
    driver.awaits_numbers = False
    assert driver.next_action() == Wait()
    driver.order(0, quota=2)
    driver.train()
    assert [(closed.round, closed.steps) for closed in driver.of(RoundClosed)] == [(0, 2)]


# --- everything at once ---------------------------------------------------------------------------
@pytest.mark.slow
@settings(deadline=None)
@given(
    quotas=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    turns=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=40),
)
def test_whatever_is_held_up_rounds_close_in_order_with_their_steps(quotas, turns):
    """In each turn training, the close, or neither is held up, and the round may be asked for."""
    driver = Driver(step_s=0.1)
    orders = list(enumerate(quotas))
    for holds_training, holds_close, asks in [*turns, *[(False, False, False)] * 70]:
        driver.sync.holds_training, driver.sync.holds_close = holds_training, holds_close
        closed = driver.of(RoundClosed)
        if orders and len(closed) == orders[0][0]:
            driver.order(*orders.pop(0), place=(0, closed[-1].position if closed else 0))
        elif asks and driver.machine._state.round:
            driver.obey(CloseRound(len(closed)))
        before = len(driver.steps)
        driver.train(1)
        assert not (holds_training and len(driver.steps) > before)
    closed = driver.of(RoundClosed)
    assert [event.round for event in closed] == list(range(len(quotas)))
    assert sum(event.steps for event in closed) == len(driver.steps)
    for event, quota in zip(closed, quotas, strict=True):
        assert event.step == H * event.round + H / max(1, quota) * event.steps
        own = [step for step in driver.steps if step.round == event.round]
        assert [step.steps for step in own] == list(range(event.steps))
        assert event.steps > 0 or quota == 0
    plan, blocks = DataPlan(SPEC.seed, NUM_BLOCKS), BATCH * len(driver.steps)
    assert closed[-1].position == plan.take(0, 0, blocks, "me", MEMBERS).position


def test_what_is_kept_before_a_round_stands_where_the_weights_were_loaded():
    driver = Driver(loaded=False)
    driver.obey(Load(step=40.0, epoch=2, position=7))
    driver.obey(Keep("there"))
    assert driver.next_action() == Keep("there")
    driver.machine.kept(None)
    (kept,) = driver.of(Kept)
    assert (kept.step, kept.epoch, kept.position, kept.tokens) == (40.0, 2, 7, 0)
