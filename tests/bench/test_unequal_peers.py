"""The parts of bench.unequal_peers that decide what its figures mean."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_texts import small_texts

from bench.quality import unequal_findings as findings
from bench.quality.arms import Arm
from bench.quality.pace import Pooling, Speeds, active_at, as_often_as_voted, in_lowest_terms
from bench.quality.replicas import LoopedReplicas, StackedReplicas
from bench.quality.run import Result, train_arm
from bench.quality.runs import told
from bench.quality.settings import FULL, SHORT, SMOKE_UNEQUAL
from bench.quality.store import Store
from bench.quality.unequal import ARMS, SLOW
from bench.quality.waiting import Pace, Rules, waits
from bench.quality.world import World
from bench.simulated_pace import Kept, keep_pace
from peer.averaging.gossip.outer_step import outer_step
from peer.codec import get_codec

CPU = torch.device("cpu")
P = 128


def _steps_of(quotas, inner_steps):
    counts = [0] * len(quotas)
    for place in range(inner_steps):
        active = active_at(place, quotas, inner_steps)
        for index in range(len(quotas)) if active is None else active:
            counts[index] += 1
    return counts


@pytest.mark.parametrize(
    ("quotas", "inner_steps"), [([8, 4, 2], 8), ([50, 25, 12], 50), ([7, 3, 1], 7)]
)
def test_each_replica_does_its_quota(quotas, inner_steps):
    assert _steps_of(quotas, inner_steps) == quotas


def test_a_slow_replica_begins_with_the_round_and_keeps_its_distances():
    active = [place for place in range(8) if active_at(place, [8, 2], 8) is None]
    assert active == [0, 4]
    assert active_at(3, [8, 2], 8) == [0]


def test_a_quota_above_h_is_refused():
    with pytest.raises(ValueError, match="quotas"):
        active_at(0, [8, 9], 8)


def test_a_group_names_its_members_as_often_as_they_count():
    assert in_lowest_terms([8, 2]) == [4, 1]
    assert in_lowest_terms([2]) == [1]
    assert as_often_as_voted(7, (3, 7), [4, 1]) == [7, 3, 3, 3, 3]
    assert as_often_as_voted(3, (3, 7), [4, 1]) == [3, 3, 3, 3, 7]
    assert as_often_as_voted(5, (5,), [1]) == [5]


def test_votes_make_the_mean_of_the_outer_step_a_weighted_one():
    arm = Arm("mean", alpha=0.0, beta=1.0, speeds=Speeds("tokens", SLOW))
    thetas = {3: torch.zeros(P), 7: torch.ones(P)}
    members = as_often_as_voted(7, (3, 7), arm.speeds.votes([8, 2]))
    phi_P, delta_P = torch.zeros(P), torch.zeros(P)
    codes = [thetas[member].view(torch.uint8) for member in members]
    outer_step(phi_P, delta_P, codes, get_codec("fp32"), arm.factors)
    torch.testing.assert_close(phi_P, torch.full((P,), 0.2))


def test_quotas_follow_the_speeds_and_waiting_costs_time():
    assert ARMS["equal"].speeds.quotas(8, 8) == [8, 8, 8, 8, 8, 8, 4, 2]
    assert ARMS["waiting"].speeds.quotas(8, 8) == [8] * 8
    assert ARMS["without"].speeds.quotas(8, 8) == [8] * 6
    assert (ARMS["equal"].speeds.step_time, ARMS["waiting"].speeds.step_time) == (1, 4)
    assert ARMS["normalised"].speeds.stretch(2, 8) == 4
    assert ARMS["tokens"].speeds.stretch(2, 8) == ARMS["normalised"].speeds.stretch(8, 8) == 1


def test_equal_arms_are_those_of_the_other_study():
    plain, speeds = Arm("noloco"), ARMS["equal"].speeds
    assert plain == replace(ARMS["equal"], name="noloco", speeds=replace(speeds, slow=()))
    assert plain.speeds.quotas(8, 8) == [8] * 8


@pytest.mark.parametrize("setting", [SMOKE_UNEQUAL, SHORT, FULL])
@pytest.mark.parametrize("arm", ARMS.values(), ids=lambda arm: arm.name)
def test_all_arms_train_whole_rounds_and_end_together(setting, arm):
    steps = setting.steps // arm.speeds.step_time
    assert steps * arm.speeds.step_time == setting.steps
    assert steps % arm.inner_steps(setting.inner_steps) == 0
    assert setting.curve_every % arm.speeds.step_time == 0


def test_a_result_with_speeds_is_found_again(tmp_path):
    store, arm = Store(tmp_path, SHORT, Result), ARMS["equal"]
    store.save(arm, _result("equal", 0, 2.0))
    assert store.load(arm, 0) is not None
    assert store.load(replace(arm, speeds=Speeds(slow=(0.5, 0.3))), 0) is None


def _result(name, seed, loss):
    setting = {key: getattr(SHORT, key) for key in SHORT.__dataclass_fields__}
    tree = told(ARMS[name])
    return Result(tree, setting, seed, 1, [loss], loss, deviations=[(1, 0.0, 0.0, 0.0)])


# --- waiting --------------------------------------------------------------------------------------
def _pace(quotas, jitter=0.0, exchange=0.0, slow=SLOW):
    return Pace([1.0] * 6 + list(slow), quotas, 8, exchange, jitter)


QUOTAS = [8] * 6 + [4, 2]


def test_who_keeps_the_quotas_waits_for_jitter_only():
    steady = waits(_pace(QUOTAS), 50, seed=0)
    assert steady.for_partner.max() < 1e-9
    shaken = waits(_pace(QUOTAS, jitter=0.05), 50, seed=0)
    assert 0.005 < shaken.for_partner.mean() < 0.03


def test_who_waits_for_the_slowest_waits_three_quarters_of_the_time():
    found = waits(_pace([8] * 8), 200, seed=0)
    assert found.for_partner[:6].mean() == pytest.approx(0.75, abs=0.02)
    assert found.for_partner[6] == pytest.approx(0.5, abs=0.02)
    assert found.for_partner[7] == 0.0


def test_an_exchange_takes_its_share_of_a_round():
    found = waits(_pace(QUOTAS, exchange=0.25), 50, seed=0)
    assert found.for_exchange == pytest.approx([0.2] * 8)


def test_overlap_waits_for_nobody_but_trains_past_its_quota():
    uneven = _pace(QUOTAS, slow=(0.45, 0.3))
    found = waits(uneven, 100, seed=0, rules=Rules(overlap=True))
    assert not found.for_partner.any()
    assert found.steps[:6].mean() > 1.05
    assert waits(uneven, 100, seed=0).steps == pytest.approx([1.0] * 8)


def test_closing_early_shortens_waits_and_rounds():
    uneven = _pace(QUOTAS, slow=(0.45, 0.3))
    patient, early = (waits(uneven, 100, 0, Rules(early=early)) for early in (False, True))
    assert early.for_partner[:6].mean() < 0.6 * patient.for_partner[:6].mean()
    assert early.steps.min() >= 0.5
    assert early.steps[:6].mean() < 1.0


def test_the_model_follows_its_seed():
    one, same, other = (waits(_pace(QUOTAS, jitter=0.1), 20, seed) for seed in (0, 0, 1))
    assert np.array_equal(one.for_partner, same.for_partner)
    assert not np.array_equal(one.for_partner, other.for_partner)


@pytest.mark.slow
def test_the_daemon_keeps_fast_peers_busy_with_overlap():
    overlapping, blocking = (keep_pace([1, 1, 1, 0.5], 8, 8, 1, overlap=o) for o in (True, False))
    assert min(peer.busy for peer in overlapping) > 0.99
    assert max(peer.busy for peer in blocking) < min(peer.busy for peer in overlapping)
    assert overlapping[3].steps == pytest.approx(4, abs=0.5)


def test_an_exchange_is_as_long_where_rounds_are_shorter():
    often, seldom = (
        findings.model_waits(ARMS[name], SHORT) for name in ("waiting-often", "waiting")
    )
    ratio = often.for_exchange[0] / seldom.for_exchange[0]
    assert ratio == pytest.approx(4, rel=0.1)


# --- findings -------------------------------------------------------------------------------------
def test_goals_are_about_the_choice():
    runs = {
        "equal": {0: _result("equal", 0, 2.0), 1: _result("equal", 1, 2.1)},
        "tokens": {0: _result("tokens", 0, 2.2), 1: _result("tokens", 1, 2.3)},
        "waiting": {0: _result("waiting", 0, 1.9), 1: _result("waiting", 1, 1.9)},
        "without": {0: _result("without", 0, 1.9)},
    }
    kept = [Kept(1.0, 1.0, 8.0)] * 6 + [Kept(0.5, 1.0, 2.0)] * 2
    wait, tokens, waiting = findings.goals(runs, [kept])
    assert wait.met
    assert tokens.met
    assert not waiting.met
    assert not findings.goals(runs, [kept, [Kept(0.9, 1.0, 8.0)] * 8])[0].met


def test_an_arm_is_compared_with_one_of_the_same_outer_step():
    assert findings.reference_of(ARMS["tokens-alpha-0"]) == "equal-alpha-0"
    assert findings.reference_of(ARMS["tokens-plain"]) == "equal-plain"
    assert findings.reference_of(ARMS["tokens"]) == "equal"


# --- training -------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    setting = replace(SMOKE_UNEQUAL, source=small_texts(folder, 80))
    return World.open(setting, 0, tmp_path_factory.mktemp("cache"))


def test_the_active_replicas_alone_take_blocks(world):
    feed = world.feed(ARMS["equal"].speeds.quotas(4, 6))
    assert len(feed.next_blocks()) == 6
    first_BT = feed.next_blocks([5])[0]
    feed.next_blocks([0, 1])
    assert not np.array_equal(feed.next_blocks([5])[0], first_BT)


@pytest.mark.parametrize("kind", ["looped", "stacked"])
def test_only_active_replicas_move(world, kind):
    replicas = (
        LoopedReplicas(world.spec, 3, world.vocabulary, CPU, "fp32", 1)
        if kind == "looped"
        else StackedReplicas(world.spec, 3, world.vocabulary, CPU, "fp32")
    )
    before = [theta_P.clone() for theta_P in replicas.thetas]
    replicas.step(np.random.default_rng(0).integers(0, 256, (2, 1, 17)), 1e-2, [0, 2])
    moved = [not torch.equal(old, new) for old, new in zip(before, replicas.thetas, strict=True)]
    assert moved == [True, False, True]


@pytest.mark.slow
def test_arms_use_the_time_that_they_have(world):
    results = {name: train_arm(world, ARMS[name])[0] for name in ("equal", "waiting", "without")}
    tokens_of_step = world.spec.tokens_per_step
    assert results["equal"].tokens == 16 * (4 + 1 / 2 + 1 / 4) * tokens_of_step
    assert results["waiting"].tokens == 6 * 4 * tokens_of_step
    assert results["without"].tokens == 16 * 4 * tokens_of_step
    assert all(result.curve[-1][0] == 16 for result in results.values())
    assert [len(result.losses) for result in results.values()] == [6, 6, 4]


@pytest.mark.slow
def test_poolings_differ_only_where_speeds_do(world):
    even = [Arm(f"even-{pooling}", speeds=Speeds(pooling)) for pooling in POOLINGS]
    same = [train_arm(world, arm)[1] for arm in even]
    assert all(torch.equal(mean_P, same[0]) for mean_P in same)
    uneven = [train_arm(world, ARMS[pooling])[1] for pooling in POOLINGS]
    assert not torch.equal(uneven[0], uneven[1])
    assert not torch.equal(uneven[0], uneven[2])


POOLINGS: tuple[Pooling, ...] = ("equal", "tokens", "normalised")


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 2])
def test_a_stretched_move_is_taken_once(world, rounds):
    """A peer alone goes 4 times as far as it trained, and no further when it trains no more."""
    setting = replace(world.setting, steps=4 * rounds, replicas=1, curve_every=4)
    parts = {name: getattr(world, name) for name in world.__dataclass_fields__}
    alone = _TrainsOneRound(**(parts | {"setting": setting}))
    start_P = LoopedReplicas(world.spec, 1, world.vocabulary, CPU, "fp32", 1).thetas[0].clone()
    moves = []
    for pooling in ("equal", "normalised"):
        arm = Arm("alone", alpha=0.0, beta=1.0, speeds=_OneStep(pooling))
        moves.append(train_arm(alone, arm)[1] - start_P)
    assert moves[0].abs().max() > 1e-3
    torch.testing.assert_close(moves[1], 4 * moves[0], atol=1e-6, rtol=1e-4)


class _TrainsOneRound(World):
    """The learning rate is nothing from the second round on."""

    def rate(self, time):
        return 1e-2 if time < self.setting.inner_steps else 0.0


class _OneStep(Speeds):
    """A peer that does one step of each round."""

    def quotas(self, inner_steps, replicas):
        return [1] * replicas
