"""A stranger that talks nonsense about fragments: averages stay exact, and nobody stands still."""

import pytest
import trio
from missiles import fragment_missiles, missiles
from streaming_worlds import (
    LONGEST_ROUND_S,
    OPTIONS,
    assert_equal,
    contributors,
    fragment_spec,
    longest_round_s,
    returned,
)
from swarm_worlds import simulated, start

from peer.runtime import Network
from protocol.errors import LocoError
from protocol.wire.versions import FRAGMENT
from simulation.swarm import identity_of, open_swarm

pytestmark = pytest.mark.slow

SEED = 1
BEGIN, END = 4, 8
"""Rounds of the others in which the stranger talks."""
DRIP_EVERY_S = 0.01


async def throw(network: Network, peer_id: str, data: bytes, pause_s: float) -> None:
    """On a stream of its own: at one go, or byte by byte. Then wait."""
    stream = await network.open_stream(peer_id, FRAGMENT)
    try:
        if not pause_s:
            await stream.send_all(data)
        for byte in data if pause_s else b"":
            await stream.send_all(bytes([byte]))
            await trio.sleep(pause_s)
        while await stream.receive_some():
            pass
    except LocoError:
        pass
    finally:
        with trio.CancelScope(shield=True):
            await stream.aclose()


@pytest.mark.parametrize(
    ("half", "pause_s"),
    [
        pytest.param(False, 0.0, id="whole at one go", marks=pytest.mark.long),
        pytest.param(True, DRIP_EVERY_S, id="cut short and dripped"),
        pytest.param(False, DRIP_EVERY_S, id="whole and dripped", marks=pytest.mark.long),
        pytest.param(True, 0.0, id="cut short at one go", marks=pytest.mark.long),
    ],
)
def test_nonsense_about_fragments_changes_nothing(tmp_path, pause_s, half):
    @simulated(SEED)
    async def run():
        async with open_swarm(SEED, fragment_spec(12), tmp_path, OPTIONS) as swarm:
            await start(swarm, *"abc")
            await swarm.until(lambda: swarm["a"].facts.round == BEGIN)
            stranger = identity_of(SEED, "stranger").peer_id
            a = swarm["a"]
            nonsense = fragment_missiles(str(a.facts.run_id), stranger)
            if not pause_s:
                nonsense |= missiles()
            async with (
                swarm.internet.open_network(stranger) as network,
                trio.open_nursery() as them,
            ):
                await network.connect(a.peer_id, a.network.addresses)
                for data in nonsense.values():
                    said = data[: len(data) // 2] if half else data
                    them.start_soon(throw, network, a.peer_id, said, pause_s)
                await swarm.until(lambda: a.facts.round == END)
                them.cancel_scope.cancel()
            await swarm.finished()
            assert_equal(*(swarm[name] for name in "abc"))
            for name in "abc":
                assert contributors(swarm[name], after=BEGIN - 1).keys() == {3}
                assert {end["missing"] for end in returned(swarm[name], after=BEGIN - 1)} == {0}
                assert longest_round_s(swarm[name]) <= LONGEST_ROUND_S

    run()
