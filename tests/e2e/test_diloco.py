"""Streaming DiLoCo with real processes: all hold the same outer copy, whoever comes or is killed.

Bound, set before anything was measured: whatever happens, within HEALED_S all peers end a cycle of
every fragment in one state again, and all of them contribute to it.
"""

import signal
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import pytest
import trio
from missiles import fragment_missiles, missiles
from raw_client import cut_short, drip, raw_client, throw
from swarm import RUN_SPEC, START_S, Peer, Swarm, has_said, none_blamed, nothing_broke, open_swarm

from peer.observe.event_names import EventName
from protocol.wire.versions import FRAGMENT

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

NUM_FRAGMENTS = 3
HEALED_S = 60.0
NUM_ROUNDS = 2
"""Closed by each peer while a stranger talks."""
SPEC = RUN_SPEC.replace("num_layers = 1", "num_layers = 2").replace(
    "[sync]",
    """
[sync]
method = "diloco"
diloco = { blocks_per_fragment = 1, overlap_steps = 5 }
""",
)


@pytest.fixture(scope="module")
def fragments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    with open_swarm(tmp_path_factory.mktemp("diloco"), SPEC) as swarm:
        swarm.found()
        yield swarm


def ends(peer: Peer, after: int) -> dict[tuple[int, int], tuple[str, int]]:
    """Fragment and round to the state it ended in, and how many contributed."""
    return {
        (event["fragment"], event["round"]): (event["digest"], event["contributors"])
        for event in peer.events(EventName.FRAGMENT_RETURNED)[after:]
    }


def wait_one_state(peers: list[Peer]) -> None:
    """Until all end a cycle of each fragment in one state, to which all have contributed."""
    seen = {peer: len(peer.events(EventName.FRAGMENT_RETURNED)) for peer in peers}

    def fragments_in_one_state() -> set[int]:
        states = defaultdict(list)
        for peer in peers:
            for key, end in ends(peer, seen[peer]).items():
                states[key].append(end)
        return {
            fragment
            for (fragment, _), found in states.items()
            if len(found) == len(peers) and {*found} == {(found[0][0], len(peers))}
        }

    peers[0].wait_for(
        "one state of all fragments",
        lambda: len(fragments_in_one_state()) == NUM_FRAGMENTS,
        HEALED_S,
    )


def wait_rounds(peers: list[Peer], num_rounds: int) -> None:
    """Until each has closed so many more, with all that it sends in them."""
    for name, times in (
        (EventName.ROUND_CLOSED, num_rounds),
        (EventName.FRAGMENT_RETURNED, num_rounds * NUM_FRAGMENTS),
    ):
        for peer in peers:
            enough = len(peer.events(name)) + times
            peer.wait_for(f"{times} more {name}", partial(has_said, peer, name, enough), START_S)


def joined(swarm: Swarm, num_peers: int) -> list[Peer]:
    while len(swarm.members) < num_peers:
        swarm.join(swarm.members[-1])
    for peer in swarm.members:
        peer.wait_event(EventName.FRAGMENT_RETURNED, START_S)
    return swarm.members


def test_a_founder_alone_trains(fragments: Swarm) -> None:
    (founder,) = fragments.members
    alone = founder.wait_event(EventName.FRAGMENT_RETURNED)
    assert (alone["contributors"], alone["missing"], alone["moved"]) == (1, 0, 0)


def test_joiners_are_in_one_state_with_the_others(fragments: Swarm) -> None:
    peers = joined(fragments, 3)
    wait_one_state(peers)
    for peer in peers:
        assert peer.metric("loco_outer_rounds_total", outcome="averaged") > 0
        assert peer.metric("loco_wire_bytes_total", protocol="/loco/fragment/1") > 0
    none_blamed(peers)


@pytest.mark.long
async def test_garbage_on_the_fragment_conversation_harms_nobody(
    fragments: Swarm, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """They train on; that averages stay exact too is shown in virtual time."""
    peers = await trio.to_thread.run_sync(joined, fragments, 3)
    seen = {peer: len(peer.events()) for peer in peers}
    run_id = peers[0].status()["run_id"]
    async with raw_client(tmp_path_factory.mktemp("raw"), peers[0].address) as (network, peer_id):
        stranger = network.peer_id
        nonsense = fragment_missiles(run_id, stranger)
        async with trio.open_nursery() as nursery:
            for data in [*missiles().values(), *nonsense.values()]:
                nursery.start_soon(throw, network, peer_id, FRAGMENT, data)
        async with trio.open_nursery() as nursery:
            for data in nonsense.values():
                nursery.start_soon(cut_short, network, peer_id, FRAGMENT, data)
        async with trio.open_nursery() as nursery:
            for data in nonsense.values():
                nursery.start_soon(drip, network, peer_id, FRAGMENT, data)
            await trio.to_thread.run_sync(wait_rounds, peers, NUM_ROUNDS)
            nursery.cancel_scope.cancel()
    nothing_broke(peers, seen, stranger)


@pytest.mark.long
def test_a_killed_trainer_comes_back_into_the_same_state(fragments: Swarm) -> None:
    *others, victim = joined(fragments, 3)
    count = len(victim.events())
    victim.trainer().kill()
    died = victim.wait_event(EventName.TRAINER_DIED, after=count)
    victim.wait_event(EventName.TRAINER_STARTED, START_S, after=victim.events().index(died))
    wait_one_state([*others, victim])


@pytest.mark.long
def test_a_killed_p2pd_costs_no_state(fragments: Swarm) -> None:
    *others, victim = joined(fragments, 3)
    count = len(victim.events())
    victim.p2pd().kill()
    victim.wait_event(EventName.NETWORK_RESTARTED, after=count)
    wait_one_state([*others, victim])


@pytest.mark.long
def test_a_killed_peer_is_missed_by_nobody(fragments: Swarm) -> None:
    *others, victim = joined(fragments, 3)
    victim.kill()
    wait_one_state(others)


@pytest.mark.long
def test_who_sleeps_wakes_up_into_the_state_of_the_others(fragments: Swarm) -> None:
    """Long: real processes sleep in test_comebacks.py, fragments in test_fragment_swarm.py."""
    *others, sleeper = joined(fragments, 3)
    sleeper.signal_all(signal.SIGSTOP)
    wait_one_state(others)
    sleeper.signal_all(signal.SIGCONT)
    wait_one_state([*others, sleeper])
