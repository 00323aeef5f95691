"""One peer that says it is at the end of the run: nobody jumps there, or gives its weights up."""

import dataclasses

import pytest
import trio
from existing import existing
from streaming_worlds import OPTIONS, assert_equal, fragment_spec
from swarm_worlds import jumps, simulated, start, toy_spec
from test_admission import BEAT, greet

from peer.daemon.duplicates import BEAT_S
from peer.observe.event_names import EventName
from peer.simulation.swarm import identity_of, open_swarm
from protocol.schedule.rounds import LOST_LAG_ROUNDS

pytestmark = pytest.mark.slow

SEED = 1
ROUNDS = LOST_LAG_ROUNDS + 10


async def lie(swarm, network, name: str, rounds: int) -> None:
    """Link with a peer as a member of its group, and claim the last round but one."""
    group = existing(swarm[name].facts.held).group.digest
    talk, _ = await greet(swarm, network, name, state="training", group=group)
    step = (rounds - 1) * 20
    claim = dataclasses.replace(
        BEAT, round=rounds - 1, step=step, group=group, steps_per_s=10.0, fraction=0.5
    )
    while True:
        await talk.send(claim)
        await trio.sleep(BEAT_S)


@pytest.mark.parametrize("method", ["diloco", "noloco"])
def test_one_beat_that_claims_the_last_round_moves_nobody(tmp_path, method):
    """Without the middle of two others both would jump there, or join again at the liar."""
    spec = fragment_spec(ROUNDS) if method == "diloco" else toy_spec(ROUNDS)

    @simulated(SEED)
    async def run():
        async with open_swarm(SEED, spec, tmp_path, OPTIONS) as swarm:
            await start(swarm, *"ab")
            await swarm.until(lambda: swarm["a"].facts.round == 3)
            liar = identity_of(SEED, "liar").peer_id
            async with swarm.internet.open_network(liar) as network, trio.open_nursery() as them:
                for name in "ab":
                    them.start_soon(lie, swarm, network, name, ROUNDS)
                await swarm.until(lambda: swarm["a"].facts.round == 8)
                assert max(swarm[name].facts.round for name in "ab") <= 9
                them.cancel_scope.cancel()
            if method == "diloco":
                rounds = [e["round"] for e in swarm["b"].events(EventName.ROUND_OPENED)]
                assert set(rounds) >= set(range(3, 8))
            else:
                assert not any(3 <= round_ <= 9 for name in "ab" for round_ in jumps(swarm[name]))
            if method == "diloco":
                await swarm.finished()
                assert_equal(swarm["a"], swarm["b"])

    run()
