"""p2pd, the go-libp2p daemon that ships inside the hivemind wheel: its process, and requests to it.

- It speaks TCP and TLS. QUIC loses what was written just before a close, and its version can be
  made to take all memory from afar; Noise costs a fifth of the throughput.
- No Kademlia: it would tell strangers who is in the run and where, and keep what they bring.
- p2pd has a relay of its own that no flag turns off, for everybody and with limits that no flag
  changes (128 KiB, 2 minutes). Ours takes over its protocol (relay.py).
- It bounds neither connections nor streams, and its connection manager may cut links rather than
  what nobody uses. So we look after it (libp2p.py): connections are closed by the rules of
  protocol/membership/crowds.py; Go collects garbage early, above MEMORY_GOAL_BYTES earlier; and a
  p2pd of MAX_MEMORY_BYTES is replaced. Where the machine has no memory left, p2pd is killed first.
- `-autonat` answers other p2pds that ask whether they can be reached, and lets ours punch holes:
  it does so once four others have told it how they see it, and one has failed to dial it.
- It must not outlive us. p2pd exits when its last persistent control connection closes (`attach`
  holds one open), and `-idleTimeout` covers the moment before the first one is there. So kill -9 of
  the daemon takes p2pd along.
- A port belongs to one p2pd. go-libp2p listens with SO_REUSEPORT: a second p2pd on a taken port
  would start without complaint and steal half of the first one's connections. `held_ports`
  therefore binds each port first, without that flag, and keeps it bound (not listening) for as long
  as the network lives, so that a restarted p2pd finds the same ports free.
- A unix socket's path has at most 107 bytes, so those between us and p2pd cannot stand in the home.
  They are named by a hash of the identity file's path, the same for every start.

Requests. p2pd takes a protobuf `Request` behind a uvarint length on its control socket and answers
with a `Response`:

    Request     1 kind   2, 3, 4, 7 what is asked for, of CONNECT, STREAM_OPEN, STREAM_HANDLER and
                DISCONNECT
    Response    1 whether it failed   2 {1 why}   3 StreamInfo   4 our own peer   6 peers connected
    StreamInfo  1 peer   2 address   3 protocol
    peer        1 id     2 addresses

Every request has a connection of its own. One lasting connection is upgraded to a *persistent* one,
on which nothing is ever said; its end tells us at once that p2pd is gone. A connection on which a
STREAM_OPEN succeeded has become the stream itself. For a stream from outside, p2pd connects to our
listener and writes a StreamInfo first.
"""

import errno
import hashlib
import importlib.util
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import psutil
import trio

from peer.runtime import Address
from protocol.address import multiaddr
from protocol.address.varint import read_delimited
from protocol.errors import LocoError, RemoteProtocolError, Unusable
from protocol.limits import ANSWER_S, DIAL_TIMEOUT_S, MAX_CONTROL_PAYLOAD_BYTES
from protocol.names import printable

from .dial_errors import BACKOFF
from .protobuf import (
    Field,
    Fields,
    all_of,
    decode_fields,
    delimited,
    encode_fields,
    one_of,
    receive_exactly,
)
from .reachability import FAMILIES, local_form, own_addresses

# --- the process ---------------------------------------------------------------------------------

START_TIMEOUT_S: Final = 20
"""How long p2pd may take to come up, and then waits for somebody to attach before it gives up."""
STOP_GRACE_S: Final = 2.0
MAX_KEPT_BYTES: Final = 16 * 1024
_READY: Final = b"Peer Addrs"
MEMORY_GOAL_BYTES: Final = 192 << 20
"""Twice what it takes among real peers."""
MAX_MEMORY_BYTES: Final = 512 << 20
"""Out of reach for what Go does not need: then strangers hold it, or it leaks."""
KILLED_EARLIER: Final = b"500"
"""How much sooner, of 1000, it is killed than others where memory ends: that costs no weights."""


class P2pdFailed(LocoError):
    """p2pd could not be started or has ended; the message holds its own last words."""


