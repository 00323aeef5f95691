"""Re-planning: what machines move when machines go and come, and what that is priced at."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from existing import existing
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_settings import small_problem

from bench.planner_settings import published_problem
from protocol.errors import LocalProtocolError
from protocol.pipeline.assignment import NoPlan
from protocol.pipeline.checker import violations
from protocol.pipeline.plan import Plan, jobs_of
from protocol.pipeline.planner import Budget, plan
from protocol.pipeline.problem import PathRules, PipelinePeer
from protocol.pipeline.replan import carried_over, replan, resized
from protocol.pipeline.simulator import Simulator
from protocol.pipeline.state_moves import MoveTerms, StateMoves
from protocol.pipeline.takeover import NOBODY

FREE_SLOTS = PathRules(waves_fit=False)
BRIEF = Budget(evaluations=60, rough_tries=200)
SOME = Budget(evaluations=400, rough_tries=500)
LITTLE = Budget(evaluations=150, rough_tries=500)


def terms(problem, horizon=100, state_bytes=10**9):
    return MoveTerms((state_bytes,) * problem.num_stages, horizon)


def of_machines(problem, keep, sizes):
    """The snapshot with these machines alone, in this order."""

    def cut(matrix):
        return tuple(tuple(matrix[a][b] for b in keep) for a in keep)

    return replace(
        problem,
        peers=tuple(problem.peers[m] for m in keep),
        latency_us=cut(problem.latency_us),
        bytes_per_s=cut(problem.bytes_per_s),
        stage_sizes=sizes,
    )


def noisy(problem, seed):
    rates = tuple(
        tuple(
            rate * (20 + (37 * a + 53 * b + 13 * seed) % 161) // 100 for b, rate in enumerate(row)
        )
        for a, row in enumerate(problem.bytes_per_s)
    )
    return replace(problem, bytes_per_s=rates)


@cache
def published():
    problem = published_problem(microbatches=15)
    problem = replace(problem, rules=FREE_SLOTS)
    return problem, plan(problem, Budget(evaluations=100, rough_tries=2000)).plan


def end_us(problem, its_plan) -> int:
    return existing(Simulator(problem).run(jobs_of(problem, its_plan)).makespan_us)


def names_of(problem, moves):
    return {problem.peers[move.machine].name for move in moves}


def test_the_same_snapshot_keeps_the_plan():
    problem, previous = published()
    again = replan(problem, previous, problem, terms(problem), BRIEF)
    assert again.plan == previous
    assert again.problem == problem
    assert (again.moves, again.cost_us, again.evaluations) == ((), 0, 0)


@pytest.mark.slow
def test_the_same_machines_in_another_order_keep_the_plan_by_name():
    problem, previous = published()
    kept = [*range(10, 20), *range(10)]
    turned = of_machines(problem, kept, problem.stage_sizes)
    patient = replace(terms(problem), least_gain_permille=300)
    again = replan(problem, previous, turned, patient, BRIEF)
    assert again.moves == ()
    assert again.plan.to_json(turned)["arrangement"] == previous.to_json(problem)["arrangement"]
    assert violations(again.problem, again.plan) == []


@pytest.mark.slow
def test_noise_on_links_changes_nothing_that_does_not_pay():
    problem, previous = published()
    drifted = noisy(problem, 1)
    before = end_us(drifted, previous)
    patient = replace(terms(problem), least_gain_permille=500)
    kept = replan(problem, previous, drifted, patient, SOME)
    assert (kept.plan, kept.makespan_us) == (previous, before)
    other = replan(problem, previous, drifted, terms(problem, 1), SOME)
    assert other.moves == ()  # a horizon of one iteration pays for no fetch
    assert other.plan != previous
    assert other.makespan_us <= 0.99 * before
    assert violations(other.problem, other.plan) == []


@pytest.mark.slow
def test_one_machine_gone_moves_nobody_where_its_stage_has_others():
    problem, previous = published()
    for gone in (0, 7, 11):
        keep = [m for m in range(20) if m != gone]
        now = of_machines(problem, keep, (4, 3, 3, 3, 3, 3))
        after = replan(problem, previous, now, terms(problem, 2), BRIEF)
        assert after.moves == ()
        assert violations(after.problem, after.plan) == []
        held = previous.to_json(problem)["arrangement"]
        kept = after.plan.to_json(now)["arrangement"]
        assert {**held, problem.peers[gone].name: None} == {
            **kept,
            problem.peers[gone].name: None,
        }


@pytest.mark.slow
def test_a_machine_that_comes_back_finds_its_place_in_a_plan_that_is_known():
    problem, previous = published()
    whole_us = end_us(problem, previous)
    fewer = of_machines(problem, [m for m in range(20) if m != 18], (4, 3, 3, 3, 3, 3))
    between = replan(problem, previous, fewer, terms(problem, 10**6), BRIEF)
    known = [(problem, previous)]
    assert between.makespan_us > whole_us
    back = replan(between.problem, between.plan, problem, terms(problem, 10**6), BRIEF, known=known)
    assert back.makespan_us <= whole_us
    assert violations(back.problem, back.plan) == []


def test_the_last_of_a_stage_is_replaced_by_one_machine():
    problem = replace(small_problem((2, 1, 3), 3, 4, slots=8), rules=FREE_SLOTS)
    previous = Plan((0, 0, 1, 2, 2, 2), (((2, 3), (2, 4)), ((2, 3), (2, 5)), (), (), (), ()))
    now = of_machines(problem, [0, 1, 3, 4, 5], (2, 1, 2))
    after = replan(problem, previous, now, terms(problem), BRIEF)
    (move,) = after.moves
    assert (move.left, move.taken, move.source) == (2, 1, None)
    assert move.fetch_us == 600_000_000  # nobody has it: from where it is kept
    assert violations(after.problem, after.plan) == []


def test_the_last_data_peer_is_replaced_too():
    problem = replace(small_problem((1, 2, 2), 3, 2, slots=8), rules=FREE_SLOTS)
    previous = Plan((0, 1, 1, 2, 2), (((1, 3), (2, 4)), (), (), (), ()))
    now = of_machines(problem, [1, 2, 3, 4], (1, 1, 2))
    after = replan(problem, previous, now, terms(problem), BRIEF)
    assert [move.taken for move in after.moves] == [0]
    assert violations(after.problem, after.plan) == []


def test_a_newcomer_gets_the_stage_that_needs_it_most():
    problem = replace(small_problem((2, 3, 1), 3, 8, slots=8, latency_us=10), rules=FREE_SLOTS)
    previous = Plan(
        (0, 0, 1, 1, 1, 2),
        (((2, 5), (3, 5), (4, 5), (2, 5)), ((3, 5), (4, 5), (2, 5), (3, 5)), (), (), (), ()),
    )
    now = replace(small_problem((2, 3, 2), 3, 8, slots=8, latency_us=10), rules=FREE_SLOTS)
    after = replan(problem, previous, now, terms(problem, 20, 10**7), LITTLE)
    assert [(move.machine, move.left, move.taken) for move in after.moves] == [(6, None, 2)]
    assert after.problem.stage_sizes == (2, 3, 2)
    before_us = end_us(problem, previous)
    assert after.makespan_us < 0.8 * before_us


@pytest.mark.slow
def test_a_longer_horizon_lets_machines_move():
    """The second stage is held once; the first, thrice: one of those should change."""
    problem = replace(small_problem((2, 4, 1), 3, 12, slots=12, latency_us=10), rules=FREE_SLOTS)
    previous = Plan(
        (0, 0, 1, 1, 1, 1, 2), ((((2, 6), (3, 6)) * 3), (((4, 6), (5, 6)) * 3), *[()] * 5)
    )
    slower = replace(problem, peers=(*problem.peers[:6], PipelinePeer("p6", 200_000, 12)))
    fewer = of_machines(slower, [0, 1, 2, 3, 4, 6], (2, 3, 1))
    for now, (horizon, least_gain_permille, moves) in product(
        (slower, fewer), ((1, 10, False), (100_000, 10, True), (100_000, 990, False))
    ):
        costs = replace(terms(problem, horizon), least_gain_permille=least_gain_permille)
        after = replan(problem, previous, now, costs, LITTLE)
        assert (len(after.moves) > 0) == moves
        assert violations(after.problem, after.plan) == []
        assert all(move.fetch_us > 1_000_000_000 for move in after.moves)  # a gigabyte at 1 MB/s


@pytest.mark.slow
def test_the_same_snapshots_give_the_same_bytes_and_the_plan_before_counts():
    problem, previous = published()
    keep = [m for m in range(20) if m != 3]
    now = of_machines(problem, keep, (4, 3, 3, 3, 3, 3))
    found = [replan(problem, previous, now, terms(problem), BRIEF) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0].plan.digest(found[0].problem) == DIGEST
    other = plan(problem, Budget(evaluations=50, rough_tries=2000, seed=1)).plan
    assert replan(problem, other, now, terms(problem), BRIEF).plan != found[0].plan


DIGEST = "30c3684ec75df1d4f2f06370133cb54a"


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4).map(lambda rest: (2, *rest)),
    visited=st.integers(2, 5),
    microbatches=st.integers(1, 7),
    rules=st.sampled_from([PathRules(), FREE_SLOTS, PathRules(waves_fit=False, stage_slack=1)]),
    gone=st.sets(st.integers(0, 13), max_size=4),
    newcomers=st.integers(0, 3),
    compute=st.lists(st.integers(1, 500_000), min_size=17, max_size=17),
    horizon=st.sampled_from([1, 30, 10**6]),
)
@settings(max_examples=60, deadline=None)
def test_replans_never_break_a_constraint(
    sizes, visited, microbatches, rules, gone, newcomers, compute, horizon
):
    number = sum(sizes)
    whole = small_problem((*sizes[:-1], sizes[-1] + newcomers), 2, microbatches, slots=3)
    peers = tuple(replace(peer, forward_us=compute[i]) for i, peer in enumerate(whole.peers))
    whole = replace(whole, peers=peers, visited=min(visited, len(sizes)), rules=rules)
    problem = of_machines(whole, range(number), sizes)
    keep = [m for m in range(number + newcomers) if m >= number or m not in gone]
    if len(keep) < len(sizes):
        return
    now = of_machines(whole, keep, (len(keep) - len(sizes) + 1, *[1] * (len(sizes) - 1)))
    try:
        previous = plan(problem, Budget(evaluations=10, rough_tries=100)).plan
        after = replan(problem, previous, now, terms(problem, horizon), Budget(30, 100))
    except NoPlan:
        return
    assert violations(after.problem, after.plan) == []
    outcome = Simulator(after.problem).run(jobs_of(after.problem, after.plan))
    assert outcome.makespan_us == after.makespan_us
    names = {peer.name: stage for peer, stage in zip(problem.peers, previous.stages, strict=True)}
    changed = {
        peer.name
        for peer, stage in zip(now.peers, after.plan.stages, strict=True)
        if names.get(peer.name) != stage
    }
    assert names_of(now, after.moves) == changed


def test_another_number_of_stages_is_refused():
    problem, previous = published()
    other = published_problem(4, sizes=(8, 4, 4, 4))
    with pytest.raises(LocalProtocolError, match="another model's"):
        replan(problem, previous, other, terms(other), BRIEF)


def test_a_plan_is_carried_over_by_name():
    problem = small_problem((1, 1, 1), 3)
    previous = Plan((0, 1, 2), (((1, 2),), (), ()))
    now = replace(
        small_problem((1, 1, 1), 3),
        peers=(problem.peers[2], PipelinePeer("new", 1, 1), problem.peers[0]),
    )
    carried = carried_over(problem, previous, now)
    assert carried.stages == (2, NOBODY, 0, 1)  # the last one is p1, gone
    assert carried.paths == {2: ((3, 0),)}


def test_moves_are_priced_by_the_best_link_and_what_waits_for_them():
    problem = small_problem((1, 2, 2), 3, latency_us=0)
    rates = [[1_000_000] * 5 for _ in range(5)]
    rates[2][3] = 4_000_000
    problem = replace(problem, bytes_per_s=tuple(map(tuple, rates)))
    costs = MoveTerms((0, 8_000_000, 2_000_000), 10, restart_us=0)
    moves = StateMoves(problem, (0, 1, 1, 2, 2), costs)
    to_first = (0, 1, 1, 1, 2)
    (move,) = moves.of(to_first)
    assert (move.machine, move.left, move.taken, move.source) == (3, 2, 1, 2)
    assert move.fetch_us == 2_000_000  # not the 8 s from machine 1
    # Nothing runs meanwhile: all wait for two seconds, and half of a stage has waited as long.
    assert moves.cost_us(to_first, 500_000) == 3_000_000
    moves.meanwhile_us = 1_000_000
    assert moves.cost_us(to_first, 500_000) == 1_000_000 + 1_000_000
    assert moves.surcharge(to_first, 500_000) == 200_000
    assert moves.cost_us(to_first, 2_000_000) == 1_000_000  # no gain comes late
    far = replace(costs, state_bytes=(0, 400_000_000, 0))  # 100 s, and 10 iterations are 10 s
    late = StateMoves(problem, (0, 1, 1, NOBODY, 2), far)
    late.meanwhile_us = 1_000_000
    assert late.surcharge(to_first, 400_000) == 600_000  # as slow as without it to the end
    newcomer = StateMoves(problem, (0, 1, 1, NOBODY, 2), costs)
    newcomer.meanwhile_us = 1_000_000
    assert newcomer.cost_us(to_first, 1_000_000) == 0  # nobody waits for a newcomer


def test_a_shared_line_out_makes_two_fetches_take_longer():
    problem = small_problem(
        (1, 1, 3), 3, latency_us=0, out_bytes_per_s=(10**6, 1_500_000, *[1] * 3)
    )
    moves = StateMoves(problem, (0, 1, NOBODY, NOBODY, 2), MoveTerms((0, 6_000_000, 0), 1, 0))
    assert moves.cost_us((0, 1, 1, NOBODY, 2), 1) == 6_000_000
    assert moves.cost_us((0, 1, 1, 1, 2), 1) == 8_000_000


@pytest.mark.parametrize(
    "wrong", [{"horizon": 0}, {"state_bytes": (-1, 0)}, {"orphan_us": -1}, {"restart_us": -1}]
)
def test_terms_are_checked(wrong):
    with pytest.raises(LocalProtocolError, match="horizon >= 1"):
        replace(MoveTerms((1, 1), 1), **wrong)
    with pytest.raises(LocalProtocolError, match="one entry for each stage"):
        StateMoves(small_problem(), (0, 1, 2), MoveTerms((1, 1), 1))


def test_sizes_follow_the_stages():
    problem = small_problem((1, 1, 2), 3)
    assert resized(problem, (0, 1, 2, 2)) is problem
    assert resized(problem, (0, 1, 2, 1)).stage_sizes == (1, 2, 1)
