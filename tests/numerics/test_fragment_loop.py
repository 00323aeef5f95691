"""Streaming through the inner loop: what is sent and merged after which step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from training_worlds import MEMBERS, PAUSE, World, build_world, order, run, tiny_spec

from peer.training.fragments import FragmentSnapshots
from peer.training.messages import CloseRound, Evaluate, Load, RoundClosed, TrainRound
from peer.training.ports import NonFinite, WrongCommand
from protocol.fragment.fragments import Span
from protocol.trainer_messages import FragmentMerged, FragmentSent, Merge, Try, Yield, Yielded

pytestmark = pytest.mark.slow

H = 12


def streaming_world(inner_steps=H, codec="fp32", own_overlap=None, **diloco) -> World:
    section = {"overlap_steps": 2, "blocks_per_fragment": 1, **diloco}
    spec = tiny_spec(method="diloco", inner_steps=inner_steps, codec=codec, diloco=section)
    return build_world(spec.with_overlap(own_overlap))


@dataclass
class Swarm:
    """The daemon: merges each fragment some steps after its send; notes when things happened."""

    world: World
    rounds: int = 2
    quota: int = H
    merge_after: int = 0
    steps: int = 0
    sent: list[tuple[int, int]] = field(default_factory=list)
    merged: list[tuple[int, int]] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    log: list[object] = field(default_factory=list)

    def __post_init__(self):
        stepper: Any = self.world.stepper
        step = stepper.step

        def counted(*arguments):
            self.steps += 1
            return step(*arguments)

        stepper.step = counted

    def run(self, *commands):
        return run(self.world, *(commands or (order(0, self.quota),)), answer=self.answer)

    def answer(self, event):
        self.log.append(event)
        if isinstance(event, FragmentSent):
            self.sent.append((event.fragment, self.steps))
            return [*[PAUSE] * self.merge_after, self.result(event)]
        if isinstance(event, FragmentMerged):
            self.merged.append((event.fragment, self.steps))
            self.waited_s.append(event.waited_s)
        if isinstance(event, RoundClosed) and event.round + 1 < self.rounds:
            following, place = event.round + 1, (event.epoch, event.position)
            start_step, stride = float(H * following), H / max(1, self.quota)
            return [TrainRound(following, self.quota, MEMBERS, *place, start_step, stride)]
        return []

    def result(self, sent):
        return Merge(sent.fragment, sent.cycle, (0,), ())


SENDS = [(1, 4), (2, 8), (0, 12), (1, 16), (2, 20), (0, 24)]


@pytest.mark.parametrize("merge_after", [0, 1, 2])
def test_sends_and_merges_are_those_of_the_paper(merge_after):
    swarm = Swarm(streaming_world(), merge_after=merge_after)
    script = swarm.run()
    assert swarm.sent == SENDS
    assert swarm.merged == [(fragment, step + 2) for fragment, step in SENDS[:-1]]
    assert swarm.waited_s == [0.0] * 5
    sent = script.of(FragmentSent)
    assert [event.cycle for event in sent] == [0, 0, 1, 1, 1, 2]
    assert [event.steps for event in sent] == [4, 8, 12, 12, 12, 12]
    assert [event.tokens for event in sent] == [32 * event.steps for event in sent]
    closed = script.of(RoundClosed)
    assert [event.steps for event in closed] == [12, 12]
    # What falls due at the end of a round is sent before it is closed.
    ends = [event for event in swarm.log if isinstance(event, (FragmentSent, RoundClosed))]
    assert [type(event) for event in ends[2:4]] == [FragmentSent, RoundClosed]


@pytest.mark.parametrize("own_overlap", [0, 3, 9])
def test_a_peer_with_its_own_overlap_sends_with_the_others_and_merges_later(own_overlap):
    usual = Swarm(streaming_world(overlap_steps=1))
    usual.run()
    swarm = Swarm(streaming_world(overlap_steps=1, own_overlap=own_overlap))
    swarm.run()
    assert swarm.sent == usual.sent == SENDS
    ends = [(fragment, step + own_overlap) for fragment, step in SENDS]
    assert swarm.merged == [(fragment, step) for fragment, step in ends if step <= 2 * H]
    assert usual.merged == [(fragment, step + 1) for fragment, step in SENDS[:-1]]


def test_with_late_wait_training_stands_still_for_a_late_merge():
    swarm = Swarm(streaming_world(late="wait"), rounds=1, merge_after=4)
    swarm.run()
    assert swarm.merged == [(1, 6), (2, 10)]
    assert swarm.waited_s == [1.0, 1.0]


def test_with_late_skip_training_goes_on_and_merges_what_comes():
    swarm = Swarm(streaming_world(late="skip"), rounds=1, merge_after=3)
    swarm.run()
    assert swarm.merged == [(1, 7), (2, 11)]
    assert swarm.waited_s == [0.0, 0.0]


def test_a_fragment_in_flight_is_not_sent_again_even_with_late_skip():
    class Slow(Swarm):
        def answer(self, event):
            following = TrainRound(2, 4, MEMBERS, 0, 64, 8.0, 1.0)
            first = isinstance(event, FragmentSent) and event.cycle == 1
            return [*([following] if first else []), *super().answer(event)]

    world = streaming_world(late="skip", inner_steps=4, fragments="whole")
    swarm = Slow(world, rounds=0, merge_after=100)
    swarm.run(order(0), TrainRound(1, 4, MEMBERS, 0, 32, 4.0, 1.0))
    assert swarm.sent == [(0, 4), (0, 8), (0, 12)]
    assert swarm.merged[:2] == [(0, 8), (0, 12)]
    assert swarm.waited_s[0] == 1.0


def test_without_overlap_training_waits_at_once():
    swarm = Swarm(streaming_world(overlap_steps=0), merge_after=1)
    swarm.run()
    assert swarm.sent == SENDS
    assert swarm.merged == SENDS
    assert set(swarm.waited_s[:2]) == {1.0}


def test_more_overlap_than_a_slow_peer_has_steps_ends_at_the_next_send():
    swarm = Swarm(streaming_world(overlap_steps=9), rounds=3, quota=3)
    swarm.run()
    assert swarm.sent == [(f, r * 3 + s) for r in range(3) for f, s in ((1, 1), (2, 2), (0, 3))]
    assert swarm.merged[:3] == [(1, 4), (2, 5), (0, 6)]


@pytest.mark.parametrize("quota", [1, 2, 5, 30])
def test_each_fragment_is_sent_once_a_round_at_any_speed(quota):
    swarm = Swarm(streaming_world(overlap_steps=0), rounds=3, quota=quota)
    script = swarm.run()
    per_round = [(event.fragment, event.cycle) for event in script.of(FragmentSent)]
    assert per_round == [(f, r + (f == 0)) for r in range(3) for f in (1, 2, 0)]


def test_a_round_that_is_closed_early_sends_what_was_left_of_it():
    swarm = Swarm(streaming_world(), rounds=1)
    script = swarm.run(order(0, H), *[PAUSE] * 5, CloseRound(0))
    assert swarm.sent == [(1, 4), (2, 5), (0, 5)]
    assert [event.steps for event in script.of(RoundClosed)] == [5]


def test_a_round_of_no_steps_sends_the_rest_at_once_and_holds_nothing():
    swarm = Swarm(streaming_world(), rounds=1)
    swarm.run(order(0, H), *[PAUSE] * H, TrainRound(1, 0, MEMBERS, 0, 0, float(H), 1.0))
    assert swarm.sent == [(1, 4), (2, 8), (0, 12), (1, 12), (2, 12)]
    assert swarm.merged == [(1, 6), (2, 10), (0, 12), (1, 12), (2, 12)]
    closed = [event for event in swarm.log if isinstance(event, RoundClosed)]
    assert [(event.round, event.steps) for event in closed] == [(0, 12), (1, 0)]


def test_two_rounds_of_no_steps_follow_each_other():
    swarm = Swarm(streaming_world(), rounds=2, quota=0)
    swarm.run()
    assert swarm.sent == [(1, 0), (2, 0), (1, 0), (2, 0)]
    assert len(swarm.merged) == 4


def spans_of(world: World, fragment: int) -> Sequence[Span]:
    snapshots = world.values
    assert isinstance(snapshots, FragmentSnapshots)
    return snapshots.fragments[fragment].spans


def values(world: World, vector: npt.NDArray[Any], fragment: int) -> npt.NDArray[Any]:
    spans = spans_of(world, fragment)
    return np.concatenate([vector[start:stop] for start, stop in spans])


@dataclass
class Watched(Swarm):
    """Notes the fast weights at each event, and moves phi when a fragment was sent."""

    thetas: list[tuple[Any, npt.NDArray[Any]]] = field(default_factory=list)

    def answer(self, event):
        self.thetas.append((event, self.world.theta.copy()))
        if isinstance(event, FragmentSent):
            for start, stop in spans_of(self.world, event.fragment):
                self.world.slow[start:stop] += 0.01
        return super().answer(event)

    def after(self, kind, fragment):
        return next(
            theta
            for event, theta in self.thetas
            if isinstance(event, kind) and event.fragment == fragment
        )


def test_merge_0_puts_the_outer_copy_into_the_fast_weights():
    swarm = Watched(streaming_world(merge=0.0), rounds=1)
    swarm.run()
    for fragment in (1, 2):
        merged = values(swarm.world, swarm.after(FragmentMerged, fragment), fragment)
        np.testing.assert_array_equal(merged, values(swarm.world, swarm.world.slow, fragment))


def test_chunks_that_were_not_stepped_are_plain_training():
    class Nothing(Watched):
        def result(self, sent):
            return Merge(sent.fragment, sent.cycle, (), ())

    swarm = Nothing(streaming_world(), rounds=1)
    alone: Any = Watched(streaming_world(late="skip"), rounds=1)
    alone.result = lambda sent: PAUSE
    swarm.run()
    alone.run()
    assert len(swarm.merged) == 2
    assert alone.merged == []
    np.testing.assert_array_equal(swarm.world.theta, alone.world.theta)


def test_while_a_fragment_is_yielded_its_next_send_waits():
    swarm = Swarm(streaming_world(late="skip"), rounds=1)
    amend = Merge(2, None, (), (), ())
    script = swarm.run(order(0, H), Yield(2), *[PAUSE] * 20, amend)
    assert script.of(Yielded) == [Yielded(2)]
    assert swarm.sent == [(1, 4), (2, 8), (0, 12)]
    sent = script.of(FragmentSent)
    assert [event.waited_s for event in sent] == [0.0, 1.0, 0.0]


def test_a_yield_that_crosses_a_send_is_void_and_one_behind_a_merge_follows_it():
    class Yields(Swarm):
        def answer(self, event):
            if isinstance(event, FragmentSent) and event.cycle == 0:
                crossing = event.fragment == 1
                return [
                    *([Yield(1)] if crossing else []),
                    *super().answer(event),
                    *([] if crossing else [Yield(2)]),
                ]
            if isinstance(event, Yielded):
                self.yielded_at = self.steps
                assert isinstance(self.log[-1], FragmentMerged)
                return [Merge(2, None, (), (0,), ())]
            return super().answer(event)

    swarm = Yields(streaming_world())
    script = swarm.run()
    assert swarm.sent == SENDS
    assert script.of(Yielded) == [Yielded(2)]
    assert swarm.yielded_at == 10


def test_amending_moves_the_fast_weights_with_the_outer_copy():
    world = streaming_world(merge=0.75)
    seen = {}

    def answer(event):
        if isinstance(event, Yielded):
            world.slow += 0.5
            return [Merge(1, None, (), (), (0,)), Evaluate(0)]
        return []

    def before(command):
        seen[type(command)] = world.theta.copy()

    run(world, order(0, H), PAUSE, Yield(1), answer=answer, before=before)
    moved = seen[Evaluate] - seen[Merge]
    np.testing.assert_allclose(values(world, moved, 1), 0.125, atol=1e-6)
    assert not values(world, moved, 0).any()
    assert not values(world, moved, 2).any()


def test_load_forgets_what_is_in_flight():
    world = streaming_world()
    script = run(world, order(0, H), *[PAUSE] * 5, Load(), order(0, H), *[PAUSE] * 5)
    cycles = [(event.fragment, event.cycle, event.steps) for event in script.of(FragmentSent)]
    assert cycles[:2] == [(1, 0, 4), (1, 0, 4)]
    digests = [event.digest for event in script.of(FragmentSent)][:2]
    assert digests[0] == digests[1]


def test_numbers_that_are_not_finite_are_never_sent():
    world = streaming_world()
    world.slow[700] = np.nan
    with pytest.raises(NonFinite, match="nan"):
        run(world, order(0, H))


IN_FLIGHT = [order(0, H), *[PAUSE] * 5]


@pytest.mark.parametrize(
    "commands",
    [
        [Merge(1, 0, (0,), ())],
        [*IN_FLIGHT, Merge(1, 1, (0,), ())],
        [*IN_FLIGHT, Merge(1, 0, (1,), ())],
        [*IN_FLIGHT, Merge(1, 0, (0,), (0,))],
        [*IN_FLIGHT, Merge(1, 0, (0, 0), ())],
        [*IN_FLIGHT, Merge(1, 0, (0,), ()), Merge(1, 0, (0,), ())],
        [Yield(3)],
        [Yield(-1)],
        [Yield(1), Yield(1)],
        [Merge(1, None, (), (), ())],
        [Yield(1), Merge(1, None, (0,), (), (0,))],
        [Yield(1), Merge(1, None, (0,), (0,), ())],
        [*IN_FLIGHT, Try(1, 0, 4)],
    ],
)
def test_commands_that_make_no_sense_are_refused(commands):
    with pytest.raises(WrongCommand):
        run(streaming_world(), *commands)


@pytest.mark.parametrize("command", [Yield(0), Merge(0, None, (), (), ())])
def test_in_pairs_nothing_is_yielded(command):
    with pytest.raises(WrongCommand, match="pairs"):
        run(build_world(tiny_spec()), command)
