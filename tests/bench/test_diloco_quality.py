"""The parts of bench.diloco_quality that decide what its figures mean."""

from dataclasses import asdict, replace

import pytest
import torch
from small_texts import small_texts

from bench.quality import streaming_findings as findings
from bench.quality.fragment_swarm import FragmentSwarm, heavy_ball_step
from bench.quality.settings import STREAMING_FULL, STREAMING_SHORT, STREAMING_SMOKE
from bench.quality.store import Store
from bench.quality.streaming import StreamingResult, setting_of, train_streaming_arm
from bench.quality.streaming_arms import DEFAULT, STREAMING_ARMS
from bench.quality.study import Study
from peer.averaging.diloco.nesterov import ChunkValues, NesterovFactors
from peer.averaging.gossip.outer_step import NolocoFactors
from peer.averaging.gossip.outer_step import outer_step as noloco_step
from peer.codec import get_codec
from peer.training.model import FlatModel, initial_module

SETTINGS = [STREAMING_SMOKE, STREAMING_SHORT, STREAMING_FULL]
AVERAGING = [arm for arm in STREAMING_ARMS.values() if arm.group == "all"]


def test_the_study_has_at_most_twenty_arms():
    assert len(STREAMING_ARMS) <= 20


@pytest.mark.parametrize("arm", AVERAGING, ids=lambda arm: arm.name)
def test_an_arm_changes_one_factor(arm):
    default = asdict(STREAMING_ARMS[DEFAULT])
    changed = {name for name, value in asdict(arm).items() if value != default[name]} - {"name"}
    if arm.name.startswith("plain"):
        assert changed - {"inner_steps"} == {"fragments", "overlap_steps", "merge", "code"}
    else:
        assert len(changed) == (arm.name != DEFAULT)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
@pytest.mark.parametrize("arm", STREAMING_ARMS.values(), ids=lambda arm: arm.name)
def test_an_arm_trains_as_many_tokens_and_comes_back_before_it_is_sent_again(arm, setting):
    own, inner_steps = setting_of(arm, setting), arm.inner_steps or setting.inner_steps
    assert own.replicas * own.batch_size == setting.replicas * setting.batch_size
    assert arm.overlap_steps < inner_steps
    assert setting is STREAMING_SMOKE or setting.steps % inner_steps == 0


def test_replicas_that_cannot_share_a_step_are_refused():
    odd = replace(STREAMING_SHORT, replicas=3, batch_size=3)
    with pytest.raises(ValueError, match="9 sequences"):
        setting_of(STREAMING_ARMS["m8"], replace(odd, replicas=1, batch_size=9))


def _models(count: int) -> list[FlatModel]:
    spec = STREAMING_SMOKE.spec(0)
    return [FlatModel(initial_module(spec, 64), torch.device("cpu")) for _ in range(count)]


@pytest.mark.parametrize("code", ["fp32", "int8", "int4"])
def test_every_peer_sends_a_rings_share_of_each_fragment(code):
    swarm = FragmentSwarm(_models(4), STREAMING_ARMS[DEFAULT].diloco, 12, code)
    for step in range(1, 25):
        swarm.after_step(step)
    bytes_per_value = {"fp32": 4, "int8": 1 + 2 / 128, "int4": 0.5 + 2 / 128}[code]
    per_cycle = 2 * 3 / 4 * bytes_per_value
    assert swarm.sent_bytes == pytest.approx(2 * per_cycle * swarm.phi_P.numel())
    largest = max(fragment.size for fragment in swarm.fragments)
    assert swarm.largest_send_bytes == pytest.approx(per_cycle * largest)


def test_heavy_ball_is_nolocos_step_of_a_group_of_all():
    generator = torch.Generator().manual_seed(0)
    phi, v, theta = torch.randn(3, 384, generator=generator)
    rate, momentum = 0.4, 0.9
    D = phi - theta
    codec, delta = get_codec("fp32"), -rate * v
    stepped = heavy_ball_step(
        ChunkValues(phi, v), D.view(torch.uint8), codec, NesterovFactors(rate, momentum)
    )
    group_phi = phi.clone()
    noloco_step(
        group_phi, delta, [theta.view(torch.uint8)], codec, NolocoFactors(momentum, rate, rate)
    )
    torch.testing.assert_close(stepped.phi_C, group_phi)


def _result(arm: str, loss: float, seed: int = 0) -> StreamingResult:
    return StreamingResult({"name": arm}, {}, seed, 1, loss=loss, fast_loss=loss + 0.1)


def test_the_gate_is_two_sided_and_of_equal_seeds_and_h():
    runs = {
        "plain": {0: _result("plain", 2.0), 1: _result("plain", 2.5, 1)},
        "plain-h100": {0: _result("plain-h100", 2.2)},
        "streaming": {0: _result("streaming", 2.019), 2: _result("streaming", 9.0, 2)},
        "h100": {0: _result("h100", 2.17)},
        "heavy-ball": {0: _result("heavy-ball", 3.0)},
    }
    streaming, h100 = sorted(findings.goals(runs), key=lambda goal: goal.met, reverse=True)
    assert (round(streaming.measured, 3), round(h100.measured, 3)) == (0.019, -0.03)
    assert (streaming.met, h100.met) == (True, False)
    table = {row["arm"]: row for row in findings.rows(runs)}
    assert table["streaming"]["to plain"] == "+0.0190"
    assert table["heavy-ball"]["fast less slow"] == "+0.1000"


@pytest.mark.long
@pytest.mark.slow
def test_arms_differ_as_they_should_and_are_made_once(tmp_path):
    texts = tmp_path / "texts"
    setting = replace(STREAMING_SMOKE, source=small_texts(texts, 60))
    names = ("plain", DEFAULT, "m2", "whole", "ddp", "none", "int4", "heavy-ball")
    arms = [STREAMING_ARMS[name] for name in names]
    store = Store(tmp_path / "results.jsonl", setting, StreamingResult)
    study = Study(store, tmp_path / "cache", train_streaming_arm)
    made = study.gather(arms, [0], made_only=False)
    found = {name: made[name][0] for name in names}
    assert len({result.loss for result in found.values()}) == len(names)
    assert found["plain"].loss == found["plain"].fast_loss == found["plain"].mean_fast_loss
    assert found[DEFAULT].fast_loss != found[DEFAULT].mean_fast_loss
    assert len(found["whole"].fragment_parameters) == 1
    assert len(found[DEFAULT].fragment_parameters) == 3
    assert found["none"].sent_megabytes == 0
    assert found["m2"].sent_megabytes == pytest.approx(found[DEFAULT].sent_megabytes * 2 / 3)
    assert [step for step, _, _ in found[DEFAULT].curve] == [12, 24]
    again = study.gather(arms, [0], made_only=True)
    assert again["int4"][0].seconds == found["int4"].seconds
