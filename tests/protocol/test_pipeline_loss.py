"""A relay that is lost in the middle of an iteration, against schedules worked out by hand."""

from dataclasses import replace

import pytest
from existing import existing
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_settings import small_problem

from protocol.errors import LocalProtocolError
from protocol.pipeline.loss import Loss, Policy, _LossyIteration, lose
from protocol.pipeline.problem import Work
from protocol.pipeline.simulator import Job, Order, Simulator

FREE = Work(boundary_bytes=0)
"""Boundaries that take no time on a line."""
ALONE = small_problem((1, 2, 1), 3, latency_us=0, work=FREE)
"""Alone, a microbatch on the path 1, 3 works there from 0.1 to 0.3 s and, the loss taking 25 ms,
back from 0.325 to 0.625; it is home at 0.775. Machine 2 is the other one of machine 1's stage."""
JOB = Job(0, (1, 3))


def after_loss(at_us, after_us, policy=Policy.REPLACE, jobs=(JOB,), problem=ALONE):
    return lose(Simulator(problem), jobs, Loss(1, at_us, after_us, policy, (2,)))


def test_a_forward_in_work_is_sent_again_to_a_replica():
    found = after_loss(150_000, 100_000)
    assert found.makespan_us == 925_000  # the forward begins at 0.25, not at 0.1
    assert (found.wasted_us, found.untrained, found.dropped) == (50_000, 0, ())


def test_activations_are_made_again_while_the_microbatch_goes_on():
    found = after_loss(250_000, 50_000)
    assert found.makespan_us == 775_000  # again from 0.3 to 0.4, needed at 0.475
    assert found.wasted_us == 100_000


def test_a_backward_waits_for_the_forward_that_is_run_again():
    found = after_loss(250_000, 250_000)
    assert found.makespan_us == 775_000 + 125_000  # again from 0.5 to 0.6, needed at 0.475


def test_a_gradient_that_comes_before_the_input_waits_for_it():
    late = replace(ALONE, latency_us=((0, 0, 400_000, 0), (0,) * 4, (0,) * 4, (0,) * 4))
    found = after_loss(250_000, 50_000, problem=late)
    assert found.makespan_us == 1_100_000  # again from 0.7 to 0.8, the gradient is there at 0.475


def test_what_is_still_being_made_goes_to_the_replica_when_it_is_done():
    assert after_loss(50_000, 10_000).makespan_us == 775_000


def test_a_gradient_that_was_with_the_relay_is_sent_again():
    found = after_loss(500_000, 100_000)
    assert found.makespan_us == 1_000_000  # forward 0.6 to 0.7, backward to 0.85, home at 1.0
    assert found.wasted_us == 100_000 + 25_000


def test_gradients_of_weights_die_with_the_relay():
    found = after_loss(700_000, 10_000)
    assert (found.makespan_us, found.untrained, found.wasted_us) == (775_000, 1, 0)
    assert after_loss(10**9, 0).untrained == 0  # after the end nothing is lost


def test_the_relay_itself_may_come_back_with_empty_hands():
    found = after_loss(250_000, 300_000, Policy.RETURN)
    assert found.makespan_us == 950_000  # again from 0.55 to 0.65
    assert found.wasted_us == 100_000


def test_a_dropped_microbatch_gives_its_slots_back_and_the_next_begins():
    problem = replace(ALONE, peers=tuple(replace(peer, slots=1) for peer in ALONE.peers))
    found = after_loss(250_000, 50_000, Policy.DROP, (JOB, Job(0, (1, 3), 0, 0)), problem)
    assert found.dropped == (0,)
    assert found.done_us == (-1, 300_000 + 775_000)  # the second one goes by the replica
    assert found.makespan_us == 1_075_000
    assert found.wasted_us == 300_000  # three forwards; the loss had not begun


def test_microbatches_on_their_way_to_the_relay_are_dropped_too():
    problem = replace(ALONE, latency_us=((1_000_000,) * 4,) * 4)
    assert after_loss(200_000, 100_000, Policy.DROP, problem=problem).dropped == (0,)
    rerouted = after_loss(0, 0, Policy.DROP, problem=problem)
    assert (rerouted.dropped, rerouted.untrained) == ((), 0)  # it had not begun


