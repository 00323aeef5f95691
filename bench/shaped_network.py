"""Several hosts on one machine, each behind an access link of its own rate: network namespaces.

    namespace h0  [eth0] === [port0]  \\
    namespace h1  [eth0] === [port1]   >  bridge, in a namespace of its own
    namespace h2  [eth0] === [port2]  /

Idea. Each host is a network namespace with one interface, the end of a veth pair whose other end
lies on a bridge. A token bucket (tbf) on either end limits what leaves it: the one at the host
shapes upload, the one at the bridge shapes download. So each host has an access link as at home,
all traffic of its processes shares it, and the core between the links is as fast as the machine.

Rules:
- A bucket holds BUCKET_S of its rate, and at least MIN_BUCKET_BYTES: so much may pass at once after
  a pause. It queues QUEUE_S of its rate; what does not fit is dropped, and TCP slows down.
- Namespaces come and go as namespaces.py says. Addresses are the same in every network, which does
  not matter: nobody can reach from one into another.

What it does not show: delay (router/ has it), loss other than that of full queues, and address
translation. The counters of an interface see one packet where the kernel hands on several
segments of TCP at once, so they count the headers of that packet alone; the buckets count those of
each segment, as a wire would.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Final

from .namespaces import Namespaces, NetworkFailed, in_namespace, open_namespaces, run, why_none

BUCKET_S: Final = 0.002
MIN_BUCKET_BYTES: Final = 128 * 1024
"""Twice the largest packet that the kernel hands on at once: one that is larger than the bucket, if
only by its headers, is cut up first, which costs more processor time than what is measured."""
QUEUE_S: Final = 0.05
MAX_HOSTS: Final = 250
"""Hosts for which a /24 has room."""
TOOLS: Final = ("ip", "tc")


@dataclass(frozen=True, slots=True)
class AccessLink:
    """How fast a host may send and receive, in bits per second; None is as fast as the machine."""

    up_bits_per_s: float | None = None
    down_bits_per_s: float | None = None

    def describe(self) -> str:
        if self.up_bits_per_s is None and self.down_bits_per_s is None:
            return "unshaped"
        rates = (self.up_bits_per_s, self.down_bits_per_s)
        words = ["unshaped" if rate is None else f"{rate / 1e6:g}" for rate in rates]
        return f"{words[0] if rates[0] == rates[1] else ' up, '.join(words) + ' down'} Mbit/s"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that passed the interface of a host since it was made, Ethernet headers included."""

    received_bytes: int
    sent_bytes: int

    def __sub__(self, before: "Traffic") -> "Traffic":
        return Traffic(
            self.received_bytes - before.received_bytes, self.sent_bytes - before.sent_bytes
        )


class ShapedNetwork:
    """A network that is there. Made by `shaped_network`."""

    def __init__(self, name: str, num_hosts: int) -> None:
        self._name = name
        self.num_hosts = num_hosts
        self.bridge = f"{name}-bridge"
        """The namespace between the hosts."""

    def namespace(self, host: int) -> str:
        """The name of a host's namespace for `ip netns`."""
        return f"{self._name}-h{host}"

    def address(self, host: int) -> str:
        """IPv4 address of a host."""
        return f"10.77.0.{host + 1}"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs the given one on a host."""
        return in_namespace(self.namespace(host), command)

    def shape(self, host: int, link: AccessLink) -> None:
        """Give a host another access link; what is in the old one's queues is dropped."""
        _limit(self.namespace(host), "eth0", link.up_bits_per_s)
        _limit(self.bridge, f"port{host}", link.down_bits_per_s)

    def traffic(self, host: int) -> Traffic:
        """Bytes that have passed the interface of a host so far."""
        told = run("ip", "-json", "-stats", "-netns", self.namespace(host), "link", "show", "eth0")
        counters = json.loads(told)[0]["stats64"]
        return Traffic(counters["rx"]["bytes"], counters["tx"]["bytes"])


@contextmanager
def shaped_network(links: Sequence[AccessLink]) -> Iterator[ShapedNetwork]:
    """Hosts with these access links, all on one bridge.

    Raises:
        NetworkFailed
    """
    if len(links) > MAX_HOSTS:
        raise NetworkFailed(f"{len(links)} hosts, at most {MAX_HOSTS}")
    with open_namespaces() as namespaces:
        network = ShapedNetwork(namespaces.prefix, len(links))
        bridge = network.bridge
        namespaces.add(bridge)
        run("ip", "-netns", bridge, "link", "add", "bridge", "type", "bridge")
        run("ip", "-netns", bridge, "link", "set", "bridge", "up")
        for host, link in enumerate(links):
            _attach(network, host, namespaces)
            network.shape(host, link)
        yield network


@cache
def missing() -> str | None:
    """Why no such network can be built here, in a sentence; None if one can."""
    if (reason := why_none(TOOLS)) is not None:
        return reason
    try:
        with shaped_network([AccessLink(1e6, 1e6)]):
            return None
    except NetworkFailed as error:
        return f"no network can be built here: {error}"


def _attach(network: ShapedNetwork, host: int, namespaces: Namespaces) -> None:
    """Make a host with its interface, and put the other end on the bridge."""
    bridge, namespace, port = network.bridge, network.namespace(host), f"port{host}"
    namespaces.add(namespace)
    veth = ("type", "veth", "peer", "name", "eth0", "netns", namespace)
    run("ip", "-netns", bridge, "link", "add", port, *veth)
    run("ip", "-netns", bridge, "link", "set", port, "master", "bridge", "up")
    run("ip", "-netns", namespace, "address", "add", f"{network.address(host)}/24", "dev", "eth0")
    run("ip", "-netns", namespace, "link", "set", "eth0", "up")


def _limit(namespace: str, interface: str, bits_per_s: float | None) -> None:
    """Limit what leaves an interface from now on."""
    device = ("dev", interface, "root")
    if bits_per_s is None:  # in place of what may be there: one without any limit
        run("tc", "-netns", namespace, "qdisc", "replace", *device, "pfifo")
        return
    bytes_per_s = bits_per_s / 8
    bucket_bytes = max(int(bytes_per_s * BUCKET_S), MIN_BUCKET_BYTES)
    queue_bytes = max(int(bytes_per_s * QUEUE_S), MIN_BUCKET_BYTES)
    tbf = ("tbf", "rate", f"{bits_per_s:.0f}bit", "burst", f"{bucket_bytes}b")
    run("tc", "-netns", namespace, "qdisc", "replace", *device, *tbf, "limit", f"{queue_bytes}b")
