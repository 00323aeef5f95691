"""What only the real directory can suffer: hostile nodes, hung threads, a p2pd that goes away."""

import threading
from functools import partial

import pytest
import trio
from directory_worlds import eventually, real_world

from peer.network import directory as directory_module
from peer.network.directory import open_hivemind_directory
from peer.runtime import DirectoryUnrecoverable
from protocol.errors import StreamLost
from protocol.limits import MAX_RECORDS_PER_SHARD
from protocol.membership.records import place_of, record_keys

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
KEY, OTHER_KEY = record_keys("run")[:2]


@pytest.fixture
async def world(tmp_path_factory):
    async with real_world(tmp_path_factory) as real:
        yield real


@pytest.fixture
def impatient(monkeypatch):
    """Deadlines short enough for a test; the shares between them stay."""
    monkeypatch.setattr(directory_module, "CALL_TIMEOUT_S", 0.4)
    monkeypatch.setattr(directory_module, "HUNG_AFTER_S", 0.2)
    monkeypatch.setattr(directory_module, "REATTACH_EVERY_S", 0.1)


@pytest.fixture
def blocker():
    """Blocks any loop that calls it, until the test is over."""
    over = threading.Event()
    yield lambda: over.wait(30)
    over.set()


async def _inside(peer, function):
    """Run an async function of the node in the directory's thread."""
    node = peer.directory._thread.node
    node.probed = partial(function, node)
    return await peer.directory._thread.call("probed")


def _place_key(key):
    from hivemind.dht.routing import DHTID

    return DHTID.from_bytes(place_of(key))


async def test_hostile_stores_are_refused_by_the_node_that_gets_them(world):
    honest, hostile = await world.peer(1), await world.peer(2)
    value = await honest.announce(KEY)
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.p2p import PeerID
    from hivemind.proto import dht_pb2
    from hivemind.utils import MSGPackSerializer

    peer = PeerID.from_base58(honest.peer_id)
    expires_s = hostile.directory.swarm_time_s() + 3000
    wrapped = MSGPackSerializer.dumps(hostile.value(KEY, expires_s))
    forever = hostile.directory.swarm_time_s() + 1e8
    crowd = DictionaryDHTValue()
    crowd.store(honest.peer_id, wrapped, expires_s)
    own = MSGPackSerializer.dumps(hostile.peer_id)
    endless = MSGPackSerializer.dumps(hostile.value(KEY, forever))
    attempts = [
        (MSGPackSerializer.dumps(None), b"plain value over the dictionary", forever),
        (MSGPackSerializer.dumps(None), wrapped, expires_s),
        (b"", MSGPackSerializer.dumps(crowd), expires_s),
        (b"", b"\xc1garbage", expires_s),
        (b"", MSGPackSerializer.dumps([1, 2]), expires_s),
        (b"\xc1", wrapped, expires_s),
        (MSGPackSerializer.dumps([1]), wrapped, expires_s),
        (MSGPackSerializer.dumps(honest.peer_id), wrapped, expires_s),
        (own, wrapped, expires_s + 1),
        (own, endless, forever),
        (own, b"\xc1", expires_s),
        (own, bytes(100_000), expires_s),
    ]

    async def send(node):
        answers = []
        for tag, data, when in attempts:
            request = dht_pb2.StoreRequest(
                keys=[place_of(KEY)],
                subkeys=[tag],
                values=[data],
                expiration_time=[when],
                in_cache=[False],
            )
            stub = node._node.protocol.get_stub(peer)
            try:
                answers += list((await stub.rpc_store(request, timeout=2)).store_ok)
            except Exception:  # noqa: BLE001 - an error is a refusal too
                answers.append(False)
        return answers

    assert await _inside(hostile, send) == [False] * len(attempts)
    assert await honest.directory.get(KEY) == {honest.peer_id: value}


async def test_a_hostile_replica_neither_hangs_nor_misleads_a_reader(world):
    reader, hostile = await world.peer(1), await world.peer(2)
    value = await reader.announce(KEY)
    forever = hostile.directory.swarm_time_s() + 1e8
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.utils.timed_storage import ValueWithExpiration

    for poison in [
        b"\xc1 does not decode",
        DictionaryDHTValue(),
        _dictionary({7: b"z"}, forever),
        _dictionary({reader.peer_id: b"\xc1", "x": b"y"}, forever),
    ]:

        async def lie(node, poison=poison):
            node._node.protocol.storage.data[_place_key(KEY)] = ValueWithExpiration(poison, forever)

        await _inside(hostile, lie)
        with trio.fail_after(4):
            assert await reader.directory.get(KEY) == {reader.peer_id: value}
    assert not reader.directory.failures


