"""Peers that say hello and no more: what they claim in it moves nobody."""

import pytest
import trio
from existing import existing
from streaming_worlds import OPTIONS, assert_equal, fragment_spec
from swarm_worlds import jumps, simulated, start, toy_spec
from test_admission import greet

from peer.observe.event_names import EventName
from protocol.schedule.rounds import LOST_LAG_ROUNDS
from simulation.swarm import identity_of, open_swarm

pytestmark = pytest.mark.slow

SEED = 1
ROUNDS = LOST_LAG_ROUNDS + 10
GREETERS = 3
BEGIN, END = 5, 9
"""Rounds of the others in which they greet; a round takes two seconds."""


async def say_hello(swarm, greeter: str, claim: int) -> None:
    """Greet both peers as a member of their group, far ahead; then neither beat nor go."""
    peer_id = identity_of(SEED, greeter).peer_id
    async with swarm.internet.open_network(peer_id) as network:
        for name in "ab":
            group = existing(swarm[name].facts.held).group.digest
            step = 20 * claim
            await greet(swarm, network, name, state="training", group=group, round=claim, step=step)
        await trio.sleep_forever()


@pytest.mark.parametrize("method", [pytest.param("diloco", marks=pytest.mark.long), "noloco"])
def test_hellos_alone_move_nobody_however_many_they_are(tmp_path, method):
    """Three of five: without what is trusted both would jump, or join again where nobody is."""
    spec = fragment_spec(ROUNDS) if method == "diloco" else toy_spec(ROUNDS)

    @simulated(SEED, limit_s=300)
    async def run():
        async with open_swarm(SEED, spec, tmp_path, OPTIONS) as swarm:
            await start(swarm, *"ab")
            await swarm.until(lambda: swarm["a"].facts.round == BEGIN)
            async with trio.open_nursery() as them:
                for number in range(GREETERS):
                    them.start_soon(say_hello, swarm, f"greeter{number}", ROUNDS - 1)
                await swarm.until(
                    lambda: len(swarm["a"].roster.alive(trio.current_time())) == 1 + GREETERS
                )
                await swarm.until(lambda: swarm["a"].facts.round == END)
                them.cancel_scope.cancel()
            for name in "ab":
                peer = swarm[name]
                assert peer.failure is None
                assert peer.facts.round <= END + 1
                rounds = [event["round"] for event in peer.events(EventName.ROUND_OPENED)]
                assert set(rounds) >= set(range(BEGIN, END))
                if method == "noloco":
                    assert not any(BEGIN <= round_ <= END for round_ in jumps(peer))
            if method == "diloco":
                await swarm.finished()
                assert_equal(swarm["a"], swarm["b"])

    run()
