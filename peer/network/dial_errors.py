"""Sentences for failed dials: the step that failed, out of p2pd's own words.

resolve      a name has no address
dial         no TCP connection: refused, unreachable, timed out, or no address known
handshake    connected, but the other side is not the peer it should be, or speaks no TLS
protocol     a peer is there, but does not speak what was asked for
"""

import re
from collections.abc import Sequence
from typing import Final

import trio

from peer.runtime import PeerId
from protocol.address import multiaddr
from protocol.limits import ANSWER_S
from protocol.names import short_id
from protocol.wire.messages import printable_sentence

_STEPS: Final = {
    "protocol": r"protocols? not supported|failed to negotiate protocol|protocol mismatch",
    "resolve": r"no such host|lookup |failed to resolve|server misbehaving",
    "handshake": r"security protocol|handshake|peer ?id mismatch|peer IDs? don't match|tls:",
}
BACKOFF: Final = "dial backoff"
"""p2pd's words for an address that it does not try now, since it has failed a moment ago."""
_MISMATCH: Final = re.compile(r"peer id mismatch: expected (\w+), but remote key matches (\w+)")
_CAUSE: Final = re.compile(r"\* \[/\w+/([^/\]]+)/\w+/(\d+)[^\]]*\] (.+?)(?= \* \[|$)")
_VERBS: Final = re.compile(r"^dial \w+ \S+: (connect: )?")
_TIMED_OUT: Final = re.compile(r"i/o timeout|context deadline exceeded|operation timed out")
_CURES: Final = {
    "another peer answers": "take the join line anew from whoever runs that peer; HOST:PORT alone"
    " believes whoever answers",
    "no address is known": "check how the name is written, and that this machine can look names up",
    "clock: ": "set the one that is wrong: timedatectl set-ntp true",
    "refused": "no peer listens there now: check the port, and that the peer runs",
    "no route|unreachable|timed out|nothing came|no answer|dial backoff": "check the address, that"
    " the machine is up, and that its firewall or router lets the port in",
    "does not speak /loco/": "it is a newer loco-peer than this one, or none: ask which version the"
    " run has (loco-peer version) and install that; of the newest, pip install -U loco-peer",
    "does not speak libp2p|not over tls": "another program listens there, perhaps the peer's"
    " metrics: give the port of its join line",
}
"""Remedies, by what the sentence says."""


def cure_of(words: str) -> str:
    """The remedy for a failed dial, by its sentence; empty where none is known."""
    cures = (cure for pattern, cure in _CURES.items() if re.search(pattern, words.lower()))
    return next(cures, "")


def mismatch_sentence(expected: PeerId, found: PeerId, where: str) -> str:
    """Another peer answers: with the ends of both ids, by which people know them."""
    who = f"expected ...{short_id(expected)}, found ...{short_id(found)}"
    return f"handshake: another peer answers{f' at {where}' if where else ''}: {who}"


def _p2pds_causes(words: str) -> str:
    """Each address that p2pd has tried (or passed over, if it tried none), and why it failed."""
    found = [(f"{host}:{port}", _VERBS.sub("", why)) for host, port, why in _CAUSE.findall(words)]
    tried = [(where, why) for where, why in found if why != BACKOFF] or found
    plain = [f"{where}: {_TIMED_OUT.sub('timed out', why)}" for where, why in tried]
    return "; ".join(dict.fromkeys(plain)) or words


def dial_sentence(peer_id: PeerId, error: BaseException, protocol: str | None = None) -> str:
    """One line for people: the step that failed, then what p2pd says of each address."""
    words = re.sub(r"\s+", " ", str(error))
    step = next((step for step, said in _STEPS.items() if re.search(said, words)), "dial")
    if step == "protocol" and protocol is not None:
        return f"protocol: {peer_id} does not speak {protocol}"
    if other := _MISMATCH.search(words):
        causes = _CAUSE.findall(words)
        where = next((f"{host}:{port}" for host, port, why in causes if "mismatch" in why), "")
        return mismatch_sentence(other[1], other[2], where)
    return f"{step}: cannot reach {peer_id}: {printable_sentence(_p2pds_causes(words))}"


async def unresolved_sentence(peer_id: PeerId, addresses: Sequence[bytes]) -> str | None:
    """The sentence for a peer whose (binary) addresses are all names that do not resolve."""
    hosts = [multiaddr.parse(multiaddr.from_bytes(address))[0] for address in addresses]
    if not hosts or not all(kind in ("dns", "dns4", "dns6") for kind, _ in hosts):
        return None
    for _, name in hosts:
        if await _resolves(name):
            return None
    names = ", ".join(name for _, name in hosts)
    return f"resolve: cannot reach {peer_id}: no address is known for {names}"


async def _resolves(name: str) -> bool:
    try:
        with trio.fail_after(ANSWER_S):
            return bool(await trio.socket.getaddrinfo(name, None))
    except (OSError, UnicodeError, trio.TooSlowError):
        return False
