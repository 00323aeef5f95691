"""Can others dial us, and where? The answers of those that have tried, put together.

Idea. A peer asks some of those that it is linked to for two things: which address its connection
comes from (`observed`), and whether a connection of their own to the addresses that it names gets
through to it (`reached`). The first shows the router's outer address and how it chooses ports, the
second whether anybody can dial in. A peer behind a router cannot see either for itself.

Rules:
- The newest answer of each peer counts, for ANSWER_LASTS_S; those of as many peers as there are
  links are kept.
- An address works if at least half of those that tried it got through: one that lies, or is itself
  cut off, decides nothing once there are three.
- Nothing is known before an answer came in which some address of the family was tried.
- A router that gave the port that we listen on, or one other port to all, is of the kind that holes
  can be punched through; one that gave several ports is not.
"""

import ipaddress
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from protocol.address.multiaddr import CIRCUIT, InvalidAddress, is_relayed, normalise, parse
from protocol.limits import MAX_DIAL_BACK_ADDRESSES, MAX_LINKS, forget_oldest

ANSWER_LASTS_S: Final = 1800.0


class Reach(StrEnum):
    """Whether others can dial us."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


class NatKind(StrEnum):
    """The router between us and the others."""

    NONE = "none"
    CONE = "cone"
    """A NAT that shows us at one port to all: holes can be punched."""
    SYMMETRIC = "symmetric"
    """A NAT that shows us at another port to each: relays alone help."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class DialBack:
    """One peer's answer.

    Attributes:
        observed: the address that our connection comes from; None where that peer has dialled us
            or is connected through a relay, which tells nothing.
        tried, reached: addresses dialled, and those of them where we answered.
    """

    observed: str | None
    tried: frozenset[str]
    reached: frozenset[str]


def answer_of(
    asked: Collection[str], observed: str | None, tried: Iterable[str], reached: Iterable[str]
) -> DialBack:
    """A peer's answer, without addresses that it was not asked to try: it cannot name us any."""
    wanted = frozenset(asked)
    return DialBack(observed, wanted & frozenset(tried), wanted & frozenset(reached))


def host_and_port(address: str) -> tuple[str, int] | None:
    """The IP address and the port of a direct address of TCP; None for any other."""
    try:
        parts = parse(normalise(address))
    except InvalidAddress:
        return None
    names = [name for name, _ in parts]
    if names[:2] not in (["ip4", "tcp"], ["ip6", "tcp"]) or is_relayed(address):
        return None
    return parts[0][1], int(parts[1][1])


def candidates(
    observed_hosts: Iterable[str], addresses: Iterable[str], ports: Iterable[int]
) -> list[str]:
    """Addresses of ours worth a try: those that we tell others, and our ports where they see us."""
    seen = list(observed_hosts)
    named = [each for each in map(host_and_port, addresses) if each is not None]
    own = [(host, port) for host, port in named if _is_global(host) or host in seen]
    outer = [(host, port) for host in seen for port in sorted(set(ports))]
    return [_address(*each) for each in dict.fromkeys([*own, *outer])][:MAX_DIAL_BACK_ADDRESSES]


def relay_address(relay: str, addresses: Iterable[str]) -> str | None:
    """The address of a peer behind a relay at these addresses; None where it cannot be dialled."""
    direct = [each for each in map(host_and_port, addresses) if each is not None]
    direct.sort(key=lambda each: not _is_global(each[0]))
    return f"{_address(*direct[0])}/p2p/{relay}{CIRCUIT}" if direct else None


def may_try(address: str, observed: str) -> bool:
    """Whether to dial an address that a peer names, whose connection comes from `observed`.

    A peer could make us knock at others' doors. So it is dialled where it comes from, and in the
    other family of addresses, which its connection does not show, where it is public.
    """
    named, seen = host_and_port(address), host_and_port(observed)
    if named is None or seen is None:
        return False
    host, seen_host = ipaddress.ip_address(named[0]), ipaddress.ip_address(seen[0])
    return host == seen_host or (host.version != seen_host.version and host.is_global)


class DialBacks:
    """The newest answers of peers that have tried to dial us."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[float, DialBack]] = {}

    def heard(self, now_s: float, peer_id: str, answer: DialBack) -> None:
        self._answers.pop(peer_id, None)
        self._answers[peer_id] = now_s, answer
        forget_oldest(self._answers, MAX_LINKS)

    def forget(self) -> None:
        """Drop all answers: our addresses have changed."""
        self._answers.clear()

    def num_answers(self, now_s: float) -> int:
        return len(self._fresh(now_s))

    def working(self, now_s: float) -> list[str]:
        """Addresses at which others get through, those with most votes first."""
        tried, reached = self._votes(now_s)
        working = [address for address in reached if 2 * reached[address] >= tried[address]]
        return sorted(working, key=lambda address: (-reached[address], address))

    def reach(self, now_s: float, version: int | None = None) -> Reach:
        """Whether others can dial us, over IPv4, IPv6, or (None) at all."""
        tried, _ = self._votes(now_s)
        if not any(_is_of(address, version) for address in tried):
            return Reach.UNKNOWN
        works = any(_is_of(address, version) for address in self.working(now_s))
        return Reach.YES if works else Reach.NO

    def observed_hosts(self, now_s: float) -> list[str]:
        """The IP addresses that others see, most seen first."""
        hosts = Counter(host for host, _ in self._observed(now_s))
        return sorted(hosts, key=lambda host: (-hosts[host], host))

    def nat_kind(self, now_s: float, own_hosts: Iterable[str]) -> NatKind:
        seen, own = set(self._observed(now_s)), set(own_hosts)
        if not seen:
            return NatKind.UNKNOWN
        if all(host in own for host, _ in seen):
            return NatKind.NONE
        outer = {host: {port for other, port in seen if other == host} for host, _ in seen}
        if any(len(ports) > 1 for host, ports in outer.items() if host not in own):
            return NatKind.SYMMETRIC
        return NatKind.CONE if len(self._fresh(now_s)) > 1 else NatKind.UNKNOWN

    def _observed(self, now_s: float) -> list[tuple[str, int]]:
        found = [host_and_port(a.observed) for a in self._fresh(now_s) if a.observed is not None]
        return [each for each in found if each is not None]

    def _votes(self, now_s: float) -> tuple[Counter[str], Counter[str]]:
        tried, reached = Counter[str](), Counter[str]()
        for answer in self._fresh(now_s):
            tried.update(answer.tried)
            reached.update(answer.reached & answer.tried)
        return tried, reached

    def _fresh(self, now_s: float) -> list[DialBack]:
        oldest_s = now_s - ANSWER_LASTS_S
        return [answer for at_s, answer in self._answers.values() if at_s >= oldest_s]


def _address(host: str, port: int) -> str:
    return f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/{port}"


def _is_global(host: str) -> bool:
    return ipaddress.ip_address(host).is_global


def _is_of(address: str, version: int | None) -> bool:
    return version is None or address.startswith(f"/ip{version}/")
