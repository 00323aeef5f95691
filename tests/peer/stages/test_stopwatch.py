"""Times of microbatches, from what daemon and trainer say to each other."""

import pytest

from peer.facts import MicrobatchTime, PipelineFacts
from peer.stages.stopwatch import Stopwatch
from protocol.microbatch.trainer_messages import Begun, Drop, Filled, GradientAdded, Stepped
from protocol.routing.measures import ENOUGH, Measures
from protocol.wire.stage_messages import Direction


def filled(direction, number):
    return Filled(Direction(direction), number, 0, None)


@pytest.fixture
def watched():
    measures, facts = Measures(), PipelineFacts()
    return measures, facts, lambda has_loss: Stopwatch(measures, facts, has_loss=has_loss)


def test_work_of_a_relay_begins_when_the_trainer_is_done_with_the_one_before(watched):
    measures, facts, make = watched
    stopwatch = make(has_loss=False)
    stopwatch.restarted(0.0)
    for start in range(0, 10 * ENOUGH, 10):
        stopwatch.told(filled("forward", start), start + 1.0)
        stopwatch.told(filled("forward", start + 1), start + 1.0)  # waits for the first one
        stopwatch.took(filled("forward", start), start + 2.0)
        stopwatch.took(filled("forward", start + 1), start + 3.0)
        stopwatch.told(filled("backward", start), start + 4.0)
        stopwatch.took(filled("backward", start), start + 5.0)
        stopwatch.took(GradientAdded(start), start + 6.0)  # the gradient of the weights, after it
    assert (measures.work().forward_us, measures.work().backward_us) == (1_000_000, 2_000_000)
    assert facts.spent_s[MicrobatchTime.COMPUTING] == 4.0 * ENOUGH


def test_a_data_peer_has_a_loss_and_iterations(watched):
    measures, facts, make = watched
    stopwatch = make(has_loss=True)
    stopwatch.restarted(0.0)
    for start in range(0, 10 * ENOUGH, 10):
        stopwatch.took(Begun(1), start)
        stopwatch.took(filled("forward", start), start + 1.0)
        stopwatch.told(filled("forward", start), start + 2.0)
        stopwatch.took(filled("backward", start), start + 2.5)
        stopwatch.told(filled("backward", start), start + 4.0)
        stopwatch.took(GradientAdded(start), start + 7.0)
        stopwatch.took(Stepped(1), start + 8.0)
    work = measures.work()
    assert (work.forward_us, work.loss_us, work.backward_us) == (1_000_000, 500_000, 3_000_000)
    assert facts.iteration_s == 7.0


def test_waiting_for_a_slot_is_not_sending(watched):
    _, facts, make = watched
    stopwatch = make(has_loss=True)
    stopwatch.asked(3.0, 2.5)
    stopwatch.asked(1.0, 5.0)  # no longer than it was away
    stopwatch.sent("other", 2.0)
    assert facts.spent_s[MicrobatchTime.WAITING] == 3.5
    assert facts.spent_s[MicrobatchTime.SENDING] == 2.5


def test_what_is_dropped_is_no_work(watched):
    measures, _, make = watched
    stopwatch = make(has_loss=False)
    for number in range(ENOUGH):
        stopwatch.told(filled("forward", number), 1.0 * number)
        stopwatch.told(Drop(number), 1.0 * number)
    assert measures.work().forward_us == 0
