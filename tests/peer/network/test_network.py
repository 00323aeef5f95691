"""What every network promises, checked on the simulated and on the real one."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
from network_worlds import AnyNetwork, Pair, peer_id_of, real_network, wait_until

from peer.runtime import Stream
from protocol.address.multiaddr import InvalidAddress
from protocol.errors import LocalProtocolError, LocoError, StreamLost
from protocol.limits import INBOUND_STREAMS
from simulation.network import SimulatedInternet

ECHO = "/loco/echo/1"
BULK_BYTES = 8 << 20


@pytest.fixture(
    params=["simulated", pytest.param("real", marks=[pytest.mark.slow, pytest.mark.e2e])]
)
def kind(request: pytest.FixtureRequest) -> str:
    """Which implementation a test of the shared suite runs against."""
    return str(request.param)


@pytest.fixture
def clock(kind: str) -> trio.abc.Clock | None:
    """Virtual time for the simulated network; pytest-trio takes the clock from here."""
    return trio.testing.MockClock(autojump_threshold=0) if kind == "simulated" else None


@pytest.fixture
def short_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose path leaves room for a socket's name."""
    return tmp_path_factory.mktemp("n")


@pytest.fixture
async def pair(kind: str, clock: trio.abc.Clock | None, short_path: Path) -> AsyncIterator[Pair]:
    """Two networks, not yet connected."""
    async with AsyncExitStack() as stack:
        if kind == "simulated":
            internet = SimulatedInternet(seed=1)
            one: AnyNetwork = await stack.enter_async_context(
                internet.open_network(peer_id_of("a"))
            )
            other: AnyNetwork = await stack.enter_async_context(
                internet.open_network(peer_id_of("b"))
            )
        else:
            one = await stack.enter_async_context(real_network(short_path, "a"))
            other = await stack.enter_async_context(real_network(short_path, "b"))
        yield Pair(one, other)


async def echo(stream: Stream) -> None:
    while data := await stream.receive_some():
        await stream.send_all(data)


def pattern(name: str, num_bytes: int) -> bytes:
    return hashlib.shake_256(name.encode()).digest(num_bytes)


async def connected(pair: Pair) -> None:
    await pair.b.serve(ECHO, echo)
    await pair.connect()


def nothing_open(network: AnyNetwork) -> bool:
    return len(network.streams) == 0


async def assert_nothing_open(pair: Pair) -> None:
    for network in (pair.a, pair.b):
        await wait_until(partial(nothing_open, network))


async def test_echo_and_who_is_at_the_other_end(pair: Pair) -> None:
    seen = []

    async def handler(stream: Stream) -> None:
        seen.append(stream.remote_peer_id)
        await echo(stream)

    await pair.b.serve(ECHO, handler)
    await pair.connect()
    stream = await pair.a.open_stream(pair.b.peer_id, ECHO)
    await stream.send_all(b"are you there?")
    answer = bytearray(14)
    await stream.receive_into(memoryview(answer))
    await stream.aclose()
    assert answer == b"are you there?"
    assert seen == [pair.a.peer_id]
    assert stream.remote_peer_id == pair.b.peer_id
    await assert_nothing_open(pair)


async def test_addresses_are_full_and_name_the_peer(pair: Pair) -> None:
    assert pair.b.addresses
    assert all(address.endswith(f"/p2p/{pair.b.peer_id}") for address in pair.b.addresses)


async def test_the_called_peer_can_call_back(pair: Pair) -> None:
    await pair.a.serve(ECHO, echo)
    await pair.connect()
    stream = await pair.b.open_stream(pair.a.peer_id, ECHO)
    await stream.send_all(b"back")
    assert await stream.receive_some() == b"back"
    await stream.aclose()


