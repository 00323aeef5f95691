"""The book of peers: what one peer holds against others, and what it lets them cost.

An identity costs nothing, so what others can make us do is bounded for each of them, and so is what
is kept of them. Nobody else is told what stands here: a liar would have honest peers ignored. (A
fault that all can prove is a matter for a ban.)

Conduct. One fault ends a stream; many must not cost us as many streams.
  1. A fault adds its weight to a peer's score, which halves every HALF_LIFE_S.
  2. From SLOWED_FROM on the peer's streams are served after a wait. From IGNORED_FROM on it is
     ignored (neither linked nor served), until its score has faded to TAKEN_BACK_AT.
  3. Only what breaks the protocol, or cannot be true, is a fault. Streams that end, stall or come
     too late are no faults (lines, disks and clocks do that), nor is a peer that is busy or was
     restarted, nor what views explain: an owner by another view, a partner of another round.
  4. A peer that was proved to have lied is convicted, and ignored for good.

Patience.
  5. A peer that could not be reached, or could not help, is asked again after a pause. Each
     pause in a row is twice as long as the last, up to a bound; an answer ends them.

Hearsay. Naming a peer costs nothing, so it costs us no more than the namer's budgets.
  6. A number of names is noted of one peer, and in total; further ones are ignored. A name leaves
     the budget when its peer is linked, or forgotten.
  7. Dials to names have a budget of their own, so that they leave room for the others; after
     MAX_HEARSAY_TRIES of them a name is forgotten.

Budgets and paces.
  8. A budget bounds places in all, for one identity, and for one network: an identity costs
     nothing, an address something, a network more. A network is the /24 of an IPv4 address or the
     /48 of an IPv6 address; a relayed address is in its relay's network, or is one of that relay
     alone. Other addresses that are not of the open internet have no network, and share the whole
     budget: their peers are beside us already, and people run many on one machine.
  9. One peer, and all of one network, may begin so many things a second, and a burst of them. More
     waits for its turn, and is not refused: where a peer's messages are read at such a pace, its
     flood piles up on its own line.

Invariant: what is kept grows with places taken, faults, and pauses not long over, each within a
bound; never with all peers that were seen.
"""

import ipaddress
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from protocol.address.multiaddr import InvalidAddress, parse, relay_of
from protocol.limits import (
    HEARSAY,
    HEARSAY_DIALS,
    MAX_CONVICTED,
    MAX_HEARSAY_TRIES,
    Shares,
    forget_oldest,
)

HALF_LIFE_S: Final = 300.0
SLOWED_FROM: Final = 2.5
IGNORED_FROM: Final = 7.5
"""Three faults of weight 1, and eight, within minutes: each fades a little until the next."""
TAKEN_BACK_AT: Final = 2.0
HIGHEST: Final = 32.0
"""No score is higher, so nobody is ignored for longer than twenty minutes after its last fault."""
SLOWED_S: Final = 2.0
MAX_SCORES: Final = 1024
"""One more drives out the lowest."""


class Fault(StrEnum):
    BROKEN_RULE = "broken_rule"
    BAD_VECTOR = "bad_vector"
    IMPLAUSIBLE = "implausible"  # much further away than those of others


WEIGHTS: Final = {Fault.BROKEN_RULE: 1.0, Fault.BAD_VECTOR: 2.0, Fault.IMPLAUSIBLE: 1.0}


# --- budgets --------------------------------------------------------------------------------------
PREFIX_BITS: Final = {4: 24, 6: 48}
"""Addresses of one customer of a provider, by the version of IP."""


def prefix_of(address: str) -> str | None:
    """The network of a multiaddr; None where it is a private one, or cannot be told."""
    try:
        (kind, value), relay = parse(address)[0], relay_of(address)
    except InvalidAddress:
        return None
    network = _network(value) if kind in ("ip4", "ip6") else None
    return network or (f"relay {relay}" if relay else None)


def _network(text: str) -> str | None:
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if not ip.is_global:
        return None
    return str(ipaddress.ip_network((ip, PREFIX_BITS[ip.version]), strict=False))


