"""The event simulator against the published times and against schedules worked out by hand."""

from dataclasses import replace
from itertools import pairwise

import pytest
from existing import existing
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_settings import small_problem

from bench.pipeline.late import steady_us
from bench.planner_settings import (
    BLIND,
    NO_COLLISIONS,
    PUBLISHED_S,
    SKIPPIPE,
    published_pipelines,
    published_plan,
    published_problem,
)
from protocol.pipeline.problem import StageWork
from protocol.pipeline.simulator import (
    BACKWARD,
    FORWARD,
    LATER,
    LOSS,
    BusyInterval,
    Job,
    Order,
    Plan,
    Simulator,
    jobs_of,
)

FREE = StageWork(boundary_bytes=0)
"""Boundaries that take no time on a line."""


@pytest.mark.parametrize(
    ("name", "plan", "visited", "ours_s"),
    [
        ("full", published_pipelines(), 6, 79.680336),
        ("blind", published_plan(BLIND), 4, 48.915657),
        ("no_collisions", published_plan(NO_COLLISIONS), 4, 35.574739),
        ("skippipe", published_plan(SKIPPIPE), 4, 33.313888),
    ],
)
def test_the_published_times_come_out(name, plan, visited, ours_s):
    problem = published_problem(visited)
    outcome = Simulator(problem).run(jobs_of(problem, plan))
    assert existing(outcome.makespan_us) / 1e6 == ours_s
    assert ours_s == pytest.approx(PUBLISHED_S[name], rel=0.01)


def test_one_microbatch_alone_takes_its_unloaded_time():
    problem = small_problem()  # forward 100 ms, boundary 1 ms, latency 10 ms
    outcome = Simulator(problem).run([Job(0, (1, 2))])
    # Three forwards, the loss, three backwards, and six journeys.
    assert outcome.makespan_us == 300_000 + 25_000 + 450_000 + 6 * 11_000


def test_gaps_and_copies_are_paid():
    work = StageWork(boundary_bytes=0, hop_us=7, gap_us=1000, origin_gap_us=300)
    problem = small_problem((1, 1), 2, latency_us=0, work=work, slots=1)
    alone = Simulator(problem).run([Job(0, (1,))]).makespan_us
    assert alone == 525_000 + 4 * 7
    twice = Simulator(problem).run([Job(0, (1,)), Job(0, (1,), 0, 0)]).makespan_us
    assert twice == 2 * alone + 1000  # the data peer rests after the first one's backward


def test_a_machine_does_one_thing_at_a_time():
    problem = small_problem((2, 1), 2, latency_us=0, work=FREE)
    record: list[BusyInterval] = []
    outcome = Simulator(problem).run([Job(0, (2,)), Job(1, (2,))], record)
    at_relay = [(s.job, s.kind, s.start_us, s.end_us) for s in record if s.machine == 2]
    assert at_relay == [
        (0, FORWARD, 100_000, 200_000),
        (1, FORWARD, 200_000, 300_000),
        (0, BACKWARD, 300_000, 450_000),
        (1, BACKWARD, 450_000, 600_000),
    ]
    assert outcome.done_us == (600_000, 750_000)


def test_a_forward_waits_for_a_slot_and_its_backward_frees_one():
    problem = small_problem((2, 1), 2, latency_us=1_000_000, work=FREE, slots=1)
    record: list[BusyInterval] = []
    Simulator(problem).run([Job(0, (2,)), Job(1, (2,))], record)
    at_relay = [(s.job, s.kind) for s in record if s.machine == 2]
    assert at_relay == [(0, FORWARD), (0, BACKWARD), (1, FORWARD), (1, BACKWARD)]


def test_backwards_overtake_with_backward_first():
    problem = small_problem((1, 1), 2, latency_us=0, work=FREE, slots=3)
    jobs = [Job(0, (1,)), Job(0, (1,)), Job(0, (1,))]
    kinds = {}
    for order in Order:
        record: list[BusyInterval] = []
        Simulator(problem, order).run(jobs, record)
        kinds[order] = [stretch.kind for stretch in record if stretch.machine == 0][:4]
    assert kinds[Order.ARRIVAL] == [FORWARD, FORWARD, FORWARD, LOSS]
    assert kinds[Order.BACKWARD_FIRST] == [FORWARD, FORWARD, LOSS, FORWARD]