async def test_bulk_both_ways_at_once_is_whole(pair: Pair) -> None:
    there, back = pattern("there", BULK_BYTES), pattern("back", BULK_BYTES)
    received = {}

    async def take(stream: Stream, name: str) -> None:
        buffer = bytearray(BULK_BYTES)
        await stream.receive_into(memoryview(buffer))
        received[name] = hashlib.sha256(buffer).digest()

    async def exchange(stream: Stream, data: bytes, name: str) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, data)
            nursery.start_soon(take, stream, name)

    async def handler(stream: Stream) -> None:
        await exchange(stream, back, "there")
        assert await stream.receive_some() == b""

    await pair.b.serve("/loco/bulk/1", handler)
    await pair.connect()
    stream = await pair.a.open_stream(pair.b.peer_id, "/loco/bulk/1")
    with trio.fail_after(60):
        await exchange(stream, there, "back")
        await stream.aclose()
        await assert_nothing_open(pair)
    assert received == {
        "there": hashlib.sha256(there).digest(),
        "back": hashlib.sha256(back).digest(),
    }
    for network in (pair.a, pair.b):
        statistics = network.statistics()
        assert statistics.sent_bytes == {"/loco/bulk/1": BULK_BYTES}
        assert statistics.received_bytes == {"/loco/bulk/1": BULK_BYTES}


async def test_a_reader_that_waits_holds_the_writer_back(pair: Pair) -> None:
    go_on = trio.Event()
    wanted = 64 << 20

    async def handler(stream: Stream) -> None:
        await go_on.wait()
        buffer = bytearray(1 << 20)
        for _ in range(wanted >> 20):
            await stream.receive_into(memoryview(buffer))
        await stream.send_all(b"all")

    await pair.b.serve("/loco/slow/1", handler)
    await pair.connect()
    stream = await pair.a.open_stream(pair.b.peer_id, "/loco/slow/1")
    data = bytes(64 << 10)  # less than all buffers on the way
    sent = 0
    with trio.move_on_after(2) as patience:
        while sent < wanted:
            await stream.send_all(data)
            sent += len(data)
    assert patience.cancelled_caught
    assert 0 < sent <= 32 << 20
    with pytest.raises(StreamLost, match="cancelled half-way"):
        await stream.send_all(b"more")
    go_on.set()
    await stream.aclose()
    await assert_nothing_open(pair)


async def test_the_end_of_input_is_empty_for_some_and_lost_for_into(pair: Pair) -> None:
    async def handler(stream: Stream) -> None:
        await stream.send_all(b"abc")

    await pair.b.serve("/loco/short/1", handler)
    await pair.connect()
    stream = await pair.a.open_stream(pair.b.peer_id, "/loco/short/1")
    buffer = bytearray(3)
    await stream.receive_into(memoryview(buffer))
    assert buffer == b"abc"
    assert await stream.receive_some() == b""
    await stream.aclose()
    stream = await pair.a.open_stream(pair.b.peer_id, "/loco/short/1")
    with pytest.raises(StreamLost, match="after 3 of 4 bytes"):
        await stream.receive_into(memoryview(bytearray(4)))
    await stream.aclose()
    await assert_nothing_open(pair)


async def test_writing_to_a_stream_that_the_peer_closed_is_lost(pair: Pair) -> None:
    async def handler(stream: Stream) -> None:
        await stream.receive_some()

    await pair.b.serve("/loco/deaf/1", handler)
    await pair.connect()
    stream = await pair.a.open_stream(pair.b.peer_id, "/loco/deaf/1")
    with trio.fail_after(30), pytest.raises(StreamLost):
        while True:
            await stream.send_all(bytes(1 << 16))
    await stream.aclose()
    await assert_nothing_open(pair)


async def test_what_was_sent_before_closing_arrives(pair: Pair) -> None:
    received = []
    done = trio.Event()

    async def handler(stream: Stream) -> None:
        total = 0
        while data := await stream.receive_some():
            total += len(data)
        received.append(total)
        done.set()

    await pair.b.serve("/loco/sink/1", handler)
    await pair.connect()
    stream = await pair.a.open_stream(pair.b.peer_id, "/loco/sink/1")
    await stream.send_all(bytes(1 << 20))
    await stream.aclose()
    with trio.fail_after(20):
        await done.wait()
    assert received == [1 << 20]