async def test_a_replicas_word_on_expiry_is_not_taken(world):
    """hivemind ends a search as soon as an answer claims to be fresh enough."""
    reader, hostile = await world.peer(1), await world.peer(2)
    from hivemind.p2p import PeerID
    from hivemind.utils.timed_storage import ValueWithExpiration

    await hostile.announce(KEY, lifetime_s=60.0)
    key, forever = _place_key(KEY), hostile.directory.swarm_time_s() + 1e8

    async def lie(node):
        storage = node._node.protocol.storage
        storage.data[key] = ValueWithExpiration(storage.data[key].value, forever)
        storage.data[_place_key(OTHER_KEY)] = ValueWithExpiration(_dictionary({}, 0), forever)

    async def ask(node):
        peer = PeerID.from_base58(hostile.peer_id)
        keys = [key, _place_key(OTHER_KEY)]
        found = await node._node.protocol.call_find(peer, keys)
        return [found[key][0] for key in keys]

    await _inside(hostile, lie)
    full, empty = await _inside(reader, ask)
    assert full.expiration_time < forever - 1e7
    assert empty is None


async def test_the_node_follows_the_directorys_clock_and_not_the_machines(world):
    first = await world.peer(1, clock_skew_s=-7200.0)
    second = await world.peer(2, clock_skew_s=-7200.0)
    value = await first.announce(KEY, lifetime_s=30.0)  # two hours ago for time.time
    assert await second.directory.get(KEY) == {first.peer_id: value}


def _dictionary(entries, expires_s):
    from hivemind.dht.storage import DictionaryDHTValue

    dictionary = DictionaryDHTValue()
    for subkey, value in entries.items():
        dictionary.store(subkey, value, expires_s)
    return dictionary


async def test_a_shard_does_not_grow_beyond_its_bound(world):
    from directory_worlds import Peer

    from peer.network.identity import Identity

    first, second = await world.peer(1), await world.peer(2)
    for number in range(MAX_RECORDS_PER_SHARD + 5):
        extra = Peer(Identity((number + 500).to_bytes(32, "big")), second.directory, world)
        await extra.announce(KEY)
    assert len(await first.directory.get(KEY)) <= MAX_RECORDS_PER_SHARD


async def test_a_blocked_thread_is_replaced_and_the_swarm_found_again(world, impatient, blocker):
    first, second = await world.peer(1), await world.peer(2)
    value = await first.announce(KEY)
    second.directory._thread.node.loop.call_soon_threadsafe(blocker)
    blocked_node = second.directory._thread.node

    async def healed():
        return await second.directory.get(KEY) == {first.peer_id: value}

    await eventually(healed)
    statistics = second.directory
    assert statistics.restarts == 1
    assert statistics.failures["hung"] >= 1
    assert second.directory._thread.node is not blocked_node
    theirs = await second.announce(KEY)
    assert await first.directory.get(KEY) == {first.peer_id: value, second.peer_id: theirs}


async def test_only_a_new_process_helps_a_thread_that_hangs_again_and_again(
    world, impatient, blocker
):
    peer = await world.peer(1)

    async def block_and_call():
        if peer.directory._thread is not None:
            peer.directory._thread.node.loop.call_soon_threadsafe(blocker)
        await peer.directory.get(KEY)

    async def block_for_ever():
        while True:
            await block_and_call()

    with pytest.raises(DirectoryUnrecoverable), trio.fail_after(20):
        await block_for_ever()
    assert peer.directory.restarts == directory_module.MAX_RESTARTS_IN_A_ROW
    with pytest.raises(DirectoryUnrecoverable):
        await peer.directory.get(KEY)


async def test_closing_takes_no_longer_than_its_bound(world, impatient, blocker):
    peer = await world.peer(1)
    thread = peer.directory._thread
    thread.node.loop.call_soon_threadsafe(blocker)
    with trio.fail_after(2):
        await peer.directory.aclose()
    assert all(t.daemon for t in threading.enumerate() if t.name == "directory")


async def test_p2pd_killed_and_restarted(world, impatient):
    first, second = await world.peer(1), await world.peer(2)
    value = await first.announce(KEY)
    world.daemons[2].process._process.kill()

    async def is_detached():
        return not second.directory.attached

    await eventually(is_detached)
    with trio.fail_after(1):
        assert await second.directory.get(KEY) == {}
    assert second.directory.failures["detached"] >= 1
    await world.daemons[2].life.aclose()
    _, daemon = await world.start_p2pd(2)
    await second.directory.reattach(daemon.control_address)
    assert second.directory.attached

    async def found_again():
        return await second.directory.get(KEY) == {first.peer_id: value}

    await eventually(found_again)
    assert second.directory.restarts == 0


async def test_no_p2pd_is_said_so(tmp_path):
    with pytest.raises(StreamLost, match="cannot attach"):
        async with open_hivemind_directory(f"/unix{tmp_path}/nobody"):
            pass
