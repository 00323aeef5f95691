"""How long commands take to say something: user and wall seconds of whole processes.

Each is run some times in turn with the others, and the median is shown, beside `python -c pass`.
Of a busy machine the user seconds say more. `status` asks a socket that answers at once, the
others find no daemon; `torch` alone is there to compare with.

    python -m bench.startup [--full] [--json FILE]
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import trio

from bench.report import Goal, Report, options
from peer.facts import PeerState
from peer.observe.control import serve_control
from peer.observe.status import Status
from peer.state.home import Home

PROGRAM: Final = ("-c", "from peer.cli import main; main()")
BASE: Final = "python -c pass"
TORCH: Final = "python -c 'import torch'"
COMMANDS: Final[Mapping[str, Sequence[str]]] = {
    BASE: ("-c", "pass"),
    TORCH: ("-c", "import torch"),
    "--help": (*PROGRAM, "--help"),
    "start --help": (*PROGRAM, "start", "--help"),
    "version": (*PROGRAM, "version"),
    "Tab in bash": PROGRAM,
    "status": (*PROGRAM, "status"),
    "status --health": (*PROGRAM, "status", "--health"),
    "leave, no daemon": (*PROGRAM, "leave", "--home", "none"),
    "start missing.toml": (*PROGRAM, "start", "missing.toml"),
    "join, no address": (*PROGRAM, "join"),
    "new run.toml --preset huge": (*PROGRAM, "new", "run.toml", "--preset", "huge"),
    "export, no daemon": (*PROGRAM, "export", "--hf", "hf", "--home", "none"),
    "generate, no export": (*PROGRAM, "generate", "--prompt", "x", "--hf", "none"),
    "measure --device tpu": (*PROGRAM, "measure", "--device", "tpu"),
    "doctor --listen x": (*PROGRAM, "doctor", "--listen", "x"),
}
TAB: Final = {
    "_LOCO_PEER_COMPLETE": "complete_bash",
    "COMP_WORDS": "loco-peer start --",
    "COMP_CWORD": "2",
}
TIMES: Final = 3
FULL_TIMES: Final = 11
LONGEST_S: Final = 1.0
"""Goal: user seconds in which every command has said what is wrong."""


def main() -> None:
    arguments = options(__doc__).parse_args()
    times = FULL_TIMES if arguments.full else TIMES
    report = Report("startup", "Seconds of a whole process, medians", {"times": times})
    with tempfile.TemporaryDirectory() as folder:
        measured = trio.run(measure, Home(Path(folder) / "home"), times)
    base = statistics.median(user_s for user_s, _ in measured[BASE])
    for name, found in measured.items():
        user_s, wall_s = (statistics.median(column) for column in zip(*found, strict=True))
        row = {"command": name, "user s": round(user_s, 2), "wall s": round(wall_s, 2)}
        report.rows.append(row | {"beyond python s": round(user_s - base, 2)})
    slowest = max(row["beyond python s"] for row in report.rows if row["command"] != TORCH)
    what = "slowest command beyond python, user s"
    report.goals.append(Goal(what, slowest, at_most=LONGEST_S))
    report.notes.append(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    report.publish(arguments.json)


async def measure(home: Home, times: int) -> dict[str, list[tuple[float, float]]]:
    """User and wall seconds of each command, as often as asked."""
    home.prepare()

    async def status(_: dict[str, Any]) -> dict[str, Any]:
        return Status(peer_id="12D3KooWbench", state=PeerState.TRAINING, round=3).to_json()

    found: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    with home.locked():  # as a daemon does
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_control, home.control_socket, {"status": status}, print)
            for _ in range(times):
                for name in COMMANDS:
                    found[name].append(await trio.to_thread.run_sync(timed, name, home))
            nursery.cancel_scope.cancel()
    return found


def timed(name: str, home: Home) -> tuple[float, float]:
    root = str(Path(__file__).resolve().parents[1])
    own = {"LOCO_HOME": str(home.root), "PYTHONPATH": root}
    environment = os.environ | own | (TAB if name.startswith("Tab") else {})
    began_s = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, *COMMANDS[name]],
        env=environment,
        cwd=home.root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime, time.monotonic() - began_s


if __name__ == "__main__":
    main()
