"""The final averaging: all peers end with the mean of all, whoever dies, is late or sees others."""

import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio
from existing import existing
from gossip_tap import Tap, assert_both_or_neither, install
from swarm_worlds import distance, final_outcomes, simulated, start, toy_spec, with_holes

from peer.averaging.gossip.final_rounds import FinalMeetings, FinalRounds
from peer.facts import PeerState
from peer.observe.event_names import EventName
from peer.process.rejoin import JoinAgain
from peer.state.kept_files import Acquaintances
from protocol.gossip.final_averaging import MIN_WAIT_S
from protocol.gossip.matchmaking import WAIT_ROUNDS
from simulation.machine import Machine
from simulation.swarm import SimulatedSwarm, open_swarm
from simulation.trainer import SimulatedSpeed
from simulation.virtual_time import run_in_virtual_time

ROUNDS, INNER_STEPS, ROUND_S = 3, 10, 1.0


CODECS = ["fp32", "int8", "int8-diff"]


def replicas_before(
    swarm: SimulatedSwarm, monkeypatch: pytest.MonkeyPatch
) -> dict[str, npt.NDArray[Any]]:
    """Slow weights of each peer, by name, as they are when its meetings begin."""
    replicas: dict[str, npt.NDArray[Any]] = {}
    begin = FinalMeetings.begin

    def tapped(meetings: FinalMeetings, roster: str) -> None:
        begin(meetings, roster)
        own_id = meetings._exchanges.network.peer_id
        (peer,) = [each for each in swarm.peers.values() if each.peer_id == own_id]
        replicas[peer.name] = peer.slow_weights()

    monkeypatch.setattr(FinalMeetings, "begin", tapped)
    return replicas


def rounding(weights: npt.NDArray[Any]) -> float:
    """Root mean square of what int8 codes round off, at most."""
    return float(np.abs(weights).max() / 127 / np.sqrt(12))


def names(number: int) -> list[str]:
    return [f"p{place}" for place in range(number)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "num_meetings", "codec"),
    [  # each number of meetings with each codec, and each number of peers
        *[(2, 1, codec) for codec in CODECS],
        *[(3, 3, codec) for codec in CODECS],
        *[(5, 4, codec) for codec in CODECS],
        *[pytest.param(8, 3, codec, marks=pytest.mark.long) for codec in CODECS],
    ],
)
def test_all_peers_end_with_the_mean_of_all(tmp_path, monkeypatch, number, num_meetings, codec):
    @simulated()
    async def run() -> None:
        spec = toy_spec(ROUNDS, INNER_STEPS, codec=codec)
        async with open_swarm(1, spec, tmp_path) as swarm:
            replicas = replicas_before(swarm, monkeypatch)
            await start(swarm, *names(number))
            await swarm.finished()
            peers = list(swarm.peers.values())
            mean = np.mean([replicas[peer.name] for peer in peers], axis=0)
            apart = [np.sqrt(np.mean((replicas[peer.name] - mean) ** 2)) for peer in peers]
            assert min(apart) > 0.05  # they had trained on data of their own
            # Each meeting hands on codes of codes.
            noise = 1e-6 if codec == "fp32" else np.sqrt(num_meetings + 1) * rounding(mean)
            for peer in peers:
                assert set(final_outcomes(peer)) == {"averaged"}
                assert np.sqrt(np.mean((peer.slow_weights() - mean) ** 2)) <= noise
                assert distance(peer, peers[0]) <= 2 * noise
            assert max(len(final_outcomes(peer)) for peer in peers) == num_meetings
            ended = [peer.events(EventName.RUN_FINISHED)[0] for peer in peers]
            mean_loss = np.mean([event["replica_loss"] for event in ended])
            assert all(event["validation_loss"] <= mean_loss for event in ended)

    run()


async def killed_at(at: int, folder: Path, patch: pytest.MonkeyPatch) -> bool:
    """Five peers; one is killed at its operation `at` of its meetings. Whether it came so far."""
    tap = Tap(lambda: swarm["p1"], at=at)
    install(tap, patch)
    begin = FinalMeetings.begin

    def tapped(meetings: FinalMeetings, roster: str) -> None:
        begin(meetings, roster)
        tap.armed |= meetings._exchanges.network.peer_id == swarm["p1"].peer_id

    patch.setattr(FinalMeetings, "begin", tapped)
    async with open_swarm(1, toy_spec(ROUNDS, INNER_STEPS), folder) as swarm:
        tap.strike = lambda: swarm.kill("p1")
        await start(swarm, *names(5))
        await swarm.until(lambda: tap.armed)
        began_s = trio.current_time()
        await swarm.finished()
        others = [swarm[name] for name in names(5) if name != "p1"]
        for peer in others:
            assert peer.facts.state is PeerState.FINISHED
            assert "averaged" in final_outcomes(peer), at
            broken = [each for each in final_outcomes(peer) if each != "averaged"]
            assert set(broken) <= {"partner_lost", "unsettled"}, at
            assert len(broken) <= 2, at  # as often as it was to come
        losses = [existing(peer.facts.validation_loss) for peer in others]
        assert np.mean(losses) <= np.mean([existing(peer.facts.replica_loss) for peer in others]), (
            at
        )
        assert trio.current_time() - began_s < MIN_WAIT_S, at
        assert_both_or_neither(tap, *others)
    return tap.struck


@pytest.mark.long
@pytest.mark.slow
def test_a_member_killed_in_its_meetings_holds_nobody_up(tmp_path, monkeypatch):
    for at in itertools.count(1, 4):
        with monkeypatch.context() as patch:
            body = functools.partial(killed_at, at, tmp_path / str(at), patch)
            if not run_in_virtual_time(1, body):
                break
    assert at > 12


