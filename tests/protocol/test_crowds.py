"""Which connections are closed where there are too many."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from protocol.limits import MAX_CONNECTIONS_PER_PEER, MAX_IDLE_CONNECTIONS
from protocol.membership.book import prefix_of
from protocol.membership.crowds import idle_peers, to_close

CROWD = [(f"c{n}".encode(), f"/ip4/8.8.8.{n % 250}/tcp/1") for n in range(600)]
OTHERS = [(f"o{n}".encode(), f"/ip4/9.9.{n}.1/tcp/1") for n in range(20)]


def all_idle(connections: list[tuple[bytes, str]]) -> set[bytes]:
    return set(idle_peers(connections, ()))


def test_a_crowd_of_one_network_keeps_nobody_else_out() -> None:
    connections = [*CROWD, *OTHERS]
    closed = to_close(connections, (), all_idle(connections))
    assert not {peer for peer, _ in OTHERS} & set(closed)
    assert len(connections) - len(closed) == MAX_IDLE_CONNECTIONS


def test_private_addresses_count_by_host() -> None:
    crowd = [(f"c{n}".encode(), "/ip4/10.0.0.1/tcp/1") for n in range(600)]
    beside = (b"beside", "/ip4/10.0.0.2/tcp/1")
    assert beside[0] not in to_close([*crowd, beside], (), all_idle([*crowd, beside]))


def test_a_newcomer_has_time_to_say_hello() -> None:
    assert to_close(CROWD, (), ()) == []


def test_what_is_used_stays() -> None:
    used = {peer for peer, _ in CROWD}
    assert to_close(CROWD, used, used) == []


def test_one_peer_with_many_connections_loses_them_all() -> None:
    many = [(b"one", "/ip4/8.8.8.8/tcp/1")] * (MAX_CONNECTIONS_PER_PEER + 1)
    assert to_close(many, {b"one"}, ()) == [b"one"]
    assert to_close(many[1:], {b"one"}, ()) == []


@given(
    st.lists(
        st.tuples(st.integers(0, 200), st.integers(0, 6), st.booleans(), st.booleans()),
        max_size=300,
        unique_by=lambda each: each[0],
    )
)
def test_what_stays_is_bounded_and_shared(peers: list[tuple[int, int, bool, bool]]) -> None:
    connections = [(bytes([n]), f"/ip4/{network + 20}.1.1.1/tcp/1") for n, network, *_ in peers]
    used = {bytes([n]) for n, _, is_used, _ in peers if is_used}
    before = {bytes([n]) for n, *_, was_idle in peers if was_idle}
    closed = set(to_close(connections, used, before))
    assert not closed & used
    assert closed <= before
    left = {peer: prefix_of(at) for peer, at in connections if peer not in used | closed}
    assert len([peer for peer in left if peer in before]) <= MAX_IDLE_CONNECTIONS
    if closed:
        networks = Counter(left.values())
        lost = {prefix_of(at) for peer, at in connections if peer in closed}
        most = max(networks.values())
        assert all(networks[network] >= min(most, MAX_IDLE_CONNECTIONS // 7) for network in lost)
