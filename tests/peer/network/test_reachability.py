"""Which addresses come first."""

from network_worlds import peer_id_of

from peer.network.reachability import best_first, is_loopback

PEER = peer_id_of("someone")


def test_addresses_that_most_can_reach_come_first() -> None:
    loopback, private = "/ip4/127.0.0.1/tcp/1", "/ip4/192.168.0.1/tcp/1"
    public, name = "/ip4/8.8.8.8/tcp/1", "/dns4/seed.example/tcp/1"
    relayed = f"{public}/p2p/{PEER}/p2p-circuit"
    given_in = [loopback, private, relayed, public, loopback, name]
    assert best_first(given_in) == [public, name, relayed, private, loopback]
    assert is_loopback(loopback)
    assert not is_loopback(private)
