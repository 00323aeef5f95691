"""What one node keeps: valid, alive, within the shares of each peer and network."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.network.identity import Identity
from protocol.limits import MAX_RECORD_LIFETIME_S, RECORDS, RECORDS_OF_SHARD, Shares
from protocol.membership import record_table
from protocol.membership.book import prefix_of
from protocol.membership.record_table import RecordTable
from protocol.membership.records import PeerRecord, encode_record, place_of, record_keys

NOW_S = 1.75e9
KEYS = [*record_keys("run"), *record_keys("other")]
PLACES = [place_of(key) for key in KEYS]
IDENTITIES = [Identity((number + 1).to_bytes(32, "big")) for number in range(80)]
LAN = "/ip4/192.168.1.7/tcp/1"


def address_in(network: int) -> str:
    return f"/ip4/5.6.{network}.8/tcp/1"


def record(number: int, key: int = 0, expires_s: float = NOW_S + 60) -> bytes:
    identity = IDENTITIES[number]
    told = PeerRecord(identity.peer_id, 1, (LAN,), expires_s)
    return encode_record(told, KEYS[key], identity.sign)


def kept(
    table: RecordTable,
    number: int,
    key: int = 0,
    expires_s: float = NOW_S + 60,
    address: str = LAN,
    now_s: float = NOW_S,
) -> bool:
    value = record(number, key, expires_s)
    return table.keep(now_s, PLACES[key], IDENTITIES[number].peer_id, value, address)


def test_what_is_kept_is_found_until_it_expires() -> None:
    table = RecordTable()
    assert kept(table, 0)
    found = {IDENTITIES[0].peer_id: record(0)}
    assert table.at(NOW_S, PLACES[0]) == found
    assert table.at(NOW_S, PLACES[1]) == {}
    assert table.at(NOW_S + 61, PLACES[0]) == {}
    assert len(table) == 1
    assert kept(table, 1, expires_s=NOW_S + 200, now_s=NOW_S + 61)
    assert len(table) == 1, "the expired one gave its place back"


def test_another_peers_record_is_not_taken() -> None:
    table = RecordTable()
    assert not table.keep(NOW_S, PLACES[0], IDENTITIES[1].peer_id, record(0), LAN)
    assert not table.keep(NOW_S, PLACES[1], IDENTITIES[0].peer_id, record(0), LAN)
    assert not table.keep(NOW_S, PLACES[0], IDENTITIES[0].peer_id, b"", LAN)


def test_an_expiry_in_the_past_or_far_away_is_not_taken() -> None:
    table = RecordTable()
    assert not kept(table, 0, expires_s=NOW_S)
    assert not kept(table, 0, expires_s=NOW_S + MAX_RECORD_LIFETIME_S + 1)
    assert kept(table, 0, expires_s=NOW_S + MAX_RECORD_LIFETIME_S)


def test_a_longer_record_takes_the_place_of_a_shorter_one_alone() -> None:
    table = RecordTable()
    assert kept(table, 0, expires_s=NOW_S + 60)
    assert kept(table, 0, expires_s=NOW_S + 90)
    assert not kept(table, 0, expires_s=NOW_S + 90)
    assert not kept(table, 0, expires_s=NOW_S + 70)
    assert len(table) == 1


def test_one_peer_fills_no_more_than_its_share() -> None:
    table = RecordTable()
    taken = [kept(table, 0, key) for key in range(len(KEYS))]
    assert taken.count(True) == RECORDS.per_peer
    assert kept(table, 1), "there is room for others"


def test_one_network_fills_no_place_and_a_lan_may() -> None:
    table = RecordTable()
    taken = [kept(table, number, address=address_in(1)) for number in range(70)]
    assert taken.count(True) == RECORDS_OF_SHARD.per_prefix
    assert kept(table, 71, address=address_in(2))
    beside = RecordTable()
    assert [kept(beside, number) for number in range(70)].count(True) == RECORDS_OF_SHARD.total


@given(st.data())
def test_shares_hold_whatever_comes(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_table, "RECORDS", Shares(12, 3, 6))
        patch.setattr(record_table, "RECORDS_OF_SHARD", Shares(5, 1, 2))
        table = RecordTable()
        now_s, came_from = NOW_S, {}
        for _ in range(data.draw(st.integers(1, 60))):
            now_s += data.draw(st.sampled_from([0.0, 0.5, 30.0]))
            number = data.draw(st.integers(0, 9))
            key = data.draw(st.integers(0, 5))
            address = data.draw(st.sampled_from([address_in(1), address_in(2), LAN]))
            expires_s = now_s + data.draw(st.sampled_from([-1, 10, 40, 1e5]))
            new = IDENTITIES[number].peer_id not in table.at(now_s, PLACES[key])
            if kept(table, number, key, expires_s, address, now_s) and new:
                came_from[IDENTITIES[number].peer_id, key] = address
            found = [(peer_id, key) for key in range(6) for peer_id in table.at(now_s, PLACES[key])]
            assert len(found) <= len(table) <= 12
            assert max(Counter(peer_id for peer_id, _ in found).values(), default=0) <= 3
            networks = Counter((prefix_of(came_from[each]), each[1]) for each in found)
            assert all(n <= 2 for (network, _), n in networks.items() if network is not None)
            assert all(n <= 5 for n in Counter(key for _, key in found).values())
