"""What only real processes show: p2pd dying, its parent dying, ports, TLS handshakes."""

import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import trio
from network_worlds import WAIT_S, peer_id_of, real_network, wait_until

from peer.network.p2pd import P2pdFailed, socket_paths
from peer.network.protobuf import delimited
from peer.network.relay import Relay, reserve
from peer.network.tls_probe import read_peer_id
from peer.runtime import Stream
from protocol.address import multiaddr
from protocol.address.peer_id import peer_id_to_bytes
from protocol.errors import StreamLost
from protocol.membership.dial_back import relay_address

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

ECHO = "/loco/echo/1"


@pytest.fixture
def short_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose path leaves room for a socket's name."""
    return tmp_path_factory.mktemp("n")


async def echo(stream: Stream) -> None:
    while data := await stream.receive_some():
        await stream.send_all(data)


def port_of(addresses: object) -> int:
    assert isinstance(addresses, tuple)
    return int(dict(multiaddr.parse(addresses[-1]))["tcp"])


def exists(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


async def ask(stream: Stream, question: bytes) -> bytes:
    await stream.send_all(question)
    answer = bytearray(len(question))
    await stream.receive_into(memoryview(answer))
    return bytes(answer)


async def test_the_peer_id_is_the_identitys(short_path: Path) -> None:
    async with real_network(short_path, "a") as a:
        assert a.peer_id == peer_id_of("a")


async def test_killed_p2pd_is_replaced_and_everything_goes_on(short_path: Path) -> None:
    async with real_network(short_path, "a") as a, real_network(short_path, "b") as b:
        await b.serve(ECHO, echo)
        await a.connect(b.peer_id, b.addresses)
        for killed in (a, b):
            stream = await a.open_stream(b.peer_id, ECHO)
            assert await ask(stream, b"before") == b"before"
            addresses, pid = killed.addresses, killed.statistics().p2pd_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            if killed is a:
                with pytest.raises(StreamLost, match="p2pd"):
                    await stream.receive_some()
                with pytest.raises(StreamLost, match="p2pd"):
                    await stream.send_all(b"x")
            with trio.fail_after(WAIT_S):
                while not killed.statistics().restarts:
                    await trio.sleep(0.01)
            await stream.aclose()
            assert killed.addresses == addresses
            assert killed.statistics().restarts == 1
            assert "SIGKILL" in killed.statistics().last_failure
            with trio.fail_after(WAIT_S):
                stream = await a.open_stream(b.peer_id, ECHO)
                assert await ask(stream, b"after") == b"after"
            await stream.aclose()
        await wait_until(lambda: len(a.streams) == len(b.streams) == 0)


async def test_a_stream_knows_where_it_came_from(short_path: Path) -> None:
    seen: list[str] = []

    async def look(stream: Stream) -> None:
        seen.append(stream.remote_address)
        await stream.send_all(b"x")

    async with real_network(short_path, "a") as a, real_network(short_path, "b") as b:
        await b.serve(ECHO, look)
        await a.connect(b.peer_id, b.addresses)
        stream = await a.open_stream(b.peer_id, ECHO)
        assert await stream.receive_some() == b"x"
        await stream.aclose()
    (address,) = seen
    assert multiaddr.parse(address)[0] == ("ip4", "127.0.0.1")


async def test_circuits_come_through_relays_where_we_hold_a_place_alone(short_path: Path) -> None:
    async with (
        real_network(short_path, "hub") as hub,
        real_network(short_path, "behind") as behind,
        real_network(short_path, "far") as far,
    ):
        relay = Relay(
            hub,
            carry_all,
            offers=lambda: True,
            knows=lambda _: True,
            mbps=1000.0,
            wall_time_s=time.time,
        )
        await relay.start()
        await behind.serve(ECHO, echo)
        await behind.connect(hub.peer_id, hub.addresses)
        await reserve(behind, hub.peer_id)
        bare = [multiaddr.split_peer_id(address)[0] for address in hub.addresses]
        through = relay_address(hub.peer_id, bare)
        assert through is not None
        await far.connect(behind.peer_id, [through])
        refused = await far.open_stream(behind.peer_id, ECHO)
        with trio.fail_after(WAIT_S), pytest.raises(StreamLost):
            await ask(refused, b"let me in")
        assert behind.statistics().refused_streams == 1
        behind.announce([through])
        stream = await far.open_stream(behind.peer_id, ECHO)
        assert await ask(stream, b"by the door") == b"by the door"
        behind.announce([])  # the place is given up, and the conversation goes on
        another = await far.open_stream(behind.peer_id, ECHO)
        assert await ask(another, b"and on") == b"and on"


async def test_a_stream_from_where_cannot_be_told_is_not_taken(short_path: Path) -> None:
    """p2pd tells of one that comes through a relay with another kind of key than Ed25519."""
    relay = bytes.fromhex("a503221220") + bytes(32) + bytes.fromhex("a202")
    direct = multiaddr.to_bytes("/ip4/203.0.113.1/tcp/4001")
    async with real_network(short_path, "a") as a:
        await a.serve(ECHO, echo)
        _, listener = socket_paths(short_path / "a.key", short_path)
        for address, answer in ((direct, b"hello"), (direct + relay, b"")):
            told = [(1, peer_id_to_bytes(peer_id_of("b"))), (2, address), (3, ECHO.encode())]
            async with await trio.open_unix_socket(str(listener)) as connection:
                await connection.send_all(delimited(told) + answer)
                with trio.fail_after(WAIT_S):
                    assert await connection.receive_some() == answer


async def carry_all(_num_bytes: int) -> None:
    await trio.lowlevel.checkpoint()


async def test_a_bug_that_a_stranger_finds_ends_its_stream_and_is_counted(
    short_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[tuple[str, str, BaseException]] = []

    async def stumble(_stream: Stream) -> None:
        raise OverflowError("seen")

    async with real_network(short_path, "a") as a, real_network(short_path, "b") as b:
        await b.serve(ECHO, stumble)
        b.tellers.append(lambda *bug: told.append(bug))
        await a.connect(b.peer_id, b.addresses)
        for _ in range(2):
            stream = await a.open_stream(b.peer_id, ECHO)
            with trio.fail_after(WAIT_S):
                assert await stream.receive_some() == b""
            await stream.aclose()
        await wait_until(lambda: b.statistics().failed_streams == 2)
        (bug,) = told
        assert (bug[0], bug[1], type(bug[2])) == (a.peer_id, ECHO, OverflowError)
    assert "this is a bug in loco-peer" in capsys.readouterr().err


async def test_streams_that_wait_are_woken_when_p2pd_dies(short_path: Path) -> None:
    async def deaf(_stream: Stream) -> None:
        await trio.sleep_forever()

    async def lost(method: object, *args: object) -> None:
        assert callable(method)
        with pytest.raises(StreamLost, match="p2pd"):
            await method(*args)

    async with real_network(short_path, "a") as a, real_network(short_path, "b") as b:
        await b.serve("/loco/deaf/1", deaf)
        await a.connect(b.peer_id, b.addresses)
        reader = await a.open_stream(b.peer_id, "/loco/deaf/1")
        writer = await a.open_stream(b.peer_id, "/loco/deaf/1")
        with trio.fail_after(WAIT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lost, reader.receive_into, memoryview(bytearray(8)))
                nursery.start_soon(lost, writer.send_all, bytes(64 << 20))
                await wait_until(lambda: a.statistics().sent_bytes.get("/loco/deaf/1", 0) > 0)
                os.kill(a.statistics().p2pd_pid or 0, signal.SIGKILL)
        await reader.aclose()
        await writer.aclose()


async def test_a_taken_port_is_named(short_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(P2pdFailed, match=f"port {port} is taken"):
            async with real_network(short_path, "a", listen=[f"/ip4/127.0.0.1/tcp/{port}"]):
                pass


async def test_a_port_used_by_another_p2pd_is_taken_too(short_path: Path) -> None:
    async with real_network(short_path, "a") as a:
        port = port_of(a.addresses)
        with pytest.raises(P2pdFailed, match=f"port {port} is taken"):
            async with real_network(short_path, "b", listen=[f"/ip4/127.0.0.1/tcp/{port}"]):
                pass


async def test_a_port_can_be_used_again_at_once(short_path: Path) -> None:
    port = 0
    for _ in range(2):
        async with (
            real_network(short_path, "a", listen=[f"/ip4/127.0.0.1/tcp/{port}"]) as a,
            real_network(short_path, "b") as b,
        ):
            await b.connect(a.peer_id, a.addresses)
            port = port_of(a.addresses)


async def test_one_identity_runs_once_and_stale_sockets_do_not_matter(short_path: Path) -> None:
    control, _ = socket_paths(short_path / "a.key", short_path)
    async with real_network(short_path, "a"):
        with pytest.raises(P2pdFailed, match="another daemon uses this identity"):
            async with real_network(short_path, "a"):
                pass
    assert not list(short_path.glob("*.p2pd")) + list(short_path.glob("*.in"))
    for path in (control, control.with_suffix(".in")):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(path))
    async with real_network(short_path, "a") as a:
        assert a.peer_id


async def test_a_listening_address_must_be_tcp(short_path: Path) -> None:
    with pytest.raises(P2pdFailed, match="cannot listen on /ip4/127.0.0.1/udp/1/quic-v1"):
        async with real_network(short_path, "a", listen=["/ip4/127.0.0.1/udp/1/quic-v1"]):
            pass


async def test_announced_addresses_come_first_and_a_local_one_stays(short_path: Path) -> None:
    announced = "/dns4/seed.example/tcp/4001"
    async with (
        real_network(short_path, "a", listen=["/ip4/0.0.0.0/tcp/0"], announce=[announced]) as a,
        real_network(short_path, "b") as b,
    ):
        assert a.addresses[0] == f"{announced}/p2p/{a.peer_id}"
        assert a.addresses[-1].startswith("/ip4/127.0.0.1/tcp/")
        await b.connect(a.peer_id, a.addresses[-1:])


async def test_failed_dials_name_their_step(short_path: Path) -> None:
    async def hang_up(stream: trio.SocketStream) -> None:
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    serve_loopback = partial(trio.serve_tcp, port=0, host="127.0.0.1")
    async with real_network(short_path, "a") as a, real_network(short_path, "b") as b:
        async with trio.open_nursery() as nursery:
            (listener,) = await nursery.start(serve_loopback, hang_up)
            web = f"/ip4/127.0.0.1/tcp/{listener.socket.getsockname()[1]}"
            for name, address, step in (
                ("c", "/ip4/127.0.0.1/tcp/1", "dial: cannot reach {}: 127.0.0.1:1: .* refused$"),
                ("d", "/dns4/no.such.name.invalid/tcp/1", "resolve: cannot reach {}"),
                ("e", web, "handshake: cannot reach {}"),
                ("f", b.addresses[0].partition("/p2p/")[0], "handshake: another peer answers at"),
            ):
                with pytest.raises(StreamLost, match=f"^{step.format(peer_id_of(name))}"):
                    await a.connect(peer_id_of(name), [address])
            nursery.cancel_scope.cancel()
        with pytest.raises(StreamLost, match="another peer's address"):
            await a.connect(peer_id_of("c"), b.addresses)


@pytest.mark.parametrize(
    "address",
    [
        "/quic-v1",
        "/ip4/127.0.0.1/tcp/0",
        "/ip4/127.0.0.1/tcp/1/p2p-circuit",
        "/tcp/1/ip4/127.0.0.1",
    ],
)
async def test_an_address_that_can_be_read_and_not_dialled_costs_that_dial(
    short_path: Path, address: str
) -> None:
    """As strangers tell them of themselves, and the home remembers them."""
    assert multiaddr.readable([address]) == (address,)
    async with real_network(short_path, "a") as a, real_network(short_path, "b") as b:
        pid = a.statistics().p2pd_pid
        with pytest.raises(StreamLost):
            await a.connect(peer_id_of("nowhere"), [address])
        await a.connect(b.peer_id, [address, *b.addresses])
        assert a.statistics().p2pd_pid == pid


CHILD = """
import sys, trio
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from network_worlds import real_network

async def main():
    async with real_network(Path(sys.argv[1]), "child") as network:
        print(network.statistics().p2pd_pid, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


async def test_a_killed_daemon_takes_its_p2pd_along(short_path: Path) -> None:
    arguments = [sys.executable, "-c", CHILD, str(short_path), str(Path(__file__).parent)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as child:  # noqa: ASYNC220 - ends below
        assert child.stdout is not None
        with trio.fail_after(30):
            pid = int(await trio.to_thread.run_sync(child.stdout.readline))
        assert exists(pid)
        child.kill()
    await wait_until(lambda: not exists(pid))
    async with real_network(short_path, "child") as again:
        assert again.statistics().p2pd_pid != pid


async def test_tls_probe_reads_the_peer_id(short_path: Path) -> None:
    async with real_network(short_path, "a") as a:
        assert await read_peer_id("127.0.0.1", port_of(a.addresses)) == a.peer_id
        assert await read_peer_id("localhost", port_of(a.addresses)) == a.peer_id
