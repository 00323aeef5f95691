"""What silence of a trainer is normal."""

import math

from msgspec.structs import replace

from peer.training.messages import Load, Ready, RoundClosed, TrainerProgress, TrainRound
from peer.training.process import SILENCE_FLOOR_S, START_TIMEOUT_S, Watchdog
from protocol.run.run_spec import RunSpec, SyncSection
from protocol.trainer_messages import Amend, FragmentMerged, FragmentSent, Merge, Yielded

READY = Ready(1, 128, "", "cpu", "fp32", 1, 10.0)
CLOSED = RoundClosed(0, 1, 1, 0.0, 0, 0, 0.0, 0.0)
SENT = FragmentSent(1, 0, 4, 4, "", 0.0, 0.0, 4.0)
BACK = Merge(1, 0, (0,), ())
ORDER = TrainRound(0, 5, (("a", 1),), 0, 0, 0.0, 1.0)


def test_it_may_be_silent_when_there_is_nothing_to_do():
    watchdog = Watchdog(RunSpec())
    assert watchdog.silence_bound_s == START_TIMEOUT_S
    watchdog.received(READY)
    assert watchdog.silence_bound_s == math.inf
    watchdog.sent(Load(0))
    watchdog.sent(ORDER)
    assert SILENCE_FLOOR_S < watchdog.silence_bound_s < 2 * SILENCE_FLOOR_S
    watchdog.received(CLOSED)
    assert watchdog.silence_bound_s == math.inf


def test_slow_steps_stretch_the_bound():
    watchdog = Watchdog(RunSpec())
    watchdog.received(READY)
    watchdog.sent(ORDER)
    before_s = watchdog.silence_bound_s
    watchdog.received(TrainerProgress(0, 1, 1, 0.0, 0.0, 0.0, 30.0, 1.0))
    assert watchdog.silence_bound_s > before_s + 30


def test_without_overlap_the_wait_for_a_merge_is_no_hang():
    watchdog = Watchdog(RunSpec(sync=SyncSection(overlap=False)))
    watchdog.received(READY)
    watchdog.sent(ORDER)
    watchdog.received(SENT)
    watchdog.received(CLOSED)
    watchdog.sent(ORDER)
    assert watchdog.silence_bound_s == math.inf
    watchdog.sent(BACK)
    assert watchdog.silence_bound_s < math.inf
    watchdog.received(FragmentMerged(1, 0, 0.0))
    assert watchdog.silence_bound_s < math.inf


def test_at_the_end_of_the_run_the_wait_for_a_merge_is_no_hang():
    watchdog = Watchdog(RunSpec())
    watchdog.received(READY)
    watchdog.sent(ORDER)
    watchdog.received(SENT)
    watchdog.received(CLOSED)
    last = replace(ORDER, round=1, total_steps=7)
    watchdog.sent(last)
    watchdog.received(TrainerProgress(1, 1, 1, 0.0, 0.0, 0.0, 0.1, 6.0))
    assert watchdog.silence_bound_s < math.inf
    watchdog.received(TrainerProgress(1, 2, 1, 0.0, 0.0, 0.0, 0.1, 7.0))
    assert watchdog.silence_bound_s == math.inf
    watchdog.sent(BACK)
    assert watchdog.silence_bound_s < math.inf


def test_waiting_for_an_average_is_no_hang():
    watchdog = Watchdog(RunSpec(sync=SyncSection(method="diloco")))
    watchdog.received(READY)
    watchdog.sent(ORDER)
    assert watchdog.silence_bound_s < math.inf
    for begins, ends in (
        (SENT, BACK),
        (Yielded(1), Amend(1, (), (), ())),
    ):
        watchdog.received(begins)
        assert watchdog.silence_bound_s == math.inf
        watchdog.sent(ends)
        assert watchdog.silence_bound_s < math.inf
    watchdog.received(replace(CLOSED, step=1.0))
    watchdog.sent(ORDER)
    assert watchdog.silence_bound_s < math.inf


def test_in_pairs_a_fragment_in_flight_excuses_nobody():
    watchdog = Watchdog(RunSpec(sync=SyncSection(method="streaming")))
    watchdog.received(READY)
    watchdog.sent(ORDER)
    watchdog.received(SENT)
    assert watchdog.silence_bound_s < math.inf