class CannotListen(P2pdFailed, Unusable):
    """An address to listen on cannot be used; the message says what to change."""


@dataclass(frozen=True, slots=True)
class P2pdConfig:
    """The settings with which p2pd is started, of `open_libp2p_network`; ports are resolved."""

    identity_path: Path
    control_path: Path
    listen: tuple[Address, ...]
    announce: tuple[Address, ...] = ()

    def announced(self) -> list[Address]:
        """The addresses at which others can reach us, as far as this machine knows now."""
        here = map(local_form, self.listen)
        return list(self.announce) or own_addresses(self.listen) or list(here)

    def arguments(self) -> list[str]:
        return [
            str(bundled_binary()),
            f"-listen=/unix{self.control_path}",
            f"-id={self.identity_path}",
            f"-hostAddrs={','.join(self.listen)}",
            f"-idleTimeout={START_TIMEOUT_S}s",
            *(f"-announceAddrs={','.join(told)}" for told in [self.announced()] if told),
            *("-tls=1", "-noise=0", "-relayService=0", "-autonat=1"),
            "-natPortMap=0",
        ]


def bundled_binary() -> Path:
    """The p2pd inside the hivemind wheel, found without importing hivemind. Raises P2pdFailed."""
    spec = importlib.util.find_spec("hivemind")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, "hivemind_cli", "p2pd")
        if path.is_file():
            return path
    raise P2pdFailed("p2pd was not found: reinstall with 'pip install --force-reinstall hivemind'")


@contextmanager
def held_ports(listen: Sequence[Address]) -> Iterator[tuple[Address, ...]]:
    """The addresses with their ports, bound while the block lasts; port 0 takes a free one.

    Raises:
        CannotListen
    """
    with ExitStack() as stack:
        yield tuple(_hold(address, stack) for address in listen)


def _hold(address: Address, stack: ExitStack) -> Address:
    parts = multiaddr.parse(multiaddr.normalise(address))
    (kind, host), *rest = parts
    if [kind, *(name for name, _ in rest)] not in (["ip4", "tcp"], ["ip6", "tcp"]):
        raise CannotListen(
            f"cannot listen on {address}: use /ip4/ADDRESS/tcp/PORT or /ip6/ADDRESS/tcp/PORT"
        )
    port = int(rest[0][1])
    holder = stack.enter_context(socket.socket(FAMILIES[kind], socket.SOCK_STREAM))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if kind == "ip6":
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        holder.bind((host, port))
    except OSError as error:
        raise CannotListen(_bind_sentence(address, host, port, error)) from error
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return f"/{kind}/{host}/tcp/{holder.getsockname()[1]}"


def _bind_sentence(address: Address, host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} is taken ({address}): choose another with --listen, or stop the program "
            "that uses it"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"this machine has no address {host} ({address}): listen on 0.0.0.0 and announce the "
            "public address"
        )
    return f"cannot listen on {address}: {error.strerror}"


class P2pdProcess:
    """A running p2pd. `keep_reading` must run for as long as it lives."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._said = b""  # the last of its output

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the process; 0 once it is gone."""
        try:
            size: int = psutil.Process(self.pid).memory_info().rss
        except psutil.Error:
            return 0
        return size

    @property
    def _last_words(self) -> str:
        lines = self._said.decode(errors="replace").split("\n")
        last = " | ".join([line for line in lines if line][-3:])
        return printable(last) or "it printed nothing"

    async def describe_end(self) -> str:
        """A sentence on how p2pd ended, which is waited for a moment."""
        with trio.move_on_after(STOP_GRACE_S):
            await self._process.wait()
        status = self._process.poll()
        if status is None:
            return "p2pd closed its control connection"
        if status < 0:
            return f"p2pd was killed by {signal.Signals(-status).name}"
        return f"p2pd exited with status {status}: {self._last_words}"

    async def keep_reading(self) -> None:
        """Read its output to the end, so that it never blocks on it."""
        while await self._read_some():
            pass

    async def wait_ready(self) -> None:
        """Wait until it serves its control socket. Raises P2pdFailed."""
        with trio.move_on_after(START_TIMEOUT_S):
            while _READY not in self._said:
                if not await self._read_some():
                    raise P2pdFailed(f"p2pd did not start: {self._last_words}")
            return
        raise P2pdFailed(f"p2pd did not start in {START_TIMEOUT_S} s: {self._last_words}")

    async def _read_some(self) -> bool:
        assert self._process.stdout is not None
        data = await self._process.stdout.receive_some(MAX_KEPT_BYTES)
        self._said = (self._said + data)[-MAX_KEPT_BYTES:]
        return bool(data)