def test_what_has_left_the_relay_arrives():
    far = replace(ALONE, latency_us=((1_000_000,) * 4,) * 4)
    undisturbed_us = Simulator(far).run([JOB]).makespan_us
    assert after_loss(1_300_000, 0, problem=far).makespan_us == undisturbed_us
    # The forward at machine 1 ends at 1.2 s; its boundary leaves at once, or for a second.
    slow = replace(far, work=Work(boundary_bytes=1_000_000))
    undisturbed_us = existing(Simulator(slow).run([JOB]).makespan_us)
    found = after_loss(2_800_000, 0, problem=slow)  # it began to leave at 2.2 s
    assert found.makespan_us == undisturbed_us + 2_700_000  # again from 2.8 + 2 s, not from 2.1
    assert found.wasted_us == 100_000


def test_what_cannot_be_lost_is_refused():
    with pytest.raises(LocalProtocolError, match="a data peer takes"):
        lose(Simulator(ALONE), [JOB], Loss(0, 1, 1, Policy.RETURN))
    with pytest.raises(LocalProtocolError, match="nobody holds the lost relay's stage"):
        lose(Simulator(ALONE), [JOB], Loss(1, 1, 1))


WORKS = [
    Work(boundary_bytes=20_000),
    Work(boundary_bytes=20_000, backward_permille=2000, input_permille=500, gap_us=7),
]
SETTINGS = st.fixed_dictionaries(
    {
        "paths": st.lists(st.permutations([2, 4, 5]), min_size=1, max_size=8),
        "latency_us": st.integers(0, 200_000),
        "work": st.sampled_from(WORKS),
        "order": st.sampled_from(Order),
        "lines": st.sampled_from(["free", "queued", "shared"]),
    }
)


def setting(paths, latency_us, work, order, lines):
    """Two data peers; three machines of stage 1, of which paths visit the first."""
    problem = small_problem(
        (2, 2, 1, 1), 4, latency_us=latency_us, work=work, slots=8, queued_links=lines == "queued"
    )
    if lines == "shared":
        problem = replace(problem, out_bytes_per_s=(300_000,) * 6, in_bytes_per_s=(250_000,) * 6)
    jobs = [
        Job(i % 2, tuple(path), 1000 * i, i - 2 if i > 1 else None) for i, path in enumerate(paths)
    ]
    return Simulator(problem, order), jobs


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(SETTINGS, st.integers(0, 8_000_000), st.integers(0, 900_000), st.sampled_from(Policy))
def test_whatever_is_lost_all_else_comes_home_and_slots_are_free(given_, at_us, after_us, policy):
    simulator, jobs = setting(**given_)
    undisturbed = simulator.run(jobs)
    lossy = _LossyIteration(simulator, jobs, Loss(2, at_us, after_us, policy, (3,)))
    found = lossy.run()
    assert found == lose(simulator, jobs, Loss(2, at_us, after_us, policy, (3,)))
    assert found.makespan_us is not None
    for index, done_us in enumerate(found.done_us):
        assert (done_us < 0) == (index in found.dropped)
    if policy is not Policy.DROP:
        assert found.dropped == ()
    if at_us > undisturbed.makespan_us:
        assert found.makespan_us == undisturbed.makespan_us
    free = [count for m, count in enumerate(lossy.iteration.slots[:6]) if m != 2]
    assert free == [8] * 5
    gone_us = at_us + (after_us if policy is Policy.RETURN else 10**12)
    at_relay = [s for s in lossy.record if s.machine == 2]
    assert all(s.end_us <= at_us or s.start_us >= gone_us for s in at_relay)
    assert 0 <= found.wasted_us <= sum(s.end_us - s.start_us for s in lossy.record)


@settings(max_examples=30, deadline=None)
@given(SETTINGS)
def test_a_loss_before_the_beginning_is_another_path(given_):
    simulator, jobs = setting(**given_)
    found = lose(simulator, jobs, Loss(2, 0, 0, Policy.REPLACE, (3,)))
    others = [job._replace(relays=tuple(3 if m == 2 else m for m in job.relays)) for job in jobs]
    expected = simulator.run(others)
    assert (found.makespan_us, found.done_us) == (expected.makespan_us, expected.done_us)
    assert found.wasted_us == found.untrained == 0
