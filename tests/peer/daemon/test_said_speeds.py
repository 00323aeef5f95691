"""Speeds that most of a view tells for seconds: neither do rounds last on, nor does the run end."""

from typing import Any

import pytest
import trio
from existing import existing
from msgspec import structs
from streaming_worlds import OPTIONS, ROUND_S, fragment_spec
from swarm_worlds import simulated, start, toy_spec
from test_admission import BEAT, greet

from peer.daemon.greeting import BEAT_S
from peer.facts import PeerState
from peer.observe.event_names import EventName
from protocol.membership.view import TRUSTED_AFTER_S
from protocol.schedule.rounds import LARGEST_CHANGE, LARGEST_RATIO, VARIED
from simulation.swarm import SimulatedSwarm, SwarmOptions, identity_of, open_swarm

pytestmark = pytest.mark.slow

SEED, INNER_STEPS = 1, 20
HONEST = "abc"
LIARS = [f"liar{number}" for number in range(5)]
LIES_S = 2 * TRUSTED_AFTER_S
RELAYED = ("/ip4/192.0.2.9/tcp/1/p2p/{relay}/p2p-circuit",)
"""Who is reached through relays only is not chosen as an owner: this is about speeds alone."""
MOST_STEPS = INNER_STEPS * LARGEST_RATIO / LARGEST_CHANGE * (1 + VARIED)
SMALL = SwarmOptions(padded_parameters=7 * 128)


async def lie(swarm: SimulatedSwarm, network: Any, name: str, speed: float) -> None:
    """Be where this peer is, and tell it this speed."""
    claim: dict[str, Any] = {"state": "training"}
    claim["group"] = existing(swarm[name].facts.held).group.digest
    addresses = tuple(each.format(relay=swarm["a"].peer_id) for each in RELAYED)
    talk, _ = await greet(swarm, network, name, addresses=addresses, **claim)
    while True:
        facts = swarm[name].facts
        claim |= {"round": facts.round, "step": facts.step, "position": facts.position}
        await talk.send(structs.replace(BEAT, steps_per_s=speed, **claim))
        await trio.sleep(BEAT_S)


async def lie_to_all(swarm: SimulatedSwarm, liar: str, speed: float) -> None:
    async with (
        swarm.internet.open_network(identity_of(SEED, liar).peer_id) as network,
        trio.open_nursery() as links,
    ):
        for name in HONEST:
            links.start_soon(lie, swarm, network, name, speed)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "speed"),
    [
        ("noloco", 0.001),
        ("noloco", 1e12),
        ("diloco", 5e-324),
        ("diloco", 1e12),
        ("noloco", 5e-324),
        ("diloco", 0.001),
    ],
)
def test_speeds_that_most_of_a_view_tells_for_seconds_cost_seconds(tmp_path, method, speed):
    """A round of thousands of steps stayed open when they had gone; a step counted for 1e10."""
    is_diloco = method == "diloco"
    spec, options = (fragment_spec(400), OPTIONS) if is_diloco else (toy_spec(400), SMALL)

    @simulated(SEED)
    async def run():
        async with open_swarm(SEED, spec, tmp_path, options) as swarm:
            await start(swarm, *HONEST)
            peers = [swarm[name] for name in HONEST]
            await swarm.until(lambda: min(peer.facts.round for peer in peers) >= 3)
            async with trio.open_nursery() as them:
                for liar in LIARS:
                    them.start_soon(lie_to_all, swarm, liar, speed)
                await trio.sleep(LIES_S)
                them.cancel_scope.cancel()
            closed = {peer.name: len(peer.events(EventName.ROUND_CLOSED)) for peer in peers}
            await trio.sleep(10 * ROUND_S)
            for peer in peers:
                quotas = [event["quota"] for event in peer.events(EventName.ROUND_OPENED)]
                print(method, speed, peer.name, quotas, peer.facts.step)
                assert max(quotas) <= MOST_STEPS
                assert max(quotas) > 5 * INNER_STEPS or speed > 1, "they were trusted"
                assert len(peer.events(EventName.ROUND_CLOSED)) >= closed[peer.name] + 5
                assert peer.facts.state is PeerState.TRAINING

    run()
