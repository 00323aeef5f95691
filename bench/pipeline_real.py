"""Pipelines of nine real peers: what an iteration takes by each way of choosing paths.

Nine daemons on machines of known links, whose compute is stated (bench/pipeline_world), S = 4
stages, three data peers, two relays for each further stage; paths of three stages where stages are
skipped. Worlds:

    regions            links between nine regions of the world, a sixteenth of their bandwidth;
                       boundaries of 1 MiB (bf16)
    bf16, int8         the same latencies, 100 Mbit/s everywhere; 1M values in a boundary

Per way: the iteration that the simulator predicts for its plan, and what real daemons take when
they follow it, median of some; the ratio to the full pipeline; microbatches that were lost. A swarm
is given its paths as a table, so this measures paths and the exchange, not how links are measured.

    python -m bench.pipeline_real [--full] [--worlds A ...] [--ways A ...] [--json FILE]

Needs root.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from bench.pipeline_world.swarm import planned_swarm, watch
from bench.pipeline_world.timeline import ends_of_iterations, iteration_times, read_pieces
from bench.pipeline_world.ways import FULL, NAMES, OURS, Way, ways_of
from bench.pipeline_world.world import MICROBATCHES, PLACES, STAGE_SIZES, VISITED, World
from bench.real_peers import PeerFailed, RealPeer
from bench.report import Goal, Report, Row, options
from bench.router.network import congestion_control, missing, routed_network
from protocol.pipeline.problem import US_PER_S

MBIT_100: Final = 100_000_000
WORLDS: Final = {
    world.name: world
    for world in (
        World("regions", 200_000, 2, thinner=16),
        World("bf16", 200_000, 4, "bf16", bits_per_s=MBIT_100),
        World("int8", 200_000, 4, "int8", bits_per_s=MBIT_100),
    )
}
WARM: Final = 1
"""Iterations along the plan before those that count."""
ITERATIONS: Final = 4
FULL_ITERATIONS: Final = 15
PATIENCE: Final = 4.0
"""A swarm may take so many times what was predicted, and START_S."""
START_S: Final = 60.0
LOOK_EVERY_S: Final = 2.0
OF_FULL: Final = 0.55
OF_PREDICTED: Final = 0.1


@dataclass(frozen=True, slots=True)
class Found:
    """What came of one swarm.

    Attributes:
        took_s: iterations that count, in order.
        lost: microbatches that did not come back, of all data peers.
        load: processes of the machine that wanted a core, mean.
    """

    world: World
    way: Way
    took_s: Sequence[float]
    lost: int
    load: float
    late_ms: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.took_s)

    @property
    def predicted_s(self) -> float:
        return self.way.predicted_us / US_PER_S

    @property
    def over_predicted(self) -> float:
        return self.median_s / self.predicted_s

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "world": self.world.name,
            "way": self.way.name,
            "plan": self.way.plan.to_json(self.way.problem),
            "predicted_s": self.predicted_s,
            "took_s": list(self.took_s),
            "lost": self.lost,
            "load": self.load,
            "router_late_ms": self.late_ms,
        }


def run_way(world: World, way: Way, iterations: int) -> Found:
    """Let real daemons follow a plan. Raises PeerFailed."""
    origins = [machine for machine, paths in enumerate(way.plan.paths) if paths]
    spec = world.run_toml(way.problem.visited, way.share)
    with (
        tempfile.TemporaryDirectory(prefix="loco") as name,
        routed_network(world.links()) as network,
        planned_swarm(network, spec, way.plan, world.stated_s(), Path(name)) as peers,
    ):
        before, loads, begin_s = network.statistics(), list[float](), time.monotonic()
        wanted = WARM + iterations
        end_s = begin_s + START_S + PATIENCE * wanted * way.predicted_us / US_PER_S
        while True:
            watch(peers, LOOK_EVERY_S)
            loads.append(psutil.getloadavg()[0])
            ends = [_ends(Path(name), machine, way.share, begin_s) for machine in origins]
            if min(map(len, ends)) > wanted:
                break
            if time.monotonic() > end_s:
                raise PeerFailed(f"{way.name}: {min(map(len, ends))} of {wanted} iterations")
        after = network.statistics()
        lost = sum(_lost(peers[machine]) for machine in origins)
    late_s = (after.late_s - before.late_s) / max(1, after.packets - before.packets)
    took_s = iteration_times(ends)[-iterations:]
    return Found(world, way, took_s, lost, statistics.fmean(loads), 1e3 * late_s)


def _ends(folder: Path, machine: int, share: int, since_s: float) -> list[float]:
    """Ends of a data peer's iterations since then."""
    pieces = read_pieces(folder / f"trainer{machine}.jsonl")
    return [end_s for end_s in ends_of_iterations(pieces, share) if end_s > since_s]


def _lost(peer: RealPeer) -> int:
    counts: Mapping[str, int] = peer.status()["microbatches"]
    return counts.get("lost", 0)


def row_of(found: Found, full_s: float | None) -> Row:
    """A row of the table."""
    return {
        "world": found.world.name,
        "way": found.way.name,
        "data peers": sum(map(bool, found.way.plan.paths)),
        "predicted s": found.predicted_s,
        "measured s": found.median_s,
        "least": min(found.took_s),
        "most": max(found.took_s),
        "of full": found.median_s / full_s if full_s else None,
        "of predicted": found.over_predicted,
        "lost": found.lost,
        "load": found.load,
        "late ms": found.late_ms,
    }


def goals_of(found: Sequence[Found]) -> list[Goal]:
    """What should hold in one world."""
    world, by_name = found[0].world.name, {each.way.name: each for each in found}
    goals = [
        Goal(
            f"{world}, {each.way.name}: measured over predicted",
            each.over_predicted,
            1 - OF_PREDICTED,
            1 + OF_PREDICTED,
        )
        for each in found
    ]
    ours, full = by_name.get(OURS), by_name.get(FULL)
    if ours and full:
        goals.append(Goal(f"{world}: ours of full", ours.median_s / full.median_s, at_most=OF_FULL))
    others = [each.median_s for each in found if each is not ours]
    if ours and others:
        over = ours.median_s / min(others)
        goals.append(Goal(f"{world}: ours over the best other way", over, at_most=1.0))
    return goals


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and publish.

    Args:
        arguments: of the command line; None are the process's own.
    """
    parser = options(__doc__)
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--ways", nargs="+", choices=NAMES, default=list(NAMES))
    chosen = parser.parse_args(arguments)
    if (reason := missing()) is not None:
        parser.exit(1, f"hosts of their own are needed: {reason}\n")
    iterations = FULL_ITERATIONS if chosen.full else ITERATIONS
    report = Report("pipeline_real", "Pipelines of nine real peers: seconds of an iteration")
    report.settings = {
        "iterations": iterations,
        "cores": os.cpu_count(),
        "congestion_control": congestion_control(),
        "places": PLACES,
        "stage_sizes": STAGE_SIZES,
        "visited": VISITED,
        "microbatches": MICROBATCHES,
        "swarms": [],
    }
    for name in chosen.worlds:
        found, full_s = list[Found](), None
        for way in ways_of(WORLDS[name].problem()):
            if way.name not in chosen.ways:
                continue
            found.append(run_way(WORLDS[name], way, iterations))
            full_s = found[-1].median_s if way.name == FULL else full_s
            report.rows.append(row_of(found[-1], full_s))
            report.settings["swarms"].append(found[-1].to_json())
            print(dict(report.rows[-1]), flush=True)
        report.goals += goals_of(found)
        report.publish(chosen.json)


if __name__ == "__main__":
    main()
