"""Streams over QUIC lose nothing that was written before a close; real p2pd."""

from pathlib import Path

import pytest
import trio
from network_worlds import real_network

from peer.network.libp2p import Libp2pNetwork, is_quic
from peer.runtime import Stream

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

ECHO = "/test/echo/1"
TIMES = 60
SIZE = 1000


def over_quic(network: Libp2pNetwork) -> list[str]:
    return [address for address in network.addresses if is_quic(address)]


async def answer(stream: Stream) -> None:
    """Answer, and close at once."""
    await stream.receive_some()
    await stream.send_all(b"x" * SIZE)


async def test_what_was_written_before_a_close_arrives(tmp_path: Path) -> None:
    async with (
        real_network(tmp_path, "a", quic=True) as a,
        real_network(tmp_path, "b", quic=True) as b,
    ):
        await b.serve(ECHO, answer)
        assert over_quic(b)
        await a.connect(b.peer_id, over_quic(b))
        arrived = []
        for _ in range(TIMES):
            stream = await a.open_stream(b.peer_id, ECHO)
            assert is_quic(stream.remote_address)
            await stream.send_all(b"?")
            came = b""
            with trio.fail_after(10):
                while more := await stream.receive_some():
                    came += more
                    if len(came) == SIZE:
                        break
            arrived.append(len(came))
            await stream.aclose()
        assert arrived == [SIZE] * TIMES


async def test_who_does_not_want_quic_dials_nobody_over_it(tmp_path: Path) -> None:
    async with real_network(tmp_path, "a") as a, real_network(tmp_path, "b", quic=True) as b:
        assert not over_quic(a)
        await b.serve(ECHO, answer)
        await a.connect(b.peer_id, b.addresses)
        stream = await a.open_stream(b.peer_id, ECHO)
        assert not is_quic(stream.remote_address)
        await stream.aclose()
