"""Hosts with links of their own, put together from namespaces and a forwarder (see __init__.py)."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

from bench.link_table import LinkTable, draw_table
from bench.namespaces import NetworkFailed, in_namespace, open_namespaces, run, why_none

from .forwarder import Statistics
from .tun import DEVICE, INTERFACE

TOOLS: Final = ("ip",)
STOP_S: Final = 5.0
_CONGESTION_CONTROL: Final = Path("/proc/sys/net/ipv4/tcp_congestion_control")


class RoutedNetwork:
    """A network that is there. Made by `routed_network`."""

    def __init__(
        self, table: LinkTable, namespaces: Sequence[str], forwarder: "subprocess.Popen[str]"
    ) -> None:
        self.table = table
        self._namespaces = namespaces
        self._forwarder = forwarder

    @property
    def num_hosts(self) -> int:
        return len(self._namespaces)

    def namespace(self, host: int) -> str:
        """The name that `ip netns` knows."""
        return self._namespaces[host]

    def address(self, host: int) -> str:
        """IPv4 address of a host."""
        return f"10.78.0.{host + 1}"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs the given one on a host."""
        return in_namespace(self._namespaces[host], command)

    def set(self, host: int, setting: str, value: str) -> None:
        """Change one of the host's kernel settings, such as net/ipv4/tcp_wmem."""
        write = ["sh", "-c", f'echo "{value}" > /proc/sys/{setting}']
        subprocess.run(self.command(host, write), check=True)

    def statistics(self) -> Statistics:
        """What the forwarder has done so far. Raises NetworkFailed."""
        assert self._forwarder.stdin is not None
        try:
            self._forwarder.stdin.write("?\n")
            self._forwarder.stdin.flush()
        except OSError as error:
            raise NetworkFailed("the forwarder has ended") from error
        return Statistics(**json.loads(_line_of(self._forwarder)))


@contextmanager
def routed_network(table: LinkTable) -> Iterator[RoutedNetwork]:
    """Hosts with these links.

    Raises:
        NetworkFailed
    """
    with open_namespaces() as namespaces:
        names = [f"{namespaces.prefix}-h{host}" for host in range(table.num_hosts)]
        for name in names:
            namespaces.add(name)
        with _forwarder(table, names) as forwarder:
            network = RoutedNetwork(table, names, forwarder)
            for host in range(network.num_hosts):
                _connect(network, host)
            yield network


@contextmanager
def _forwarder(table: LinkTable, names: Sequence[str]) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "bench.router.forwarder", json.dumps(table.to_json()), *names]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        try:
            _line_of(process)
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise NetworkFailed("the forwarder has ended; its last words are above")
    return line


def _connect(network: RoutedNetwork, host: int) -> None:
    name, device = network.namespace(host), ("dev", INTERFACE)
    network.set(host, f"net/ipv6/conf/{INTERFACE}/disable_ipv6", "1")
    run("ip", "-netns", name, "address", "add", f"{network.address(host)}/24", *device)
    run("ip", "-netns", name, "link", "set", *device, "up")


def congestion_control() -> str:
    """TCP's, which hosts have from the machine: not each is allowed to them, so it is not set."""
    return _CONGESTION_CONTROL.read_text().strip()


@cache
def missing() -> str | None:
    """Why no such network can be built here, in a sentence; None if one can."""
    if (reason := why_none(TOOLS)) is not None:
        return reason
    if not DEVICE.exists():
        return f"there is no {DEVICE}"
    try:
        with routed_network(draw_table(2, seed=0)):
            return None
    except (NetworkFailed, OSError, subprocess.CalledProcessError) as error:
        return f"no network can be built here: {error}"
