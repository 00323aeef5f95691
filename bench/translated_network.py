"""An internet on one machine, with hosts behind routers that translate addresses (NAT).

    public host        11.77.0.x     \\
    public host        11.77.0.x      >  bridge, in a namespace of its own: the internet
    router 0 outside   11.77.1.1     /
      inside 192.168.0.1  ===  bridge  ===  hosts 192.168.0.2, .3, ...

Idea. Each host and each router is a network namespace. A router forwards from its inside to its
outside and translates there, with nftables, as a router at home does: what its hosts begin may
be answered, and nothing else comes in. `Kind` says how it chooses the outer port. A router whose
`behind` names another one has its outside on that one's inside: so a carrier's network
translates a second time.

    OPEN        all that arrives for an unknown port goes to the first host: a full cone, as far as
                that host is concerned
    CONE        the port that the host itself chose, towards everybody: most routers at home
    SYMMETRIC   a random port for each destination

Rules:
- Namespaces come and go as namespaces.py says. The internet's addresses are real ones of somebody
  else, since libp2p dials back to none that is set aside for examples; nothing leaves the bridge.
- What comes to a router's closed port is dropped and not refused, as routers do.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Final

from .namespaces import Namespaces, NetworkFailed, in_namespace, open_namespaces, run, why_none

TOOLS: Final = ("ip", "nft")
_ACCEPT_ANSWERS: Final = "ct state established,related accept"


class Kind(StrEnum):
    """How a router translates; see the top of the file."""

    OPEN = "open"
    CONE = "cone"
    SYMMETRIC = "symmetric"


@dataclass(frozen=True, slots=True)
class Router:
    """A router and the hosts behind it.

    Attributes:
        behind: the router, by its place in the list, that its outside is connected to; None is the
            internet.
    """

    kind: Kind
    hosts: int = 1
    behind: int | None = None


@dataclass(frozen=True, slots=True)
class Host:
    """A host that is there."""

    namespace: str
    address: str

    def command(self, command: Sequence[str]) -> list[str]:
        """The command that runs the given one on this host."""
        return in_namespace(self.namespace, command)


@dataclass(frozen=True, slots=True)
class TranslatedNetwork:
    """A network that is there.

    Attributes:
        public: hosts on the internet itself.
        inside: the hosts behind each router.
        outer: the address of each router's outside.
    """

    public: tuple[Host, ...]
    inside: tuple[tuple[Host, ...], ...]
    outer: tuple[str, ...]


@contextmanager
def translated_network(public: int, routers: Sequence[Router]) -> Iterator[TranslatedNetwork]:
    """So many hosts on the internet, and these routers with theirs.

    Raises:
        NetworkFailed
    """
    with open_namespaces() as namespaces:
        builder = _Builder(namespaces)
        hosts = tuple(builder.public_host(number) for number in range(public))
        inside = tuple(builder.router(number, router) for number, router in enumerate(routers))
        outer = tuple(_outer(number, router) for number, router in enumerate(routers))
        yield TranslatedNetwork(hosts, inside, outer)


@cache
def missing() -> str | None:
    """Why no such network can be built here, in a sentence; None if one can."""
    if (reason := why_none(TOOLS)) is not None:
        return reason
    try:
        with translated_network(1, [Router(Kind.CONE)]):
            return None
    except NetworkFailed as error:
        return f"no network can be built here: {error}"


class _Builder:
    """Makes namespaces, their interfaces and their rules."""

    def __init__(self, namespaces: Namespaces) -> None:
        self._namespaces = namespaces
        self._internet = f"{namespaces.prefix}-net"
        namespaces.add(self._internet)
        _bridge(self._internet)

    def public_host(self, number: int) -> Host:
        name, address = f"{self._namespaces.prefix}-p{number}", f"11.77.0.{number + 1}"
        self._namespaces.add(name)
        _plug(name, "eth0", self._internet, f"p{number}")
        _give(name, "eth0", f"{address}/16")
        return Host(name, address)

    def router(self, number: int, router: Router) -> tuple[Host, ...]:
        name = f"{self._namespaces.prefix}-r{number}"
        self._namespaces.add(name)
        outside = self._internet if router.behind is None else self._router(router.behind)
        _plug(name, "outside", outside, f"r{number}")
        _give(name, "outside", f"{_outer(number, router)}/{16 if router.behind is None else 24}")
        if router.behind is not None:
            _route(name, f"192.168.{router.behind}.1")
        _bridge(name)
        _give(name, "bridge", f"192.168.{number}.1/24")
        run("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        hosts = tuple(self._inside_host(number, name, host) for host in range(router.hosts))
        run("ip", "netns", "exec", name, "nft", _rules(router.kind, hosts))
        return hosts

    def _router(self, number: int) -> str:
        return f"{self._namespaces.prefix}-r{number}"

    def _inside_host(self, router: int, router_name: str, host: int) -> Host:
        name = f"{self._namespaces.prefix}-r{router}h{host}"
        address = f"192.168.{router}.{host + 2}"
        self._namespaces.add(name)
        _plug(name, "eth0", router_name, f"h{host}")
        _give(name, "eth0", f"{address}/24")
        _route(name, f"192.168.{router}.1")
        return Host(name, address)


def _outer(number: int, router: Router) -> str:
    return (
        f"11.77.{number + 1}.1"
        if router.behind is None
        else f"192.168.{router.behind}.2{number:02}"
    )


def _rules(kind: Kind, hosts: Sequence[Host]) -> str:
    translate = "masquerade random,fully-random" if kind is Kind.SYMMETRIC else "masquerade"
    opened = f'iifname "outside" dnat to {hosts[0].address};' if kind is Kind.OPEN else ""
    forward = 'ct status dnat accept; iifname "bridge" accept'
    return f"""
    table ip router {{
        chain incoming {{ type nat hook prerouting priority -100; {opened} }}
        chain outgoing {{ type nat hook postrouting priority 100; oifname "outside" {translate}; }}
        chain through {{
            type filter hook forward priority 0; policy drop; {_ACCEPT_ANSWERS}; {forward};
        }}
        chain here {{
            type filter hook input priority 0; policy drop; {_ACCEPT_ANSWERS};
            iifname != "outside" accept;
        }}
    }}"""


def _bridge(namespace: str) -> None:
    run("ip", "-netns", namespace, "link", "add", "bridge", "type", "bridge")
    run("ip", "-netns", namespace, "link", "set", "bridge", "up")


def _plug(namespace: str, interface: str, bridge: str, port: str) -> None:
    """An interface of the namespace, with its other end on a bridge of another."""
    veth = ("type", "veth", "peer", "name", interface, "netns", namespace)
    run("ip", "-netns", bridge, "link", "add", port, *veth)
    run("ip", "-netns", bridge, "link", "set", port, "master", "bridge", "up")
    run("ip", "-netns", namespace, "link", "set", interface, "up")


def _give(namespace: str, interface: str, address: str) -> None:
    run("ip", "-netns", namespace, "address", "add", address, "dev", interface)


def _route(namespace: str, gateway: str) -> None:
    run("ip", "-netns", namespace, "route", "add", "default", "via", gateway)
