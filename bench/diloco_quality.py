"""Quality of streaming DiLoCo against plain DiLoCo at equal tokens: real text, the project's model.

    python -m bench.diloco_quality [--full] [--arms A,B] [--seeds 0,1,2]

M = 4 replicas in one process (bench/quality/fragment_swarm.py). Arms are in
quality/streaming_arms.py, sizes in quality/settings.py. Each run (arm and seed) leaves one line in
the results file and is not made again; a study that was stopped goes on where it was. The tables
are of all runs found, of the arms and seeds asked for.

Goal, as in the paper (Streaming DiLoCo, arXiv 2501.18512, table 5: 0.01 nats at most): fragments,
overlap, merging and codes leave the loss of the slow weights within 0.02 nats of plain DiLoCo's at
equal H.

The short setting has ten rounds at H = 30, and only three at H = 100. Its model of four blocks
makes three fragments of two blocks (two of them, and the rest), or five of one.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Final

from bench.quality import streaming_findings as findings
from bench.quality.settings import STREAMING_FULL, STREAMING_SHORT, STREAMING_SMOKE
from bench.quality.store import Store
from bench.quality.streaming import StreamingResult, train_streaming_arm
from bench.quality.streaming_arms import STREAMING_ARMS
from bench.quality.study import Study, study_options
from bench.report import Report

RESULTS: Final = Path(__file__).parent / "results" / "diloco_quality.jsonl"


def main() -> None:
    arguments = study_options(__doc__, STREAMING_ARMS, RESULTS).parse_args()
    setting = STREAMING_FULL if arguments.full else STREAMING_SHORT
    setting = STREAMING_SMOKE if arguments.smoke else setting
    store = Store(arguments.results, setting, StreamingResult)
    study = Study(store, arguments.cache, train_streaming_arm)
    names = arguments.arms or STREAMING_ARMS
    runs = study.gather(
        [STREAMING_ARMS[name] for name in names], arguments.seeds, made_only=arguments.made_only
    )
    report = Report("diloco_quality", f"Streaming DiLoCo and plain DiLoCo, {setting.name}")
    report.settings = asdict(setting)
    report.rows = findings.rows(runs)
    report.goals = findings.goals(runs)
    report.notes = findings.notes(runs)
    report.publish(arguments.json)


if __name__ == "__main__":
    main()
