"""The parts of bench.hostile that decide what its figures mean."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_texts import small_texts

from bench.lies import findings
from bench.lies.arms import ARMS, CONTRIBUTED, NONE, OWNED, PEERS, SHARES, TRIMMED, Way
from bench.lies.figures import Figures
from bench.lies.fragments import FragmentSwarm
from bench.lies.liars import FAR, HUGE, JUST_BELOW, Liars, Scene, rms
from bench.lies.pairs import GossipSwarm
from bench.lies.pieces import Pieces
from bench.lies.run import HostileResult, train_hostile_arm
from bench.lies.settings import HOSTILE, SMOKE_HOSTILE
from bench.lies.time_of import DefenceTime, time_of_defences
from bench.quality.world import World
from peer.codec import get_codec
from peer.network.identity import Identity
from peer.training.model import FlatModel, initial_module

SPEC = SMOKE_HOSTILE.spec(0)
IDENTITIES = [Identity(bytes([n + 1]) * 32) for n in range(PEERS)]
MOVE = torch.tensor([0.5, -1.0, 2.0] * 128)
HONEST = [MOVE, 3 * MOVE, torch.ones(384)]
SCENE = Scene(0, MOVE, HONEST, reach=7.0)


def lied(attack: str, scene: Scene = SCENE) -> torch.Tensor:
    return Liars(attack, seed=0).lied_move(scene)


def test_flips_and_scales_are_multiples_of_the_move():
    for attack, factor in {"flip": -1, "scale-10": 10, "scale-100": 100}.items():
        torch.testing.assert_close(lied(attack), factor * MOVE)


def test_noise_is_ten_times_as_long_and_has_no_direction():
    noise = lied("noise")
    assert rms(noise) == pytest.approx(10 * rms(MOVE), rel=1e-5)
    assert abs(torch.cosine_similarity(noise, MOVE, dim=0)) < 0.2
    torch.testing.assert_close(noise, lied("noise"))


def test_inner_product_manipulation_is_as_long_as_an_honest_move():
    mean = torch.stack(HONEST).mean(0)
    assert torch.cosine_similarity(lied("inner"), mean, dim=0) == pytest.approx(-1.0)
    assert rms(lied("inner")) == pytest.approx(sorted(map(rms, HONEST))[1], rel=1e-5)


def test_colluders_push_in_one_direction_as_far_as_is_let_through():
    liars = Liars("collude", seed=0)
    first = liars.lied_move(SCENE)
    later = liars.lied_move(Scene(0, -MOVE, [torch.randn(384)], reach=14.0))
    assert rms(first) == pytest.approx(JUST_BELOW * SCENE.reach, rel=1e-5)
    torch.testing.assert_close(later, 2 * first)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_codes_that_are_no_numbers_are_not_valid_and_huge_ones_are(codec):
    pieces = Pieces(get_codec(codec), [256, 128])
    assert not pieces.are_valid(Liars("nan", seed=0).lied_codes("a", MOVE, pieces))
    huge = Liars("huge", seed=0).lied_codes("a", MOVE, pieces)
    assert pieces.are_valid(huge)
    assert float(pieces.decoded(huge).min()) == pytest.approx(HUGE, rel=0.01)


def test_a_replay_is_what_that_liar_sent_first():
    liars, pieces = Liars("replay", seed=0), Pieces(get_codec("fp32"), [384])
    first = liars.lied_codes("a", MOVE, pieces)
    assert liars.lied_codes("a", 2 * MOVE, pieces) is first
    assert liars.lied_codes("b", 2 * MOVE, pieces) is not first


def test_owners_turn_averages_round():
    near = Liars("owner-near", seed=0).owned_average(MOVE, 7.0)
    assert rms(near) == pytest.approx(JUST_BELOW * 7.0, rel=1e-5)
    assert torch.cosine_similarity(near, MOVE, dim=0) == pytest.approx(-1.0)
    torch.testing.assert_close(Liars("owner-far", seed=0).owned_average(MOVE, 7.0), -FAR * MOVE)
    assert Liars("flip", seed=0).owned_average(MOVE, 7.0) is MOVE


def test_pieces_are_coded_one_by_one():
    pieces, codec = Pieces(get_codec("int8"), [256, 128]), get_codec("int8")
    codes = pieces.encoded(MOVE)
    alone = torch.empty(codec.code_bytes(128), dtype=torch.uint8)
    codec.encode(MOVE[256:], alone)
    assert torch.equal(codes[codec.code_bytes(256) :], alone)
    torch.testing.assert_close(pieces.decoded(codes), MOVE, atol=0.02, rtol=0)


# --- arms -----------------------------------------------------------------------------------------
def test_every_attack_of_every_share_has_its_reference_and_an_arm_without_defences():
    for arm in ARMS.values():
        assert ARMS[arm.reference].honest == arm.honest
        if arm.attack != NONE:
            name = arm.name.removesuffix("-off").removesuffix("-audited").removesuffix("-trim")
            other = name if arm.defence == "off" else f"{name}-off"
            assert (ARMS[other].attack, ARMS[other].liars) == (arm.attack, arm.liars)
    trimmed = 1 + 2 * len(TRIMMED)
    assert len(ARMS) == 2 * (6 + 4 * len(CONTRIBUTED)) + 6 * len(OWNED) + trimmed
    assert [PEERS - liars for liars in SHARES] == [14, 11]


@pytest.mark.parametrize("setting", [HOSTILE, SMOKE_HOSTILE], ids=lambda setting: setting.name)
def test_settings_have_whole_rounds_of_all_peers(setting):
    assert setting.steps % setting.inner_steps == 0
    assert (setting.replicas, setting.trained_steps > 0) == (PEERS, True)


# --- the two ways ---------------------------------------------------------------------------------
def models(count: int) -> list[FlatModel]:
    made = [FlatModel(initial_module(SPEC, 64), torch.device("cpu")) for _ in range(count)]
    for model in made[1:]:
        model.theta_P.copy_(made[0].theta_P)
    return made


def train(models: list[FlatModel], swarm: GossipSwarm | FragmentSwarm, rounds: int) -> None:
    """Steps that lead nowhere, of about one length."""
    generator = torch.Generator().manual_seed(1)
    for step in range(1, rounds * SPEC.sync.round_steps + 1):
        for model in models:
            model.theta_P.add_(torch.randn(model.theta_P.shape, generator=generator), alpha=1e-3)
        swarm.after_step(step)
    swarm.settle()


def gossip(name: str, rounds: int = 8) -> tuple[GossipSwarm, torch.Tensor]:
    arm = ARMS[f"pairs-{name}"]
    made = models(PEERS - arm.absent)
    start_P = made[0].theta_P.clone()
    names = [identity.peer_id for identity in IDENTITIES[: len(made)]]
    swarm = GossipSwarm([model.theta_P for model in made], SPEC, arm, names)
    train(made, swarm, rounds)
    return swarm, torch.stack(swarm.judged()).mean(0) - start_P


def fragments(name: str, rounds: int = 6) -> tuple[FragmentSwarm, torch.Tensor]:
    arm = ARMS[f"fragments-{name}"]
    made = models(PEERS - arm.absent)
    start_P = made[0].theta_P.clone()
    swarm = FragmentSwarm(made, SPEC, arm, IDENTITIES)
    train(made, swarm, rounds)
    return swarm, swarm.judged()[0] - start_P


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["nan", "huge", "scale-100"])
def test_defended_pairs_skip_what_is_no_number_or_far_away(attack):
    swarm, way = gossip(f"{attack}-5")
    clean, clean_way = gossip("none-11")
    assert swarm.figures.lost_by_liars > 0
    assert rms(way) < 2 * rms(clean_way)
    assert clean.figures.liars_share == 0
    assert len(swarm.judged()) == 11


@pytest.mark.slow
def test_pairs_without_defences_take_what_is_far_away():
    swarm, way = gossip("scale-100-5-off")
    assert swarm.figures.lost_share == 0
    assert swarm.figures.liars_share > 0.1
    assert rms(way) > 5 * rms(gossip("scale-100-5")[1])


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["nan", "huge", "owner-far"])
def test_defended_fragments_stay_where_they_are(attack):
    swarm, way = fragments(f"{attack}-5")
    assert rms(way) < 5 * rms(fragments("none-11")[1])
    assert (swarm.figures.lost > 0) == (attack == "owner-far")


@pytest.mark.slow
def test_fragments_without_defences_go_where_liars_want():
    assert rms(fragments("owner-far-5-off")[1]) > 5 * rms(fragments("owner-far-5")[1])
    assert fragments("collude-5-off")[0].figures.liars_share == pytest.approx(5 / 16)


@pytest.mark.slow
def test_trimmed_means_stay_nearer_to_what_the_honest_alone_do():
    _, alone = fragments("none-14")
    _, pushed = fragments("collude-2")
    _, trimmed = fragments("collude-2-trim")
    assert rms(trimmed - alone) < 0.9 * rms(pushed - alone)


def test_figures_count_weights_of_liars_in_means():
    figures = Figures()
    figures.note_averaged(0.5)
    figures.note_averaged(0.0)
    figures.note_lost(by_liar=True)
    figures.note_lost(by_liar=False)
    figures.note_honest(1.0)
    figures.note_honest(0.7)
    assert (figures.liars_share, figures.lost_share, figures.clipped_share) == (0.25, 0.5, 0.5)
    assert figures.lost_by_liars == 1


# --- one run, and what is said of it --------------------------------------------------------------
@pytest.mark.slow
def test_a_run_judges_the_honest_and_one_that_leaves_all_numbers_is_said_to(tmp_path):
    texts = tmp_path / "texts"
    setting = replace(SMOKE_HOSTILE, source=small_texts(texts, 60), steps=8)
    world = World.open(setting, 0, tmp_path / "cache")
    start_P = FlatModel(
        initial_module(world.spec, world.vocabulary), torch.device("cpu")
    ).theta_P.clone()
    found = train_hostile_arm(world, ARMS["pairs-flip-2"], start_P)
    assert len(found.losses) == 14
    assert not found.diverged
    assert np.isfinite([found.start_loss, found.averaged_loss, found.fast_loss]).all()
    again = train_hostile_arm(world, ARMS["pairs-flip-2"], start_P)
    assert again.losses == found.losses
    assert train_hostile_arm(world, ARMS["fragments-huge-5-off"], start_P).diverged


def result(arm: str, loss: float, seed: int = 0) -> HostileResult:
    return HostileResult({"name": arm}, {}, seed, 1, start_loss=2.0, losses=[loss])


def test_costs_are_those_of_the_worst_attack_against_the_same_honest_peers():
    runs = {
        "pairs-none-16": {0: result("", 1.900)},
        "pairs-none-16-off": {0: result("", 1.899)},
        "pairs-none-14": {0: result("", 1.91), 1: result("", 1.92, 1)},
        "pairs-none-11": {0: result("", 1.93)},
        "pairs-flip-2": {0: result("", 1.915), 1: result("", 1.927, 1)},
        "pairs-inner-2": {0: result("", 1.95), 1: result("", 1.94, 1)},
        "pairs-collude-5": {0: result("", 2.6)},
        "pairs-huge-5-off": {0: result("", math.inf)},
    }
    times: dict[Way, DefenceTime] = {
        "pairs": DefenceTime(0.01, 1.0),
        "fragments": DefenceTime(0.1, 1.0),
    }
    goals = {goal.what: goal for goal in findings.goals(runs, times)}
    worst = goals["pairs, 2 liars: cost of the worst attack, inner (s.e. 0.0100)"]
    assert (round(worst.measured, 4), worst.met) == (0.03, False)
    diverged = goals["pairs, 5 liars: loss less the checkpoint's, worst, collude"]
    assert (round(diverged.measured, 4), diverged.met) == (0.6, False)
    assert goals["pairs, no liars: cost of the defences"].met
    assert goals["pairs: time of the defences, of an exchange"].met
    assert not goals["fragments: time of the defences, of an exchange"].met
    table = {(row["attack"], row["liars"], row["defences"]): row for row in findings.rows(runs)}
    assert table["inner", "2 of 16", "on"]["costs"] == "+0.0300"
    assert table["none", "0 of 14", "on"]["costs"] is None
    assert table["huge", "5 of 16", "off"]["costs"] == "no number"
    assert findings.notes(runs) == ["loss of the checkpoint: seed 0: 2.0000, seed 1: 2.0000"]


def test_defences_are_timed_for_both_ways():
    times = time_of_defences(1 << 14)
    assert set(times) == {"pairs", "fragments"}
    assert all(each.share > 0 for each in times.values())
