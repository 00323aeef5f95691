"""Swarms without harm: every round is averaged, and a seed makes one world."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from swarm_worlds import (
    assert_trains_on,
    distance,
    exchanges,
    final_outcomes,
    outcomes,
    partners,
    simulated,
    start,
    tally,
    toy_spec,
    training_outcomes,
    with_holes,
)

from peer.codec import compiled
from peer.facts import PeerState
from peer.observe.event_names import EventName
from simulation.swarm import open_swarm
from simulation.virtual_time import run_in_virtual_time

ROUNDS, FINAL = 4, 1


@simulated()
async def test_two_peers_average_every_round_and_finish(tmp_path):
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        await start(swarm, "a", "b")
        await swarm.finished()
        a, b = swarm["a"], swarm["b"]
        assert outcomes(a) == outcomes(b) == ["averaged"] * (ROUNDS + FINAL)
        assert set(partners(a).values()) == {b.peer_id}
        for peer in (a, b):
            status = peer.status()
            assert (status.state, status.round) == (PeerState.FINISHED, ROUNDS + FINAL - 1)
            assert status.outcomes.averaged == ROUNDS + FINAL
            assert dict(status.outcomes.skipped) == {}
            assert len(peer.timings) == ROUNDS + FINAL
            assert [e["round"] for e in peer.events(EventName.RUN_FINISHED)] == [ROUNDS + FINAL - 1]
            assert_trains_on(peer)
        assert len(list(exchanges(a, b))) == ROUNDS + FINAL
        # The final averaging brings the replicas together: both have the mean of the same codes.
        assert distance(a, b) < 2e-3
        assert a.status().validation_loss == pytest.approx(b.status().validation_loss, abs=1e-4)
        assert (
            (a.status().train_loss or math.inf) < 2.0 < a.events(EventName.ROUND_CLOSED)[0]["loss"]
        )


@pytest.mark.slow
@simulated(seed=3)
async def test_eight_peers_average_every_round(tmp_path):
    async with open_swarm(3, toy_spec(ROUNDS), tmp_path) as swarm:
        names = [f"p{i}" for i in range(8)]
        await start(swarm, *names)
        await swarm.finished()
        peers = [swarm[name] for name in names]
        for peer in peers:
            assert final_outcomes(peer) == ["averaged"] * 3
            assert_trains_on(peer)
        counted = tally(*peers, after=0)
        assert counted.total() >= 8 * (ROUNDS + 3 - 2)
        # The last to end may find that all others have.
        assert counted["averaged"] >= counted.total() - 1, counted
        assert len(list(exchanges(*peers))) == tally(*peers)["averaged"] / 2


@simulated()
async def test_of_three_peers_none_is_left_over(tmp_path):
    rounds = 8
    async with open_swarm(1, toy_spec(rounds), tmp_path) as swarm:
        await start(swarm, "a", "b", "c")
        await swarm.finished()
        peers = [swarm[name] for name in "abc"]
        for peer in peers:
            assert_trains_on(peer)
            *trained, last = training_outcomes(peer)
            assert trained == ["averaged"] * (len(trained))
            assert rounds - 2 <= len(trained) <= rounds
            # Of the last rounds one may be left over: the others have ended, and wait for it.
            assert last in {"averaged", "no_partner"}
        assert sorted(len(final_outcomes(peer)) for peer in peers) == [1, 2, 3]
        assert {outcome for peer in peers for outcome in final_outcomes(peer)} == {"averaged"}
        assert len(list(exchanges(*peers))) == tally(*peers)["averaged"] / 2


@simulated()
async def test_a_peer_alone_trains_with_no_partner(tmp_path):
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        await start(swarm, "a")
        await swarm.finished()
        assert outcomes(swarm["a"]) == ["no_partner"] * (ROUNDS + FINAL)
        assert (swarm["a"].status().train_loss or math.inf) < 2.0


@simulated()
async def test_it_is_told_what_codes_vectors(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "COMPILED_FROM", 128)
    monkeypatch.setitem(sys.modules, "peer.codec.int8_kernels", None)
    compiled.kernels_of.cache_clear()
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        await start(swarm, "a")
        await swarm.finished()
        a = swarm["a"]
        (chosen,) = a.events(EventName.CODEC_CHOSEN)
        (started,) = a.events(EventName.TRAINER_STARTED)
        why = "ModuleNotFoundError: import of peer.codec.int8_kernels halted; None in sys.modules"
        assert (chosen["codec"], chosen["loops"]) == ("int8", f"plain: {why}")
        assert started["codec"] == "plain"
        assert a.status().codec == f"int8: daemon plain: {why}, trainer plain"
        assert a.report.now().facts.loops == {"trainer": "plain", "daemon": f"plain: {why}"}
    compiled.kernels_of.cache_clear()


def event_log(seed: int, folder: Path) -> bytes:
    """Of a small swarm with everything that is drawn: jitter, holes, latencies, noise."""

    async def body() -> bytes:
        options = with_holes(seed, 0.2)
        async with open_swarm(seed, toy_spec(3, 10), folder, options) as swarm:
            await start(swarm, "a", "b", "c", "d")
            swarm.kill("b")
            await swarm.finished("a", "c", "d")
            return swarm.event_log()

    return run_in_virtual_time(seed, body)


@pytest.mark.slow
def test_the_same_seed_makes_the_same_event_log(tmp_path):
    first = event_log(3, tmp_path / "first")
    assert len(first.splitlines()) > 100
    assert event_log(3, tmp_path / "second") == first
    assert event_log(4, tmp_path / "third") != first


@pytest.mark.long
@pytest.mark.slow
def test_the_event_log_does_not_depend_on_the_process(tmp_path):
    code = (
        "import sys; from pathlib import Path; from test_swarm import event_log;"
        "sys.stdout.buffer.write(event_log(3, Path(sys.argv[1])))"
    )

    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", code, str(tmp_path / "there")]
    ran = subprocess.run(command, env=environment, check=True, capture_output=True)
    assert ran.stdout == event_log(3, tmp_path / "here")  # whose hash seed was drawn
