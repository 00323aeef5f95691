"""Does the router (bench/router) keep its word: delay and rate of each link, at what cost?

Six hosts whose links are drawn by a seed (link_table.py): 4 to 140 ms one way, 20 to 300 Mbit/s,
and one host with an uplink of 10 Mbit/s. Measured from the hosts, not by the router:

    round trip   of a small packet, median of some; alone, before anything else is sent
    rate         what one or several TCP streams bring to the receiver, their first seconds left
                 out, in Mbit/s of what a wire carries (the headers of full segments are added)

Streams run alone, eight on one link, one on each of six links at the same time, and two from behind
the thin uplink. Beside them stands what the router cost: share of one core, milliseconds by which
packets were late (which is how long the router itself had to wait for a core), packets dropped.

TCP is the machine's own (the settings say which congestion control), but for its buffers, which are
made large enough for the longest link.

Needs root. `python -m bench.routed_network [--full] [--json FILE]`
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .link_table import LinkTable, draw_table
from .report import Goal, Report, Row, options
from .router.network import RoutedNetwork, congestion_control, missing, routed_network

HOSTS: Final = 6
SEED: Final = 0
THIN_HOST: Final = 5
THIN_BITS_PER_S: Final = 10e6
WIRE_PER_PAYLOAD: Final = 1500 / 1448
"""Payload of a full segment with timestamps."""
BUFFER_BYTES: Final = 1 << 26
PINGS: Final = 20
RAMP_S: Final = 4.0
"""TCP needs some round trips until it fills a link; the longest here is of 0.28 s."""
Way = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Case:
    """Streams that run at the same time.

    Attributes:
        ways: source and destination of each.
    """

    name: str
    ways: Sequence[Way]


@dataclass(frozen=True, slots=True)
class Cost:
    """What the router did while streams ran."""

    core_share: float
    late_ms: float
    dropped: int


def six_links() -> LinkTable:
    """The table of all measurements with unequal links."""
    return draw_table(HOSTS, SEED, uplinks_bits_per_s={THIN_HOST: THIN_BITS_PER_S})


def cases(table: LinkTable) -> list[Case]:
    """Alone on the fastest, slowest and longest link; several on one; one on each of six."""
    ways = [way for way in table.links if THIN_HOST not in way]
    fastest = max(ways, key=lambda way: table.links[way].bits_per_s)
    slowest = min(ways, key=lambda way: table.links[way].bits_per_s)
    longest = max(ways, key=lambda way: table.links[way].delay_s)
    ring = [(host, (host + 1) % table.num_hosts) for host in range(table.num_hosts)]
    return [
        Case("alone, fastest link", [fastest]),
        Case("alone, slowest link", [slowest]),
        Case("alone, longest link", [longest]),
        Case("eight on one link", [longest] * 8),
        Case("one on each of six links", ring),
        Case("two through the thin uplink", [(THIN_HOST, 0), (THIN_HOST, 1)]),
    ]


def rate_between(seen: Sequence[tuple[float, int]], begin_s: float, end_s: float) -> float:
    """Bytes per second between two times, out of (time, bytes so far)."""
    within = [(at_s, count) for at_s, count in seen if begin_s <= at_s <= end_s]
    if len(within) < 2:
        return 0.0
    (first_s, first), (last_s, last) = within[0], within[-1]
    return (last - first) / (last_s - first_s)  # after a loss, what came before may count now


def measure_streams(network: RoutedNetwork, case: Case, seconds: float) -> tuple[list[float], Cost]:
    """Payload in bytes per second of each stream."""
    receivers = [_start(network, way[1], "receive") for way in case.ways]
    ports = [_line_of(receiver) for receiver in receivers]
    before, began_s = network.statistics(), time.monotonic()
    senders = [
        _start(network, source, "send", network.address(destination), port, f"{RAMP_S + seconds}")
        for (source, destination), port in zip(case.ways, ports, strict=True)
    ]
    time.sleep(RAMP_S + seconds)
    after, ended_s = network.statistics(), time.monotonic()
    for process in senders:
        process.communicate()
    told = [json.loads(_line_of(receiver)) for receiver in receivers]
    for process in receivers:
        process.communicate()
    packets = max(1, after.packets - before.packets)
    cost = Cost(
        (after.cpu_s - before.cpu_s) / (ended_s - began_s),
        1e3 * (after.late_s - before.late_s) / packets,
        after.dropped - before.dropped,
    )
    return [rate_between(seen, began_s + RAMP_S, began_s + RAMP_S + seconds) for seen in told], cost


def measure_round_trip(network: RoutedNetwork, way: Way) -> float:
    """Seconds, the median of some."""
    there = _start(network, way[1], "echo")
    try:
        address, port = network.address(way[1]), _line_of(there)
        asked = _start(network, way[0], "ask", address, port, f"{PINGS}")
        took_s: list[float] = json.loads(_line_of(asked))
        asked.communicate()
    finally:
        there.communicate()
    return statistics.median(took_s)


def rows_of(network: RoutedNetwork, case: Case, seconds: float) -> list[Row]:
    """A row for each way of the case; streams on one way are added up."""
    round_trips_s = {way: measure_round_trip(network, way) for way in dict.fromkeys(case.ways)}
    rates, cost = measure_streams(network, case, seconds)
    rows: list[Row] = []
    for way, round_trip_s in round_trips_s.items():
        of_way = [rate for rate, each in zip(rates, case.ways, strict=True) if each == way]
        wanted_mbit = 1e-6 * _due_rate(network.table, way, case)
        mbit = 8e-6 * sum(of_way) * WIRE_PER_PAYLOAD
        wanted_ms = 1e3 * network.table.round_trip_s(*way)
        rows.append(
            {
                "case": case.name,
                "link": f"{way[0]} to {way[1]}",
                "streams": len(of_way),
                "Mbit/s": wanted_mbit,
                "measured": mbit,
                "share": mbit / wanted_mbit,
                "round trip ms": wanted_ms,
                "measured ms": 1e3 * round_trip_s,
                "router's core": cost.core_share,
                "late ms": cost.late_ms,
                "dropped": cost.dropped,
            }
        )
    return rows


def _due_rate(table: LinkTable, way: Way, case: Case) -> float:
    """What this way should get: of an uplink that several ways use, its share."""
    uplink = table.uplinks_bits_per_s[way[0]]
    shared_by = len({each for each in case.ways if each[0] == way[0]})
    return min(table.links[way].bits_per_s, uplink / shared_by if uplink else float("inf"))


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """What should hold; streams that share the thin uplink are judged together."""
    apart = [row for row in rows if "thin" not in row["case"]]
    thin = [row for row in rows if "thin" in row["case"]]
    excess_ms = max(row["measured ms"] - row["round trip ms"] for row in rows)
    goals = [
        Goal("least share of a link's rate", min(row["share"] for row in apart), at_least=0.85),
        Goal("largest share of a link's rate", max(row["share"] for row in apart), at_most=1.05),
        Goal("round trip beyond its delay, ms, largest", excess_ms, at_most=2.0),
    ]
    if thin:
        share = sum(row["measured"] for row in thin) / sum(row["Mbit/s"] for row in thin)
        goals.append(Goal("share of the thin uplink's rate", share, at_least=0.85, at_most=1.02))
    return goals


def _start(network: RoutedNetwork, host: int, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "bench.router.stream", *arguments]
    return subprocess.Popen(
        network.command(host, command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def main() -> None:
    """Measure and publish."""
    parser = options(__doc__)
    chosen = parser.parse_args()
    if (reason := missing()) is not None:
        parser.exit(1, f"hosts of their own are needed: {reason}\n")
    seconds = 30.0 if chosen.full else 12.0
    table = six_links()
    report = Report("routed_network", "Delay and rate of links through the router")
    report.settings = {
        "seconds": seconds,
        "congestion_control": congestion_control(),
        "table": table.to_json(),
    }
    with routed_network(table) as network:
        for host in range(network.num_hosts):
            for buffer in ("tcp_rmem", "tcp_wmem"):
                network.set(host, f"net/ipv4/{buffer}", f"4096 131072 {BUFFER_BYTES}")
        for case in cases(table):
            report.rows += rows_of(network, case, seconds)
    report.goals = goals_of(report.rows)
    report.publish(chosen.json)


if __name__ == "__main__":
    main()
