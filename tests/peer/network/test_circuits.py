"""Our relay, between simulated peers: whom it carries for, how much, and when it ends."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest
import trio
from network_worlds import peer_id_of

from peer.network import relay as relay_module
from peer.network.protobuf import delimited, encode_fields
from peer.network.relay import (
    CIRCUIT_IDLE_S,
    HOP,
    HOP_ANSWER,
    RESERVATION_S,
    STOP,
    CircuitStatus,
    HopKind,
    Relay,
    parse_status,
    receive_delimited,
    reserve,
)
from peer.runtime import Stream
from protocol.address.peer_id import peer_id_to_bytes
from protocol.errors import LocoError
from protocol.limits import ANSWER_S, CIRCUITS, STRANGERS_SHARE, Shares
from simulation.network import SimulatedInternet, SimulatedNetwork

AGREED = b"\x04\x08\x01\x20\x64"


class FreeLine:
    """A line without limits, which counts."""

    def __init__(self) -> None:
        self.carried = 0

    async def carry(self, num_bytes: int) -> None:
        self.carried += num_bytes


@dataclass
class World:
    """A relay, one behind it that echoes what comes through circuits, and one who dials."""

    internet: SimulatedInternet
    relay: Relay
    line: FreeLine
    hub: SimulatedNetwork
    behind: SimulatedNetwork
    dialler: SimulatedNetwork
    offers: list[bool] = field(default_factory=lambda: [True])
    strangers: set[str] = field(default_factory=set)

    async def ask(self, source: SimulatedNetwork | None = None) -> tuple[Stream, int]:
        """A stream on which a circuit was asked for, and the answer."""
        stream = await (source or self.dialler).open_stream(self.hub.peer_id, HOP)
        behind = encode_fields([(1, peer_id_to_bytes(self.behind.peer_id))])
        await stream.send_all(delimited([(1, int(HopKind.CONNECT)), (2, behind)]))
        return stream, parse_status(await receive_delimited(stream), *HOP_ANSWER)


async def echo(stream: Stream) -> None:
    """What a peer behind a relay does: agree, then (here) send everything back."""
    await receive_delimited(stream)
    await stream.send_all(AGREED)
    while data := await stream.receive_some():
        await stream.send_all(data)


@asynccontextmanager
async def world(mbps: float = 1000.0) -> AsyncIterator[World]:
    internet, offers, line = SimulatedInternet(1), [True], FreeLine()
    async with AsyncExitStack() as stack:
        networks = [
            await stack.enter_async_context(internet.open_network(peer_id_of(name)))
            for name in ("hub", "behind", "dialler")
        ]
        hub, behind, dialler = networks
        strangers: set[str] = set()
        relay = Relay(
            hub,
            line.carry,
            knows=lambda peer_id: peer_id not in strangers,
            offers=lambda: offers[0],
            mbps=mbps,
            wall_time_s=lambda: 1e9,
        )
        await relay.start()
        await behind.serve(STOP, echo)
        for other in (behind, dialler):
            await other.connect(hub.peer_id, hub.addresses)
        yield World(internet, relay, line, hub, behind, dialler, offers, strangers)


async def test_bytes_go_both_ways(autojump_clock: object) -> None:
    async with world() as made:
        assert await reserve(made.behind, made.hub.peer_id) == RESERVATION_S
        stream, status = await made.ask()
        assert status == CircuitStatus.OK
        await stream.send_all(b"x" * 100_000)
        back = bytearray(100_000)
        await stream.receive_into(memoryview(back))
        assert bytes(back) == b"x" * 100_000
        assert made.relay.circuits == 1
        await stream.aclose()
        await trio.sleep(1)
        now = made.relay
        assert (now.circuits, now.reservations, now.carried_bytes) == (0, 1, 200_000)
        assert made.line.carried == 200_000


async def refused_without_reservation(made: World) -> CircuitStatus:
    return CircuitStatus((await made.ask())[1])


async def refused_when_expired(made: World) -> CircuitStatus:
    await reserve(made.behind, made.hub.peer_id)
    await trio.sleep(RESERVATION_S + 1)
    return CircuitStatus((await made.ask())[1])


async def refused_when_there_are_too_many(made: World) -> CircuitStatus:
    await reserve(made.behind, made.hub.peer_id)
    for _ in range(CIRCUITS.per_peer):
        assert (await made.ask())[1] == CircuitStatus.OK
    return CircuitStatus((await made.ask())[1])


async def refused_when_it_is_gone(made: World) -> CircuitStatus:
    await reserve(made.behind, made.hub.peer_id)
    made.internet.kill(made.behind.peer_id)
    return CircuitStatus((await made.ask())[1])


@pytest.mark.parametrize(
    ("attempt", "status"),
    [
        (refused_without_reservation, CircuitStatus.NO_RESERVATION),
        (refused_when_expired, CircuitStatus.NO_RESERVATION),
        (refused_when_there_are_too_many, CircuitStatus.RESOURCE_LIMIT_EXCEEDED),
        (refused_when_it_is_gone, CircuitStatus.CONNECTION_FAILED),
    ],
)
async def test_a_circuit_is_refused(
    attempt: Callable[[World], Awaitable[CircuitStatus]],
    status: CircuitStatus,
    autojump_clock: object,
) -> None:
    async with world() as made:
        assert await attempt(made) == status
        assert made.relay.refused == 1


async def test_who_asks_nothing_is_cut_off_and_it_is_no_bug(autojump_clock: object) -> None:
    async with world() as made:
        told: list[BaseException] = []
        made.hub.tellers.append(lambda _peer_id, _protocol, bug: told.append(bug))
        stream = await made.dialler.open_stream(made.hub.peer_id, HOP)
        with trio.fail_after(2 * ANSWER_S):
            assert await stream.receive_some() == b""
        assert told == []


async def test_who_is_out_of_reach_relays_for_nobody(autojump_clock: object) -> None:
    async with world() as made:
        made.offers[0] = False
        with pytest.raises(LocoError, match="does not relay"):
            await reserve(made.behind, made.hub.peer_id)
    async with world(mbps=0) as made:
        with pytest.raises(LocoError, match="does not relay"):
            await reserve(made.behind, made.hub.peer_id)


async def test_places_are_bounded(monkeypatch: pytest.MonkeyPatch, autojump_clock: object) -> None:
    monkeypatch.setattr(relay_module, "RESERVATIONS", Shares(1, 1, 1))
    async with world() as made:
        for _ in range(2):  # one who has a place renews it
            await reserve(made.behind, made.hub.peer_id)
        with pytest.raises(LocoError, match="status 200"):
            await reserve(made.dialler, made.hub.peer_id)


async def test_a_stranger_gets_no_place(autojump_clock: object) -> None:
    async with world() as made:
        made.strangers.add(made.behind.peer_id)
        with pytest.raises(LocoError, match=f"status {CircuitStatus.PERMISSION_DENIED}"):
            await reserve(made.behind, made.hub.peer_id)


async def test_one_network_takes_neither_all_places_nor_all_circuits(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    monkeypatch.setattr(relay_module, "RESERVATIONS", Shares(8, 1, 4))
    monkeypatch.setattr(relay_module, "CIRCUITS", Shares(12, 2, 6))
    async with world() as made, AsyncExitStack() as stack:
        await reserve(made.behind, made.hub.peer_id)
        places, circuits = [], []
        for number in range(1, 17):
            peer_id, where = peer_id_of(f"of one {number}"), f"/ip4/8.8.8.{number}/tcp/1"
            one = await stack.enter_async_context(made.internet.open_network(peer_id, where))
            await one.connect(made.hub.peer_id, made.hub.addresses)
            with suppress(LocoError):
                places.append(await reserve(one, made.hub.peer_id))
            circuits.append((await made.ask(one))[1])
        assert len(places) == 4
        assert circuits.count(CircuitStatus.OK) == 6
        await reserve(made.dialler, made.hub.peer_id)
        assert (await made.ask())[1] == CircuitStatus.OK


async def test_a_stranger_tunnels_slowly_until_it_is_known(autojump_clock: object) -> None:
    async with world(mbps=16) as made:
        await reserve(made.behind, made.hub.peer_id)
        made.strangers.add(made.dialler.peer_id)
        stream, _ = await made.ask()
        slow_s = await took_s(stream, 200_000)
        made.strangers.clear()
        assert slow_s > 2 > await took_s(stream, 200_000)
        assert slow_s == pytest.approx(2 * 8 * 0.2 / (16 * STRANGERS_SHARE), rel=0.5)


async def took_s(stream: Stream, num_bytes: int) -> float:
    """How long bytes take there and back."""
    began_s, back = trio.current_time(), bytearray(num_bytes)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.send_all, bytes(num_bytes))
        await stream.receive_into(memoryview(back))
    return trio.current_time() - began_s


async def test_a_circuit_that_is_idle_ends(autojump_clock: object) -> None:
    async with world() as made:
        await reserve(made.behind, made.hub.peer_id)
        stream, _ = await made.ask()
        began_s = trio.current_time()
        assert await stream.receive_some() == b""
        assert trio.current_time() - began_s == pytest.approx(CIRCUIT_IDLE_S, abs=1)


async def test_circuits_keep_to_the_rate(autojump_clock: object) -> None:
    async with world(mbps=8) as made:
        await reserve(made.behind, made.hub.peer_id)
        stream, _ = await made.ask()
        assert await took_s(stream, 4_000_000) > 7, "8 MB both ways at 1 MB/s"
