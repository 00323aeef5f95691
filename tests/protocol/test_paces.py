"""One peer, and one network, begin no more in a second than they may."""

import pytest

from protocol.membership.book import Paces

PUBLIC = "/ip4/8.8.8.{}/tcp/1"
PRIVATE = "/ip4/192.168.0.1/tcp/1"


def test_a_burst_passes_and_what_follows_waits_for_its_turn():
    paces = Paces(10.0, 1000.0, 2.0)
    assert [paces.begin(0.0, "a", PRIVATE) for _ in range(20)] == [0.0] * 20
    waits = [paces.begin(0.0, "a", PRIVATE) for _ in range(10)]
    assert waits == pytest.approx([0.1 * n for n in range(1, 11)])
    assert paces.begin(0.0, "b", PRIVATE) == 0.0
    assert paces.begin(3.0, "a", PRIVATE) == 0.0


def test_many_identities_of_one_network_share_its_pace():
    paces = Paces(10.0, 20.0, 1.0)
    waits = [paces.begin(0.0, f"peer{n}", PUBLIC.format(n)) for n in range(30)]
    assert waits[:20] == [0.0] * 20
    assert waits[-1] == pytest.approx(0.5)
    assert paces.begin(0.0, "other", "/ip4/9.9.9.9/tcp/1") == 0.0
    assert [paces.begin(0.0, f"lan{n}", PRIVATE) for n in range(30)] == [0.0] * 30


def test_what_is_kept_does_not_grow_with_those_that_were_seen():
    paces = Paces(10.0, 20.0, 1.0)
    for n in range(1000):
        paces.begin(n / 10, f"peer{n}", PRIVATE)
    assert len(paces._kept) < 50
