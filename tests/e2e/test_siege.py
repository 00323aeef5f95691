"""A hostile member says all that the wire schema allows, and nearly so, to peers that train.

It attacks in bursts, with calm between them, so that what else the machine does is in both alike:
rounds of bursts and of calm are then compared. Each burst is by another identity, for one that lies
is soon ignored. In the last burst a newcomer joins. The short form
has a dozen rounds of each kind, whose medians differ by half where other work comes and goes; so it
finds a peer that waits for the liar, and the long form what a liar costs.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
import trio
from hostile_member import SERVED, attacking, new_member
from swarm import Event, Peer, Swarm, all_averaging, ending, nothing_broke, wait_until

from bench.fuzzing.shots import kinds_of
from peer.observe.event_names import EventName

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

BURSTS = 3
NUM_ROUNDS = 3
"""Rounds that each peer closes at least, in each burst and each calm."""
PART_WITH_NEWCOMER = 0.4
"""Of the time."""
TYPES = {kind.__name__ for protocol in SERVED for kind in kinds_of(protocol)}
TYPES_FIRED = 30
"""So many of the 34 TYPES of five conversations must have gone out at least."""


def lives(peers: Sequence[Peer]) -> list[tuple[object, ...]]:
    """Processes and incarnations."""
    return [
        (
            peer.process.pid,
            peer.trainer().pid,
            peer.p2pd().pid,
            *(event["incarnation"] for event in peer.events(EventName.DAEMON_STARTED)),
        )
        for peer in peers
    ]


async def rounds_in(peers: Sequence[Peer], seconds: float) -> list[float]:
    """Lengths of the rounds that begin and end within so long, or longer: each peer has some."""
    before = {peer: len(closed(peer)) for peer in peers}
    await trio.sleep(seconds)
    await trio.to_thread.run_sync(
        wait_until,
        lambda: all(len(closed(peer)) - before[peer] >= NUM_ROUNDS for peer in peers),
        f"{NUM_ROUNDS} rounds",
    )
    return [
        later["monotonic_s"] - earlier["monotonic_s"]
        for peer in peers
        for earlier, later in pairwise(closed(peer)[before[peer] :])
    ]


def closed(peer: Peer) -> list[Event]:
    return peer.events(EventName.ROUND_CLOSED)


@pytest.mark.long
@pytest.mark.parametrize(("attack_s", "longer"), [(15.0, 2.0), (60.0, 1.2)])
async def test_a_hostile_member_costs_the_others_little_and_a_newcomer_joins(
    swarm: Swarm, tmp_path_factory: pytest.TempPathFactory, attack_s: float, longer: float
) -> None:
    peers = swarm.at_least(2)
    seen, before = {peer: len(peer.events()) for peer in peers}, lives(peers)
    liars = [await new_member(tmp_path_factory.mktemp("raw"), peers) for _ in range(BURSTS + 1)]
    burst_s = attack_s * (1 - PART_WITH_NEWCOMER) / BURSTS
    calm, attacked, fired = list[float](), list[float](), Counter[str]()
    for liar in liars[:BURSTS]:
        calm += await rounds_in(peers, burst_s)
        async with attacking(liar, peers) as hostile:
            attacked += await rounds_in(peers, burst_s)
        fired += hostile.fired
    async with attacking(liars[-1], peers) as hostile:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep, attack_s * PART_WITH_NEWCOMER)
            newcomer = swarm.join(peers[1])
            with ending(newcomer):
                await trio.to_thread.run_sync(newcomer.wait_averaging)
                await trio.to_thread.run_sync(all_averaging, peers)
                nothing_broke(peers, seen, *(liar.peer_id for liar in liars))
        fired += hostile.fired
    ratio = statistics.median(attacked) / statistics.median(calm)
    print(f"median round {ratio:.2f} times as long, {fired.total()} messages")
    assert lives(peers) == before
    assert len(TYPES & fired.keys()) >= TYPES_FIRED
    assert ratio <= longer
