"""What strangers can do to a real p2pd, by hand: learn, crowd, fill its memory."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
import trio
from bare_libp2p import MULTISTREAM, TLS, YAMUX, Bare, bare_connection, first_answer, said
from network_worlds import WAIT_S, SeededEntropy, peer_id_of, real_network, wait_until

from peer.network import libp2p as libp2p_module
from peer.network import p2pd as p2pd_module
from peer.network.identity import Identity
from peer.network.libp2p import Libp2pNetwork
from peer.network.p2pd import P2pdFailed, P2pdRefused
from peer.runtime import Stream
from protocol.address.multiaddr import to_bytes
from protocol.address.peer_id import peer_id_to_bytes
from protocol.errors import StreamLost
from protocol.membership import crowds

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

ECHO = "/loco/echo/1"
KADEMLIA = "/ipfs/kad/1.0.0"


@pytest.fixture
def short_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("n")


def identity_of(name: str) -> Identity:
    return Identity(SeededEntropy(name).token_bytes(32))


async def echo(stream: Stream) -> None:
    while data := await stream.receive_some():
        await stream.send_all(data)


async def echoes(stream: Stream, data: bytes) -> bool:
    await stream.send_all(data)
    answer = bytearray(len(data))
    await stream.receive_into(memoryview(answer))
    return bytes(answer) == data


@asynccontextmanager
async def two_that_speak(folder: Path) -> AsyncIterator[tuple[Libp2pNetwork, Stream]]:
    """One, and a stream that another has opened to it."""
    async with real_network(folder, "a") as a, real_network(folder, "b") as b:
        await a.serve(ECHO, echo)
        await b.connect(a.peer_id, a.addresses)
        stream = await b.open_stream(a.peer_id, ECHO)
        assert await echoes(stream, b"before")
        yield a, stream


async def test_a_stranger_is_told_nothing_of_others(short_path: Path) -> None:
    async with (
        two_that_speak(short_path) as (a, _),
        bare_connection(a.addresses[-1], identity_of("stranger")) as stranger,
    ):
        with trio.fail_after(WAIT_S):
            refusal = said(MULTISTREAM, "na")
            answer = await stranger.ask(said(MULTISTREAM, KADEMLIA), len(refusal))
    assert answer == refusal


async def test_a_connection_begins_in_tls_or_not_at_all(short_path: Path) -> None:
    async with real_network(short_path, "a") as a:
        for offered, answer in ((TLS, TLS), ("/plaintext/2.0.0", "na"), (YAMUX, "na")):
            with trio.fail_after(WAIT_S):
                assert await first_answer(a.addresses[-1], offered) == answer


class OfAnother(Identity):
    """Somebody's public key, and signatures by another one."""

    def sign(self, data: bytes) -> bytes:
        return identity_of("stranger").sign(data)


async def test_a_stranger_cannot_come_as_another(short_path: Path) -> None:
    came: list[str] = []

    async def note(stream: Stream) -> None:
        came.append(stream.remote_peer_id)

    member = OfAnother(SeededEntropy("member").token_bytes(32))
    async with real_network(short_path, "a") as a:
        await a.serve(ECHO, note)
        for identity in (member, identity_of("stranger")):
            with trio.fail_after(WAIT_S), suppress(trio.BrokenResourceError):
                async with bare_connection(a.addresses[-1], identity) as one:
                    await one.ask(said(MULTISTREAM, ECHO), 1 << 10)
        await wait_until(lambda: bool(came))
    assert came == [identity_of("stranger").peer_id]


async def test_a_crowd_of_connections_is_cut_and_links_are_not(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crowds, "MAX_IDLE_CONNECTIONS", 4)
    monkeypatch.setattr(libp2p_module, "LOOK_EVERY_S", 0.3)
    open_now = 0

    async def stay(one: Bare) -> None:
        nonlocal open_now
        await one.drain()
        open_now -= 1

    async with (
        two_that_speak(short_path) as (a, stream),
        AsyncExitStack() as stack,
        trio.open_nursery() as nursery,
    ):
        for number in range(16):
            attacker = bare_connection(a.addresses[-1], identity_of(f"stranger {number}"))
            open_now += 1
            nursery.start_soon(stay, await stack.enter_async_context(attacker))
        await wait_until(lambda: open_now <= 4)
        assert await echoes(stream, b"after")
        async with real_network(short_path, "newcomer") as newcomer:
            await newcomer.connect(a.peer_id, a.addresses)
            assert await echoes(await newcomer.open_stream(a.peer_id, ECHO), b"hello")
        nursery.cancel_scope.cancel()


async def test_one_that_fills_the_memory_has_p2pd_replaced(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libp2p_module, "LOOK_EVERY_S", 0.1)
    async with two_that_speak(short_path) as (a, stream):
        size = psutil.Process(a.statistics().p2pd_pid).memory_info().rss
        monkeypatch.setattr(libp2p_module, "MAX_MEMORY_BYTES", size + (4 << 20))
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_flood, a.addresses[-1])
                while not a.statistics().restarts:
                    await trio.sleep(0.01)
                # The new one may take as much by itself.
                monkeypatch.setattr(libp2p_module, "MAX_MEMORY_BYTES", 1 << 40)
                nursery.cancel_scope.cancel()
        assert "of memory" in a.statistics().last_failure
        with pytest.raises(StreamLost):
            await echoes(stream, b"lost")
        async with real_network(short_path, "c") as c:
            await c.connect(a.peer_id, a.addresses)
            assert await echoes(await c.open_stream(a.peer_id, ECHO), b"after")


async def _flood(address: str) -> None:
    async with (
        bare_connection(address, identity_of("stranger")) as stranger,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(stranger.drain)
        try:
            while True:
                await stranger.open_streams(500, said(MULTISTREAM))
        except trio.BrokenResourceError:
            await trio.sleep_forever()


async def test_what_others_say_is_harmless_on_a_terminal(short_path: Path) -> None:
    async def write(stream: trio.SocketStream) -> None:
        await stream.send_all(said(MULTISTREAM, "\x1b]0;owned\x07\x1b[2J"))
        await trio.sleep_forever()

    async with real_network(short_path, "a") as a, trio.open_nursery() as nursery:
        serve = partial(trio.serve_tcp, port=0, host="127.0.0.1")
        (listener,) = await nursery.start(serve, write)
        where = f"/ip4/127.0.0.1/tcp/{listener.socket.getsockname()[1]}"
        assert a._client is not None
        with pytest.raises(P2pdRefused) as refused:
            await a._client.connect(peer_id_to_bytes(peer_id_of("c")), [to_bytes(where)])
        assert "owned" in str(refused.value)
        assert str(refused.value).isprintable()
        nursery.cancel_scope.cancel()


async def test_the_last_words_of_a_p2pd_are_harmless_too(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = short_path / "p2pd"
    program.write_text("#!/bin/sh\nprintf 'a peer said \\033[2Jboo'\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setattr(p2pd_module, "bundled_binary", lambda: program)
    with pytest.raises(P2pdFailed) as failed:
        async with real_network(short_path, "a"):
            pass
    assert "boo" in str(failed.value)
    assert str(failed.value).isprintable()
