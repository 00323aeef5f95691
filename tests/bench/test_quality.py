"""The parts of bench.noloco_quality that decide what its figures mean."""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from bench.quality import findings
from bench.quality.arms import ARMS, CODE_ARMS, STUDY_ARMS
from bench.quality.exchange import ModuloExchange, checksum, coarse, exchange_of, vectors_sent
from bench.quality.measures import pearson, replica_deviation, standard_error
from bench.quality.pairing import groups_of_round
from bench.quality.replicas import LoopedReplicas, StackedReplicas
from bench.quality.run import Result, train_arm
from bench.quality.runs import paired, told
from bench.quality.settings import FULL, FULL_LATE, LONG, SHORT, SHORT_LATE, SMOKE
from bench.quality.store import Store
from peer.codec import BLOCK, differences
from peer.codec.differences import blocks_of

P = 1024
CPU = torch.device("cpu")


def _close_pair(apart: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(P, generator=generator)
    return [base + apart * torch.randn(P, generator=generator) for _ in range(2)]


def _result(arm: str, seed: int, loss: float) -> Result:
    setting = {"warmup_steps": 0}
    return Result(
        {"name": arm, "group": ARMS[arm].group}, setting, seed, 1, losses=[loss], averaged_loss=loss
    )


@pytest.mark.parametrize("round_", range(20))
def test_everyone_is_in_one_pair(round_):
    groups = groups_of_round("pairs", "run", round_, 8)
    assert sorted(index for group in groups for index in group) == list(range(8))
    assert {len(group) for group in groups} == {2}


def test_an_odd_replica_is_left_alone():
    assert sorted(map(len, groups_of_round("pairs", "run", 0, 5))) == [1, 2, 2]


def test_pairs_change_from_round_to_round():
    rounds = {tuple(sorted(groups_of_round("pairs", "run", round_, 8))) for round_ in range(20)}
    assert len(rounds) > 10


def test_partners_by_bit_have_averaged_with_all_after_three_rounds():
    values = torch.eye(8)
    for round_ in range(5, 8):
        pairs = groups_of_round("pairs", "run", round_, 8, "bits")
        assert sorted(index for pair in pairs for index in pair) == list(range(8))
        for one, other in pairs:
            values[one] = values[other] = (values[one] + values[other]) / 2
    assert torch.equal(values, torch.full((8, 8), 1 / 8))
    assert sorted(groups_of_round("pairs", "run", 2, 6, "bits")) == [(0, 4), (1, 5), (2,), (3,)]


def test_an_arm_with_muon_changes_the_inner_optimizer_alone():
    spec = SHORT.spec(0)
    assert ARMS["ddp"].spec(spec) is spec
    changed = ARMS["ddp-muon-2"].spec(spec)
    assert changed.optimizer.name == "muon"
    assert changed.optimizer.muon is not None
    assert changed.optimizer.muon.learning_rate == 2 * spec.optimizer.learning_rate
    assert changed.optimizer.learning_rate == spec.optimizer.learning_rate
    assert changed.model_copy(update={"optimizer": spec.optimizer}) == spec


@pytest.mark.slow
def test_muon_is_what_an_arm_with_it_trains_with(world):
    losses = {name: train_arm(world, ARMS[name])[0].loss for name in ("ddp", "ddp-muon-1")}
    assert losses["ddp"] != losses["ddp-muon-1"]
    assert train_arm(world, replace(ARMS["ddp-muon-1"], muon=0.0))[0].loss == losses["ddp"]


def test_a_pair_sends_one_vector_each_and_a_ring_almost_two():
    assert vectors_sent([(0, 1), (2, 3), (4,)]) == 4
    assert vectors_sent([range(8)]) == 14


def test_deviation_is_that_of_the_papers_code():
    vectors = [torch.tensor([1.0, 0.0]), torch.tensor([3.0, 0.0])]
    assert replica_deviation(vectors, 2) == pytest.approx(math.sqrt(2 / 4))
    assert replica_deviation(vectors, 1) == pytest.approx(1.0)


def test_pearson_and_standard_error():
    assert pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1.0)
    assert pearson([1, 2, 3], [1, 1, 1]) is None
    assert standard_error([1.0]) is None
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0)


def test_modulo_rounds_the_finer_the_closer_the_replicas_are():
    errors = []
    for apart in (0.1, 0.001):
        thetas, exchange = _close_pair(apart), ModuloExchange(8, 4.0)
        exchange.share(thetas, [(0, 1)])
        shared = exchange.share(thetas, [(0, 1)])
        errors.append(float((shared.decoded[0] - thetas[0]).abs().max()))
    raw = float((coarse(thetas[0], 8).values() - thetas[0]).abs().max())
    assert errors[1] < raw / 20
    assert errors[1] < errors[0] <= raw


