"""Places by identity and by network, and which network an address is in."""

import pytest

from protocol.limits import Shares
from protocol.membership.book import Budget, prefix_of

RELAY = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


@pytest.mark.parametrize(
    ("address", "prefix"),
    [
        ("/ip4/5.6.7.8/tcp/1", "5.6.7.0/24"),
        ("/ip6/2a00:1450:4001:81b::200e/tcp/1", "2a00:1450:4001::/48"),
        ("/ip6/::ffff:5.6.7.8/tcp/1", "5.6.7.0/24"),
        (f"/ip4/5.6.7.8/tcp/1/p2p/{RELAY}/p2p-circuit", "5.6.7.0/24"),
        (f"/ip4/192.168.1.7/tcp/1/p2p/{RELAY}/p2p-circuit", f"relay {RELAY}"),
        (f"/p2p/{RELAY}/p2p-circuit", f"relay {RELAY}"),
        ("/ip4/127.0.0.1/tcp/1", None),
        ("/ip4/10.1.2.3/tcp/1", None),
        ("/ip4/192.168.1.7/tcp/1", None),
        ("/ip6/::1/tcp/1", None),
        ("/ip6/fd00::1/tcp/1", None),
        ("/dns4/example.org/tcp/1", None),
        ("", None),
        ("nonsense", None),
    ],
)
def test_the_network_of_an_address(address, prefix):
    assert prefix_of(address) == prefix


def take(budget: Budget, *places: tuple[str, str]) -> list[bool]:
    """Take these places where there is room. Returns whether there was."""
    found = []
    for peer_id, address in places:
        found.append(budget.has_room(peer_id, address))
        if found[-1]:
            budget.take(peer_id, address)
    return found


def test_one_identity_takes_its_share_and_no_more():
    budget = Budget(Shares(total=10, per_peer=2, per_prefix=10))
    assert take(budget, *[("a", "")] * 3, ("b", "")) == [True, True, False, True]
    assert (budget._by_peer, budget.taken) == ({"a": 2, "b": 1}, 3)


def test_one_network_takes_its_share_whoever_is_in_it():
    budget = Budget(Shares(total=10, per_peer=2, per_prefix=3))
    sybils = [(f"sybil {number}", f"/ip4/5.6.7.{number}/tcp/1") for number in range(4)]
    assert take(budget, *sybils) == [True, True, True, False]
    assert take(budget, ("next door", "/ip4/5.6.8.1/tcp/1")) == [True]


def test_a_network_of_ones_own_has_the_whole_budget():
    budget = Budget(Shares(total=5, per_peer=1, per_prefix=1))
    at_home = [(f"peer {number}", "/ip4/192.168.1.2/tcp/1") for number in range(6)]
    assert take(budget, *at_home) == [True] * 5 + [False]


def test_what_is_given_back_is_there_again_and_nothing_is_remembered():
    budget = Budget(Shares(total=1, per_peer=1, per_prefix=1))
    for number in range(100):
        place = (f"peer {number}", f"/ip4/5.6.{number}.8/tcp/1")
        assert take(budget, place) == [True]
        budget.give_back(*place)
    assert budget.taken == 0
    assert not budget._by_peer
    assert not budget._by_prefix