@simulated()
async def test_who_dies_before_the_meetings_is_not_waited_for(tmp_path):
    async with open_swarm(1, toy_spec(ROUNDS, INNER_STEPS), tmp_path) as swarm:
        await start(swarm, *names(4))
        await swarm.until(lambda: swarm["p1"].facts.step >= ROUNDS * INNER_STEPS - 5)
        swarm.kill("p1")
        await swarm.finished()
        others = [swarm[name] for name in ("p0", "p2", "p3")]
        for peer in others:
            (planned,) = peer.events(EventName.FINAL_AVERAGING)
            assert planned["peers"] == 3
            assert set(final_outcomes(peer)) == {"averaged"}
            assert distance(peer, others[0]) < 4 * rounding(peer.slow_weights())


@pytest.mark.slow
@simulated()
async def test_who_sees_another_roster_meets_random_peers(tmp_path, monkeypatch):
    roster = FinalRounds._roster

    async def without_one(finale: FinalRounds) -> list[str]:
        seen = await roster(finale)
        if finale._facts.peer_id == swarm["p1"].peer_id:
            seen.remove(swarm["p2"].peer_id)
        return seen

    monkeypatch.setattr(FinalRounds, "_roster", without_one)
    async with open_swarm(1, toy_spec(ROUNDS, INNER_STEPS), tmp_path) as swarm:
        await start(swarm, *names(4))
        await swarm.until(lambda: bool(swarm["p1"].events(EventName.FINAL_AVERAGING)))
        began_s = trio.current_time()
        await swarm.finished()
        assert trio.current_time() - began_s < 2 * MIN_WAIT_S
        peers = list(swarm.peers.values())
        refused: list[str] = []
        for peer in peers:
            refused += [e["reason"] for e in peer.events(EventName.PROPOSAL_REFUSED)]
            assert peer.facts.state is PeerState.FINISHED
            assert "averaged" in final_outcomes(peer), peer.name
        assert "other_roster" in refused
        losses = [existing(peer.facts.validation_loss) for peer in peers]
        assert np.mean(losses) <= np.mean([existing(peer.status().replica_loss) for peer in peers])


@pytest.mark.slow
@simulated()
async def test_with_views_full_of_holes_the_run_ends_and_replicas_come_closer(tmp_path):
    options = with_holes(3, 0.2)
    async with open_swarm(3, toy_spec(ROUNDS, INNER_STEPS), tmp_path, options) as swarm:
        await start(swarm, *names(6))
        await swarm.finished()
        peers = [peer for peer in swarm.peers.values() if peer.failure is None]
        assert len({e["peers"] for p in peers for e in p.events(EventName.FINAL_AVERAGING)}) > 1
        assert len(peers) >= 5
        assert all("averaged" in final_outcomes(peer) for peer in peers)
        losses = [existing(peer.facts.validation_loss) for peer in peers]
        assert np.mean(losses) <= np.mean([existing(peer.facts.replica_loss) for peer in peers])


@simulated()
async def test_who_was_cut_off_as_the_others_ended_joins_again(tmp_path):
    """It trains to the end alone; when it sees the others again they have finished."""
    async with open_swarm(1, toy_spec(ROUNDS + 20, INNER_STEPS), tmp_path) as swarm:
        await start(swarm, "a", "b", "c")
        await swarm.until(lambda: swarm["c"].facts.step >= 20)
        swarm.isolate("c")
        await swarm.until(lambda: swarm["c"].facts.training_averaged)
        assert not swarm["c"].view.alive(trio.current_time())
        await swarm.finished("a", "b")
        swarm.internet.heal()
        await swarm.finished()
        assert isinstance(swarm["c"].failure, JoinAgain), swarm["c"].failure
        remembered = Acquaintances(tmp_path / "c" / "neighbours.json").read()
        assert set() < {*remembered} <= {swarm[name].peer_id for name in "ab"}
        for name in "ab":
            assert final_outcomes(swarm[name]) == ["averaged"]


@simulated()
async def test_the_last_one_left_does_not_wait_for_ever(tmp_path):
    async with open_swarm(1, toy_spec(ROUNDS, INNER_STEPS), tmp_path) as swarm:
        await start(swarm, "a", "b")
        await swarm.until(lambda: swarm["b"].facts.step >= 10)
        swarm.kill("b")
        await swarm.until(lambda: swarm["a"].facts.training_averaged)
        ended_s = trio.current_time()
        await swarm.finished()
        assert swarm["a"].failure is None
        assert final_outcomes(swarm["a"]) == ["no_partner"]
        assert trio.current_time() - ended_s < MIN_WAIT_S + 1.0


@pytest.mark.long
@simulated()
async def test_who_is_too_slow_for_the_wait_takes_part_no_more_and_joins_again(tmp_path):
    async with open_swarm(1, toy_spec(ROUNDS, INNER_STEPS), tmp_path) as swarm:
        late = Machine(SimulatedSpeed(step_s=40.0))
        await start(swarm, "a", "b", "c", machine_of={"c": late})
        await swarm.finished("a", "b")
        await swarm.finished()
        c = swarm["c"]
        assert isinstance(c.failure, JoinAgain), c.failure
        for name in "ab":
            peer = swarm[name]
            (planned,) = peer.events(EventName.FINAL_AVERAGING)
            assert planned["peers"] == 2
            assert final_outcomes(peer) == ["averaged"]
            waited_s = planned["monotonic_s"] - peer.events(EventName.VALIDATED)[-2]["monotonic_s"]
            assert waited_s <= max(MIN_WAIT_S, WAIT_ROUNDS * ROUND_S) + 1.0
