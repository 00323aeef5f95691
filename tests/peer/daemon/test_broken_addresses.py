"""What is called an address and is none, wherever peers tell addresses: nobody's daemon ends."""

import math
from collections.abc import Callable
from typing import Any, Final

import pytest
import test_reaching
import trio
from existing import existing
from swarm_worlds import simulated, start, toy_spec
from test_admission import beat, greet
from test_reaching import nodes

from peer.daemon.outside import ASK_UNKNOWN_EVERY_S, Reaching
from peer.network.conversation import Conversation
from peer.observe.event_names import EventName
from peer.runtime import Network, Stream
from protocol.address import multiaddr
from protocol.membership import records
from protocol.membership.dial_back import Reach
from protocol.membership.group import Group
from protocol.membership.record_table import RecordTable
from protocol.membership.records import PeerRecord, encode_record, record_key
from protocol.wire.messages import PeerEntry, PeerList, Seen, Whereabouts
from simulation.swarm import SimulatedSwarm, identity_of, open_swarm

pytestmark = pytest.mark.slow

SEED: Final = 1
BROKEN: Final = (
    "/dns4/a..b/tcp/1",
    f"/dns4/{'a' * 64}.b/tcp/1",
    "/ip4/banana/tcp/1",
    "/ip4/192.0.2.1/tcp/lots",
    "/carrier/pigeon",
)
GOOD: Final = "/ip4/203.0.113.1/tcp/1"
A_DOT_DOT_B: Final = b"\x36\x04a..b\x06\x00\x01"
"""`/dns4/a..b/tcp/1` in binary."""
LONG: Final = "/ip4/192.0.2.1" + "/p2p-circuit" * 21
LONG_IN_BINARY: Final = b"\x04" + bytes([192, 0, 2, 1]) + b"\xa2\x02" * 21
"""Longer as text than any message takes, and well within the bytes of a record."""
LIAR: Final = identity_of(SEED, "liar")
NAMED: Final = identity_of(SEED, "named").peer_id


async def trains_on(swarm: SimulatedSwarm) -> None:
    """Both go on for three rounds, longer than a dial, a look around and a dial-back take."""
    due = max(peer.facts.round for peer in swarm.peers.values()) + 3
    await trio.sleep(60.0)
    await swarm.until(lambda: all(peer.facts.round >= due for peer in swarm.peers.values()))
    for peer in swarm.peers.values():
        assert not peer.ended.is_set()
        assert peer.failure is None
        assert peer.network.statistics().failed_streams == 0


def addresses_at(swarm: SimulatedSwarm, peer_id: str) -> tuple[str, ...]:
    """Where `a` would dial this peer."""
    return existing(swarm["a"].roster.get(peer_id)).addresses


def with_a_stranger(test: Callable[..., Any]) -> Callable[..., None]:
    """Two peers train, and a stranger is on the network."""

    @simulated(SEED)
    async def run(tmp_path: Any, **arguments: Any) -> None:
        async with open_swarm(SEED, toy_spec(400), tmp_path) as swarm:
            await start(swarm, *"ab")
            async with swarm.internet.open_network(LIAR.peer_id) as network:
                await test(swarm, network, **arguments)

    return run


@pytest.mark.parametrize("address", BROKEN)
def test_in_a_hello(tmp_path, address):
    @with_a_stranger
    async def tell(swarm: SimulatedSwarm, network: Network) -> None:
        for name in "ab":
            talk, _ = await greet(swarm, network, name, addresses=(address,))
            await talk.aclose()  # so that they look for it where it said that it is
        assert addresses_at(swarm, LIAR.peer_id) == ()
        await trains_on(swarm)

    tell(tmp_path=tmp_path)


@pytest.mark.parametrize("address", BROKEN)
def test_in_a_list_of_peers(tmp_path, address):
    @with_a_stranger
    async def tell(swarm: SimulatedSwarm, network: Network) -> None:
        async with trio.open_nursery() as nursery:
            talk, _ = await greet(swarm, network)
            nursery.start_soon(beat, talk)
            await talk.send(PeerList((PeerEntry(NAMED, 1, (address, GOOD)),)))
            await trio.sleep(1.0)
            assert addresses_at(swarm, NAMED) == (GOOD,)
            await trains_on(swarm)
            nursery.cancel_scope.cancel()

    tell(tmp_path=tmp_path)


