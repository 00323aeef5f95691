"""GASLoC in a simulated swarm: the way works by its row alone."""

from pathlib import Path

from existing import existing
from swarm_worlds import distance, simulated, start, tally, toy_spec

from peer.observe.status import PeerState
from peer.simulation.swarm import open_swarm

ROUNDS = 5


@simulated()
async def test_a_swarm_averages_learns_and_ends_with_one_model(tmp_path: Path) -> None:
    spec = toy_spec(ROUNDS, method="gasloc", gasloc={"momentum": 0.3})
    async with open_swarm(1, spec, tmp_path) as swarm:
        await start(swarm, "a", "b", "c", "d")
        await swarm.finished()
        peers = [swarm[name] for name in "abcd"]
        assert all(peer.facts.state is PeerState.FINISHED for peer in peers)
        counted = tally(*peers)
        assert counted["averaged"] >= 0.9 * counted.total(), counted
        # Two meetings, so what int8 rounds off is between them, and nothing more.
        assert max(distance(peers[0], other) for other in peers) < 2e-2
        assert all(existing(peer.facts.validation_loss) < 1.2 for peer in peers)


@simulated()
async def test_a_joiner_takes_over_slow_weights_and_buffer(tmp_path: Path) -> None:
    async with open_swarm(1, toy_spec(8, method="gasloc"), tmp_path) as swarm:
        await start(swarm, "a", "b")
        await swarm.until(lambda: swarm["a"].facts.step >= 60)
        swarm.join("c", through=["b"])
        await swarm.finished()
        assert tally(swarm["c"])["averaged"] > 2
        assert distance(swarm["a"], swarm["c"]) < 2e-2
