"""The model of a corpus that comes to many peers."""

import pytest

from bench.corpus import PIECE_BYTES, Simulation, World, report

pytestmark = pytest.mark.slow


def test_peers_train_and_the_founder_is_not_needed_for_long() -> None:
    world = World(0.25, 4, 0.05, 0.5, 1000.0, 50.0, 200.0)
    simulation = Simulation(world)
    simulation.run()
    joiners = [peer for name, peer in simulation.peers.items() if name != "founder"]
    assert simulation.free_of_founder_s is not None
    assert not simulation.peers["founder"].alive
    for peer in joiners:
        assert peer.first_step_s is not None
        assert peer.done_steps > 150
        assert peer.down_free_s <= simulation.now_s + 60
    given = sum(peer.given for peer in simulation.peers.values())
    assert given == sum(peer.fetched for peer in joiners)
    assert given * PIECE_BYTES < 3 * 0.25e9
    assert "switched off" in report(simulation).notes[-1]


def test_a_line_that_is_too_thin_holds_up_training_and_is_counted() -> None:
    simulation = Simulation(World(0.25, 4, 0.05, 0.05, 5.0, 5.0, 5.0))
    simulation.run()
    joiners = [peer for name, peer in simulation.peers.items() if name != "founder"]
    assert all(peer.missing for peer in joiners)
    assert simulation.free_of_founder_s is None
    assert "needed to the end" in report(simulation).notes[-1]
