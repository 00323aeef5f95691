"""The link between two measured processes: when bytes leave and arrive, and that all of them do."""

import pytest
import trio
import trio.testing

from bench.bare import Buffers, Bytes, TcpBytes, answer_swap, swap_all
from bench.relay import MAX_PIECE_BYTES, MIN_PIECE_BYTES, QUEUE_S, Relay, Shape, Wire

LINK = Shape(bits_per_s=8e6, round_trip_s=0.1)


def test_bytes_take_their_time_on_the_wire_and_then_the_delay():
    go_on_s, arrives_s = Wire(LINK).carry(10.0, 500_000)
    assert arrives_s == pytest.approx(10.0 + 0.5 + 0.05)
    assert go_on_s == pytest.approx(10.5 - QUEUE_S)


def test_all_connections_share_one_wire_and_idle_time_is_not_saved_up():
    wire = Wire(LINK)
    assert wire.carry(0.0, 1_000_000)[1] == pytest.approx(1.05)
    assert wire.carry(0.5, 1_000_000)[1] == pytest.approx(2.05)
    assert wire.carry(9.0, 1_000_000)[1] == pytest.approx(10.05)
    assert wire.carried_bytes == 3_000_000


@pytest.mark.parametrize("bits_per_s", [1e6, 200e6, 1e12])
def test_pieces_drip(bits_per_s):
    shape = Shape(bits_per_s, 0.1)
    assert MIN_PIECE_BYTES <= shape.piece_bytes <= MAX_PIECE_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("connections", [1, 3])
async def test_everything_arrives_and_is_counted(connections):
    out = bytes(range(256)) * 4096
    ours = Buffers(memoryview(out), memoryview(bytearray(len(out))))
    theirs = Buffers(memoryview(out[::-1]), memoryview(bytearray(len(out))))

    async def answer(connection):
        async with connection:
            await answer_swap(TcpBytes(connection), theirs)

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            served = await nursery.start(trio.serve_tcp, answer, 0)
            target_port = served[0].socket.getsockname()[1]
            relay = Relay(Shape(1e9, 0.002), target_port)
            relayed = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, relay.carry, relayed)
            port = relayed[0].socket.getsockname()[1]
            streams: list[Bytes] = [
                TcpBytes(await trio.open_tcp_stream("127.0.0.1", port)) for _ in range(connections)
            ]
            await swap_all(streams, ours)
            for stream in streams:
                await stream.aclose()
            nursery.cancel_scope.cancel()
    assert ours.into == theirs.out
    assert theirs.into == ours.out
    framing_bytes = connections * (16 + 2)
    assert relay.there.carried_bytes + relay.back.carried_bytes == 2 * len(out) + framing_bytes