def test_half_a_backward_lets_the_gradient_go_and_the_rest_waits_for_time():
    split = StageWork(boundary_bytes=0, backward_permille=2000, input_permille=500)
    problem = small_problem((1, 1, 1), 3, latency_us=0, work=split)
    record: list[BusyInterval] = []
    outcome = Simulator(problem).run([Job(0, (1, 2))], record)
    whole = Simulator(replace(problem, work=replace(split, input_permille=1000)))
    longer_us = existing(whole.run([Job(0, (1, 2))]).makespan_us)
    assert longer_us - existing(outcome.makespan_us) == 200_000
    later = [(s.machine, s.start_us, s.end_us) for s in record if s.kind == LATER]
    assert later == [(2, 425_000, 525_000), (1, 525_000, 625_000)]


def test_what_is_left_of_a_backward_keeps_the_slot():
    split = StageWork(boundary_bytes=0, backward_permille=2000, input_permille=500)
    problem = small_problem((1, 1), 2, latency_us=0, work=split, slots=1)
    record: list[BusyInterval] = []
    Simulator(problem).run([Job(0, (1,)), Job(0, (1,), 0, 0)], record)
    assert [s.kind for s in record if s.machine == 1] == [FORWARD, BACKWARD, LATER] * 2


def test_a_queued_link_carries_one_boundary_at_a_time():
    slow = StageWork(boundary_bytes=1_000_000)  # a second each
    problem = small_problem((1, 1), 2, work=slow, latency_us=0)
    jobs = [Job(0, (1,)), Job(0, (1,))]
    times = [
        Simulator(replace(problem, queued_links=queued)).run(jobs).makespan_us
        for queued in (False, True)
    ]
    # Side by side both wait for the machines alone; else the second is 0.85 s behind.
    assert times == [4_675_000, 5_525_000]


def test_paths_that_block_each_other_are_stuck():
    problem = small_problem((2, 1, 1), 3, slots=1)
    jobs = [Job(0, (2, 3)), Job(1, (3, 2))]
    outcome = Simulator(problem).run(jobs)
    assert outcome.makespan_us is None
    assert outcome.done_us == (-1, -1)


def test_a_delay_of_one_update_leaves_the_work_of_the_busiest_machine():
    problem = small_problem((1, 1), 2, 4, latency_us=150_000, work=FREE, slots=8)
    plan = Plan((0, 1), (((1,),) * 8, ()))
    simulator = Simulator(problem)
    assert simulator.run(jobs_of(problem, plan)).makespan_us == 2_550_000
    assert steady_us(simulator, plan) == pytest.approx(8 * 275_000, rel=0.02)
    far = Simulator(replace(problem, latency_us=((0, 10**6), (10**6, 0))))
    assert (
        existing(steady_us(far, plan)) > 4 * 10**6
    )  # eight slots do not hide four seconds on the way


def test_a_record_has_the_work_of_every_machine():
    problem = small_problem((1, 1), 2, latency_us=0, work=FREE)
    record: list[BusyInterval] = []
    assert Simulator(problem).run([Job(0, (1,))], record).makespan_us == 525_000
    worked = [sum(s.end_us - s.start_us for s in record if s.machine == m) for m in range(2)]
    assert worked == [275_000, 250_000]


@settings(max_examples=50)
@given(
    st.lists(st.permutations([2, 3, 4]), min_size=1, max_size=8),
    st.integers(0, 200_000),
    st.sampled_from(Order),
    st.booleans(),
    st.sampled_from([1000, 600]),
)
def test_every_iteration_keeps_the_rules(paths, latency_us, order, queued, input_permille):
    work = StageWork(boundary_bytes=20_000, input_permille=input_permille, gap_us=5)
    problem = small_problem(
        (2, 1, 1, 1), 4, latency_us=latency_us, work=work, slots=8, queued_links=queued
    )
    jobs = [Job(i % 2, tuple(path)) for i, path in enumerate(paths)]
    record: list[BusyInterval] = []
    simulator = Simulator(problem, order)
    outcome = simulator.run(jobs, record)
    assert outcome == simulator.run(jobs)
    for machine in range(5):
        own = [s for s in record if s.machine == machine]
        assert all(a.end_us <= b.start_us for a, b in pairwise(own))
    for index, job in enumerate(jobs):
        unloaded_us = sum(
            piece.work_us + piece.transfer_us + piece.flight_us
            for piece in simulator.route(job.origin, job.relays)
        )
        assert outcome.done_us[index] >= unloaded_us
        assert len([s for s in record if s.job == index and s.kind != LATER]) == 9
    assert outcome.makespan_us == max(s.end_us for s in record)
