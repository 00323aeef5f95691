"""A partner is killed, cut off or cancelled at every step of an exchange: the other one goes on."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio
from gossip_tap import Tap, install
from swarm_worlds import distance, outcomes, skips, start, tally, toy_spec

from peer.averaging import outcome
from peer.network.simulated_link import LinkModel
from peer.simulation.machine import Machine
from peer.simulation.swarm import SimulatedSwarm, SwarmOptions, open_swarm
from peer.simulation.virtual_time import run_in_virtual_time
from peer.training.toy import SimulatedSpeed
from protocol import pieces

ROUNDS, FINAL = 3, 1
VECTORS = SwarmOptions(padded_parameters=68 * 1024, link=LinkModel(0.02, bandwidth_bytes_per_s=2e6))
"""A vector is several segments long: it can be cut off in the middle."""
MACHINE = Machine(SimulatedSpeed(step_s=1.3))
ROUND_S = 8.0
LONGEST_SKIP_S = 8.0
"""To notice that a partner is gone, and to ask in vain how it ended."""


async def harmed_swarm(
    seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch, at: int, harm: str
) -> tuple[SimulatedSwarm, Tap]:
    """Three peers; `b` is harmed at its operation number `at` after the first round."""
    tap = Tap(lambda: swarm["b"], at=at)
    with monkeypatch.context() as patch:
        install(tap, patch)
        async with open_swarm(
            seed, toy_spec(ROUNDS, 6, final_rounds=FINAL), folder, VECTORS
        ) as swarm:
            tap.strike = {
                "kill": lambda: swarm.kill("b"),
                "cancel": lambda: swarm["b"].scope.cancel(),  # noqa: PLW0108 - there is no b yet
                "leave": lambda: swarm["b"].peer.request_stop(),  # noqa: PLW0108
            }[harm]
            await start(swarm, *"abc", machine_of=dict.fromkeys("abc", MACHINE))
            await swarm.until(lambda: swarm["b"].facts.round == 1)
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
    return tap.operations // (ROUNDS + FINAL - 1)


# In each of these worlds `b` has a partner in the round in which it is killed.
@pytest.mark.slow
@pytest.mark.parametrize(("seed", "every", "striped"), [(1, 1, False), (2, 1, False), (1, 9, True)])
def test_a_partner_killed_at_any_operation_costs_the_others_one_skip(
    seed, every, striped, tmp_path, monkeypatch
):
    if striped:
        monkeypatch.setattr(outcome, "STRIPE_FROM_BYTES", 1)
        for module in (outcome, pieces):
            monkeypatch.setattr(module, "PIECE_BYTES", 4096)
    last = operations_of_a_round(seed, tmp_path / "whole", monkeypatch)
    reasons = set()
    for at in range(1, last + 1, every):
        swarm, tap = run_in_virtual_time(
            seed, partial(harmed_swarm, seed, tmp_path / str(at), monkeypatch, at, "kill")
        )
        assert tap.struck
        a, c = swarm["a"], swarm["c"]
        for peer in (a, c):
            assert len(outcomes(peer)) == ROUNDS + FINAL, at
            broken = [reason for reason in skips(peer) if reason != "no_partner"]
            reasons |= set(broken)
            assert len(broken) <= 1, (at, outcomes(peer))
            assert outcomes(peer)[-1:] == ["averaged"], (at, outcomes(peer))
            assert all(t.exchange_s < LONGEST_SKIP_S for t in peer.timings), at
            assert all(t.train_s < 1.3 * ROUND_S for t in peer.timings), at
            assert np.isfinite(peer.slow_weights()).all()
            assert peer.network.statistics().open_streams <= 2, at  # the link with the other
        assert distance(a, c) < 5e-3, at
    assert "partner_lost" in reasons


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["cancel", "leave"])
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
        assert b.network.statistics().open_streams == 0, at
        for peer in (swarm["a"], swarm["c"]):
            broken = [reason for reason in skips(peer) if reason != "no_partner"]
            assert len(broken) <= 1, (at, outcomes(peer))
            assert outcomes(peer)[-1:] == ["averaged"], (at, outcomes(peer))
