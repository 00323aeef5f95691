"""How much processor time does an average take, and of which process?

Real peers of the demo's model on the loopback address (a daemon, p2pd and a trainer
each, bench/real_peers.py) train for SECONDS_EACH, at each number of steps between averages in turn.
What a process takes for an average is what it takes beyond what it takes where nobody averages:

    trainer             (its seconds - steps * seconds of a step without averages) / averages
    daemon, p2pd (their seconds - wall time * their share of a processor without) / averages

Seconds are the processor's, user and system, so other programs on the machine count only by what
they take of caches and shared cores; the step of the same arm is printed beside, and shares are of
it. Validations are left out (`validate_every`), but for the arm `validated`, where they are as
often as a peer allows itself.

What an average takes does not depend on what a step takes, so `--batch 1` has steps of one short
sequence with AdamW: many averages in little time, on a busy machine too. Each arm begins when loops
are compiled, after some 30 averages.

    python -m bench.average_cost [--peers 2] [--batch 8] [--seconds 60] [--arms none,2,auto]
        [--json FILE] [--append]
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil

from demo.plan import to_toml
from peer.cli.new import preset_spec
from protocol.run.run_spec import RunSpec

from .gossip_links_real import commit_of
from .real_peers import COMMAND, HERE, TRAINER, PeerFailed, RealPeer, has_averaged, started
from .report import Goal, Report, Row, options

RESULTS: Final = Path(__file__).parent / "results" / "average_cost.jsonl"
SECONDS_EACH: Final = 60.0
READY_S: Final = 300.0
NEVER: Final = 100_000
"""Steps or rounds that no arm comes to."""
LONE: Final = "none"
VALIDATED: Final = "validated"
ARMS: Final = (LONE, "2", "8", VALIDATED)
LIGHT_CONTEXT: Final = 16
"""Tokens of the one sequence of a light step."""
WARM_STEPS: Final = 4
WARM_AVERAGES: Final = 40
"""From about there on loops are compiled (peer/codec/compiled.py)."""
MOST_OF_ROUND: Final = 0.05
ROLES: Final = ("trainer", "daemon", "p2pd")
_MODULES: Final = {TRAINER: "trainer"}


@dataclass(frozen=True, slots=True)
class Taken:
    """Time, processors' time by role, and what was done: from any moment on, or between two."""

    wall_s: float
    cpu_s: Mapping[str, float]
    steps: int
    averages: int


def spec_of(arm: str, batch_size: int) -> RunSpec:
    tree = preset_spec("demo").model_dump()
    named: dict[str, int | str] = {LONE: NEVER, VALIDATED: 2, "auto": "auto"}
    steps = named.get(arm) or int(arm)
    tree["sync"] |= {"inner_steps": steps, "validate_every": 1 if arm == VALIDATED else NEVER}
    tree["training"] |= {"total_steps": NEVER, "batch_size": batch_size}
    if batch_size == 1:
        tree["optimizer"] |= {"name": "adamw", "muon": None}
        tree["model"]["context_length"] = LIGHT_CONTEXT
    return RunSpec.model_validate(tree)


def role_of(process: psutil.Process) -> str | None:
    command = process.cmdline()
    named = [role for word in command if (role := _MODULES.get(word))]
    if named or Path(command[0]).name == "p2pd":
        return (named or ["p2pd"])[0]
    return "daemon" if Path(command[1]).name == "loco-peer" else None


def stand_of(peer: RealPeer) -> Taken:
    cpu_s = dict.fromkeys(ROLES, 0.0)
    for process in peer.family():
        with suppress(psutil.NoSuchProcess, IndexError):
            if (role := role_of(process)) is not None:
                times = process.cpu_times()
                cpu_s[role] += times.user + times.system
    now_s, status = time.monotonic(), peer.status()
    return Taken(now_s, cpu_s, status["step"], status["outcomes"]["averaged"])


def taken_by(before: Taken, after: Taken) -> Taken:
    cpu_s = {role: after.cpu_s[role] - before.cpu_s[role] for role in ROLES}
    return Taken(
        after.wall_s - before.wall_s,
        cpu_s,
        after.steps - before.steps,
        after.averages - before.averages,
    )


