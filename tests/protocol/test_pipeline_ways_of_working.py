"""Ways of working, against figures worked out by hand."""

from pipeline_settings import small_problem

from protocol.pipeline.pipelines import PricedIteration
from protocol.pipeline.planner import Planned
from protocol.pipeline.problem import StageWork
from protocol.pipeline.simulator import Plan
from protocol.pipeline.what_if import by_way_of_working


def iteration(microbatches=1, times=1, **changes) -> PricedIteration:
    work = StageWork(boundary_bytes=0, backward_permille=2000)
    problem = small_problem((1, 1), 2, microbatches, work=work, latency_us=0, **changes)
    plan = Plan((0, 1), (((1,),) * microbatches, ()))
    return PricedIteration(problem, Planned(plan, 0, 0), (), times=times)


def test_one_microbatch():
    found = by_way_of_working([iteration()], mending=20)
    # Forwards of 0.1 s, the loss 0.025 s, backwards 0.2 s.
    assert found["arrival"] == found["1f1b"] == 0.625
    assert found["two_parts"] == found["both"] == 0.525  # the relay's gradient leaves at half time


def test_backwards_first_is_another_order():
    found = by_way_of_working([iteration(6, slots=3)], mending=1)
    assert found["1f1b"] != found["arrival"]


def test_kinds_of_iterations_count_as_often_as_they_come():
    twice = by_way_of_working([iteration(times=2), iteration(forward_us=400_000)], mending=1)
    assert twice["arrival"] == (2 * 0.625 + 4 * 0.625) / 3


def test_paths_that_block_each_other_have_no_time():
    problem = small_problem((2, 1, 1), 3, 2, slots=1)
    stuck = Plan((0, 0, 1, 2), (((2, 3),), ((3, 2),), (), ()))
    found = by_way_of_working([PricedIteration(problem, Planned(stuck, 0, 0), ())], mending=1)
    assert found["arrival"] is None
    assert found["both"] is None
