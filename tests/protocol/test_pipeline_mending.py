"""Mending a plan: what it finds, what it keeps to, and when it gives up."""

from existing import existing
from pipeline_settings import small_problem

from bench.pipeline.checker import violations
from protocol.pipeline.planner import mended
from protocol.pipeline.simulator import Order, Plan, Simulator, jobs_of

ONE_RELAY = Plan((0, 1, 1), (((1,),) * 4, (), ()))
"""Four microbatches, all over one of two relays."""


def priced(problem, plan, order=Order.ARRIVAL):
    return existing(Simulator(problem, order).run(jobs_of(problem, plan)).makespan_us)


def test_an_idle_relay_gets_its_share():
    problem = small_problem((1, 2), 2, 4, slots=4)
    found = existing(mended(problem, ONE_RELAY, 100))
    assert sorted(path for (path,) in found.plan.paths[0]) == [1, 1, 2, 2]
    assert found.makespan_us == priced(problem, found.plan) < priced(problem, ONE_RELAY)
    assert violations(problem, found.plan) == []


def test_an_idle_data_peer_gets_its_share():
    problem = small_problem((2, 2), 2, 4, slots=4)
    lopsided = Plan((0, 0, 1, 1), (((2,), (3,), (2,), (3,)), (), (), ()))
    found = existing(mended(problem, lopsided, 200))
    assert [len(paths) for paths in found.plan.paths] == [2, 2, 0, 0]
    assert violations(problem, found.plan) == []


def test_it_tries_no_more_than_it_may():
    problem = small_problem((1, 2), 2, 4, slots=4)
    alone = existing(mended(problem, ONE_RELAY, 1))
    assert (alone.plan, alone.evaluations) == (ONE_RELAY, 1)
    assert all(existing(mended(problem, ONE_RELAY, n)).evaluations <= n for n in range(1, 12))


def test_a_plan_that_blocks_itself_is_not_mended():
    problem = small_problem((2, 1, 1), 3, 2, slots=1)
    assert mended(problem, Plan((0, 0, 1, 2), (((2, 3),), ((3, 2),), (), ())), 50) is None


def test_it_judges_by_the_order_of_work():
    problem = small_problem((1, 2), 2, 4, slots=4)
    other = existing(mended(problem, ONE_RELAY, 100, Order.BACKWARD_FIRST))
    assert other.makespan_us == priced(problem, other.plan, Order.BACKWARD_FIRST)