@asynccontextmanager
async def run_p2pd(config: P2pdConfig) -> AsyncIterator[P2pdProcess]:
    """Run p2pd, ready to be asked, while the block lasts. Raises P2pdFailed."""
    config.control_path.unlink(missing_ok=True)
    process = await _spawn(config)
    try:
        running = P2pdProcess(process)
        await running.wait_ready()
        yield running
    finally:
        with trio.CancelScope(shield=True):
            await _stop(process)
        config.control_path.unlink(missing_ok=True)


async def _spawn(config: P2pdConfig) -> trio.Process:
    environment = {
        **os.environ,
        "GOLOG_LOG_LEVEL": "error",
        "GOLOG_LOG_FMT": "nocolor",
        # Percent of garbage at which Go collects; by default 100. With less, strangers that come
        # and go make a p2pd grow less; bulk takes an eighth more of the processor.
        "GOGC": "50",
        "GOMEMLIMIT": str(MEMORY_GOAL_BYTES),
    }
    try:
        process = await trio.lowlevel.open_process(
            config.arguments(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl+C in a terminal is for us; p2pd is needed to say goodbye
        )
    except OSError as error:
        raise P2pdFailed(f"p2pd cannot be run on this machine: {error}") from error
    with suppress(OSError):  # there is no such file but on Linux
        Path(f"/proc/{process.pid}/oom_score_adj").write_bytes(KILLED_EARLIER)
    return process


async def _stop(process: trio.Process) -> None:
    if process.poll() is None:
        process.terminate()
    with trio.move_on_after(STOP_GRACE_S):
        await process.wait()
    if process.poll() is None:
        process.kill()
        await process.wait()
    if process.stdout is not None:
        await process.stdout.aclose()


# --- sockets --------------------------------------------------------------------------------------

OLD_P2PD_EXIT_S: Final = 5.0
"""How long a p2pd whose daemon was killed gets to notice."""
LOOK_AGAIN_S: Final = 0.25


def socket_paths(identity_path: Path, runtime_dir: Path) -> tuple[Path, Path]:
    """The paths of control socket and listener."""
    name = hashlib.blake2b(os.fsencode(identity_path.resolve()), digest_size=8).hexdigest()
    return runtime_dir / f"{name}.p2pd", runtime_dir / f"{name}.in"


async def wait_until_unused(control_path: Path) -> None:
    """Wait until no p2pd answers at the control socket. Raises P2pdFailed: one stays.

    A p2pd whose daemon was killed ends by itself; one that stays belongs to a daemon that lives.
    """
    with trio.move_on_after(OLD_P2PD_EXIT_S):
        while True:
            try:
                await (await trio.open_unix_socket(str(control_path))).aclose()
            except OSError:
                return
            await trio.sleep(LOOK_AGAIN_S)
    raise P2pdFailed(
        f"another daemon uses this identity (its p2pd answers on {control_path}): stop it first"
    )


@asynccontextmanager
async def listen_at(path: Path) -> AsyncIterator[trio.SocketListener]:
    """A listener on a unix socket at `path`, which is removed afterwards."""
    path.unlink(missing_ok=True)
    listener = trio.socket.socket(trio.socket.AF_UNIX)
    try:
        await listener.bind(str(path))
        listener.listen()
        yield trio.SocketListener(listener)
    finally:
        listener.close()
        path.unlink(missing_ok=True)


# --- requests -------------------------------------------------------------------------------------
BACKOFF_WAIT_S: Final = 6.0
"""A little more than p2pd's shortest pause after a failed dial."""
STREAM_BUFFER_BYTES: Final = 256 * 1024
"""Kernel buffer asked for on stream sockets. What waits here has been given to one stream and
cannot go by another: with 4 MiB the last pieces of a striped vector come late, and on loopback
nothing is gained."""


class P2pdRefused(LocoError):
    """p2pd could not do what it was asked; the message is p2pd's own."""


class RequestType(IntEnum):
    IDENTIFY = 0
    CONNECT = 1
    STREAM_OPEN = 2
    STREAM_HANDLER = 3
    LIST_PEERS = 5
    DISCONNECT = 7
    PERSISTENT_CONN_UPGRADE = 9


class PeerAddresses(NamedTuple):
    """A peer and its addresses, all binary."""

    peer: bytes
    addresses: tuple[bytes, ...]


class StreamInfo(NamedTuple):
    """The peer at the other end of a stream, and where it is; both binary."""

    peer: bytes
    address: bytes
    protocol: str


def request(kind: RequestType, *body: Field) -> bytes:
    """A request, with its length before it."""
    fields: list[Field] = [(1, int(kind))]
    if body:
        fields.append((kind + (kind < RequestType.LIST_PEERS), encode_fields(body)))
    return delimited(fields)


def parse_response(data: bytes) -> Fields:
    """The fields of p2pd's answer. Raises P2pdRefused, RemoteProtocolError."""
    fields = decode_fields(data)
    if 2 in fields or fields.get(1) == [1]:
        why = decode_fields(one_of(fields, 2, bytes, b""))
        words = one_of(why, 1, bytes, b"no reason given").decode(errors="replace")
        raise P2pdRefused(printable(" ".join(words.split())))  # others have written part of it
    return fields


def parse_stream_info(data: bytes) -> StreamInfo:
    fields = decode_fields(data)
    protocol = one_of(fields, 3, bytes).decode(errors="replace")
    return StreamInfo(one_of(fields, 1, bytes), one_of(fields, 2, bytes), protocol)


def parse_peer(data: bytes) -> PeerAddresses:
    fields = decode_fields(data)
    return PeerAddresses(one_of(fields, 1, bytes), tuple(all_of(fields, 2)))


class P2pdClient:
    def __init__(self, control_path: Path, persistent: trio.SocketStream) -> None:
        self._control_path = control_path
        self._persistent = persistent

    async def wait_lost(self) -> None:
        try:
            while await self._persistent.receive_some():
                pass
        except trio.BrokenResourceError:
            return

    async def is_lost(self) -> bool:
        """Whether p2pd is gone, or does not answer."""
        try:
            await self.identify()
        except LocoError:
            return True
        return False

    async def identify(self) -> PeerAddresses:
        """Our own peer, and the addresses that p2pd tells others."""
        return parse_peer(one_of(await self._ask(request(RequestType.IDENTIFY)), 4, bytes))

    async def list_peers(self) -> list[PeerAddresses]:
        """The peers that p2pd is connected to, once for each connection."""
        answer = await self._ask(request(RequestType.LIST_PEERS))
        return [parse_peer(each) for each in all_of(answer, 6)]

    async def connect(self, peer: bytes, addresses: Sequence[bytes]) -> None:
        """Connect to a peer (binary id) at binary multiaddrs, waiting while p2pd does not try.

        After a failed dial p2pd tries that address again only some seconds later. A peer that
        restarts would stay out of reach for as long, although it is back.

        Raises:
            P2pdRefused: it cannot be reached.
        """
        where: list[Field] = [(2, address) for address in addresses]
        asked = request(RequestType.CONNECT, (1, peer), *where, (3, DIAL_TIMEOUT_S))
        give_up_s = trio.current_time() + BACKOFF_WAIT_S
        while True:
            try:
                await self._ask(asked, DIAL_TIMEOUT_S + ANSWER_S)
                return
            except P2pdRefused as error:
                if BACKOFF not in str(error) or trio.current_time() > give_up_s:
                    raise
            await trio.sleep(LOOK_AGAIN_S)

    async def disconnect(self, peer: bytes) -> None:
        """Close all connections with a peer (binary id)."""
        await self._ask(request(RequestType.DISCONNECT, (1, peer)))

    async def set_handler(self, listener: bytes, protocol: str) -> None:
        """Have streams of `protocol` brought to the unix listener (binary multiaddr)."""
        body: tuple[Field, ...] = ((1, listener), (2, protocol.encode()), (3, 0))
        await self._ask(request(RequestType.STREAM_HANDLER, *body))

    async def open_stream(self, peer: bytes, protocol: str) -> tuple[trio.SocketStream, bytes]:
        """A stream to a peer (binary id), and the binary address that it goes to.

        Raises:
            P2pdRefused: the peer cannot be reached or does not speak `protocol`.
        """
        body: tuple[Field, ...] = ((1, peer), (2, protocol.encode()), (3, DIAL_TIMEOUT_S))
        connection = await _open_control(self._control_path)
        try:
            asked = request(RequestType.STREAM_OPEN, *body)
            answer = await _exchange(connection, asked, DIAL_TIMEOUT_S + ANSWER_S)
            address = parse_stream_info(one_of(answer, 3, bytes)).address if 3 in answer else b""
        except BaseException:
            await trio.aclose_forcefully(connection)
            raise
        return connection, address

    async def _ask(self, asked: bytes, timeout_s: float = ANSWER_S) -> Fields:
        async with await _open_control(self._control_path) as connection:
            return await _exchange(connection, asked, timeout_s)


@asynccontextmanager
async def attach(control_path: Path) -> AsyncIterator[P2pdClient]:
    """Attach to a running p2pd, and keep it alive while the block lasts. Raises P2pdFailed."""
    async with await _open_control(control_path) as connection:
        await _exchange(connection, request(RequestType.PERSISTENT_CONN_UPGRADE), ANSWER_S)
        yield P2pdClient(control_path, connection)


async def receive_stream_info(connection: trio.SocketStream) -> StreamInfo:
    """Read what p2pd says about a stream that it brings to our listener. Raises P2pdFailed."""
    try:
        with trio.fail_after(ANSWER_S):
            return parse_stream_info(await _receive_message(connection))
    except (trio.BrokenResourceError, trio.TooSlowError, RemoteProtocolError) as error:
        raise P2pdFailed(f"p2pd announced no stream: {error}") from error


def size_buffers(connection: trio.SocketStream) -> None:
    """Ask for kernel buffers of STREAM_BUFFER_BYTES."""
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, buffer, STREAM_BUFFER_BYTES)


async def _open_control(control_path: Path) -> trio.SocketStream:
    try:
        connection = await trio.open_unix_socket(str(control_path))
    except OSError as error:
        raise P2pdFailed(f"p2pd does not answer on {control_path}: {error.strerror}") from error
    size_buffers(connection)
    return connection


async def _exchange(connection: trio.SocketStream, asked: bytes, timeout_s: float) -> Fields:
    try:
        with trio.fail_after(timeout_s):
            await connection.send_all(asked)
            return parse_response(await _receive_message(connection))
    except trio.TooSlowError as error:
        raise P2pdFailed(f"p2pd did not answer in {timeout_s:.0f} s") from error
    except trio.BrokenResourceError as error:
        raise P2pdFailed("p2pd hung up") from error


async def _receive_message(connection: trio.SocketStream) -> bytes:
    # The length is read byte by byte: what follows the message belongs to the stream.
    try:
        # LIST_PEERS with thousands of peers stays below.
        exactly = partial(receive_exactly, connection)
        return await read_delimited(exactly, MAX_CONTROL_PAYLOAD_BYTES)
    except ValueError as error:
        raise P2pdFailed(f"p2pd does not speak as it should: {error}") from error
