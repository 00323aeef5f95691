"""How others reach us: found out, made possible, and told again when it changes; and our relay.

Simulated peers have none of this: everybody reaches everybody there.

The theory of finding out is in protocol/membership/dial_back.py. Around it:

- We ask ASKED linked peers at a time: often while nothing is known, seldom afterwards, and at once
  when our own addresses have changed.
- Addresses at which others get through are announced beside those of our interfaces.
- Where nobody gets through, we reserve places at RELAYS linked peers that others can dial, and
  announce the addresses that lead through them. p2pd punches holes through them by itself.
- Every linked peer is told whenever what we announce has changed: its redials go there.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import blake3
import trio

from peer.network.conversation import Conversation
from peer.network.reachability import is_loopback
from peer.network.relay import Relay, reserve
from peer.observe.event_names import EventName
from peer.runtime import Address, Network, PeerId, Stream
from protocol.address.multiaddr import is_relayed, split_peer_id
from protocol.errors import LocoError
from protocol.limits import ANSWER_S, DIAL_BACK_EVERY_S, DIAL_BACKS
from protocol.membership.book import BackOff, Budget
from protocol.membership.dial_back import (
    DialBacks,
    Reach,
    answer_of,
    candidates,
    host_and_port,
    may_try,
    relay_address,
)
from protocol.membership.view import Member
from protocol.wire.messages import Seen, Whereabouts
from protocol.wire.versions import REACH

from .services import DaemonServices

LOOK_EVERY_S: Final = 2.0
ASKED: Final = 3
ASK_UNKNOWN_EVERY_S: Final = 15.0
ASK_KNOWN_EVERY_S: Final = 300.0
RELAYS: Final = 2
RELAY_PAUSE_S: Final = 60.0
"""A peer that did not relay for us is not asked again for so long."""
TRY_S: Final = 5.0
"""How long all addresses of a peer are tried, together."""
Reserve = Callable[[PeerId], Awaitable[float]]
"""Reserves a place at a relay; for how many seconds. Raises LocoError."""


def to_try(answers: DialBacks, own: Sequence[Address], direct: Sequence[Address]) -> list[Address]:
    """Addresses that another peer may try to dial us at.

    Args:
        own: as far as others may know them.
        direct: of this machine's interfaces, whose ports are tried.
    """
    ports = [each[1] for each in map(host_and_port, direct) if each is not None]
    return candidates(answers.observed_hosts(trio.current_time()), own, ports)


async def say_where(network: Network, peer_id: PeerId, told: Whereabouts) -> Seen | None:
    """Tell a peer where we are; what it saw, None where it does not answer."""
    try:
        async with Conversation(await network.open_stream(peer_id, REACH)) as talk:
            await talk.send(told)
            seen, _ = await talk.receive(Seen, timeout_s=ANSWER_S + TRY_S)
    except LocoError:
        return None
    return seen


async def ask_seen(
    answers: DialBacks,
    peer_id: PeerId,
    wanted: Callable[[], Sequence[Address]],
    say: Callable[[PeerId, Sequence[Address]], Awaitable[Seen | None]],
) -> None:
    """Ask a peer how we look from there; again when it has shown an address that it could try.

    Args:
        wanted: what it may try to dial us at, by all that we know now.
        say: tells it where we are and asks it to try.
    """
    tried = wanted()
    for _ in range(2):
        seen = await say(peer_id, tried)
        if seen is None:
            return
        observed = None if is_relayed(seen.observed) else seen.observed
        answer = answer_of(tried, observed, seen.tried, seen.reached)
        answers.heard(trio.current_time(), peer_id, answer)
        tried = wanted()
        if seen.tried or not tried:
            return


class Reaching:
    def __init__(self, services: DaemonServices, reserve: Reserve) -> None:
        self._network = services.network
        self._roster = services.roster
        self._facts = services.facts
        self._events = services.events
        self._reserve = reserve
        self._answers = DialBacks()
        self._own: tuple[Address, ...] = ()
        self._announced: tuple[Address, ...] = ()
        self._seen_last: tuple[Address, ...] = tuple(self._network.addresses)
        self._told: dict[PeerId, tuple[int, tuple[Address, ...]]] = {}
        self._relays: dict[PeerId, tuple[float, Address]] = {}
        self._patience = BackOff(RELAY_PAUSE_S, RELAY_PAUSE_S)
        self._trying = Budget(DIAL_BACKS)
        self._tried = deque[tuple[float, PeerId, Address]]()
        self._ask_at_s = 0.0

    async def run(self) -> None:
        await self._network.serve(REACH, self._serve)
        while True:
            await self._update()
            await trio.sleep(LOOK_EVERY_S)

    async def _update(self) -> None:
        now_s = trio.current_time()
        linked = self._roster.alive(now_s)
        self._notice_own(now_s)
        await self._ask(now_s, linked)
        await self._keep_relays(linked)
        self._announce()
        await self._tell(linked)

    # --- others -----------------------------------------------------------------------------------
    async def _serve(self, stream: Stream) -> None:
        talk, peer_id, observed = Conversation(stream), stream.remote_peer_id, stream.remote_address
        asked, _ = await talk.receive(Whereabouts, timeout_s=ANSWER_S)
        now_s = trio.current_time()
        if self._roster.living(peer_id, now_s) is not None:  # one that has left may ask, too
            self._roster.heard(now_s, peer_id, asked.incarnation, addresses=asked.addresses)
        tried = [address for address in asked.tried if may_try(address, observed)]
        while self._tried and self._tried[0][0] <= now_s - DIAL_BACK_EVERY_S:
            self._trying.give_back(*self._tried.popleft()[1:])
        if tried and self._trying.has_room(peer_id, observed):
            self._trying.take(peer_id, observed)
            self._tried.append((now_s, peer_id, observed))
        else:
            tried = []
        reached = await self._reached(peer_id, tried)
        await talk.send(Seen(observed or "/unknown", tuple(tried), tuple(reached)))

    async def _reached(self, peer_id: PeerId, tried: Sequence[Address]) -> list[Address]:
        """Try these addresses concurrently: one that hangs delays no other."""
        reached = set()

        async def probe(address: Address) -> None:
            with suppress(LocoError):
                if await self._network.probe(address) == peer_id:
                    reached.add(address)

        with trio.move_on_after(TRY_S):
            async with trio.open_nursery() as nursery:
                for address in tried:
                    nursery.start_soon(probe, address)
        return [address for address in tried if address in reached]

    # --- finding out ------------------------------------------------------------------------------
    def _notice_own(self, now_s: float) -> None:
        own = tuple(a for a in self._direct() if not is_loopback(a))
        if own != self._own:
            if self._own:
                self._answers.forget()
            self._own, self._ask_at_s = own, now_s

    def _direct(self) -> list[Address]:
        """The addresses of this machine's own interfaces, or those that the user has named."""
        bare = [split_peer_id(address)[0] for address in self._network.addresses]
        return [address for address in bare if address not in self._announced]

    async def _ask(self, now_s: float, linked: Sequence[Member]) -> None:
        if now_s < self._ask_at_s or not linked:
            return
        unlike = [member for member in linked if not member.relayed]
        asked = sorted(unlike or linked, key=lambda m: self._lot(m.peer_id, int(now_s)))[:ASKED]

        def wanted() -> list[Address]:
            return to_try(self._answers, self._own, self._direct())

        async with trio.open_nursery() as nursery:
            for member in asked:
                nursery.start_soon(ask_seen, self._answers, member.peer_id, wanted, self._say)
        self._note()
        known = self._facts.reach.reach is not Reach.UNKNOWN
        enough = self._answers.num_answers(trio.current_time()) >= min(ASKED, len(linked))
        every_s = ASK_KNOWN_EVERY_S if known and enough else ASK_UNKNOWN_EVERY_S
        self._ask_at_s = trio.current_time() + every_s

    def _lot(self, peer_id: PeerId, turn: int) -> bytes:
        return blake3.blake3(f"{self._network.peer_id}/{peer_id}/{turn}".encode()).digest(length=8)

    async def _say(self, peer_id: PeerId, tried: Sequence[Address]) -> Seen | None:
        addresses = tuple(self._network.addresses)
        told = Whereabouts(self._facts.incarnation, addresses, tuple(tried))
        seen = await say_where(self._network, peer_id, told)
        if seen is not None:
            member = self._roster.get(peer_id)
            self._told[peer_id] = 0 if member is None else member.incarnation, addresses
        return seen

    def _note(self) -> None:
        now_s, facts, answers = trio.current_time(), self._facts.reach, self._answers
        hosts = [each[0] for each in map(host_and_port, self._own) if each is not None]
        before = facts.reach
        facts.reach, facts.v4, facts.v6 = (answers.reach(now_s, each) for each in (None, 4, 6))
        facts.nat = answers.nat_kind(now_s, hosts)
        facts.observed = tuple(answers.observed_hosts(now_s))
        facts.working = tuple(answers.working(now_s))
        facts.answers = answers.num_answers(now_s)
        if facts.reach is not before:
            self._events.emit(
                EventName.REACHABILITY_CHANGED, reachable=str(facts.reach), nat=str(facts.nat)
            )

    # --- relays -----------------------------------------------------------------------------------
    async def _keep_relays(self, linked: Sequence[Member]) -> None:
        now_s, members = trio.current_time(), {member.peer_id: member for member in linked}
        needed = self._facts.reach.reach is Reach.NO
        self._relays = {
            peer: place
            for peer, place in self._relays.items()
            if needed and peer in members and not members[peer].relayed
        }
        if needed:
            for peer_id in [peer for peer, (at_s, _) in self._relays.items() if at_s <= now_s]:
                await self._reserve_at(members[peer_id])
            for member in self._possible(linked, now_s)[: RELAYS - len(self._relays)]:
                await self._reserve_at(member)
        self._facts.reach.relays = tuple(self._relays)

    def _possible(self, linked: Sequence[Member], now_s: float) -> list[Member]:
        """Peers that might relay for us, the nearest first."""
        possible = [
            member
            for member in linked
            if not member.relayed
            and member.peer_id not in self._relays
            and self._patience.is_due(member.peer_id, now_s)
        ]
        return sorted(possible, key=lambda m: (m.rtt_s or 0.0, self._lot(m.peer_id, 0)))

    async def _reserve_at(self, member: Member) -> None:
        peer_id, now_s = member.peer_id, trio.current_time()
        address = relay_address(peer_id, (split_peer_id(a)[0] for a in member.addresses))
        self._relays.pop(peer_id, None)
        try:
            if address is None:
                raise LocoError("it has no address of its own")
            lasts_s = await self._reserve(peer_id)
        except LocoError:
            self._patience.failed(peer_id, now_s)
            return
        self._relays[peer_id] = now_s + lasts_s / 2, address  # then it is renewed

    # --- telling ----------------------------------------------------------------------------------
    def _announce(self) -> None:
        working = self._answers.working(trio.current_time())
        outer = [address for address in working if address not in self._own]
        announced = (*outer, *(address for _, address in self._relays.values()))
        if announced != self._announced:
            self._announced = announced
            self._network.announce(announced)

    async def _tell(self, linked: Sequence[Member]) -> None:
        """Tell those who were told otherwise; our hello has told newcomers, since the last look."""
        addresses = tuple(self._network.addresses)
        present = {member.peer_id: member.incarnation for member in linked}
        self._told = {p: told for p, told in self._told.items() if present.get(p) == told[0]}
        for peer_id, incarnation in present.items():
            self._told.setdefault(peer_id, (incarnation, self._seen_last))
        self._seen_last = addresses
        outdated = [peer for peer, told in self._told.items() if told[1] != addresses]
        async with trio.open_nursery() as nursery:
            for peer_id in outdated:
                nursery.start_soon(self._say, peer_id, ())


async def be_reached(services: DaemonServices, relay_mbps: float) -> None:
    """Find out how others reach us, and relay for them at this rate at most; 0 is not at all."""
    facts = services.facts.reach
    relay = Relay(
        services.network,
        services.pacing.carry,
        knows=lambda peer_id: services.roster.get(peer_id) is not None,
        offers=lambda: facts.reach is not Reach.NO,
        mbps=relay_mbps,
        wall_time_s=services.directory.swarm_time_s,
    )
    await relay.start()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Reaching(services, partial(reserve, services.network)).run)
        while True:
            facts.reservations, facts.circuits = relay.reservations, relay.circuits
            facts.carried_bytes = relay.carried_bytes
            facts.relayed_peers = services.network.statistics().relayed_peers
            await trio.sleep(LOOK_EVERY_S)