class Budget:
    """Places, and those that hold them (rule 8)."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._by_peer: Counter[str] = Counter()
        self._by_prefix: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        return self._by_peer.total()

    def has_room(self, peer_id: str, address: str = "") -> bool:
        """Whether this peer, coming from this address, may have one more place."""
        prefix = prefix_of(address)
        return (
            self.taken < self._shares.total
            and self._by_peer[peer_id] < self._shares.per_peer
            and (prefix is None or self._by_prefix[prefix] < self._shares.per_prefix)
        )

    @contextmanager
    def held(self, peer_id: str, address: str) -> Iterator[None]:
        """Hold a place while the block lasts."""
        self._add(peer_id, address, 1)
        try:
            yield
        finally:
            self._add(peer_id, address, -1)

    def take(self, peer_id: str, address: str = "") -> None:
        self._add(peer_id, address, 1)

    def give_back(self, peer_id: str, address: str = "") -> None:
        self._add(peer_id, address, -1)

    def _add(self, peer_id: str, address: str, places: int) -> None:
        for counts, holder in ((self._by_peer, peer_id), (self._by_prefix, prefix_of(address))):
            if holder is not None:
                counts[holder] += places
                if counts[holder] <= 0:
                    del counts[holder]


# --- paces ----------------------------------------------------------------------------------------
class Allowance:
    """A bucket that fills with time."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = self._left = burst
        self._at_s = -math.inf

    def spend(self, now_s: float, cost: float) -> float:
        """Let `cost` pass now; for how many seconds nothing more should."""
        self._left = min(self._burst, self._left + (now_s - self._at_s) * self._per_s) - cost
        self._at_s = now_s
        return max(0.0, -self._left / self._per_s)

    def is_full(self, now_s: float) -> bool:
        """Whether it is as good as a new one."""
        return self._left + (now_s - self._at_s) * self._per_s >= self._burst


class Paces:
    """The paces, a second, of one peer and of one network (rule 9); `burst_s` of them at once."""

    def __init__(self, per_peer: float, per_prefix: float, burst_s: float) -> None:
        self._per_peer, self._per_prefix, self._burst_s = per_peer, per_prefix, burst_s
        self._kept: dict[tuple[str | None, float], Allowance] = {}
        self._swept_s = 0.0

    def begin(self, now_s: float, peer_id: str, address: str) -> float:
        """A peer begins one more thing; how long it should wait."""
        if now_s >= self._swept_s + self._burst_s:
            self._swept_s = now_s
            self._kept = {key: own for key, own in self._kept.items() if not own.is_full(now_s)}
        wait_s = 0.0
        for key in ((peer_id, self._per_peer), (prefix_of(address), self._per_prefix)):
            if key[0] is not None:
                new = Allowance(key[1], key[1] * self._burst_s)
                wait_s = max(wait_s, self._kept.setdefault(key, new).spend(now_s, 1.0))
        return wait_s


# --- patience -------------------------------------------------------------------------------------
class Pauses(NamedTuple):
    """The first pause, and the longest one that failures alone come to."""

    first_s: float
    most_s: float


REDIALS: Final = Pauses(0.5, 30.0)


