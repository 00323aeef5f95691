"""Does the gossip exchange move vectors at the speed of the link?

Two peers, each a process with a p2pd of its own, swap the int8 codes of one vector. Compared within
one run, interleaved, medians over the repeats:

    exchange      peer/averaging as the daemon runs it: from the answer to a proposal until both
                  sides hold both receipts; framing, digest and check of the codes included
    raw p2pd, n   the same bytes both ways over n bare libp2p streams
    TCP           the same bytes both ways over one connection of trio's

first on the bare loopback, then through a link that delays and paces (relay.py), where the share of
the link's rate is what counts. On loopback everything shares the cores, so ratios matter alone.

The small message: 1 KB there and back on a conversation, beside the same on a bare stream.
"""

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import trio

from protocol.limits import MAX_STRIPES

from .children import Child, start_child
from .relay import Shape
from .report import Goal, Report, options

VECTOR_BYTES: Final = 256 * 10**6
"""Length of a vector, in the short setting too: of a short one most goes to growing windows."""
SMALLEST_OF_RAW: Final = 0.8
STREAMS: Final = (1, 8, MAX_STRIPES)
"""Numbers of raw p2pd streams; the last is the number that the exchange has."""
BYTES_PER_PARAMETER: Final = (1.0, 1.03)
LINKS: Final = (
    (Shape(bits_per_s=200e6, round_trip_s=0.08), 0.9),
    (Shape(bits_per_s=1e9, round_trip_s=0.1), 0.8),
)
"""Links, and the share of each that the exchange should reach."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: how much is moved, and how often."""

    vector_bytes: int
    repeats: int
    link_repeats: int


class Pair:
    """Two peers and the relay between them, with `a` connected to `b` over one link or none."""

    def __init__(self, a: Child, b: Child, relay: Child, shape: Shape | None) -> None:
        self._a, self._b, self._relay, self._shape = a, b, relay, shape
        self._round = 0
        self._a_id = self._b_id = ""
        self._tcp_port = 0
        self.payload_bytes = self.parameters = 0

    async def connect(self) -> None:
        """Make the link, and connect over it."""
        hello = await self._b.ask("hello")
        self._a_id, self._b_id = (await self._a.ask("hello"))["peer_id"], hello["peer_id"]
        self.payload_bytes, self.parameters = hello["payload_bytes"], hello["parameters"]
        p2pd_port = int(hello["addresses"][-1].split("/tcp/")[1].split("/")[0])
        self._tcp_port = await self._through_relay(hello["tcp_port"])
        address = f"/ip4/127.0.0.1/tcp/{await self._through_relay(p2pd_port)}/p2p/{self._b_id}"
        await self._a.ask("connect", peer_id=self._b_id, addresses=[address])

    async def _through_relay(self, port: int) -> int:
        shape = self._shape
        if shape is None:
            return port
        answer = await self._relay.ask(
            "open",
            target_port=port,
            bits_per_s=shape.bits_per_s,
            round_trip_s=shape.round_trip_s,
        )
        return int(answer["port"])

    async def tcp(self) -> float:
        return float((await self._a.ask("tcp", port=self._tcp_port))["s"])

    async def bare(self, streams: int) -> float:
        return float((await self._a.ask("bare", peer_id=self._b_id, streams=streams))["s"])

    async def exchange(self) -> tuple[float, float]:
        """Seconds until the slower side was through, and the most bytes that one sent."""
        self._round += 1
        answers: list[dict[str, Any]] = []

        async def one(child: Child, peer_id: str) -> None:
            answers.append(await child.ask("gossip", round=self._round, peer_id=peer_id))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, self._a, self._b_id)
            nursery.start_soon(one, self._b, self._a_id)
        return max(x["s"] for x in answers), max(x["sent_bytes"] for x in answers)

    async def echo(self, what: str) -> list[float]:
        times_s: list[float] = (await self._a.ask(what, peer_id=self._b_id))["s"]
        return times_s

    async def carried_bytes(self) -> int:
        return int((await self._relay.ask("carried_bytes"))["bytes"])


