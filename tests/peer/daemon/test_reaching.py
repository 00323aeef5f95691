"""Peers find out how others reach them, and tell it again: on a simulated network."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from peer.daemon.outside import (
    ASK_UNKNOWN_EVERY_S,
    LOOK_EVERY_S,
    RELAYS,
    TRY_S,
    Reaching,
    say_where,
)
from peer.daemon.report import join_address
from peer.facts import Facts
from peer.network.identity import Identity
from peer.observe.events import EventLog
from peer.runtime import PeerId
from protocol.errors import LocoError
from protocol.limits import DIAL_BACK_EVERY_S, DIAL_BACKS, MAX_DIAL_BACK_ADDRESSES
from protocol.membership.dial_back import NatKind, Reach
from protocol.membership.view import Roster
from protocol.wire.messages import Seen, Whereabouts
from simulation.network import SimulatedInternet, SimulatedNetwork

PUBLIC = "/ip4/8.8.{}.1/tcp/4001"


@dataclass
class Node:
    """One peer's network, roster and what looks after its reachability."""

    network: SimulatedNetwork
    roster: Roster
    facts: Facts
    reaching: Reaching
    reserved_at: list[PeerId] = field(default_factory=list)
    refusing: set[PeerId] = field(default_factory=set)

    async def keep_alive(self, others: list["Node"]) -> None:
        """Beats between peers that are linked."""
        while True:
            for other in others:
                if other is not self:
                    now_s = trio.current_time()
                    self.roster.heard(now_s, other.network.peer_id, 1)
            await trio.sleep(1)


async def open_node(stack: AsyncExitStack, internet: SimulatedInternet, number: int) -> Node:
    peer_id = Identity(bytes([number]) * 32).peer_id
    address = PUBLIC.format(number)
    network = await stack.enter_async_context(internet.open_network(peer_id, address))
    roster, facts = Roster(10.0), Facts(peer_id, 1)
    events = EventLog(lambda _: None, peer=peer_id, wall_time_s=trio.current_time)
    node: Node

    async def reserve(relay: PeerId) -> float:
        if relay in node.refusing:
            raise LocoError("no")
        node.reserved_at.append(relay)
        return 600.0

    services: Any = SimpleNamespace(network=network, roster=roster, facts=facts, events=events)
    reaching = Reaching(services, reserve)
    node = Node(network, roster, facts, reaching)
    return node


@asynccontextmanager
async def nodes(count: int) -> AsyncIterator[list[Node]]:
    """Peers that are all linked, with public addresses."""
    internet = SimulatedInternet(1)
    async with AsyncExitStack() as stack:
        made = [await open_node(stack, internet, number + 1) for number in range(count)]
        for node in made:
            for other in made:
                if other is not node:
                    there = other.network
                    await node.network.connect(there.peer_id, there.addresses)
                    addresses = tuple(there.addresses)
                    node.roster.heard(trio.current_time(), there.peer_id, 1, addresses=addresses)
        async with trio.open_nursery() as nursery:
            for node in made:
                nursery.start_soon(node.keep_alive, made)
                nursery.start_soon(node.reaching.run)
            yield made
            nursery.cancel_scope.cancel()


