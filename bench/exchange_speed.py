"""How fast is a whole model averaged among all, beside its rivals and the link?

Each peer is a process on a host of its own (bench/shaped_network.py): one access link, shaped in
both directions. One exchange averages a model of fp32 values among all peers, in one run by

    ours       peer/averaging's FragmentExchange over p2pd: all fragments at once, int8 codes.
               On the clock: contributions to their owners; check, average, code and signature
               there; results to all; the outer step of all chunks at all peers. Not on the clock:
               coding the own values, which the trainer does before it sends
    hivemind   AllReduceRunner with Uniform8BitQuantization, over its own p2pd. On the clock: its
               coding as well. Not on the clock: matchmaking
    gloo       torch.distributed's all-reduce of one flat fp32 tensor, the sum only

An exchange lasts from the moment at which the first peer begins until the last one has everything.
Medians, after one exchange that does not count; each process computes with one torch thread.

The limit of the link is that of our codes. Of S bytes of codes a peer sends what others own once,
as contributions, and what it owns N-1 times, as results: 2 (N-1)/N S bytes leave each peer, and as
many arrive. `of limit` is the time that this takes at the link's rate, over the time measured;
headers of any kind are in the time, but not in the limit. `wire MB` is what the busiest interface
counted in its busier direction.

`CPU s` is that of all peers together, of all their p2pd, and of all other processes of the machine:
what strangers take is missing here. `CPU share` is the part of the first two in what the machine's
cores had to give meanwhile: near 1 the machine was the limit, not the link. (The kernel's own work
for the network is in it only in part.)

Results are checked after each link: close to the true mean, and for ours the same bytes in all
outer copies.

hivemind's interpreter is made as bench/codec.py says, and named with --hivemind-python.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import trio

from peer.codec import get_codec

from .exchange_speed_data import model_layout
from .exchange_speed_group import Measured, open_group
from .report import Goal, Report, Row, options
from .shaped_network import AccessLink, ShapedNetwork, missing, shaped_network

OURS: Final = "ours"
HIVEMIND: Final = "hivemind"
GLOO: Final = "gloo"
BYTES_PER_VALUE: Final = 4
UNSHAPED_MBIT_PER_S: Final = 0.0
FASTER_THAN_GLOO: Final = {1000.0: 2.5, 200.0: 3.0}
OF_LIMIT: Final = {200.0: 0.85}
"""Goals, by the Mbit/s of the link."""


@dataclass(frozen=True, slots=True)
class Case:
    """One group and one link.

    Attributes:
        mbit_per_s: of the link; 0 is unshaped.
    """

    model_mb: int
    num_peers: int
    mbit_per_s: float

    @property
    def link(self) -> AccessLink:
        bits_per_s = 1e6 * self.mbit_per_s or None
        return AccessLink(bits_per_s, bits_per_s)

    @property
    def code_bytes(self) -> float:
        """Bytes that leave each of our peers, and arrive there, headers aside."""
        layout = model_layout(num_values(self.model_mb))
        codes = get_codec("int8").code_bytes(layout.padded_parameters)
        return 2 * (self.num_peers - 1) / self.num_peers * codes

    @property
    def limit_s(self) -> float | None:
        """Seconds that the link takes for them."""
        return 8e-6 * self.code_bytes / self.mbit_per_s if self.mbit_per_s else None

    def describe(self) -> str:
        return f"{self.model_mb} MB, {self.num_peers} peers, {self.link.describe()}"


Found = dict[tuple[Case, str], Measured]


def num_values(model_mb: int) -> int:
    return model_mb * 10**6 // BYTES_PER_VALUE


async def measure(
    cases: Sequence[Case], systems: Sequence[str], repeats: int, hivemind_python: Path | None
) -> Found:
    """Measure all systems over all links."""
    found: Found = {}
    for (model_mb, num_peers), group in itertools.groupby(
        cases, lambda case: (case.model_mb, case.num_peers)
    ):
        of_group = list(group)
        with shaped_network([AccessLink()] * num_peers) as network:
            for system in systems:
                _shape(network, AccessLink())
                async with open_group(
                    system, network, num_values(model_mb), hivemind_python
                ) as peers:
                    for case in of_group:
                        _shape(network, case.link)
                        found[case, system] = await peers.measure(repeats)
                        # Said at once: of a long run that is cut off so much is kept.
                        print(json.dumps(row(case, system, found)), flush=True)
    return found


def _shape(network: ShapedNetwork, link: AccessLink) -> None:
    for host in range(network.num_hosts):
        network.shape(host, link)


def rows(cases: Sequence[Case], systems: Sequence[str], found: Found) -> list[Row]:
    return [row(case, system, found) for case in cases for system in systems]


def row(case: Case, system: str, found: Found) -> Row:
    measured, limit_s = found[case, system], case.limit_s
    time_s = measured.median_s
    gloo = found.get((case, GLOO))
    return {
        "link": case.link.describe(),
        "MB": case.model_mb,
        "peers": case.num_peers,
        "system": system,
        "s": time_s,
        "fastest": min(measured.times_s),
        "slowest": max(measured.times_s),
        "times gloo": None if gloo is None else gloo.median_s / time_s,
        "of limit": None if limit_s is None else limit_s / time_s,
        "wire MB": measured.wire_bytes / 1e6,
        "peers CPU s": measured.peers_cpu_s,
        "p2pd CPU s": measured.p2pd_cpu_s,
        "strange CPU s": measured.strange_cpu_s,
        "CPU share": (measured.peers_cpu_s + measured.p2pd_cpu_s)
        / (time_s * (psutil.cpu_count() or 1)),
        "error": measured.error,
    }


def goals(cases: Sequence[Case], found: Found) -> list[Goal]:
    listed = []
    for case in cases:
        ours_s = found[case, OURS].median_s
        rivals_s = {system: found[case, system].median_s for of, system in found if of == case}
        if GLOO in rivals_s and case.mbit_per_s in FASTER_THAN_GLOO:
            least = FASTER_THAN_GLOO[case.mbit_per_s]
            what = f"ours over gloo, {case.describe()}"
            listed.append(Goal(what, rivals_s[GLOO] / ours_s, at_least=least))
        if case.limit_s is not None and case.mbit_per_s in OF_LIMIT:
            what = f"ours of the link's limit, {case.describe()}"
            least = OF_LIMIT[case.mbit_per_s]
            listed.append(Goal(what, case.limit_s / ours_s, at_least=least))
        if HIVEMIND in rivals_s:
            what = f"ours over hivemind, {case.describe()}"
            listed.append(Goal(what, rivals_s[HIVEMIND] / ours_s, at_least=1.0))
    return listed


def _continue(report: Report, path: Path) -> None:
    """Begin with what an earlier part of the same measurement has found."""
    before = json.loads(path.read_text())
    report.rows += before["rows"]
    for goal in before["goals"]:
        del goal["met"]
        report.goals.append(Goal(**goal))


def main() -> None:
    """Measure and publish."""
    parser = options(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", help="MB of fp32 values")
    parser.add_argument("--peers", type=int, nargs="+")
    parser.add_argument(
        "--links",
        type=float,
        nargs="+",
        default=[UNSHAPED_MBIT_PER_S, 1000.0, 200.0],
        help="Mbit/s each way; 0 is unshaped",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--systems", nargs="+", default=[OURS, HIVEMIND, GLOO])
    parser.add_argument("--hivemind-python", type=Path, metavar="FILE")
    parser.add_argument("--after", type=Path, metavar="FILE", help="JSON of an earlier part")
    chosen = parser.parse_args()
    if (reason := missing()) is not None:
        parser.exit(1, f"hosts of their own are needed: {reason}\n")
    sizes = chosen.sizes or ([64, 256] if chosen.full else [64])
    peers = chosen.peers or ([4, 8] if chosen.full else [4])
    cases = [Case(*each) for each in itertools.product(sizes, peers, chosen.links)]
    systems = [s for s in chosen.systems if s != HIVEMIND or chosen.hivemind_python]
    report = Report(
        "exchange_speed",
        "One exchange of a whole model among all (medians)",
        {"repeats": chosen.repeats, "codec": "int8"},
    )
    if chosen.after is not None:
        _continue(report, chosen.after)
    found = trio.run(measure, cases, systems, chosen.repeats, chosen.hivemind_python)
    report.rows += rows(cases, systems, found)
    report.goals += goals(cases, found)
    report.publish(chosen.json)


if __name__ == "__main__":
    main()
