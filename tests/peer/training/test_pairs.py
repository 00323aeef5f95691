"""When the trainer sends and merges fragments in pairs, and what becomes of theta."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.codec import get_codec
from peer.training.fragments import FragmentDeltas, regions_of, values_of
from peer.training.messages import TrainRound
from peer.training.ports import NonFinite, WrongCommand
from peer.training.shared import CodeRegions
from peer.training.sync import PairSync, TimeSpent
from protocol.run.run_spec import RunSpec, SyncSection, TrainingSection
from protocol.trainer_messages import FragmentMerged, FragmentSent, Merge, Try, Yield
from simulation.trainer import ToyWeights, simulated_layout

H = 12
ROUNDS = 6
FRAGMENTS = 3
TOKENS = 32
PARAMETERS = 7 * 128


def spec_of(codec: str = "int8") -> RunSpec:
    return RunSpec(
        training=TrainingSection(total_steps=ROUNDS * H),
        sync=SyncSection(method="streaming", inner_steps=H, codec=codec),
    )


class NoValues:
    """Deltas without weights: they see to it that sends and merges take turns."""

    fragments = [SimpleNamespace()] * FRAGMENTS

    def __init__(self) -> None:
        self.in_flight: set[int] = set()

    def load(self) -> None:
        self.in_flight.clear()

    def send(self, fragment: int, cycle: int) -> str:
        assert fragment not in self.in_flight
        self.in_flight.add(fragment)
        return f"{fragment}/{cycle}"

    def merge(self, fragment: int) -> None:
        self.in_flight.remove(fragment)


class Loop:
    """The inner loop around a PairSync, without training."""

    def __init__(self) -> None:
        values: Any = NoValues()
        self.values = values
        self.events: list[Any] = []
        self.sync = PairSync(spec_of(), values, self.events.append, TimeSpent(lambda: 0.0))
        self.sync.load()

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def train(
        self, start_step: float, steps: int, stride: float = 1.0, answer: bool = True
    ) -> TrainRound:
        """Do the steps of one round. With `answer` all that is sent comes back at once."""
        order = self.begin(start_step, steps, stride)
        for step in range(1, steps + 1):
            assert not self.sync.holds_training
            assert not self.sync.holds_close
            self.sync.stepped(order, step, TOKENS)
            self.sync.advance()
            if answer:
                self.answer_all()
        self.sync.close(order)
        return order

    def begin(self, start_step: float, quota: int, stride: float = 1.0) -> TrainRound:
        order = TrainRound(0, quota, (), 0, 0, start_step, stride)
        self.sync.begin(order)
        self.sync.advance()
        return order

    def answer_all(self) -> None:
        for fragment in sorted(self.values.in_flight):
            self.answer(fragment)

    def answer(self, fragment: int) -> None:
        sent = [event for event in self.of(FragmentSent) if event.fragment == fragment]
        self.sync.obey(Merge(fragment, sent[-1].cycle, (0,), ()))
        self.sync.advance()


def moments(loop: Loop) -> list[tuple[int, float]]:
    return [(event.fragment, event.step) for event in loop.of(FragmentSent)]


# --- when -----------------------------------------------------------------------------------------
def test_each_fragment_is_sent_at_its_own_moment_of_the_round() -> None:
    loop = Loop()
    for round_ in range(2):
        loop.train(round_ * H, H)
    assert moments(loop) == [(1, 4), (2, 8), (0, 12), (1, 16), (2, 20), (0, 24)]
    first, *_, last = loop.of(FragmentSent)
    assert (first.cycle, first.steps, first.tokens) == (0, 4, 4 * TOKENS)
    assert (last.cycle, last.steps, last.tokens) == (1, H, H * TOKENS)
    assert [(e.fragment, e.cycle) for e in loop.of(FragmentMerged)] == [
        (e.fragment, e.cycle) for e in loop.of(FragmentSent)
    ]


def test_moments_are_nominal_and_rounds_begin_anywhere() -> None:
    loop = Loop()
    loop.train(2.5, 20, stride=0.5)
    assert moments(loop) == [(1, 4), (2, 8), (0, 12)]
    loop.train(12.5, 3, stride=1.25)
    assert moments(loop)[3:] == [(1, 16.25)]


def test_a_jump_of_the_nominal_step_sends_nothing() -> None:
    loop = Loop()
    loop.train(0.0, 3)
    loop.train(30.0, 1)
    assert moments(loop) == []
    loop.train(31.0, 1)
    assert moments(loop) == [(2, 32)]


def test_a_fragment_in_flight_is_sent_once_after_its_merge_and_nothing_waits() -> None:
    loop = Loop()
    loop.train(0.0, 3 * H, answer=False)
    assert moments(loop) == [(1, 4), (2, 8), (0, 12)]
    loop.answer(2)
    assert len(moments(loop)) == 3  # between two rounds nothing is sent
    loop.begin(36.0, H)
    assert moments(loop)[3:] == [(2, 36)]
    assert not loop.sync.is_send_due
    loop.answer(1)
    assert moments(loop)[4:] == [(1, 36)]
    loop.answer(1)
    assert len(moments(loop)) == 5
    assert loop.of(FragmentSent)[-1].steps == 32


def test_a_round_of_no_steps_sends_every_fragment() -> None:
    loop = Loop()
    loop.train(0.0, 5)
    loop.begin(5.0, 0)
    assert moments(loop)[1:] == [(0, 5), (1, 5), (2, 5)]


def test_past_the_last_nominal_step_nothing_has_a_moment() -> None:
    """What was late then goes out with the rounds of no steps, and not before."""
    loop = Loop()
    loop.train((ROUNDS - 1) * H, H, answer=False)
    assert moments(loop) == [(1, 64), (2, 68)]
    loop.answer_all()
    assert len(moments(loop)) == 2
    loop.begin(ROUNDS * H, 0)
    assert {fragment for fragment, _ in moments(loop)[2:]} == {0, 1, 2}


def test_the_last_nominal_step_is_the_one_that_the_order_says() -> None:
    loop = Loop()
    order = TrainRound(0, H, (), 0, 0, float((ROUNDS - 1) * H), 1.0, total_steps=2 * ROUNDS * H)
    loop.sync.begin(order)
    for step in range(1, H + 1):
        loop.sync.stepped(order, step, TOKENS)
        loop.sync.advance()
        loop.answer_all()
    assert len(moments(loop)) == 3  # those of a round that is not the last


@settings(deadline=None)
@given(
    stride=st.sampled_from([0.25, 1 / 3, 0.7, 1.0, 1.5, 3.0, 30.0]),
    rounds=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    delays=st.lists(st.integers(0, 25), max_size=30),
)
def test_no_moment_is_missed(stride: float, rounds: list[int], delays: list[int]) -> None:
    loop, waiting, step = Loop(), dict[int, int](), 0.0
    comes_at_once = not delays
    for quota in rounds:
        order = loop.begin(step, quota, stride)
        for own in range(1, quota + 1):
            if step + stride * own >= ROUNDS * H:
                return
            late = set(loop.values.in_flight)
            loop.sync.stepped(order, own, TOKENS)
            loop.sync.advance()
            assert {i for i, flight in enumerate(loop.sync._states) if flight.is_due} <= late
            for fragment in sorted(loop.values.in_flight):
                waiting.setdefault(fragment, delays.pop() if delays else 0)
                waiting[fragment] -= 1
                if waiting[fragment] < 0:
                    del waiting[fragment]
                    loop.answer(fragment)
        step += stride * quota
    if comes_at_once and stride <= H:
        for fragment in range(FRAGMENTS):
            count = sum(event.fragment == fragment for event in loop.of(FragmentSent))
            assert count >= int(step / H) - 3


# --- commands that make no sense ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (Merge(0, 0, (0,), ()), "fragment is"),  # not in flight
        (Merge(1, 1, (0,), ()), "fragment is"),  # another send
        (Merge(1, 0, (), (0,)), "one chunk"),
        (Merge(3, 0, (0,), ()), "there are 3"),
        (Yield(0), "averages in pairs"),
        (Try(0, 0, 4), "fragment is"),
        (Try(1, 1, 4), "fragment is"),
    ],
    ids=repr,
)
def test_what_makes_no_sense_is_refused(command: Any, complaint: str) -> None:
    loop = Loop()
    loop.train(0.0, 5, answer=False)
    with pytest.raises(WrongCommand, match=complaint):
        loop.sync.obey(command)


# --- the values -----------------------------------------------------------------------------------
class Values:
    """A toy model with its deltas; slow weights as a daemon would hold them."""

    def __init__(self, codec: str) -> None:
        spec, rng = spec_of(codec), np.random.default_rng(1)
        self.codec = get_codec(codec)
        self.slow = rng.standard_normal(PARAMETERS, dtype=np.float32)
        self.weights = ToyWeights(rng.standard_normal(PARAMETERS, dtype=np.float32))
        regions = CodeRegions(-1, regions_of(spec, simulated_layout(PARAMETERS)), writable=True)
        self.regions = regions
        deltas = values_of(spec, self.weights, torch.from_numpy(self.slow), regions)
        assert isinstance(deltas, FragmentDeltas)
        self.deltas = deltas

    def part(self, vector: np.ndarray, fragment: int) -> np.ndarray:
        spans = self.deltas.fragments[fragment].spans
        return np.concatenate([vector[start:stop] for start, stop in spans])

    def sent(self, fragment: int) -> np.ndarray:
        codes = torch.frombuffer(self.regions.codes(fragment), dtype=torch.uint8)
        values = torch.empty(self.deltas.fragments[fragment].size)
        self.codec.decode(codes, values)
        return values.numpy()


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_what_is_trained_and_rounded_meanwhile_stays_in_theta(codec: str) -> None:
    values = Values(codec)
    fragment = next(f.index for f in values.deltas.fragments if len(f.spans) > 1)
    theta = values.weights.theta
    before = theta.copy()
    values.deltas.send(fragment, 0)
    np.testing.assert_allclose(values.sent(fragment), values.part(before, fragment), atol=0.02)
    np.testing.assert_array_equal(theta, before)
    theta += 0.25
    values.slow[:] -= 1.5
    moved = values.part(values.slow, fragment) - values.sent(fragment)
    values.deltas.merge(fragment)
    expected = values.part(before, fragment) + np.float32(0.25) + moved
    np.testing.assert_allclose(values.part(theta, fragment), expected, atol=1e-6)
    for other in values.deltas.fragments:
        if other.index != fragment:
            unmoved = values.part(before, other.index) + np.float32(0.25)
            np.testing.assert_array_equal(values.part(theta, other.index), unmoved)
    assert not values.weights.gradient_P.any()


def test_weights_that_are_not_finite_are_not_sent() -> None:
    values = Values("int8")
    start, _ = values.deltas.fragments[1].spans[0]
    values.weights.theta[start] = np.nan
    with pytest.raises(NonFinite, match="send 4 of fragment 1"):
        values.deltas.send(1, 4)
    assert not values.weights.gradient_P.any()
    values.deltas.send(0, 0)
