"""The real directory on a simulated network: bugs, silent nodes, many nodes."""

import itertools
from collections.abc import Collection

import pytest
import trio
from directory_worlds import Peer, hold

from peer.network.directory import SharedTable, open_directory
from peer.network.identity import Identity
from protocol.limits import Shares
from protocol.membership import node_table
from protocol.membership.book import REDIALS
from protocol.membership.node_table import CHECKED_AFTER_S, position_of, position_of_node
from protocol.membership.records import place_of, record_keys
from simulation.network import SimulatedInternet, SimulatedNetwork

KEY = record_keys("run")[0]


class _Network(SimulatedNetwork):
    """One that notes the addresses in answers; nobody answers under names of nobody."""

    names_of_nobody: Collection[str] = ()

    async def open_stream(self, peer_id, protocol):
        if peer_id in self.names_of_nobody:
            await trio.sleep_forever()
        return await super().open_stream(peer_id, protocol)

    def known_addresses(self, peer_id):
        return self._known.get(peer_id, ())

    def note_addresses(self, peer_id, addresses):
        self._known.setdefault(peer_id, tuple(addresses))


class World:
    def __init__(self, nursery):
        self.nursery, self.internet = nursery, SimulatedInternet(1)
        self.peers = []

    async def peer(self, told=0):
        """A peer that was told of another one."""
        identity = Identity((len(self.peers) + 1).to_bytes(32, "big"))
        network = await self.nursery.start(hold, self.internet.open_network(identity.peer_id))
        network.__class__ = _Network
        directory = await open_directory(network, trio.current_time)
        if self.peers:
            entry = self.peers[told].network
            await network.connect(entry.peer_id, entry.addresses)
            await directory.add_peers(entry.addresses)
        self.peers.append(Peer(identity, directory, network))
        return self.peers[-1]


@pytest.fixture
async def world():
    async with trio.open_nursery() as nursery:
        yield World(nursery)
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_twelve_that_were_each_told_of_one_find_all_until_their_records_expire(
    autojump_clock, world
):
    for number in range(12):
        await world.peer(told=max(0, number - 1))
    values = {peer.peer_id: await peer.announce(KEY, 600.0) for peer in world.peers[:10]}
    for peer in world.peers:
        assert await peer.directory.get(KEY) == values
    await trio.sleep(600.0)
    assert await world.peers[-1].directory.get(KEY) == {}


async def test_one_that_is_silent_for_a_while_is_found_again_soon(autojump_clock, world):
    first, second = await world.peer(), await world.peer()
    world.internet.partition([first.peer_id], [second.peer_id])
    value = await first.announce(KEY)
    for _ in range(3):
        assert await second.directory.get(KEY) == {}
    world.internet.heal()
    await trio.sleep(REDIALS.most_s)
    assert await second.directory.get(KEY) == {first.peer_id: value}


async def test_a_bug_that_the_answer_to_a_store_finds_costs_the_table_alone(
    autojump_clock, world, monkeypatch
):
    first, second = await world.peer(), await world.peer()
    monkeypatch.setattr(SharedTable, "_search", lambda *_: _at_once([first.peer_id]))
    monkeypatch.setattr(second.network, "open_stream", lambda *_: 1 / 0)
    await second.announce(KEY)
    assert second.directory.restarts == 1
    assert "ZeroDivisionError" in second.directory.last_failure


async def _at_once(value):
    await trio.lowlevel.checkpoint()
    return value


async def test_a_bug_in_a_search_that_is_cancelled_as_well_ends_nobody(
    autojump_clock, world, monkeypatch
):
    _, second, third = await world.peer(), await world.peer(), await world.peer()
    await second.directory.get(KEY)

    async def hang(peer_id, _):
        try:
            await trio.sleep_forever()
        finally:
            if peer_id == third.peer_id:
                raise ZeroDivisionError

    monkeypatch.setattr(second.network, "open_stream", hang)
    with trio.move_on_after(1.0) as scope:
        await second.directory.get(KEY)
    assert scope.cancelled_caught
    assert second.directory.restarts == 1


def _names_of_nobody(peers, per_peer):
    """Names that are all nearer to the key's place than these peers."""
    place = position_of(place_of(KEY))
    nearest = min(position_of_node(peer.peer_id) ^ place for peer in peers)
    drawn = (f"nobody{number}" for number in itertools.count())
    nearer = (name for name in drawn if position_of_node(name) ^ place < nearest)
    return list(itertools.islice(nearer, per_peer * len(peers)))


async def _besiege(peer, names):
    """Ask a peer something under each of these names, again and again."""
    while True:
        for number, name in enumerate(names):
            address = f"/ip4/11.0.{number % 256}.1/tcp/4001"
            peer.directory._nodes.asked(name, address, trio.current_time())
        await trio.sleep(5.0)


async def test_all_that_were_silent_for_long_in_a_search_that_was_cut_off_leave_the_table(
    autojump_clock, world, monkeypatch
):
    peer = await world.peer()
    names = _names_of_nobody([peer], per_peer=20)
    monkeypatch.setattr(_Network, "names_of_nobody", frozenset(names))
    for name in names:
        peer.directory._nodes.asked(name, "/ip4/11.0.0.1/tcp/4001", trio.current_time())
    assert await peer.directory.get(KEY) == {}
    assert len(peer.directory._nodes) == 0


@pytest.mark.slow
async def test_names_of_nobody_nearer_than_all_peers_keep_no_search_from_their_records(
    autojump_clock, world, monkeypatch
):
    for number in range(6):
        await world.peer(told=max(0, number - 1))
    names = _names_of_nobody(world.peers, per_peer=20)
    monkeypatch.setattr(_Network, "names_of_nobody", frozenset(names))
    for peer in world.peers:
        world.nursery.start_soon(_besiege, peer, names)
    await trio.sleep(1.0)
    values = {peer.peer_id: await peer.announce(KEY, 600.0) for peer in world.peers}
    for peer in world.peers:
        assert await peer.directory.get(KEY) == values


async def test_a_newcomer_takes_the_place_of_one_that_died_and_not_of_one_that_lives(
    autojump_clock, world, monkeypatch
):
    monkeypatch.setattr(node_table, "RECORDS", Shares(2, per_peer=1, per_prefix=2))
    first, living, dead = [await world.peer() for _ in range(3)]
    nodes = first.directory._nodes
    world.internet.kill(dead.peer_id)
    newcomer = await world.peer()
    assert {*nodes.told(place_of(KEY), but="")} == {living.peer_id, dead.peer_id}
    await trio.sleep(CHECKED_AFTER_S)
    for _ in range(4):
        await newcomer.directory.get(KEY)
        await trio.sleep(1.0)
    assert {*nodes.told(place_of(KEY), but="")} == {living.peer_id, newcomer.peer_id}