async def measure(setting: Setting, streams: Sequence[int]) -> Report:
    """Measure everything; see the top of the file."""
    report = Report("exchange", "Vectors both ways at once; MB/s of each direction (median)")
    for shape, share in ((None, SMALLEST_OF_RAW), *LINKS):
        with tempfile.TemporaryDirectory(prefix="loco") as folder:
            arguments = (folder, str(setting.vector_bytes))
            async with (
                start_child("bench.exchange_peer", *arguments, "a") as a,
                start_child("bench.exchange_peer", *arguments, "b") as b,
                start_child("bench.relay") as relay,
            ):
                pair = Pair(a, b, relay, shape)
                await pair.connect()
                await _measure_vectors(report, pair, setting, streams, shape, share)
                if shape is None:
                    await _measure_echo(report, pair)
    return report


async def _measure_vectors(
    report: Report,
    pair: Pair,
    setting: Setting,
    streams: Sequence[int],
    shape: Shape | None,
    share: float,
) -> None:
    bare = {f"raw p2pd, {n} stream{'s' if n > 1 else ''}": n for n in streams}
    times_s: dict[str, list[float]] = {"TCP": [], **{name: [] for name in bare}, "exchange": []}
    sent_bytes = 0.0
    await pair.exchange()  # its buffers are touched for the first time, as in a peer's first round
    carried_bytes = await pair.carried_bytes()
    repeats = setting.repeats if shape is None else setting.link_repeats
    for _ in range(repeats):
        times_s["TCP"].append(await pair.tcp())
        for name, count in bare.items():
            times_s[name].append(await pair.bare(count))
        exchange_s, sent_bytes = await pair.exchange()
        times_s["exchange"].append(exchange_s)
    if shape is not None:
        # Whoever is dialled may tell its own address: nothing may have gone past the relay.
        moved_bytes = 2 * pair.payload_bytes * repeats * len(times_s)
        assert await pair.carried_bytes() - carried_bytes >= moved_bytes
    rates = {name: pair.payload_bytes / statistics.median(s) for name, s in times_s.items()}
    best_raw = max(rates[name] for name in bare)
    for name, rate in rates.items():
        report.rows.append(
            {
                "link": "loopback" if shape is None else shape.describe(),
                "what": name,
                "MB/s": rate / 1e6,
                "slowest": pair.payload_bytes / max(times_s[name]) / 1e6,
                "fastest": pair.payload_bytes / min(times_s[name]) / 1e6,
                "of best raw": rate / best_raw,
                "of the link": None if shape is None else rate / shape.bytes_per_s,
            }
        )
    if shape is None:
        what = "exchange on loopback, of the faster raw p2pd"
        report.goals.append(Goal(what, rates["exchange"] / best_raw, at_least=share))
        least, most = BYTES_PER_PARAMETER
        per_parameter = sent_bytes / pair.parameters
        report.goals.append(
            Goal("bytes sent per parameter", per_parameter, at_least=least, at_most=most)
        )
    else:
        of_link = rates["exchange"] / shape.bytes_per_s
        what = f"exchange at {shape.describe()}, of the link"
        report.goals.append(Goal(what, of_link, at_least=share))


async def _measure_echo(report: Report, pair: Pair) -> None:
    medians_s = {"echo": [], "talk": []}  # type: dict[str, list[float]]
    for _ in range(3):
        for what, medians in medians_s.items():
            medians.append(statistics.median(await pair.echo(what)))
    raw_us, talk_us = (1e6 * statistics.median(medians) for medians in medians_s.values())
    report.notes.append(
        f"1 KB there and back (median): {raw_us:.0f} us on a raw p2pd stream, {talk_us:.0f} us on "
        f"a conversation ({talk_us / raw_us:.2f} times)"
    )


def main() -> None:
    """Measure and publish."""
    parser = options(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS, help="of raw p2pd")
    chosen = parser.parse_args()
    full: bool = chosen.full
    setting = Setting(VECTOR_BYTES, 7, 3) if full else Setting(VECTOR_BYTES, 3, 1)
    report = trio.run(measure, setting, chosen.streams)
    report.settings = {
        "vector_bytes": setting.vector_bytes,
        "repeats": setting.repeats,
        "link_repeats": setting.link_repeats,
    }
    report.publish(chosen.json)


if __name__ == "__main__":
    main()