def block_probes(node: Node, made: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody gets through to this one over a connection of its own."""
    blocked = {address.rpartition("/p2p/")[0] for address in node.network.addresses}
    for other in made:
        honest = other.network.probe

        async def probe(address: str, honest=honest) -> PeerId:
            if address in blocked:
                raise LocoError("dial: no answer")
            return await honest(address)

        monkeypatch.setattr(other.network, "probe", probe)


async def test_who_can_be_dialled_learns_it(autojump_clock: object) -> None:
    async with nodes(3) as made:
        await trio.sleep(2 * ASK_UNKNOWN_EVERY_S)
        for node in made:
            facts = node.facts.reach
            assert (facts.reach, facts.v4, facts.v6) == (Reach.YES, Reach.YES, Reach.UNKNOWN)
            assert facts.nat is NatKind.NONE
            assert node.reserved_at == []
            (address,) = node.network.addresses
            assert facts.working == (address.partition("/p2p/")[0],)
            assert join_address(node.network, node.facts).note == ""


async def test_who_cannot_be_dialled_uses_relays_and_tells_all(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    async with nodes(5) as made:
        node, *others = made
        block_probes(node, made, monkeypatch)
        await trio.sleep(4 * ASK_UNKNOWN_EVERY_S)
        assert node.facts.reach.reach is Reach.NO
        assert len(node.facts.reach.relays) == RELAYS
        assert set(node.facts.reach.relays) == set(node.reserved_at)
        peer_id = node.network.peer_id
        for other in others:
            known = other.roster.get(peer_id)
            assert known is not None
            assert known.relayed
            assert other.facts.reach.reach is Reach.YES
        assert "/p2p-circuit" in join_address(node.network, node.facts).address
        relay = node.facts.reach.relays[0]
        assert any(f"/p2p/{relay}/p2p-circuit" in each for each in node.network.addresses)


async def test_another_relay_takes_the_place_of_one_that_is_gone_or_refuses(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    async with nodes(4) as made:
        node, *others = made
        block_probes(node, made, monkeypatch)
        node.refusing.add(others[0].network.peer_id)
        await trio.sleep(4 * ASK_UNKNOWN_EVERY_S)
        first = set(node.facts.reach.relays)
        assert first == {other.network.peer_id for other in others[1:]}
        node.refusing.clear()
        gone = next(iter(first))
        node.roster.gone(gone, 1)
        monkeypatch.setattr(node.roster, "heard", lambda *_, **__: False)
        await trio.sleep(LOOK_EVERY_S + 1)
        assert gone not in node.facts.reach.relays


async def test_who_asks_while_we_are_ending_is_answered(autojump_clock: object) -> None:
    """The network serves on for a while after what looks after our reach has ended."""
    async with AsyncExitStack() as stack:
        internet = SimulatedInternet(1)
        ending, asking = [await open_node(stack, internet, number) for number in (1, 2)]
        with trio.move_on_after(1.0):
            await ending.reaching.run()
        network, there = asking.network, ending.network
        await network.connect(there.peer_id, there.addresses)
        own = PUBLIC.format(2)
        seen = await say_where(network, there.peer_id, Whereabouts(1, (), (own,)))
        assert seen is not None
        assert seen.reached == (own,)


async def test_tarpits_of_one_network_leave_dial_backs_to_others(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    """Each names four addresses that never answer; one whose first hangs is not held up either."""
    async with nodes(2) as made, AsyncExitStack() as stack:
        victim, honest = (node.network for node in made)
        internet, probe, hanging, most = victim._internet, victim.probe, list[str](), 0

        async def hang(address: str) -> PeerId:
            nonlocal most
            if not address.startswith("/ip4/8.8.100."):
                return await probe(address)
            hanging.append(address)
            most = max(most, len(hanging))
            try:
                await trio.sleep(3600)
                raise LocoError("dial: no answer")
            finally:
                hanging.remove(address)

        async def ask(network: SimulatedNetwork, *tried: str) -> Seen | None:
            await network.connect(victim.peer_id, victim.addresses)
            return await say_where(network, victim.peer_id, Whereabouts(1, (), tried))

        monkeypatch.setattr(victim, "probe", hang)
        await trio.sleep(DIAL_BACK_EVERY_S)
        tarpits = {f"/ip4/8.8.100.{number}/tcp/": 100 + number for number in range(40)}
        networks = {
            start: await stack.enter_async_context(
                internet.open_network(Identity(bytes([number]) * 32).peer_id, f"{start}4001")
            )
            for start, number in tarpits.items()
        }
        async with trio.open_nursery() as nursery:
            for start, network in networks.items():
                tried = [f"{start}{port}" for port in range(1, MAX_DIAL_BACK_ADDRESSES + 1)]
                nursery.start_soon(ask, network, *tried)
            await trio.sleep(1.0)
            (address,) = (each.partition("/p2p/")[0] for each in honest.addresses)
            seen = await ask(honest, address)
            assert seen is not None
            assert seen.reached == (address,)
            assert most == DIAL_BACKS.per_prefix * MAX_DIAL_BACK_ADDRESSES
            await trio.sleep(TRY_S)
            assert not hanging


async def test_places_are_renewed(monkeypatch: pytest.MonkeyPatch, autojump_clock: object) -> None:
    async with nodes(2) as made:
        block_probes(made[0], made, monkeypatch)
        await trio.sleep(2000)
        assert 4 <= len(made[0].reserved_at) <= 9


async def test_a_changed_address_is_announced_again_and_tried_again(
    autojump_clock: object,
) -> None:
    async with nodes(3) as made:
        node, *others = made
        await trio.sleep(2 * ASK_UNKNOWN_EVERY_S)
        moved = PUBLIC.format(77)
        node.network.move(moved)
        await trio.sleep(2 * LOOK_EVERY_S)
        for other in others:
            known = other.roster.get(node.network.peer_id)
            assert known is not None
            assert known.addresses == (f"{moved}/p2p/{node.network.peer_id}",)
        await trio.sleep(2 * ASK_UNKNOWN_EVERY_S)
        assert node.facts.reach.reach is Reach.YES
        assert node.facts.reach.observed == ("8.8.77.1",)