def test_a_wrapped_block_is_seen_and_sent_again():
    thetas, exchange = _close_pair(0.001), ModuloExchange(8, 4.0)
    exchange.share(thetas, [(0, 1)])
    thetas[1][5] += 1.0
    shared = exchange.share(thetas, [(0, 1)])
    assert shared.resent_blocks == 2
    assert float((shared.decoded[1] - thetas[1]).abs().max()) < 0.03
    torch.testing.assert_close(shared.decoded[0][128:], thetas[0][128:], atol=1e-3, rtol=0)


def test_two_wraps_in_opposite_directions_do_not_hide_each_other():
    steps = torch.zeros(1, 128, dtype=torch.int64)
    wrapped = steps.clone()
    wrapped[0, 3], wrapped[0, 90] = 16, -16
    assert int(checksum(steps, 16)) != int(checksum(wrapped, 16))


def test_bytes_of_a_modulo_round_count_what_was_sent_again():
    thetas, exchange = _close_pair(0.001), ModuloExchange(4, 2.0)
    first = exchange.share(thetas, [(0, 1)])
    assert first.sent_bytes == 2 * (P + P / 128 * 2)
    later = exchange.share(thetas, [(0, 1)])
    expected = 2 * (P / 2 + P / 128 * 3) + later.resent_blocks * 130
    assert later.sent_bytes == expected


@pytest.mark.parametrize(
    "code", ["fp32", "bf16", "int8", "int8-diff", "int4", "modulo8", "modulo4"]
)
def test_every_code_is_read_near_what_was_sent(code):
    thetas = _close_pair(0.01)
    shared = exchange_of(code).share(thetas, [(0, 1)])
    step = float(thetas[0].abs().max()) / 7
    assert float((shared.decoded[0] - thetas[0]).abs().max()) < 0.6 * step


def test_differences_are_int8_to_the_bit_and_take_fewer_bytes_from_the_second_round_on():
    thetas, packed = _close_pair(0.001), exchange_of("int8-diff")
    sizes = []
    for _ in range(2):
        shared, plain = (one.share(thetas, [(0, 1)]) for one in (packed, exchange_of("int8")))
        assert all(map(torch.equal, shared.codes, plain.codes))
        sizes.append(shared.sent_bytes / plain.sent_bytes)
    assert sizes[0] == 1
    assert sizes[1] < 0.5
    thetas[1][5:140] += 0.1
    shared = packed.share(thetas, [(0, 1)])
    assert shared.resent_blocks == 4


