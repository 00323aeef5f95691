"""The router's pure parts: what links there are, when packets arrive, what a packet is."""

import struct
import subprocess
import sys
from typing import Any

import pytest
from existing import existing

from bench.link_table import DELAYS_S, RATES_BITS_PER_S, Link, LinkTable, draw_table
from bench.router.network import missing, routed_network
from bench.router.packets import HEADER_BYTES, Packet, read_packet
from bench.router.queues import Queues

PACKET_BYTES = 1250
PACKET_BITS = 8 * PACKET_BYTES
SLOW, FAST = 1e6, 1e7
"""A packet takes 10 ms, or 1 ms."""


def table(*, uplink=None, rate=SLOW, delay_s=0.05, hosts=3):
    ways = [(a, b) for a in range(hosts) for b in range(hosts) if a != b]
    return LinkTable({way: Link(delay_s, rate) for way in ways}, [uplink] + [None] * (hosts - 1))


# --- the table ------------------------------------------------------------------------------------
def test_a_table_is_the_seeds_alone_and_within_its_bounds():
    drawn = draw_table(6, seed=3, uplinks_bits_per_s={5: 1e7})
    assert drawn == draw_table(6, seed=3, uplinks_bits_per_s={5: 1e7})
    assert drawn != draw_table(6, seed=4, uplinks_bits_per_s={5: 1e7})
    assert len(drawn.links) == 30
    for link in drawn.links.values():
        assert DELAYS_S[0] <= link.delay_s <= DELAYS_S[1]
        assert RATES_BITS_PER_S[0] <= link.bits_per_s <= RATES_BITS_PER_S[1]
    assert all(drawn.links[a, b].delay_s == drawn.links[b, a].delay_s for a, b in drawn.links)
    assert any(drawn.links[a, b].bits_per_s != drawn.links[b, a].bits_per_s for a, b in drawn.links)
    assert drawn.uplinks_bits_per_s == [None] * 5 + [1e7]


def test_a_transfer_alone_gets_the_slower_of_uplink_and_link():
    assert table(uplink=1e5).rate(0, 1) == 1e5
    assert table(uplink=1e8).rate(0, 1) == SLOW
    assert table(uplink=1e5).rate(1, 0) == SLOW
    assert table(delay_s=0.05).round_trip_s(0, 1) == pytest.approx(0.1)


def test_a_table_survives_its_json():
    drawn = draw_table(3, seed=1, uplinks_bits_per_s={0: 1e6})
    assert LinkTable.from_json(drawn.to_json()) == drawn


def test_a_table_with_a_link_missing_is_refused():
    with pytest.raises(ValueError, match="wanted"):
        LinkTable({(0, 1): Link(0.1, 1e6)}, [None, None])


# --- when packets arrive --------------------------------------------------------------------------
def test_an_empty_link_takes_its_delay_and_the_time_of_sending():
    assert Queues(table()).arrival_s(7.0, 0, 1, PACKET_BYTES) == pytest.approx(7.0 + 0.01 + 0.05)


def test_packets_of_a_link_leave_one_after_the_other_at_its_rate():
    queues = Queues(table())
    arrivals = [queues.arrival_s(0.0, 0, 1, PACKET_BYTES) for _ in range(20)]
    assert arrivals == pytest.approx([0.05 + 0.01 * (1 + n) for n in range(20)])


def test_links_of_one_host_do_not_wait_for_each_other_without_a_thin_uplink():
    queues = Queues(table())
    alone = queues.arrival_s(0.0, 0, 1, PACKET_BYTES)
    assert queues.arrival_s(0.0, 0, 2, PACKET_BYTES) == alone
    assert queues.arrival_s(0.0, 1, 0, PACKET_BYTES) == alone


def test_an_uplink_is_shared_by_all_links_of_its_host():
    queues = Queues(table(uplink=SLOW, rate=FAST))
    arrivals = [queues.arrival_s(0.0, 0, 1 + n % 2, PACKET_BYTES) for n in range(10)]
    assert arrivals == pytest.approx([0.05 + 0.01 * (1 + n) for n in range(10)])
    assert queues.arrival_s(0.0, 1, 0, PACKET_BYTES) == pytest.approx(0.05 + 0.001)


