"""A partner is killed or cancelled, or a stream is cut, at every step of an exchange."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio
from existing import existing
from gossip_tap import Tap, assert_both_or_neither, install
from swarm_worlds import (
    assert_trains_on,
    distance,
    final_outcomes,
    outcomes,
    skips,
    start,
    tally,
    toy_spec,
)

from peer.averaging.gossip import exchanges
from peer.facts import PeerState
from peer.observe.event_names import EventName
from protocol.wire import pieces
from simulation.machine import Machine
from simulation.network import LinkModel
from simulation.swarm import SimulatedPeer, SimulatedSwarm, SwarmOptions, open_swarm
from simulation.trainer import SimulatedSpeed
from simulation.virtual_time import run_in_virtual_time

ROUNDS, INNER_STEPS, STEP_S = 3, 6, 1.3
VECTORS = SwarmOptions(padded_parameters=68 * 1024, link=LinkModel(0.02, bandwidth_bytes_per_s=2e6))
"""A vector is several segments long: it can be cut off in the middle."""
MACHINE = Machine(SimulatedSpeed(step_s=STEP_S))
LONGEST_SKIP_S = 3.0
"""To notice that a partner is gone."""


async def harmed_swarm(
    seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch, at: int, harm: str
) -> tuple[SimulatedSwarm, Tap]:
    """Three peers; `b` is harmed at its operation number `at` after the first round."""
    tap = Tap(lambda: swarm["b"], at=at)
    with monkeypatch.context() as patch:
        install(tap, patch)
        async with open_swarm(seed, toy_spec(ROUNDS, INNER_STEPS), folder, VECTORS) as swarm:
            tap.strike = {
                "kill": lambda: swarm.kill("b"),
                "cut": lambda: existing(tap.struck_at).lose("cut by the test"),
                "cancel": lambda: swarm["b"].scope.cancel(),  # noqa: PLW0108 - there is no b yet
                "leave": lambda: swarm["b"].peer.request_stop(),  # noqa: PLW0108
            }[harm]
            await start(swarm, *"abc", machine_of=dict.fromkeys("abc", MACHINE))
            await swarm.until(lambda: len(outcomes(swarm["b"])) == 1)
            tap.armed = True
            await swarm.finished()
            await trio.sleep(20.0)  # whatever is left of a task or a stream has ended by then
    return swarm, tap


def operations_of_a_round(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many operations there are to strike at, in about one round."""
    swarm, tap = run_in_virtual_time(
        seed, lambda: harmed_swarm(seed, folder, monkeypatch, -1, "kill")
    )
    assert tally(swarm["b"], after=0)["averaged"] > 0
    return tap.operations // (len(outcomes(swarm["b"])) - 1)


def assert_ended_well(peer: SimulatedPeer) -> None:
    """It trained all the while, to the end of the run, and each round has ended in one way."""
    assert peer.facts.state is PeerState.FINISHED
    assert peer.facts.step == ROUNDS * INNER_STEPS
    closed = [event["round"] for event in peer.events(EventName.ROUND_CLOSED)]
    ended = peer.events(EventName.ROUND_AVERAGED, EventName.ROUND_SKIPPED)
    assert [event["round"] for event in ended] == closed == list(range(len(closed)))
    assert_trains_on(peer, STEP_S)
    assert np.isfinite(peer.slow_weights()).all()
    assert not peer.facts.faults, "what lines and machines do is nobody's fault"


def striped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the vectors travel in pieces, on streams of their own."""
    monkeypatch.setattr(exchanges, "STRIPE_FROM_BYTES", 1)
    for module in (exchanges, pieces):
        monkeypatch.setattr(module, "PIECE_BYTES", 4096)


# In each of these worlds `b` has a partner in the round in which it is harmed. One is harmed at its
# odd operations, the other at its even ones.
WORLDS = pytest.mark.parametrize(
    ("seed", "every", "pieces_"),
    [
        (1, 2, False),
        pytest.param(2, 2, False, marks=pytest.mark.long),
        pytest.param(1, 17, True, marks=pytest.mark.long),
    ],
)


@pytest.mark.slow
@WORLDS
def test_a_partner_killed_at_any_operation_costs_the_others_one_skip(
    seed, every, pieces_, tmp_path, monkeypatch
):
    if pieces_:
        striped(monkeypatch)
    last = operations_of_a_round(seed, tmp_path / "whole", monkeypatch)
    reasons = set()
    for at in range(seed, last + 1, every):
        swarm, tap = run_in_virtual_time(
            seed, partial(harmed_swarm, seed, tmp_path / str(at), monkeypatch, at, "kill")
        )
        assert tap.struck
        a, c = swarm["a"], swarm["c"]
        for peer in (a, c):
            assert_ended_well(peer)
            broken = [reason for reason in skips(peer) if reason != "no_partner"]
            reasons |= set(broken)
            assert len(broken) <= 1, (at, outcomes(peer))
            assert final_outcomes(peer) == ["averaged"], (at, outcomes(peer))
            assert all(t.exchange_s < LONGEST_SKIP_S for t in peer.timings), at
            assert len(peer.network.streams) <= 2, at  # the link with the other
        assert_both_or_neither(tap, a, c)
        assert distance(a, c) < 5e-3, at
    assert "partner_lost" in reasons


@pytest.mark.slow
@WORLDS
def test_a_stream_cut_at_any_operation_leaves_both_sides_averaged_unless_one_is_unsettled(
    seed, every, pieces_, tmp_path, monkeypatch
):
    if pieces_:
        striped(monkeypatch)
    last = operations_of_a_round(seed, tmp_path / "whole", monkeypatch)
    kinds = set()
    for at in range(seed, last + 1, every):
        swarm, tap = run_in_virtual_time(
            seed, partial(harmed_swarm, seed, tmp_path / str(at), monkeypatch, at, "cut")
        )
        assert tap.struck
        peers = [swarm[name] for name in "abc"]
        assert_both_or_neither(tap, *peers)
        for peer in peers:
            assert_ended_well(peer)
            broken = [reason for reason in skips(peer) if reason != "no_partner"]
            assert len(broken) <= 1, (at, outcomes(peer))
            kinds |= set(broken)
    assert {"partner_lost"} <= kinds <= {"partner_lost", "unsettled"}


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["cancel", pytest.param("leave", marks=pytest.mark.long)])
def test_a_peer_that_ends_at_any_operation_leaves_nothing_behind(harm, tmp_path, monkeypatch):
    last = operations_of_a_round(1, tmp_path / "whole", monkeypatch)
    for at in range(1, last + 1, 3):
        swarm, tap = run_in_virtual_time(
            1, partial(harmed_swarm, 1, tmp_path / str(at), monkeypatch, at, harm)
        )
        assert tap.struck
        b = swarm["b"]
        assert b.ended.is_set()
        assert b.failure is None
        assert len(b.network.streams) == 0, at
        assert_both_or_neither(tap, swarm["a"], swarm["c"])
        for peer in (swarm["a"], swarm["c"]):
            assert_ended_well(peer)
            broken = [reason for reason in skips(peer) if reason != "no_partner"]
            assert len(broken) <= 1, (at, outcomes(peer))
            assert final_outcomes(peer) == ["averaged"], (at, outcomes(peer))
