"""Replicas trained by recorded pairings: what a program says is what is trained and merged."""

import pytest

from bench.gossip_learning import ARMS, COMPARED, goals
from bench.quality.arms import Arm
from bench.quality.pairings import (
    Pairings,
    Part,
    TrainedRound,
    free_pairings,
    machines,
    same_round_pairings,
)
from bench.quality.replay import Replay
from bench.quality.run import Result
from bench.quality.settings import SMOKE
from bench.quality.world import World

H = SMOKE.inner_steps
PLAIN = Arm("plain", alpha=0.0, beta=1.0)


def equal_rounds(num_peers: int, merges: list[tuple[Part, ...]]) -> Pairings:
    rounds = [
        [TrainedRound(H, (number + 1.0) * H) for number in range(10)] for _ in range(num_peers)
    ]
    return Pairings(rounds, merges, [0.0])


def distance_of(replay: Replay) -> float:
    one, other = replay.thetas
    return float((one - other).norm())


@pytest.mark.slow
@pytest.mark.parametrize("late_steps", [0, H // 2])
def test_a_merge_brings_both_to_their_mean_and_keeps_what_was_trained_meanwhile(
    world: World, late_steps: int
) -> None:
    last = SMOKE.steps // H - 2 if late_steps else SMOKE.steps // H - 1
    both = Part(0, last, late_steps), Part(1, last, late_steps)
    apart = Replay(world, PLAIN, equal_rounds(2, []))
    apart.train()
    met = Replay(world, PLAIN, equal_rounds(2, [both]))
    met.train()
    assert met.result.tokens == apart.result.tokens
    distance, far = distance_of(met), distance_of(apart)
    assert far > 0
    assert distance < 1e-5 * far if not late_steps else 0 < distance < far


@pytest.mark.slow
def test_a_replica_trains_its_own_steps_and_stops_at_the_end_of_the_run(world: World) -> None:
    slow = [TrainedRound(1, (number + 1.0) * H) for number in range(10)]
    pairings = Pairings([equal_rounds(1, []).rounds[0], slow], [], [0.0])
    replay = Replay(world, PLAIN, pairings)
    replay.train()
    steps = SMOKE.steps + SMOKE.steps // H
    assert replay.result.tokens == steps * world.spec.tokens_per_step


def test_a_merge_after_the_end_of_the_run_is_dropped() -> None:
    places = machines(4, 0.7, 0, H)
    for program in (free_pairings(places, 0, 160), same_round_pairings(places, 0, 160, 0.7)):
        for merge in program.merges:
            for part in merge:
                assert program.rounds[part.peer][part.round].end_step < 160


def test_programs_have_about_one_merge_per_round_and_peer_and_rise_with_it() -> None:
    places = machines(8, 0.25, 1, H)
    free, same = free_pairings(places, 1, 400), same_round_pairings(places, 1, 400, 0.25)
    for program in (free, same):
        parts = [part for merge in program.merges for part in merge]
        assert len(parts) == pytest.approx(8 * 400 / H, rel=0.1)
        for peer in range(8):
            rounds = [part.round for part in parts if part.peer == peer]
            assert rounds == sorted(set(rounds))
    assert free_pairings(places, 1, 400) == free


def test_free_gossip_is_compared_with_the_same_delay() -> None:
    for name, reference in COMPARED.items():
        assert ARMS[name].ratio == ARMS[reference].ratio
        assert (ARMS[name].pairing, ARMS[reference].pairing) == ("free", "same round")
    runs = {
        name: {seed: Result({}, {}, seed, 1, averaged_loss=1.0 + seed * loss) for seed in range(3)}
        for name, loss in (("free-0.7", 0.2), ("same-round-0.7", 0.1))
    }
    (goal,) = goals(runs)
    assert goal.measured == pytest.approx(0.1 / (0.1 / 3**0.5))
