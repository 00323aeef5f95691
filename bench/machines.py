"""A peer of several processes (`--gpus N`): what it sends, how fast it is, and what it holds.

For 1, 2 and 4 processes: a real peer (`loco-peer start --gpus N --device cpu`) founds a run and
trains a while alone; then a real peer of one process joins, and they average. So each row has

  s per step     of the peer alone, the median of its rounds; and processor seconds of all its ranks
  MB per rank    of its trainer's processes while it trains alone: RSS, each page in full; PSS, what
                 processes share in proportion; private, which nobody shares
  sent           bytes that the peer writes to its streams for one average, the median: the vector's
                 codes and the messages about them

The ranks have a thread each. On fewer cores than ranks they take turns, so seconds say nothing of
GPUs; bytes and memory do not depend on that. Goal: the same bytes, whatever N.

    python -m bench.machines [--ranks 1 2 4] [--millions 64] [--json FILE.jsonl]
"""

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psutil
import trio

from demo.plan import Plan, to_toml
from demo.processes import RunningPeer, open_peers
from peer.observe.event_names import EventName
from protocol.run.run_spec import RunSpec

from .gossip_links_real import commit_of
from .memory import MB, SIZES
from .real_peers import HERE, read_events, trainers_of
from .report import Goal, Report, Row, options

ALONE_ROUNDS: Final = 4
AVERAGES: Final = 3
SAME: Final = 1.001
"""Messages hold numbers, whose digits are more or fewer; a vector sent twice would be 2."""
POLL_S: Final = 0.5
LIMIT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Held:
    """Memory of one process, bytes."""

    rss: int
    pss: int
    private: int


def spec_of(millions: int | None, inner_steps: int) -> RunSpec:
    """The demo's run, or one of so many parameters and of few tokens; endless, of short rounds."""
    tree = (Plan().swarm_spec() if millions is None else SIZES[millions].spec()).model_dump()
    tree["training"] |= {"total_steps": 1_000_000, "batch_size": 8, "micro_batch": "auto"}
    tree["sync"] |= {"inner_steps": inner_steps, "validate_every": 1_000_000}
    return RunSpec.model_validate(tree)


async def row_of(spec: RunSpec, ranks: int) -> Row:
    """One peer of so many processes, alone and then beside one of one process."""
    box_options = ["--gpus", str(ranks)] if ranks > 1 else []
    with tempfile.TemporaryDirectory(prefix="loco") as name:
        folder = Path(name)
        run_toml = folder / "run.toml"
        run_toml.write_text(to_toml(spec))
        async with open_peers(folder) as peers:
            box = await peers.start("box", ["start", str(run_toml), *box_options], ranks)
            first = await _events(box, EventName.ROUND_CLOSED, 1)
            trainers = trainers_of(psutil.Process(box.process.pid))
            assert len(trainers) == ranks, f"{len(trainers)} processes train in place of {ranks}"
            spent_s = _spent_s(trainers)
            closed = await _events(box, EventName.ROUND_CLOSED, len(first) + ALONE_ROUNDS)
            spent_s = _spent_s(trainers) - spent_s
            held = [_held(each) for each in trainers]
            address = box.ready["addresses"][-1]
            await peers.start("other", ["join", "--bootstrap", address])
            sent = await _sent_each(box)
    measured = closed[len(first) :]
    steps_s = [each["seconds"] / each["steps"] for each in measured]
    return {
        "parameters": box.events.parameters,
        "ranks": ranks,
        "s per step": statistics.median(steps_s),
        "processor s": spent_s / sum(each["steps"] for each in measured),
        "RSS, MB per rank": _mean_mb([each.rss for each in held]),
        "PSS": _mean_mb([each.pss for each in held]),
        "private": _mean_mb([each.private for each in held]),
        "private, rank 0": held[0].private / MB,
        "sent, bytes": statistics.median(sent),
        "at least": min(sent),
        "at most": max(sent),
    }


async def _sent_each(peer: RunningPeer) -> list[int]:
    """Bytes of each of some averages: what was sent between two moments at which none went on."""
    quiet: list[tuple[int, int]] = []
    before = (0, 0)
    with trio.fail_after(LIMIT_S):
        while len(each := one_apart(quiet)) < AVERAGES:
            await trio.sleep(POLL_S)
            reading = await peer.read()
            averaged = reading.status.outcomes.averaged if reading.status else 0
            now = averaged, reading.carried.averaging_bytes
            if now == before and now[0] and now not in quiet:
                quiet.append(now)
            before = now
    return each


def one_apart(quiet: Sequence[tuple[int, int]]) -> list[int]:
    return [sent - less for (n, less), (m, sent) in pairwise(quiet) if m == n + 1]


async def _events(peer: RunningPeer, name: EventName, count: int) -> list[dict[str, Any]]:
    """The first so many events of that name, when there are as many."""
    with trio.fail_after(LIMIT_S):
        while True:
            log = read_events(peer.home.event_log_path)
            found = [event for event in log if event["event"] == name]
            if len(found) >= count:
                return found
            await trio.sleep(POLL_S)


def _spent_s(processes: Sequence[psutil.Process]) -> float:
    """Processor time of all so far."""
    return sum(sum(each.cpu_times()[:2]) for each in processes)


def _held(process: psutil.Process) -> Held:
    memory = process.memory_full_info()
    return Held(memory.rss, memory.pss, memory.uss)


def _mean_mb(sizes: Sequence[int]) -> float:
    return statistics.mean(sizes) / MB


def main() -> None:
    """Measure and publish; each call adds a line to the file of results."""
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--millions", type=int, choices=list(SIZES), help="in place of the demo's")
    parser.add_argument("--inner-steps", type=int, default=4)
    chosen = parser.parse_args()
    spec = spec_of(chosen.millions, chosen.inner_steps)
    settings = {"commit": commit_of(HERE), "optimizer": spec.optimizer.name}
    report = Report("machines", "A peer of so many processes, on the CPU, over gloo", settings)
    report.rows += [trio.run(row_of, spec, ranks) for ranks in chosen.ranks]
    sent = [row["sent, bytes"] for row in report.rows]
    what = "bytes of an average, most over fewest"
    report.goals.append(Goal(what, max(sent) / min(sent), at_most=SAME))
    report.publish(None)
    if chosen.json is not None:
        with chosen.json.open("a") as file:
            file.write(json.dumps(report.to_json()) + "\n")


if __name__ == "__main__":
    main()
