"""Lines that several links share, against schedules worked out by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_settings import small_problem

from protocol.errors import LocalProtocolError
from protocol.pipeline.problem import Work
from protocol.pipeline.simulator import BACKWARD, FORWARD, LOSS, Job, Simulator, Stretch

SLOW = Work(boundary_bytes=1_000_000)
"""A boundary takes a second on a link."""
MUCH = 10**9


def starts_of(problem, jobs):
    record: list[Stretch] = []
    Simulator(problem).run(jobs, record)
    return {(s.machine, s.kind, s.job): s.start_us for s in record}


def test_boundaries_to_different_machines_share_the_line_out():
    problem = small_problem((1, 2), 2, 2, latency_us=0, work=SLOW)
    jobs = [Job(0, (1,)), Job(0, (2,))]
    for rate, arrivals in (
        (MUCH, [1_100_000, 1_200_000]),  # the link's second after each forward
        (1_000_000, [1_100_000, 2_100_000]),
        (500_000, [2_100_000, 4_100_000]),
    ):
        starts = starts_of(replace(problem, out_bytes_per_s=(rate, MUCH, MUCH)), jobs)
        assert [starts[1, FORWARD, 0], starts[2, FORWARD, 1]] == arrivals


def test_boundaries_from_different_machines_share_the_line_in_by_their_arrival():
    problem = small_problem((2, 1), 2, 2, latency_us=0, work=SLOW)
    problem = replace(problem, latency_us=((0, 0, 300_000), (0, 0, 0), (0, 0, 0)))
    jobs = [Job(0, (2,)), Job(1, (2,), release_us=100_000)]
    # The second one begins to arrive at 0.2 s, before the first (0.4 s), and has the line first.
    starts = starts_of(replace(problem, in_bytes_per_s=(MUCH, MUCH, 1_000_000)), jobs)
    assert [starts[2, FORWARD, 1], starts[2, FORWARD, 0]] == [1_200_000, 2_200_000]
    alone = starts_of(problem, jobs)
    assert [alone[2, FORWARD, 1], alone[2, FORWARD, 0]] == [1_200_000, 1_400_000]


def test_a_thin_line_is_the_rate_of_every_link_on_it():
    problem = small_problem((1, 1), 2, work=SLOW, latency_us=0)
    thin = replace(problem, out_bytes_per_s=(MUCH, 250_000), in_bytes_per_s=(500_000, MUCH))
    assert [thin.rate(0, 1), thin.rate(1, 0)] == [1_000_000, 250_000]
    assert thin.transfer_us(1, 0) == 4_000_000
    starts = starts_of(thin, [Job(0, (1,))])
    assert starts[0, LOSS, 0] == 100_000 + 1_000_000 + 100_000 + 4_000_000
    assert starts[1, BACKWARD, 0] == starts[0, LOSS, 0] + 25_000 + 1_000_000


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.permutations([2, 3, 4]), min_size=1, max_size=8),
    st.integers(1, 3_000_000), st.integers(1, 3_000_000), st.booleans(),
)  # fmt: skip
def test_no_microbatch_is_faster_than_alone(paths, out, inward, queued):
    work = Work(boundary_bytes=20_000)
    problem = small_problem((2, 1, 1, 1), 4, work=work, slots=8, queued_links=queued)
    jobs = [Job(i % 2, tuple(path)) for i, path in enumerate(paths)]
    shared = replace(problem, out_bytes_per_s=(out,) * 5, in_bytes_per_s=(inward,) * 5)
    simulator = Simulator(shared)
    outcome = simulator.run(jobs)
    assert outcome == simulator.run(jobs)
    for job, done_us in zip(jobs, outcome.done_us, strict=True):
        assert done_us >= simulator.unloaded_us(job.origin, job.relays)


def test_without_shared_lines_a_problem_has_the_bytes_that_it_always_had():
    problem = small_problem()
    assert b"out_bytes" not in problem.to_bytes()
    assert replace(problem, in_bytes_per_s=(1, 1, 1)).digest() != problem.digest()


def test_rates_of_lines_are_checked():
    for rates in ((1, 1), (1, 0, 1)):
        with pytest.raises(LocalProtocolError, match="out_bytes_per_s: one for each"):
            small_problem(out_bytes_per_s=rates)
