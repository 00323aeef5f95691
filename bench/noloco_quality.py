"""Quality of NoLoCo and its rivals at equal tokens: real text, the project's model and outer step.

    python -m bench.noloco_quality [--long | --longer | --larger | --full] [--late]
        [--arms A,B] [--seeds 0,1,2]

N = 8 replicas in one process. Arms are in quality/arms.py and tried.py, sizes in settings.py. Each
run (arm and seed) leaves one line in the results file and is not made again; a study that was
stopped goes on where it was. The tables are of all runs found, of the arms and seeds asked for.

Goals, as in the paper (arXiv 2506.10911): ddp < noloco <= diloco + 2% perplexity, and both far
better than no averaging; the mean of the weights no worse than the replicas; the replicas'
deviation follows the learning rate (Pearson >= 0.9). A code may cost 0.1% of the loss or two
standard errors, whichever is more.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Final

from bench.quality import findings
from bench.quality.arms import ARMS, CODE_ARMS, STUDY_ARMS
from bench.quality.checkpoints import Checkpoints
from bench.quality.run import Result
from bench.quality.settings import FULL, LARGER, LATE_OF, LONG, LONGER, SHORT, SMOKE, Setting
from bench.quality.store import Store
from bench.quality.study import Study, study_options
from bench.quality.tried import TRIED_ARMS
from bench.report import Report

RESULTS: Final = Path(__file__).parent / "results" / "noloco_quality.jsonl"

LENGTHS: Final = (LONG, LONGER, LARGER, FULL)
"""Settings that have an option of their name; without one it is the short one."""
KNOWN: Final = ARMS | TRIED_ARMS


def main() -> None:
    parser = study_options(__doc__, KNOWN, RESULTS)
    parser.add_argument("--late", action="store_true", help="codes, from a trained checkpoint")
    parser.add_argument("--long", action="store_true", help="four times the steps of the short one")
    parser.add_argument("--longer", action="store_true", help="four times those of the long one")
    parser.add_argument("--larger", action="store_true", help="the long one with 10M parameters")
    arguments = parser.parse_args()
    base = _asked_for(parser, arguments)
    setting = LATE_OF[base.name] if arguments.late else base
    train = Checkpoints(base, arguments.cache).train
    study = Study(Store(arguments.results, setting, Result), arguments.cache, train)
    names = arguments.arms or (CODE_ARMS if arguments.late else STUDY_ARMS)
    runs = study.gather(
        [KNOWN[name] for name in names], arguments.seeds, made_only=arguments.made_only
    )
    report = Report("noloco_quality", f"NoLoCo and rivals, {setting.name}")
    report.settings = asdict(setting)
    report.rows = findings.rows(runs)
    report.goals = findings.goals(runs)
    report.notes = findings.explanation(runs)
    report.publish(arguments.json)


def _asked_for(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Setting:
    """The setting that the options name, before its late phase."""
    if arguments.smoke:
        return SMOKE
    asked = [setting for setting in LENGTHS if getattr(arguments, setting.name)]
    if len(asked) > 1 or (arguments.late and asked and asked[0].name not in LATE_OF):
        parser.error("give one of --long, --longer, --larger and --full; --late goes with --full")
    return asked[0] if asked else SHORT


if __name__ == "__main__":
    main()