async def test_an_unknown_protocol_is_refused_by_name(pair: Pair) -> None:
    await connected(pair)
    with pytest.raises(StreamLost, match=r"protocol: .* does not speak /loco/none/1"):
        await pair.a.open_stream(pair.b.peer_id, "/loco/none/1")
    await assert_nothing_open(pair)


async def test_a_protocol_is_served_once(pair: Pair) -> None:
    await connected(pair)
    with pytest.raises(LocalProtocolError, match="served already"):
        await pair.b.serve(ECHO, echo)


async def test_an_unknown_peer_cannot_be_reached(pair: Pair) -> None:
    with pytest.raises(StreamLost, match="dial: cannot reach"):
        await pair.a.open_stream(peer_id_of("nobody"), ECHO)
    with pytest.raises(StreamLost, match="dial: cannot reach"):
        await pair.a.connect(peer_id_of("nobody"), ["/ip4/127.0.0.1/tcp/1"])


@pytest.mark.parametrize("address", ["/dns4/a..b/tcp/1", "/ip4/banana/tcp/1", "/carrier/pigeon"])
async def test_what_is_no_address_is_refused(pair: Pair, address: str) -> None:
    with pytest.raises(InvalidAddress):
        await pair.a.connect(pair.b.peer_id, [*pair.b.addresses, address])


async def test_handler_errors_end_their_stream_alone(pair: Pair) -> None:
    errors: list[BaseException] = [
        LocoError("on purpose"),
        trio.BrokenResourceError(),
        ExceptionGroup("two", [StreamLost("a"), trio.ClosedResourceError()]),
    ]

    async def handler(_stream: Stream) -> None:
        raise errors.pop()

    await connected(pair)
    await pair.b.serve("/loco/fails/1", handler)
    for _ in range(3):
        stream = await pair.a.open_stream(pair.b.peer_id, "/loco/fails/1")
        assert await stream.receive_some() == b""
        await stream.aclose()
    stream = await pair.a.open_stream(pair.b.peer_id, ECHO)
    await stream.send_all(b"alive")
    assert await stream.receive_some() == b"alive"
    await stream.aclose()
    assert not errors
    await assert_nothing_open(pair)


async def test_streams_of_one_peer_are_bounded(pair: Pair) -> None:
    await connected(pair)
    streams = [
        await pair.a.open_stream(pair.b.peer_id, ECHO) for _ in range(INBOUND_STREAMS.per_peer)
    ]
    for stream in streams:
        await stream.send_all(b"x")
        assert await stream.receive_some() == b"x"
    excess = await pair.a.open_stream(pair.b.peer_id, ECHO)
    assert await excess.receive_some() == b""
    assert pair.b.statistics().refused_streams == 1
    for stream in [*streams, excess]:
        await stream.aclose()
    await assert_nothing_open(pair)


@pytest.mark.parametrize("deadline_s", [0.0, 0.001, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.13])
async def test_cancelling_anywhere_leaves_nothing_open(pair: Pair, deadline_s: float) -> None:
    await connected(pair)

    async def talk() -> None:
        stream = await pair.a.open_stream(pair.b.peer_id, ECHO)
        try:
            await stream.send_all(bytes(1 << 19))
            await stream.receive_into(memoryview(bytearray(1 << 19)))
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await stream.aclose()

    with trio.move_on_after(deadline_s):
        await talk()
    await assert_nothing_open(pair)
    stream = await pair.a.open_stream(pair.b.peer_id, ECHO)
    await stream.send_all(b"fine")
    assert await stream.receive_some() == b"fine"
    await stream.aclose()


async def test_a_stream_that_is_closed_here_is_as_lost_as_any_other(pair: Pair) -> None:
    await connected(pair)
    stream = await pair.a.open_stream(pair.b.peer_id, ECHO)
    await stream.aclose()
    await stream.aclose()
    for use in (
        stream.send_all(b"x"),
        stream.receive_some(),
        stream.receive_into(memoryview(bytearray(1))),
    ):
        with pytest.raises(StreamLost, match="closed here"):
            await use
