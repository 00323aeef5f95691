"""One life of p2pd, the go-libp2p daemon that ships inside the hivemind wheel.

Rules of the house:
- TCP and TLS, and QUIC where the user wants it. QUIC loses what was written just before a close
  (libp2p_stream.py waits), and Noise costs a fifth of the throughput.
- No IPFS bootstrap: this process serves this swarm. p2pd has a relay of its own that no flag turns
  off, for everybody and with limits that no flag changes (128 KiB, 2 minutes). Ours takes over its
  protocol (relay.py).
- `-autonat` answers other p2pds that ask whether they can be reached, and lets ours punch holes:
  it does so once four others have told it how they see it, and one has failed to dial it.
- It must not outlive us. p2pd exits by itself when its last persistent control connection closes
  (p2pd_client.py holds one open), and `-idleTimeout` covers the moment before the first one is
  there. So kill -9 of the daemon takes p2pd along.
- A port belongs to one p2pd. go-libp2p listens with SO_REUSEPORT: a second p2pd on a taken port
  would start without complaint and steal half of the first one's connections. `held_ports`
  therefore binds each port first, without that flag, and keeps it bound (not listening) for as long
  as the network lives, so that a restarted p2pd finds the same ports free.

The addresses at which this machine itself can be reached: those of its network interfaces.

p2pd would tell others the address that a router gave us as well, as soon as enough of them have
seen it. It must not: nobody can dial that address unless a port is forwarded (which outside.py
finds out), and a failed dial to it leaves a state in both routers that spoils the punching of a
hole for two minutes. So p2pd is told what to announce, and this is it.

Bridges that containers and virtual machines hang on are left out: nobody outside this machine can
dial them, and elsewhere the same address is another machine's own bridge. One through which the
default route goes is this machine's way out, and stays. The address of that route comes first.

Where the unix sockets between the daemon and its p2pd lie, and whether they are in use.

A unix socket's path has at most 107 bytes, so they cannot stand in the home. Where they lie, they
are named by a hash of the identity file's path, the same for every start.
"""

import errno
import hashlib
import importlib.util
import ipaddress
import os
import re
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import trio

from peer.ports import Address
from protocol.address import multiaddr
from protocol.address.multiaddr import join_parts, parse
from protocol.errors import LocoError

from .reachability import local_form

# --- interfaces -----------------------------------------------------------------------------------

_FAMILIES: Final = {"ip4": socket.AF_INET, "ip6": socket.AF_INET6}
_ELSEWHERE: Final = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses for documentation: nobody has them, so the default route leads there."""
_INTERFACES: Final = Path("/sys/class/net")
_BRIDGE_NAMES: Final = re.compile(
    r"(docker|podman|cni|virbr|lxcbr|lxdbr|vmnet|flannel|nerdctl|bridge)\d|(br-|veth|cali|cilium_)"
)
"""Names that makers of bridges give, to what stands beside a bridge too."""


def own_addresses(listen: Sequence[Address]) -> list[Address]:
    """Each address listened on, those of all interfaces in place of an unspecified one."""
    return [address for one in listen for address in _specified(one)]


def _specified(address: Address) -> list[Address]:
    (kind, host), *rest = parse(address)
    if not ipaddress.ip_address(host).is_unspecified:
        return [address]
    hosts = reachable_hosts(_interface_addresses(_FAMILIES[kind]), _way_out(_FAMILIES[kind]))
    return [join_parts([(kind, own), *rest]) for own in hosts]


@dataclass(frozen=True, slots=True)
class InterfaceAddress:
    """An address of an interface that is up.

    Attributes:
        is_bridge: whether the interface joins others inside this machine.
    """

    interface: str
    host: str
    is_bridge: bool = False


def reachable_hosts(addresses: Iterable[InterfaceAddress], way_out: str | None) -> list[str]:
    """The addresses at which others may reach this machine, that of the default route first.

    Args:
        way_out: that of the default route; None where there is no such route.
    """
    named = [each for each in addresses if not _is_local(each.host)]
    leading = {each.interface for each in named if each.host == way_out}
    usable = [each for each in named if not each.is_bridge or each.interface in leading]
    usable.sort(key=lambda each: (each.host != way_out, each.interface not in leading))
    return [each.host for each in usable]


def _interface_addresses(family: socket.AddressFamily) -> list[InterfaceAddress]:
    """The addresses of all interfaces that are up, by name."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return [
        InterfaceAddress(name, each.address, is_bridge(name))
        for name, addresses in sorted(psutil.net_if_addrs().items())
        for each in addresses
        if name in up and each.family == family
    ]