def test_what_no_sum_shows_is_sent_whole_after_the_digest_was_wrong(monkeypatch):
    thetas, packed = _close_pair(0.001), exchange_of("int8-diff")
    packed.share(thetas, [(0, 1)])
    usual = packed.share(thetas, [(0, 1)])
    assert usual.resent_blocks == 0
    monkeypatch.setattr(
        differences, "unpack", lambda packed, reader, found: np.zeros(blocks_of(found.size), bool)
    )
    shared = packed.share(thetas, [(0, 1)])
    blocks = P // BLOCK
    assert shared.resent_blocks == 2 * blocks
    assert shared.sent_bytes == usual.sent_bytes + 2 * (P + -(-blocks // 8))


@pytest.mark.parametrize("setting", [SMOKE, SHORT, LONG, FULL, SHORT_LATE, FULL_LATE])
def test_all_arms_train_whole_rounds(setting):
    names = CODE_ARMS if setting.trained_steps else STUDY_ARMS
    for name in (*names, "fp32-4h"):
        assert setting.steps % ARMS[name].inner_steps(setting.inner_steps) == 0, name


def test_the_study_has_at_most_twenty_arms():
    assert len(STUDY_ARMS) <= 20


def test_differences_are_of_equal_seeds():
    runs = {
        "noloco": {0: _result("noloco", 0, 2.0), 1: _result("noloco", 1, 3.0)},
        "int8": {1: _result("int8", 1, 3.001), 2: _result("int8", 2, 9.0)},
    }
    assert paired("int8", runs, "noloco") == pytest.approx([0.001])
    (goal,) = findings.code_goals(runs)
    assert goal.met
    runs["int8"][1].losses = [3.01]
    (goal,) = findings.code_goals(runs)
    assert not goal.met


def test_the_gap_to_ddp_is_told_step_by_step():
    losses = {"ddp": 1.0, "plain-all-h1": 1.1, "plain-all": 1.3, "plain": 1.6, "noloco": 1.5}
    runs = {name: {0: _result(name, 0, loss)} for name, loss in losses.items()}
    told = findings.explanation(runs)
    assert [line.split()[-2] for line in told] == ["+0.1000", "+0.2000", "+0.3000", "-0.1000"]
    (whole,) = findings.explanation({name: runs[name] for name in ("ddp", "noloco")})
    assert "+0.5000" in whole


def test_a_result_of_another_size_does_not_count(tmp_path):
    path = tmp_path / "runs.jsonl"
    store = Store(path, SMOKE, Result)
    arm = ARMS["noloco"]
    result = Result(arm=told(arm), setting=asdict(SMOKE), seed=0, parameters=1, losses=[1.0])
    store.save(arm, result)
    assert store.load(arm, 0) is not None
    assert store.load(arm, 1) is None
    assert Store(path, replace(SMOKE, steps=32), Result).load(arm, 0) is None


def test_a_result_made_before_an_arm_had_a_choice_is_of_the_default(tmp_path):
    store = Store(tmp_path / "runs.jsonl", SMOKE, Result)
    arm = {name: value for name, value in told(ARMS["noloco"]).items() if name != "gamma"}
    store.save(ARMS["noloco"], Result(arm, asdict(SMOKE), 0, 1, losses=[1.0]))
    assert store.load(ARMS["noloco"], 0) is not None
    assert store.load(replace(ARMS["noloco"], gamma=1.0), 0) is None


def test_stacked_replicas_train_as_looped_ones_do(world):
    looped = LoopedReplicas(world.spec, 2, world.vocabulary, CPU, "fp32", 1)
    stacked = StackedReplicas(world.spec, 2, world.vocabulary, CPU, "fp32")
    tokens = np.random.default_rng(0).integers(0, 256, (3, 2, 2, 17))
    for blocks_NBT in tokens:
        looped.step(blocks_NBT, 1e-2)
        stacked.step(blocks_NBT, 1e-2)
    # A weight moves by 1e-2 in a step; where a gradient is next to nothing, its rounding shows.
    for one, other in zip(looped.thetas, stacked.thetas, strict=True):
        torch.testing.assert_close(one, other, atol=5e-4, rtol=0)
    assert not torch.equal(stacked.thetas[0], stacked.thetas[1])


def test_only_active_replicas_move(world):
    replicas = StackedReplicas(world.spec, 3, world.vocabulary, CPU, "fp32")
    before = [theta_P.clone() for theta_P in replicas.thetas]
    replicas.step(np.random.default_rng(0).integers(0, 256, (2, 1, 17)), 1e-2, [0, 2])
    moved = [not torch.equal(old, new) for old, new in zip(before, replicas.thetas, strict=True)]
    assert moved == [True, False, True]


@pytest.mark.slow
def test_arms_differ_as_they_should(world):
    found = {name: train_arm(world, ARMS[name]) for name in ("noloco", "diloco", "int8", "ddp")}
    results = {name: result for name, (result, _) in found.items()}
    assert results["noloco"].deviations[-1][2] > 1e-5
    assert results["diloco"].deviations[-1][2] < 1e-7
    assert 0 < abs(results["int8"].loss - results["noloco"].loss) < 0.01
    assert results["int8"].bytes_per_parameter == pytest.approx(4 * (1 + 2 / 128))
    assert results["ddp"].bytes_per_parameter == pytest.approx(16 * 4 * 2 * 3 / 4)
    assert len(results["noloco"].losses) == 4
    assert [step for step, _, _ in results["noloco"].curve] == [8, 16]


@pytest.mark.slow
def test_fragments_in_pairs_send_as_much_as_whole_models(world):
    streaming = replace(ARMS["int8"], blocks_per_fragment=1, delay=0.5)
    found, mean_P = train_arm(world, streaming)
    whole, whole_P = train_arm(world, replace(ARMS["int8"], delay=0.5))
    rounds = SMOKE.steps // SMOKE.inner_steps
    assert len(found.deviations) == rounds
    assert found.deviations[-1][2] > 1e-5
    # What has a moment of its own is sent once more at the end.
    assert 1 < found.bytes_per_parameter / whole.bytes_per_parameter < 1 + 1 / rounds
    assert found.loss == pytest.approx(whole.loss, abs=0.1)
    assert not torch.equal(mean_P, whole_P)
    assert train_arm(world, streaming)[0].losses == found.losses


@pytest.mark.slow
def test_a_gamma_of_its_own_pulls_harder_and_doubles_the_bytes(world):
    found = {gamma: train_arm(world, replace(ARMS["noloco"], gamma=gamma))[0] for gamma in (0.7, 1)}
    assert found[1].bytes_per_parameter == 2 * found[0.7].bytes_per_parameter
    assert found[1].deviations[-1][2] != found[0.7].deviations[-1][2]
    assert found[0.7].losses == train_arm(world, ARMS["noloco"])[0].losses


@pytest.mark.slow
def test_a_rate_of_its_own_changes_the_pace_alone(world):
    usual, _ = train_arm(world, ARMS["noloco"])
    slower, _ = train_arm(world, replace(ARMS["noloco"], rate_of=0.5))
    assert [point[1] / 2 for point in usual.deviations] == [p[1] for p in slower.deviations]
    assert slower.tokens == usual.tokens


@pytest.mark.slow
def test_vectors_that_come_late_find_training_gone_on(world):
    late = replace(ARMS["noloco"], delay=0.5)
    result, mean_P = train_arm(world, late)
    _, blocking_P = train_arm(world, ARMS["noloco"])
    assert [point[0] for point in result.deviations] == [6, 10, 14, 16]
    assert not torch.equal(mean_P, blocking_P)