@pytest.mark.parametrize(
    ("binary", "fault"), [(A_DOT_DOT_B, "not a host name"), (LONG_IN_BINARY, "longer than 256")]
)
def test_in_a_directory_record(tmp_path, monkeypatch, binary, fault):
    """No node of the table keeps it; from one that does, nobody takes it."""

    @with_a_stranger
    async def tell(swarm: SimulatedSwarm, network: Network) -> None:
        a, run_id = swarm["a"], existing(swarm["a"].facts.run_id)
        key = record_key(Group(run_id).digest, LIAR.peer_id)
        expires_s = a.directory.swarm_time_s() + 100.0
        record = PeerRecord(LIAR.peer_id, 1, ("/dns4/a..b/tcp/1",), expires_s)
        with monkeypatch.context() as patch:
            patch.setattr(records, "address_to_bytes", lambda _: binary)
            value = encode_record(record, key, LIAR.sign)
        assert not swarm.directory.keep(key, LIAR.peer_id, value)
        swarm.directory.connect(a.peer_id, LIAR.peer_id)
        monkeypatch.setattr(RecordTable, "at", lambda *_: {LIAR.peer_id: value})
        assert (await a.directory.get(key))[LIAR.peer_id] == value
        await trains_on(swarm)
        assert a.roster.get(LIAR.peer_id) is None

    with pytest.raises(multiaddr.InvalidAddress, match=fault):
        multiaddr.from_bytes(binary)
    tell(tmp_path=tmp_path)


def test_what_we_know_of_a_peer_and_cannot_say_ends_no_link(tmp_path):
    """However it came to be known: the next list of peers leaves it out."""

    @with_a_stranger
    async def tell(swarm: SimulatedSwarm, network: Network) -> None:
        async with trio.open_nursery() as nursery:
            for name in "ab":
                talk, _ = await greet(swarm, network, name)
                nursery.start_soon(beat, talk)
                known = PeerRecord(LIAR.peer_id, 1, (LONG, GOOD), math.inf)
                assert swarm[name].roster.record(known)
            await trains_on(swarm)
            for name in "ab":
                assert swarm[name].events(EventName.PEER_LOST) == []
            lists = list[PeerList]()
            talk, _ = await greet(swarm, await nursery.start(another_network, swarm))
            while not lists:
                message, _ = await talk.receive()
                lists += [message] if isinstance(message, PeerList) else []
            told = {entry.peer_id: entry.addresses for entry in lists[0].peers}
            assert told[LIAR.peer_id] == (GOOD,)
            assert swarm["b"].peer_id in told
            nursery.cancel_scope.cancel()

    tell(tmp_path=tmp_path)


async def another_network(
    swarm: SimulatedSwarm, task_status: trio.TaskStatus[Network] = trio.TASK_STATUS_IGNORED
) -> None:
    async with swarm.internet.open_network(NAMED) as network:
        task_status.started(network)
        await trio.sleep_forever()


# --- where peers say how others can be dialled ----------------------------------------------------
class NeedsRelays(Reaching):
    """One whom nobody can dial, as far as it knows."""

    def _note(self) -> None:
        super()._note()
        self._facts.reach.reach = Reach.NO


@pytest.mark.parametrize("address", [*BROKEN, "/ip4/198.51.100.7/tcp/1"])
async def test_as_where_we_are_seen_or_would_be_relayed(autojump_clock, monkeypatch, address):
    """What a peer tells us of ourselves is held against what we have asked it to try."""
    monkeypatch.setattr(test_reaching, "Reaching", NeedsRelays)
    told = Seen(address, (address,), (address,))
    asked = 0

    async def lie(reaching: Reaching, stream: Stream) -> None:
        nonlocal asked
        asked += 1
        async with Conversation(stream) as talk:
            await talk.receive(Whereabouts)
            await talk.send(told)

    monkeypatch.setattr(Reaching, "_serve", lie)
    async with nodes(2) as (one, other):
        for _ in range(5):
            one.roster.heard(
                trio.current_time(), other.network.peer_id, 1, addresses=(address, address)
            )
            await trio.sleep(ASK_UNKNOWN_EVERY_S)
        assert asked >= 2
        assert f"{address}/p2p/{one.network.peer_id}" not in one.network.addresses
