"""Which addresses come first."""

import pytest
from network_worlds import peer_id_of

from peer.network.reachability import (
    Scope,
    address_to_join,
    best_first,
    is_loopback,
    is_usable,
    scope_of,
)

PEER = peer_id_of("someone")


def test_addresses_that_most_can_reach_come_first() -> None:
    loopback, private = "/ip4/127.0.0.1/tcp/1", "/ip4/192.168.0.1/tcp/1"
    public, name = "/ip4/8.8.8.8/tcp/1", "/dns4/seed.example/tcp/1"
    relayed = f"{public}/p2p/{PEER}/p2p-circuit"
    given_in = [loopback, private, relayed, public, loopback, name]
    assert best_first(given_in) == [public, name, relayed, private, loopback]
    assert is_loopback(loopback)
    assert not is_loopback(private)


def joins(*addresses: str, **known: object) -> str:
    named = [f"{address}/p2p/{PEER}" for address in addresses]
    return address_to_join(named, **known).partition("/p2p/")[0]  # type: ignore[arg-type]


def test_people_join_by_what_was_named_then_by_what_works() -> None:
    loopback, private, other = (
        "/ip4/127.0.0.1/tcp/1",
        "/ip4/192.168.0.1/tcp/1",
        "/ip4/10.0.0.1/tcp/1",
    )
    public = "/ip4/8.8.8.8/tcp/1"
    assert joins(loopback, private, public) == public
    assert joins(loopback, other, private) == other, "as they are given, among equals"
    assert joins(loopback, other, private, working=[private]) == private
    assert joins(loopback, private, working=[loopback]) == private
    assert joins(public, private, given=[private], working=[public]) == private
    assert joins(loopback) == loopback


def test_people_join_through_a_relay_where_nobody_gets_through() -> None:
    public, relay = "/ip4/8.8.8.8/tcp/1", f"/ip4/8.8.4.4/tcp/1/p2p/{peer_id_of('r')}/p2p-circuit"
    named = [f"{address}/p2p/{PEER}" for address in (public, relay)]
    assert address_to_join(named) == named[0]
    assert address_to_join(named, needs_relay=True) == named[1]


def test_what_the_user_names_is_told_first() -> None:
    private, public = "/ip4/192.168.0.1/tcp/1", "/ip4/8.8.8.8/tcp/1"
    assert best_first([public, private], [private]) == [private, public]


@pytest.mark.parametrize(
    ("address", "scope"),
    [
        ("/ip4/8.8.8.8/tcp/1", Scope.ANYWHERE),
        (f"/ip4/8.8.8.8/tcp/1/p2p/{PEER}/p2p-circuit", Scope.ANYWHERE),
        (f"/ip4/10.0.0.1/tcp/1/p2p/{PEER}/p2p-circuit", Scope.NETWORK),
        (f"/dns/seed.example/tcp/1/p2p/{PEER}", Scope.ANYWHERE),
        ("/ip4/192.168.0.1/tcp/1", Scope.NETWORK),
        ("/ip4/100.64.0.1/tcp/1", Scope.NETWORK),
        ("/ip6/fd00::1/tcp/1", Scope.NETWORK),
        (f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}", Scope.MACHINE),
        ("/dns/localhost/tcp/1", Scope.MACHINE),
    ],
)
def test_from_where_an_address_can_be_dialled(address: str, scope: Scope) -> None:
    assert scope_of(address) is scope


def test_what_nobody_can_dial_is_not_usable() -> None:
    assert not is_usable("/ip4/0.0.0.0/tcp/1")
    assert is_usable("/ip4/127.0.0.1/tcp/1")