def is_bridge(interface: str, folder: Path = _INTERFACES) -> bool:
    """Whether an interface joins others inside this machine, as its kind or its name says."""
    return (folder / interface / "bridge").is_dir() or bool(_BRIDGE_NAMES.match(interface))


def _way_out(family: socket.AddressFamily) -> str | None:
    """Our address on the default route. Nothing is sent: the kernel looks the route up."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE[family], 9))
        except OSError:
            return None
        host: str = probe.getsockname()[0]
        return host


def _is_local(host: str) -> bool:
    ip = ipaddress.ip_address(host.partition("%")[0])
    return ip.is_loopback or ip.is_link_local


# --- p2pd process ---------------------------------------------------------------------------------

START_TIMEOUT_S: Final = 20.0
IDLE_TIMEOUT_S: Final = 15
"""p2pd gives up when nobody attached for so long."""
STOP_GRACE_S: Final = 2.0
MAX_KEPT_BYTES: Final = 16 * 1024
"""The newest of its output that is kept."""
_READY: Final = b"Peer Addrs"
CONNECTIONS_LOW: Final = 192
CONNECTIONS_HIGH: Final = 256
"""p2pd closes idle connections beyond this many, down to the lower figure."""


class P2pdFailed(LocoError):
    """p2pd could not be started or has ended; the message says why, in its own last words."""


class CannotListen(P2pdFailed):
    """An address to listen on cannot be used; the message says which, why, and what to change."""


@dataclass(frozen=True, slots=True)
class P2pdConfig:
    """The settings with which p2pd is started.

    Attributes:
        identity_path: key file in libp2p's format.
        control_path: unix socket that p2pd listens on for us.
        listen: multiaddrs to listen on, TCP, ports resolved.
        announce: multiaddrs to tell others instead of those it listens on; empty for those.
        route_by_dht: let p2pd find the addresses of peers it was never told of through its own
            routing table.
        quic: listen on the same ports of UDP too.
        binary: None takes the one in the hivemind wheel.
    """

    identity_path: Path
    control_path: Path
    listen: tuple[Address, ...]
    announce: tuple[Address, ...] = ()
    route_by_dht: bool = True
    quic: bool = False
    binary: Path | None = None

    @property
    def listening(self) -> list[Address]:
        """Where p2pd listens, on TCP and on UDP."""
        return [*self.listen, *(map(over_quic, self.listen) if self.quic else ())]

    def announced(self) -> list[Address]:
        """Where others can reach us as far as this machine knows, at this moment.

        Nothing where p2pd chooses the port itself; it tells others what it knows, then.
        """
        if any(address.endswith("/tcp/0") for address in self.listen):
            return list(self.announce)
        here = list(map(local_form, self.listening))
        return list(self.announce) or own_addresses(self.listening) or here

    def arguments(self) -> list[str]:
        """The command line."""
        arguments = [
            str(self.binary or bundled_binary()),
            f"-listen=/unix{self.control_path}",
            f"-id={self.identity_path}",
            f"-hostAddrs={','.join(self.listening)}",
            f"-idleTimeout={IDLE_TIMEOUT_S}s",
            *(f"-announceAddrs={','.join(told)}" for told in [self.announced()] if told),
            *("-tls=1", "-noise=0", "-relayService=0", "-autonat=1"),
            *("-connManager=1", f"-connLo={CONNECTIONS_LOW}", f"-connHi={CONNECTIONS_HIGH}"),
            "-natPortMap=0",
        ]
        if self.route_by_dht:
            arguments.append("-dhtServer=1")
        return arguments


def over_quic(address: Address) -> Address:
    """The same port of UDP, for QUIC."""
    return address.replace("/tcp/", "/udp/") + "/quic-v1"


def bundled_binary() -> Path:
    """The p2pd inside the hivemind wheel, found without importing hivemind.

    Raises:
        P2pdFailed: hivemind is not installed, or has no p2pd in it.
    """
    spec = importlib.util.find_spec("hivemind")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, "hivemind_cli", "p2pd")
        if path.is_file():
            return path
    raise P2pdFailed("p2pd was not found: reinstall with 'pip install --force-reinstall hivemind'")


@contextmanager
def held_ports(listen: Sequence[Address]) -> Iterator[tuple[Address, ...]]:
    """The TCP ports of this peer, bound while the block lasts: the addresses, with their ports.

    Port 0 takes a free one. See the rules above.

    Raises:
        CannotListen: an address cannot be used.
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
    holder = stack.enter_context(socket.socket(_FAMILIES[kind], socket.SOCK_STREAM))
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
    """A running p2pd. Somebody must run `keep_reading` for as long as it lives."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._said = b""  # the last of its output

    @property
    def pid(self) -> int:
        """The process id of p2pd."""
        return self._process.pid

    @property
    def _last_words(self) -> str:
        lines = self._said.decode(errors="replace").split("\n")
        return " | ".join([line for line in lines if line][-3:]) or "it printed nothing"

    async def describe_end(self) -> str:
        """A sentence on how p2pd ended; waits a moment for that."""
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
        """Wait until it serves its control socket.

        Raises:
            P2pdFailed: it ended instead, or took too long.
        """
        with trio.move_on_after(START_TIMEOUT_S):
            while _READY not in self._said:
                if not await self._read_some():
                    raise P2pdFailed(f"p2pd did not start: {self._last_words}")
            return
        raise P2pdFailed(f"p2pd did not start in {START_TIMEOUT_S:.0f} s: {self._last_words}")

    async def _read_some(self) -> bool:
        assert self._process.stdout is not None
        data = await self._process.stdout.receive_some(MAX_KEPT_BYTES)
        self._said = (self._said + data)[-MAX_KEPT_BYTES:]
        return bool(data)


@asynccontextmanager
async def run_p2pd(config: P2pdConfig) -> AsyncIterator[P2pdProcess]:
    """Start p2pd, wait until it serves its control socket, stop it at the end.

    Raises:
        P2pdFailed: it did not start.
    """
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
    environment = {**os.environ, "GOLOG_LOG_LEVEL": "error", "GOLOG_LOG_FMT": "nocolor"}
    try:
        return await trio.lowlevel.open_process(
            config.arguments(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl+C in a terminal is for us; p2pd is needed to say goodbye
        )
    except OSError as error:
        raise P2pdFailed(f"p2pd cannot be run on this machine: {error}") from error


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
LOOK_AGAIN_S: Final = 0.1


def socket_paths(identity_path: Path, runtime_dir: Path) -> tuple[Path, Path]:
    """The paths of control socket and listener, the same for every start with this identity."""
    name = hashlib.blake2b(os.fsencode(identity_path.resolve()), digest_size=8).hexdigest()
    return runtime_dir / f"{name}.p2pd", runtime_dir / f"{name}.in"


async def wait_until_unused(control_path: Path) -> None:
    """Wait until no p2pd answers at the control socket.

    A p2pd whose daemon was killed goes by itself; one that stays belongs to a daemon that lives.

    Raises:
        P2pdFailed: one stays.
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
