"""Can a user lose a model? Three homes, one run, and all that happens to machines, from a seed.

    python -m bench.storm [--events 50] [--seed 0] [--checkout DIR] [--out FILE.jsonl]

Real daemons, p2pd and trainers, each home on a disk of its own (root mounts it). They are killed,
hung up, ended; all lose power at once; disks are full; they are started again; the last events come
when the run is over, and then all are started and stopped five times (storms/storm.py, and
storms/plan.py for what is drawn). `--checkout` takes the daemons' code from elsewhere, so the same
events can be held against an older version.

What should hold: the step of the newest whole checkpoint in all homes never falls; the run is over
at the end, and its last checkpoint is still there, and nothing has been trained anew. One line of
JSON for each event, and one for all of them.
"""

import argparse
import json
import signal
import sys
import tempfile
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from bench.gossip_links_real import commit_of
from bench.real_peers import HERE
from bench.report import Goal, machine
from bench.storms.machines import missing
from bench.storms.storm import Line, Setting, storm

RESULTS: Final = Path(__file__).parent / "results" / "storm"


def goals_of(summary: Line, setting: Setting) -> list[Goal]:
    """What should hold, by the last line."""
    return [
        Goal("events after which the newest checkpoint was older", summary["falls"], at_most=0),
        Goal(
            "step of the newest checkpoint at the end",
            summary["last"]["step"],
            at_least=setting.total_steps,
        ),
        Goal("the run is over at the end", float(summary["ends_with_its_model"]), at_least=1),
        Goal("older checkpoints written when it was over", summary["trained_anew"], at_most=0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--events", type=int, default=Setting().events)
    parser.add_argument("--after-end", type=int, default=Setting().after_end, metavar="EVENTS")
    parser.add_argument("--steps", type=int, default=Setting().total_steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkout", type=Path, default=HERE, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the lines there")
    chosen = parser.parse_args()
    if (reason := missing()) is not None:
        parser.exit(1, f"no storm: {reason}\n")
    checkout = chosen.checkout.resolve()
    setting = replace(
        Setting(),
        events=chosen.events,
        after_end=chosen.after_end,
        total_steps=chosen.steps,
    )
    out = chosen.out or RESULTS / f"{commit_of(checkout)}-seed-{chosen.seed}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    about = {
        "bench": "storm",
        "command": ["storm", *sys.argv[1:]],
        "commit": commit_of(checkout),
        "seed": chosen.seed,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": asdict(setting),
    }
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # all is taken down then too
    with out.open("w") as lines, tempfile.TemporaryDirectory(prefix="storm-") as folder:

        def tell(line: Line) -> None:
            print(json.dumps(line), file=lines, flush=True)
            print(json.dumps(line), flush=True)

        tell(about)
        found = storm(setting, chosen.seed, checkout, Path(folder), tell)
    for goal in goals_of(found.summary, setting):
        print(goal.describe())


if __name__ == "__main__":
    main()
