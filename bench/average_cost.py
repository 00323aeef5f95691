"""What does an average cost the processor?

Two real peers on loopback train the demo's model, one arm after another: averages every 2 steps
with and without the validation that each round has, and hardly any averages. In a window that
begins when both have averaged, processor seconds are counted by program (daemon, table, p2pd,
trainer), and from the event logs steps and averages. The trainer's step is what it took in the arm
without averages; what is more in the others is the averages'. Seconds of processor, so other
programs on the machine lengthen the run, and hardly change the table.

Tokens are told at the close of a round, so the arm without averages counts no steps until then.

    python -m bench.average_cost [--json FILE]
"""

import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
import tomlkit

from peer.cli.new import preset_spec
from protocol.run.run_spec import RunSpec

from .real_peers import RealPeer, has_averaged, started
from .report import Report, Row, options

NEVER: Final = 10**4
ARMS: Final = {
    "no averages": (NEVER, NEVER),
    "every 2 steps": (2, NEVER),
    "every 2 steps, validated": (2, 1),
}
"""H, and rounds between validations."""
WINDOW_S: Final = 45.0
STARTED_S: Final = 240.0
TOKENS_PER_STEP: Final = preset_spec("demo").tokens_per_step
PROGRAMS: Final = {"peer.training.child": "trainer", "p2pd": "p2pd", "dht_node": "table"}


def spec_text(inner_steps: int, validate_every: int) -> str:
    tree = preset_spec("demo", optimizer="muon").model_dump(mode="json", exclude_none=True)
    tree["training"]["total_steps"] = 10**6
    tree["optimizer"]["schedule"] = "constant"
    tree["sync"] |= {"inner_steps": inner_steps, "validate_every": validate_every}
    return tomlkit.dumps(RunSpec.model_validate(tree).model_dump(mode="json", exclude_none=True))


def program_of(process: psutil.Process) -> str:
    told = " ".join(process.cmdline())
    return next((name for word, name in PROGRAMS.items() if word in told), "daemon")


def spent(peer: RealPeer) -> Counter[str]:
    """Processor milliseconds so far, by program; and steps, averages and validations."""
    found = Counter[str]()
    for process in peer.family():
        times = process.cpu_times()
        found[program_of(process)] += int((times.user + times.system) * 1e3)
    for event in peer.events():
        found[event["event"]] += 1
    found["steps"] = peer.status()["tokens"] // TOKENS_PER_STEP
    return found


def has_trained(peer: RealPeer) -> bool:
    return spent(peer)["steps"] > 0


def in_window(folder: Path, inner_steps: int, validate_every: int) -> Counter[str]:
    """What both peers spend in a window."""
    folder.mkdir()
    spec = folder / "run.toml"
    spec.write_text(spec_text(inner_steps, validate_every))
    peers = [RealPeer(folder / f"peer{n}", Path.cwd(), lambda daemon: daemon) for n in range(2)]
    with started(peers, spec, lambda _: "127.0.0.1:0"):
        for peer in peers:
            averages = 2 if inner_steps < NEVER else 0
            peer.wait_until(partial(has_averaged, peer, averages), "averaged", STARTED_S)
            peer.wait_until(partial(has_trained, peer), "trained", STARTED_S)
        before = sum((spent(peer) for peer in peers), Counter())
        time.sleep(WINDOW_S)
        after = sum((spent(peer) for peer in peers), Counter())
    after.subtract(before)
    return after


def row_of(arm: str, got: Counter[str], step_ms: float) -> Row:
    averages = max(1, got["RoundAveraged"])
    row: dict[str, Any] = {"arm": arm, "steps": got["steps"], "averages": got["RoundAveraged"]}
    for program in ("daemon", "table", "p2pd"):
        row[f"{program}, ms an average"] = got[program] / averages
    row["trainer, ms a step"] = got["trainer"] / max(1, got["steps"])
    row["trainer, ms an average"] = (got["trainer"] - step_ms * got["steps"]) / averages
    row["idle daemon, ms a step"] = got["daemon"] / max(1, got["steps"])
    return row


def main() -> None:
    """Measure and publish."""
    chosen = options(__doc__).parse_args()
    report = Report("average_cost", "Processor time of an average, demo model, two peers")
    step_ms = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number, (arm, (inner_steps, validate_every)) in enumerate(ARMS.items()):
            got = in_window(Path(folder) / str(number), inner_steps, validate_every)
            step_ms = step_ms or got["trainer"] / max(1, got["steps"])
            report.rows.append(row_of(arm, got, step_ms))
            print(report.rows[-1], dict(got), flush=True)
    report.publish(chosen.json)


if __name__ == "__main__":
    main()
