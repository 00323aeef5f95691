"""The process that hands on packets when they are due (see __init__.py).

    python -m bench.router.forwarder TABLE NAMESPACE ...

TABLE is a link table as JSON. When all devices are there it prints `{}`. Each line on its standard
input is a question, answered with its statistics; it ends with its input.
"""

import heapq
import json
import os
import resource
import select
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from bench.link_table import LinkTable

from .packets import read_packet
from .queues import Queues
from .tun import open_tun

READ_BYTES: Final = 1 << 17
READS_AT_ONCE: Final = 64
"""Packets of one host before the next host's turn, and before what is due is sent."""
BREATH_S: Final = 0.00025
"""After each turn, so that packets come in bunches: at most so much late, and at half the cost."""
PRIORITY: Final = 1
"""Real time, the lowest: a packet that is due must not wait for those who compute. The kernel keeps
a twentieth of the time for the others, whatever happens here."""


@dataclass(slots=True)
class Statistics:
    """What was done so far.

    Attributes:
        packets, sent_bytes: handed on; bytes as a wire counts them, by "source-destination".
        dropped: packets that found a queue full.
        refused: packets that a device did not take: its host was gone, or its queue full.
        late_s: of all packets together, after they were due.
        most_late_s: of one packet.
        cpu_s: processor time of this process.
    """

    packets: int
    sent_bytes: dict[str, int]
    dropped: int
    refused: int
    late_s: float
    most_late_s: float
    cpu_s: float


class Forwarder:
    """Reads, keeps and writes packets.

    Args:
        devices: a descriptor for each host, in the order of the table.
    """

    def __init__(self, table: LinkTable, devices: Sequence[int]) -> None:
        self._queues = Queues(table)
        self._devices = devices
        self._due: list[tuple[float, int, int, bytes]] = []
        self._order = 0
        self._sent_bytes: Counter[tuple[int, int]] = Counter()
        self._refused = 0
        self._late_s = self._most_late_s = 0.0

    def run(self) -> None:
        """Hand packets on until the standard input ends."""
        watched = [*self._devices, sys.stdin.fileno()]
        hosts = {descriptor: host for host, descriptor in enumerate(self._devices)}
        while True:
            readable, _, _ = select.select(watched, [], [], self._patience_s())
            for descriptor in readable:
                if descriptor in hosts:
                    self._read(hosts[descriptor], descriptor)
                elif not self._answer():
                    return
            self._send_due()
            time.sleep(BREATH_S)

    def _patience_s(self) -> float | None:
        """Until the next packet is due."""
        return max(0.0, self._due[0][0] - time.monotonic()) if self._due else None

    def _read(self, source: int, descriptor: int) -> None:
        for _ in range(READS_AT_ONCE):
            try:
                data = os.read(descriptor, READ_BYTES)
            except BlockingIOError:
                return
            packet = read_packet(data)
            destination = packet.destination - 1 if packet else -1
            if packet is None or not 0 <= destination < len(self._devices):
                continue  # IPv6's router solicitations, broadcasts
            arrival_s = self._queues.arrival_s(
                time.monotonic(), source, destination, packet.num_bytes
            )
            if arrival_s is not None:
                self._order += 1
                heapq.heappush(self._due, (arrival_s, self._order, destination, data))
                self._sent_bytes[source, destination] += packet.num_bytes

    def _send_due(self) -> None:
        due, now_s = self._due, time.monotonic()
        while due and due[0][0] <= now_s:
            due_s, _, destination, data = heapq.heappop(due)
            try:
                os.write(self._devices[destination], data)
            except OSError:
                self._refused += 1
            self._late_s += now_s - due_s
            self._most_late_s = max(self._most_late_s, now_s - due_s)

    def _answer(self) -> bool:
        """Say what was done, if that is asked; else the input has ended."""
        asked = os.read(sys.stdin.fileno(), READ_BYTES)
        if asked:
            print(json.dumps(asdict(self.statistics())), flush=True)
        return bool(asked)

    def statistics(self) -> Statistics:
        """What was done so far."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        sent_bytes = {f"{way[0]}-{way[1]}": count for way, count in self._sent_bytes.items()}
        return Statistics(
            packets=self._order,
            sent_bytes=sent_bytes,
            dropped=self._queues.dropped,
            refused=self._refused,
            late_s=self._late_s,
            most_late_s=self._most_late_s,
            cpu_s=used.ru_utime + used.ru_stime,
        )


def main() -> None:
    """Hand packets on for the hosts in these namespaces."""
    tree: dict[str, Any] = json.loads(sys.argv[1])
    with suppress(PermissionError):  # some machines refuse it to root, too; `late_s` tells more
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(PRIORITY))
    devices = [open_tun(namespace) for namespace in sys.argv[2:]]
    print("{}", flush=True)
    Forwarder(LinkTable.from_json(tree), devices).run()


if __name__ == "__main__":
    main()
