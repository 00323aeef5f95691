"""Sentences for failed dials: which step failed, out of p2pd's own words.

resolve      a name has no address
dial         no TCP connection: refused, unreachable, timed out, or no address known
handshake    connected, but the other side is not the peer it should be, or speaks no TLS
protocol     a peer is there, but does not speak what was asked for
"""

import re
from collections.abc import Sequence
from typing import Final

import trio

from peer.ports import PeerId
from protocol.address import multiaddr

MAX_DETAIL_CHARACTERS: Final = 300
RESOLVE_TIMEOUT_S: Final = 5.0

_STEPS: Final = (
    (
        "protocol",
        re.compile(r"protocols? not supported|failed to negotiate protocol|protocol mismatch"),
    ),
    ("resolve", re.compile(r"no such host|lookup |failed to resolve|server misbehaving")),
    (
        "handshake",
        re.compile(r"security protocol|handshake|peer ?id mismatch|peer IDs? don't match|tls:"),
    ),
)


def failed_step(words: str) -> str:
    """`resolve`, `dial`, `handshake` or `protocol`."""
    return next((step for step, pattern in _STEPS if pattern.search(words)), "dial")


def dial_sentence(peer_id: PeerId, error: BaseException, protocol: str | None = None) -> str:
    """What happened, for people: the step first, then p2pd's words on one line."""
    words = re.sub(r"\s+", " ", str(error))
    step = failed_step(words)
    if step == "protocol" and protocol is not None:
        return f"protocol: {peer_id} does not speak {protocol}"
    return f"{step}: cannot reach {peer_id}: {words[:MAX_DETAIL_CHARACTERS]}"


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
        with trio.fail_after(RESOLVE_TIMEOUT_S):
            return bool(await trio.socket.getaddrinfo(name, None))
    except (OSError, UnicodeError, trio.TooSlowError):
        return False