def test_uplink_and_link_in_a_row_take_the_slower_ones_time_and_not_both():
    for uplink, rate in ((SLOW, FAST), (FAST, SLOW)):
        queues = Queues(table(uplink=uplink, rate=rate))
        arrivals = [queues.arrival_s(0.0, 0, 1, PACKET_BYTES) for _ in range(10)]
        assert arrivals[-1] == pytest.approx(0.05 + 0.1)


def test_a_line_that_was_idle_does_not_catch_up():
    queues = Queues(table())
    queues.arrival_s(0.0, 0, 1, PACKET_BYTES)
    arrivals = [queues.arrival_s(100.0, 0, 1, PACKET_BYTES) for _ in range(2)]
    assert arrivals == pytest.approx([100.06, 100.07])


@pytest.mark.parametrize("uplink", [None, SLOW])
def test_a_packet_that_would_wait_too_long_is_dropped(uplink):
    queues = Queues(table(uplink=uplink, rate=SLOW if uplink is None else FAST), queue_s=0.095)
    arrivals = [queues.arrival_s(0.0, 0, 1, PACKET_BYTES) for _ in range(20)]
    assert [each is None for each in arrivals] == [False] * 10 + [True] * 10
    assert queues.dropped == 10
    assert queues.arrival_s(0.05, 0, 1, PACKET_BYTES) is not None  # there is room again


def test_a_packet_dropped_at_its_link_has_cost_time_of_the_uplink():
    queues = Queues(table(uplink=FAST, rate=SLOW), queue_s=0.02)
    kept = [queues.arrival_s(0.0, 0, 1, PACKET_BYTES) for _ in range(10)]
    assert None in kept
    assert queues.arrival_s(0.0, 0, 2, PACKET_BYTES) == pytest.approx(0.01 + 0.01 + 0.05)


# --- what a packet is -----------------------------------------------------------------------------
IP_BYTES, TCP_BYTES = 20, 32


def packet(payload_bytes, segment_bytes=0, last_byte=3, version=4, first_byte=10):
    vnet = struct.pack("=BBHHHH", 1, 1 if segment_bytes else 0, 0, segment_bytes, IP_BYTES, 16)
    ip = bytes([version << 4 | 5, *bytes(15), first_byte, 78, 0, last_byte])
    tcp = bytearray(TCP_BYTES)
    tcp[12] = TCP_BYTES // 4 << 4
    assert len(vnet) == HEADER_BYTES
    return vnet + ip + bytes(tcp) + bytes(payload_bytes)


def test_a_packet_that_is_not_to_be_cut_is_as_long_as_it_is():
    assert read_packet(packet(100)) == Packet(3, IP_BYTES + TCP_BYTES + 100)


@pytest.mark.parametrize(
    ("payload_bytes", "segments"), [(2897, 3), (2896, 2), (1449, 2), (1448, 1)]
)
def test_segments_are_counted_with_their_headers(payload_bytes, segments):
    found = read_packet(packet(payload_bytes, segment_bytes=1448, last_byte=250))
    assert found == Packet(250, payload_bytes + segments * (IP_BYTES + TCP_BYTES))


def test_what_is_not_for_one_host_by_ipv4_is_nothing():
    assert read_packet(packet(100, first_byte=224)) is None
    assert read_packet(packet(100, version=6)) is None
    assert read_packet(bytes(HEADER_BYTES + 3)) is None


# --- the whole ------------------------------------------------------------------------------------
@pytest.mark.slow
def test_hosts_reach_each_other_not_before_their_delay_and_nothing_stays_behind():
    if (reason := missing()) is not None:
        pytest.skip(reason)
    drawn = draw_table(2, seed=0, delays_s=(0.03, 0.03))
    with routed_network(drawn) as network:
        stream = [sys.executable, "-m", "bench.router.stream"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(network.command(1, [*stream, "echo"]), **pipes) as there:
            port = existing(there.stdout).readline().strip()
            ask = network.command(0, [*stream, "ask", network.address(1), port, "3"])
            with subprocess.Popen(ask, **pipes) as here:
                took_s = [
                    float(each)
                    for each in existing(here.stdout).readline().strip("[]\n").split(",")
                ]
                here.communicate()
            there.communicate()
        assert all(each >= drawn.round_trip_s(0, 1) for each in took_s)
        done = network.statistics()
        assert (done.packets, done.dropped, done.refused) == (6, 0, 0)
        assert set(done.sent_bytes) == {"0-1", "1-0"}
        name = network.namespace(0)
    listed = subprocess.run(["ip", "netns"], check=True, capture_output=True, text=True).stdout
    assert name not in listed