def measured(
    arm: str,
    num_peers: int,
    batch_size: int,
    seconds: float,
    program: Sequence[str] = (str(COMMAND),),
) -> Taken:
    """Taken by all peers of an arm together. Raises PeerFailed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = folder / "run.toml"
        spec.write_text(to_toml(spec_of(arm, batch_size)))
        peers = [
            RealPeer(folder / f"peer{number}", HERE, lambda command: command, program=program)
            for number in range(num_peers)
        ]
        with started(peers, spec, lambda _: "127.0.0.1:0"):
            for peer in peers:
                peer.wait_until(partial(_is_warm, peer, arm), "was warm", READY_S)
            before = [stand_of(peer) for peer in peers]
            time.sleep(seconds)
            taken = [taken_by(was, stand_of(peer)) for was, peer in zip(before, peers, strict=True)]
    return Taken(
        sum(each.wall_s for each in taken),
        {role: sum(each.cpu_s[role] for each in taken) for role in ROLES},
        sum(each.steps for each in taken),
        sum(each.averages for each in taken),
    )


def _is_warm(peer: RealPeer, arm: str) -> bool:
    if arm != LONE:
        return has_averaged(peer, WARM_AVERAGES)
    return bool(peer.status()["step"] >= WARM_STEPS)


def row_of(arm: str, taken: Taken, lone: Taken) -> Row:
    """An arm beside the one without averages."""
    step_s = lone.cpu_s["trainer"] / lone.steps
    each: dict[str, float | None] = {}
    for role in ROLES:
        usual = step_s * taken.steps
        if role != "trainer":
            usual = lone.cpu_s[role] / lone.wall_s * taken.wall_s
        more_s = taken.cpu_s[role] - usual
        each[f"{role} ms"] = 1e3 * more_s / taken.averages if taken.averages else None
    beside = [each[f"{role} ms"] for role in ROLES if role != "trainer"]
    sum_ms = sum(ms for ms in beside if ms is not None)
    h = taken.steps / taken.averages if taken.averages else None
    return {
        "arm": arm,
        "steps": taken.steps,
        "averages": taken.averages,
        "step ms": 1e3 * taken.cpu_s["trainer"] / taken.steps,
        **each,
        "steps each": h,
        "beside, of its round": sum_ms / (1e3 * step_s * h) if h else None,
        "always, of a processor": sum(taken.cpu_s[r] for r in ROLES[1:]) / taken.wall_s
        if not taken.averages
        else None,
    }


def raw(arm: str, taken: Taken) -> dict[str, Any]:
    return {
        "arm": arm,
        "wall_s": taken.wall_s,
        "cpu_s": dict(taken.cpu_s),
        "steps": taken.steps,
        "averages": taken.averages,
    }


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--seconds", type=float, default=SECONDS_EACH)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--append", action="store_true", help=f"add a line to {RESULTS.name}")
    chosen = parser.parse_args()
    arms = list(dict.fromkeys([LONE, *chosen.arms.split(",")]))
    try:
        taken = {arm: measured(arm, chosen.peers, chosen.batch, chosen.seconds) for arm in arms}
    except PeerFailed as failed:
        print(failed, file=sys.stderr)
        return 1
    rows = [row_of(arm, each, taken[LONE]) for arm, each in taken.items()]
    report = Report(
        "average_cost",
        f"Processor time of an average, {chosen.peers} peers of the demo's model",
        {
            "peers": chosen.peers,
            "batch": chosen.batch,
            "seconds": chosen.seconds,
            "commit": commit_of(HERE),
        },
        rows,
        [
            Goal(
                f"{row['arm']}: beside, of its round",
                row["beside, of its round"],
                at_most=MOST_OF_ROUND,
            )
            for row in rows
            if row["averages"] and chosen.batch > 1
        ],
    )
    report.publish(chosen.json)
    if chosen.append:
        line = report.to_json() | {"raw": [raw(arm, each) for arm, each in taken.items()]}
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