class BackOff:
    """When each peer may be asked again (rule 5); what has long been over is forgotten."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._kept: dict[str, tuple[float, float]] = {}

    def failed(self, peer_id: str, now_s: float, at_least_s: float = 0.0) -> float:
        """Note that it was not reached, or no help. The pause, which may have a lower bound."""
        self._forget(now_s)
        _, pause_s = self._kept.get(peer_id, (now_s, self._first_s))
        longer_s = min(self._most_s, 2 * pause_s)
        pause_s = max(pause_s, at_least_s)
        self._kept[peer_id] = now_s + pause_s, longer_s
        return pause_s

    def put_off(self, peer_id: str, now_s: float, *, long: bool = False) -> None:
        """Pause for one that left without failing, unless a longer pause holds."""
        self._forget(now_s)
        due_s, _ = self._kept.get(peer_id, (now_s, 0.0))
        pause_s = self._most_s if long else self._first_s
        self._kept[peer_id] = max(due_s, now_s + pause_s), self._first_s

    def answered(self, peer_id: str) -> None:
        self._kept.pop(peer_id, None)

    def is_due(self, peer_id: str, now_s: float) -> bool:
        kept = self._kept.get(peer_id)
        return kept is None or now_s >= kept[0]

    def _forget(self, now_s: float) -> None:
        over_s = now_s - self._most_s
        self._kept = {peer: kept for peer, kept in self._kept.items() if kept[0] >= over_s}


# --- the book -------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Conduct:
    score: float = 0.0
    of_s: float = 0.0
    """When the score was that."""
    ignored: bool = False

    def score_at(self, now_s: float) -> float:
        return self.score * math.exp2((self.of_s - now_s) / HALF_LIFE_S)


@dataclass(slots=True)
class _Name:
    """A peer that is no more than a name; `tries` are dials of it in vain."""

    teller: str
    tries: int = 0


class PeerBook:
    """The conduct of peers, and the names of those that nobody has met."""

    def __init__(self) -> None:
        self._conduct: dict[str, _Conduct] = {}
        self._convicted: dict[str, None] = {}
        self._names: dict[str, _Name] = {}
        self._told_names = Budget(HEARSAY)
        self._dialled_names = Budget(HEARSAY_DIALS)
        self.dials = BackOff(*REDIALS)

    # --- conduct ----------------------------------------------------------------------------------
    def score(self, now_s: float, peer_id: str) -> float:
        return self._conduct.get(peer_id, _Conduct()).score_at(now_s)

    def note(self, now_s: float, peer_id: str, fault: Fault) -> bool:
        """Add a fault. Returns whether the peer is ignored from now on, and was not before."""
        was_ignored, scores = self.is_ignored(now_s, peer_id), self._conduct
        own = scores.setdefault(peer_id, _Conduct())
        own.score, own.of_s = min(HIGHEST, own.score_at(now_s) + WEIGHTS[fault]), now_s
        own.ignored = was_ignored or own.score >= IGNORED_FROM
        if len(scores) > MAX_SCORES:
            del scores[min(scores, key=lambda peer: scores[peer].score_at(now_s))]
        return own.ignored and not was_ignored

    def convict(self, peer_id: str) -> None:
        """Ignore a peer for good that was proved to have lied."""
        self._convicted[peer_id] = None
        forget_oldest(self._convicted, MAX_CONVICTED)

    def is_convicted(self, peer_id: str) -> bool:
        return peer_id in self._convicted

    def is_ignored(self, now_s: float, peer_id: str) -> bool:
        """Whether a peer is not heard for its faults (rule 2)."""
        own = self._conduct.get(peer_id)
        if own is None or not own.ignored:
            return False
        own.ignored = own.score_at(now_s) > TAKEN_BACK_AT
        return own.ignored

    def wait_s(self, now_s: float, peer_id: str) -> float:
        """How long a stream of this peer waits before it is served."""
        return SLOWED_S if self.score(now_s, peer_id) >= SLOWED_FROM else 0.0

    # --- hearsay ----------------------------------------------------------------------------------
    def note_name(self, peer_id: str, teller: str) -> bool:
        """Keep a name that a linked peer told us. Returns whether that peer's budget had room."""
        self._forget_name(peer_id)  # the roster may have, on its own
        if not self._told_names.has_room(teller):
            return False
        self._told_names.take(teller)
        self._names[peer_id] = _Name(teller)
        return True

    def linked(self, peer_id: str) -> None:
        """Note that it is there: no pause holds any longer, and it is more than a name."""
        self.dials.answered(peer_id)
        self._forget_name(peer_id)

    def may_dial(self, now_s: float, peer_id: str) -> bool:
        """Whether it is due, and the budget of whoever named it has room."""
        name = self._names.get(peer_id)
        has_room = name is None or self._dialled_names.has_room(name.teller)
        return has_room and self.dials.is_due(peer_id, now_s)

    def dialled(self, peer_id: str) -> str | None:
        """An attempt begins; who had named the peer, which `ended` is to be told."""
        name = self._names.get(peer_id)
        if name is None:
            return None
        name.tries += 1
        self._dialled_names.take(name.teller)
        return name.teller

    def ended(self, peer_id: str, teller: str | None) -> bool:
        """End an attempt. Returns whether the peer is to be forgotten, since it never answers."""
        if teller is None:
            return False
        self._dialled_names.give_back(teller)
        name = self._names.get(peer_id)
        if name is None or name.tries < MAX_HEARSAY_TRIES:
            return False
        self._forget_name(peer_id)
        return True

    def _forget_name(self, peer_id: str) -> None:
        if (name := self._names.pop(peer_id, None)) is not None:
            self._told_names.give_back(name.teller)
