"""What others say of our reachability, put together."""

import pytest

from protocol.address.multiaddr import is_relayed
from protocol.limits import MAX_DIAL_BACK_ADDRESSES, MAX_LINKS
from protocol.membership.dial_back import (
    ANSWER_LASTS_S,
    DialBack,
    DialBacks,
    NatKind,
    Reach,
    answer_of,
    candidates,
    host_and_port,
    may_try,
    relay_address,
)
from protocol.membership.view import Roster

OUTER = "/ip4/8.8.8.8/tcp/31337"
SIX = "/ip6/2001:4860::1/tcp/31337"
RELAY = "12D3KooWEC9aiTnm17ZpGvxQDHoxnTyZ8LecyEC3QhcfNr3Qs4Ur"


def answers(*given: DialBack) -> DialBacks:
    backs = DialBacks()
    for number, answer in enumerate(given):
        backs.heard(0.0, f"peer-{number}", answer)
    return backs


def answer(reached: bool, observed: str | None = OUTER, tried: str = OUTER) -> DialBack:
    return DialBack(observed, frozenset({tried}), frozenset({tried} if reached else ()))


def test_nothing_is_known_before_somebody_has_tried() -> None:
    assert answers().reach(0.0) is Reach.UNKNOWN
    silent = answers(DialBack(OUTER, frozenset(), frozenset()))
    assert silent.reach(0.0) is Reach.UNKNOWN
    assert silent.observed_hosts(0.0) == ["8.8.8.8"]


@pytest.mark.parametrize(
    ("given", "reach"),
    [
        ((True,), Reach.YES),
        ((False,), Reach.NO),
        ((True, False), Reach.YES),
        ((True, False, False), Reach.NO),
        ((False, True, True), Reach.YES),
    ],
)
def test_half_of_those_that_tried_decide(given: tuple[bool, ...], reach: Reach) -> None:
    backs = answers(*(answer(each) for each in given))
    assert backs.reach(0.0) is reach
    assert backs.working(0.0) == ([OUTER] if reach is Reach.YES else [])


def test_a_peer_has_one_vote_and_what_was_not_tried_has_none() -> None:
    backs = answers(answer(False))
    for _ in range(5):
        backs.heard(0.0, "liar", DialBack(OUTER, frozenset(), frozenset({OUTER})))
    assert backs.reach(0.0) is Reach.NO
    assert backs.num_answers(0.0) == 2


def test_families_are_judged_apart() -> None:
    backs = answers(answer(False), answer(True, tried=SIX))
    assert backs.reach(0.0, 4) is Reach.NO
    assert backs.reach(0.0, 6) is Reach.YES
    assert backs.reach(0.0) is Reach.YES


def test_answers_grow_old_are_bounded_and_forgotten() -> None:
    backs = answers(answer(True))
    assert backs.reach(ANSWER_LASTS_S + 1) is Reach.UNKNOWN
    for number in range(2 * MAX_LINKS):
        backs.heard(1.0, f"other-{number}", answer(True))
    assert backs.num_answers(1.0) == MAX_LINKS
    backs.forget()
    assert backs.num_answers(1.0) == 0


@pytest.mark.parametrize(
    ("seen", "own", "kind"),
    [
        ((), ("10.0.0.2",), NatKind.UNKNOWN),
        (("8.8.8.8/tcp/31337",), ("8.8.8.8",), NatKind.NONE),
        (("8.8.8.8/tcp/31337",), ("10.0.0.2",), NatKind.UNKNOWN),
        (("8.8.8.8/tcp/31337", "8.8.8.8/tcp/31337"), ("10.0.0.2",), NatKind.CONE),
        (("8.8.8.8/tcp/31337", "8.8.8.8/tcp/9"), ("10.0.0.2",), NatKind.SYMMETRIC),
    ],
)
def test_ports_that_others_see_tell_the_kind_of_router(
    seen: tuple[str, ...], own: tuple[str, ...], kind: NatKind
) -> None:
    backs = answers(*(answer(False, observed=f"/ip4/{where}") for where in seen))
    assert backs.nat_kind(0.0, own) is kind


def test_candidates_are_where_others_see_us_and_public_addresses_of_our_own() -> None:
    own = ["/ip4/10.0.0.2/tcp/31337", "/ip4/172.17.0.1/tcp/31337", SIX]
    assert candidates([], own, [31337]) == [SIX]
    assert candidates(["8.8.8.8"], own, [31337]) == [SIX, OUTER]
    assert candidates(["10.0.0.2"], own, [31337]) == ["/ip4/10.0.0.2/tcp/31337", SIX]
    many = [f"8.8.8.{host}" for host in range(20)]
    assert len(candidates(many, own, [31337])) == MAX_DIAL_BACK_ADDRESSES


def test_nobody_makes_us_knock_at_others_doors() -> None:
    assert may_try(OUTER, "/ip4/8.8.8.8/tcp/5555")
    assert not may_try("/ip4/8.8.4.4/tcp/31337", "/ip4/8.8.8.8/tcp/5555")
    assert may_try(SIX, "/ip4/8.8.8.8/tcp/5555")
    assert not may_try("/ip6/fd00::1/tcp/1", "/ip4/8.8.8.8/tcp/5555")
    assert not may_try(OUTER, "")
    assert not may_try(OUTER, f"{OUTER}/p2p/{RELAY}/p2p-circuit")
    assert not may_try("/dns4/bank.example/tcp/443", "/ip4/8.8.8.8/tcp/5555")


@pytest.mark.parametrize("text", ["/ip4/banana/tcp/1", "/ip4/8.8.8.8/tcp/lots", "/x", "", "x"])
def test_what_is_no_address_has_no_host(text: str) -> None:
    assert host_and_port(text) is None
    assert not may_try(text, OUTER)
    assert not may_try(OUTER, text)
    assert relay_address(RELAY, [text]) is None


def test_a_peer_names_no_address_for_us() -> None:
    answer = answer_of([OUTER], None, [OUTER, SIX], [OUTER, SIX])
    assert answer == DialBack(None, frozenset([OUTER]), frozenset([OUTER]))


def test_addresses_through_a_relay() -> None:
    address = relay_address(RELAY, ["/ip4/10.0.0.2/tcp/1", OUTER])
    assert address == f"{OUTER}/p2p/{RELAY}/p2p-circuit"
    assert relay_address(RELAY, [address]) is None
    assert host_and_port(address) is None
    assert is_relayed(address)
    assert not is_relayed(OUTER)
    roster = Roster(10.0)
    for peer, addresses in (("far", (address,)), ("near", (OUTER,))):
        roster.heard(0.0, peer, 1, addresses=addresses)
    assert [member.relayed for member in roster.members()] == [True, False]
