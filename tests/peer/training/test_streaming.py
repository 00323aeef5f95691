"""When fragments are sent and merged, whatever the speed, the delays and the order of commands."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.training.messages import TrainRound
from peer.training.sync import FragmentSync, TimeSpent
from protocol.run.run_spec import RunSpec, SyncSection
from protocol.run.sections import DilocoSection
from protocol.trainer_messages import FragmentMerged, FragmentSent, Merge, Yield
from protocol.trainer_messages import Yielded as YieldedEvent

pytestmark = pytest.mark.slow

H = 12
FRAGMENTS = 3
TOKENS = 32


class NoValues:
    """Snapshots without weights: they note what is asked of them."""

    fragments = [SimpleNamespace(chunks=((0, 128), (128, 256)))] * FRAGMENTS

    def __init__(self):
        self.held = set()

    def send(self, fragment, cycle):
        assert fragment not in self.held
        return ""

    def merge(self, fragment, stepped, moved, redone=None):
        if redone is None:
            assert fragment not in self.held
        else:
            self.held.remove(fragment)

    def hold(self, fragment):
        self.held.add(fragment)


class Loop:
    """The inner loop around a FragmentSync, without training; an answer takes so many turns."""

    def __init__(self, late, overlap_steps, delays, yields):
        section = DilocoSection(late=late, overlap_steps=overlap_steps)
        snapshots: Any = NoValues()
        spec = RunSpec(sync=SyncSection(method="diloco", inner_steps=H, diloco=section))
        self.delays, self.yields = list(delays), list(yields)
        self.turn = self.steps = 0
        self.sync = FragmentSync(spec, snapshots, self.emit, TimeSpent(lambda: float(self.turn)))
        self.waiting: list[tuple[int, Merge]] = []
        self.sent: list[tuple[FragmentSent, int]] = []
        self.merged: list[tuple[FragmentMerged, int]] = []

    def emit(self, event):
        delay = self.delays.pop() if self.delays else 0
        match event:
            case FragmentSent(fragment, cycle):
                self.sent.append((event, self.steps))
                self.waiting.append((self.turn + delay, Merge(fragment, cycle, (0,), (1,))))
            case FragmentMerged():
                self.merged.append((event, self.steps))
            case YieldedEvent(fragment):
                self.waiting.append((self.turn + delay, Merge(fragment, None, (), (1,), (0,))))

    def take_a_turn(self):
        """Obey the commands that have come. Returns whether a step may be done."""
        self.turn += 1
        due = [command for when, command in self.waiting if when <= self.turn]
        self.waiting = [(when, command) for when, command in self.waiting if when > self.turn]
        for command in due:
            self.sync.obey(command)
            self.sync.advance()
        return not self.sync.holds_training

    def train(self, round_, quota):
        order = TrainRound(round_, quota, (), 0, 0, 0.0, 1.0)
        self.sync.begin(order)
        self.sync.advance()
        steps = 0
        while steps < quota:
            if self.take_a_turn():
                steps += 1
                self.steps += 1
                self.sync.stepped(order, steps, TOKENS)
                self.sync.advance()
                if self.yields and steps % 5 == 0 and self.yields.pop():
                    self.yield_one()
        self.sync.close(order)

    def yield_one(self):
        states = self.sync._states
        free = [
            index for index, state in enumerate(states) if not (state.yielded or state.yield_asked)
        ]
        if free:
            self.sync.obey(Yield(free[0]))

    def settle(self):
        while self.waiting:
            self.take_a_turn()


@settings(deadline=None)
@given(
    late=st.sampled_from(["wait", "skip"]),
    overlap_steps=st.integers(0, H - 1),
    quotas=st.lists(st.integers(1, 3 * H), min_size=1, max_size=4),
    delays=st.lists(st.integers(0, 30), max_size=20),
    yields=st.lists(st.booleans(), max_size=10),
)
def test_every_fragment_comes_and_goes_once_a_round(late, overlap_steps, quotas, delays, yields):
    loop = Loop(late, overlap_steps, delays, yields)
    for round_, quota in enumerate(quotas):
        loop.train(round_, quota)
    loop.train(len(quotas), 0)
    loop.settle()
    sent = [(event.fragment, event.cycle) for event, _ in loop.sent]
    expected = {(f, k) for f in (1, 2) for k in range(len(quotas) + 1)}
    expected |= {(0, k + 1) for k in range(len(quotas))}
    assert Counter(sent) == Counter(expected)
    assert Counter((event.fragment, event.cycle) for event, _ in loop.merged) == Counter(sent)
    trained = Counter[int]()
    for event, _ in loop.sent:
        trained[event.fragment] += event.steps
        assert event.tokens == event.steps * TOKENS
    assert all(trained[fragment] <= loop.steps for fragment in range(FRAGMENTS))
    assert trained[1] == trained[2] == loop.steps


@pytest.mark.parametrize("delay", range(1, 6))
@settings(deadline=None)
@given(
    overlap_steps=st.integers(0, 3),
    quota=st.integers(H, 3 * H),
    rounds=st.integers(1, 3),
)
def test_with_late_wait_a_merge_is_exactly_tau_steps_after_its_send(
    delay, overlap_steps, quota, rounds
):
    loop = Loop("wait", overlap_steps, [delay] * 100, [])
    for round_ in range(rounds):
        loop.train(round_, quota)
    sent = {(event.fragment, event.cycle): step for event, step in loop.sent}
    assert loop.merged
    for event, step in loop.merged:
        assert step - sent[event.fragment, event.cycle] == overlap_steps
        assert (event.waited_s == 0) == (delay <= overlap_steps)
