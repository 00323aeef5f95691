"""Arms of bench.noloco_quality that try what others found to help."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_texts import small_texts

from bench.quality.additions import Additions
from bench.quality.arms import ARMS
from bench.quality.moments import average_first_moments
from bench.quality.run import train_arm
from bench.quality.settings import SMOKE
from bench.quality.tried import LATE_ROUNDS, TRIED_ARMS
from bench.quality.world import World
from peer.averaging.gossip.outer_step import NolocoFactors
from protocol.run.layout import Layout


def tried(name):
    """The arm at H = 2 with the slower Muon."""
    return TRIED_ARMS[f"{name}-h2-muon-4"]


def test_outer_momentum_rises_after_the_first_rounds_and_a_steady_move_counts_once():
    arm = tried("momentum-late")
    assert arm.factors_at(0) == arm.factors_at(LATE_ROUNDS) == NolocoFactors(0.0, 1.0, 1.0)
    for round_ in range(LATE_ROUNDS + 1, LATE_ROUNDS + 9):
        factors = arm.factors_at(round_)
        assert factors.beta / (1 - factors.alpha) == pytest.approx(1.0)
    assert [round(arm.factors_at(LATE_ROUNDS + n).alpha, 3) for n in (1, 4, 5, 9)] == [
        0.1,
        0.4,
        0.5,
        0.5,
    ]


def test_what_is_tried_leaves_the_plain_arms_as_they_are():
    for name, arm in TRIED_ARMS.items():
        kind, _, rest = name.partition("-h")
        inner_steps, _, muon = rest.partition("-muon-")
        plain = ARMS[f"pairs-h{inner_steps}-muon-{muon}"]
        same = ("group", "code", "rounds_of", "delay", "muon", "partners", "rate_of")
        assert all(getattr(arm, key) == getattr(plain, key) for key in same), kind
    assert tried("momentum-restart").additions.restarts(3)
    assert not tried("momentum-restart").additions.restarts(4)
    moments, batches = tried("moments").additions, tried("batches").additions
    assert [moments.averages_moments(n) for n in range(4)] == [False] * 3 + [True]
    assert [batches.batches_at(share) for share in (0.0, 0.49, 0.5, 1.0)] == [1, 1, 2, 2]


def test_pairs_have_the_mean_of_their_first_moments_and_keep_their_second_ones():
    generator = torch.Generator().manual_seed(0)
    names = {"momentum_buffer.0": 256, "exp_avg.0": 40, "exp_avg_sq.0": 40}
    moments = [
        {name: torch.randn(size, generator=generator) for name, size in names.items()}
        for _ in range(2)
    ]
    before = [{name: value.clone() for name, value in each.items()} for each in moments]
    optimizers: list[Any] = [SimpleNamespace(moments=lambda each=each: each) for each in moments]
    sent_bytes = average_first_moments(optimizers, [(0, 1)])
    assert 384 <= sent_bytes / 2 <= 384 * 1.03
    for name in names:
        if name.startswith("exp_avg_sq"):
            assert all(
                torch.equal(now[name], was[name]) for now, was in zip(moments, before, strict=True)
            )
        else:
            mean = (before[0][name] + before[1][name]) / 2
            assert torch.equal(moments[0][name], moments[1][name])
            torch.testing.assert_close(moments[0][name], mean, atol=0.02, rtol=0)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    texts = tmp_path_factory.mktemp("texts")
    setting = replace(SMOKE, source=small_texts(texts, 60))
    return World.open(setting, 0, tmp_path_factory.mktemp("cache"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["momentum-late", "momentum-restart", "moments", "batches"])
def test_each_trains_as_many_tokens_as_the_plain_arm_and_ends_elsewhere(world, name):
    arm = replace(tried(name), rounds_of=0.5)  # H = 2 of the small setting
    if arm.additions.momentum_after:
        arm = replace(arm, additions=Additions(momentum_after=1))
    plain, _ = train_arm(world, replace(ARMS["pairs-h2-muon-4"], rounds_of=0.5))
    found, _ = train_arm(world, arm)
    assert found.tokens == plain.tokens
    assert found.losses != plain.losses
    assert (found.bytes_per_parameter > plain.bytes_per_parameter) == (name == "moments")


@pytest.mark.slow
def test_what_is_waited_for_does_not_come_late(world):
    late = replace(TRIED_ARMS["first-waits-h16-muon-8-late-0.7"], rounds_of=1.0)
    in_time, _ = train_arm(world, replace(late, delay=0.0, additions=Additions()))
    found, _ = train_arm(world, late)  # the one block of this model is among what is waited for
    assert found.losses == in_time.losses
    none, _ = train_arm(world, replace(late, additions=Additions()))
    assert none.losses != in_time.losses


def test_half_of_the_blocks_are_waited_for_and_all_that_belongs_to_none():
    arm = TRIED_ARMS["first-waits-h16-muon-8-late-0.7"]
    names = ["embed_tokens.weight", *(f"layers.{n}.up.weight" for n in range(4)), "norm.weight"]
    layout = Layout.from_shapes(dict.fromkeys(names, (256,)))
    waited = [
        entry.name
        for entry in layout.entries
        if any(start <= entry.offset < stop for start, stop in arm.additions.waited_for(layout))
    ]
    assert waited == [*names[:3], "norm.weight"]
