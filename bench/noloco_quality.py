"""Quality of NoLoCo and its rivals at equal tokens: real text, the project's model and outer step.

    python -m bench.noloco_quality [--long | --full] [--late] [--arms A,B] [--seeds 0,1,2]

N = 8 replicas in one process. Arms are in quality/arms.py and tried.py, sizes in settings.py. Each
run (arm and seed) leaves one file in the results folder and is not made again; a study that was
stopped goes on where it was. The tables are of all runs found, of the arms and seeds asked for.

Goals, as in the paper (arXiv 2506.10911): ddp < noloco <= diloco + 2% perplexity, and both far
better than no averaging; the mean of the weights no worse than the replicas; the replicas'
deviation follows the learning rate (Pearson >= 0.9). A code may cost 0.1% of the loss or two
standard errors, whichever is more.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Final

from bench.quality import findings
from bench.quality.arms import ARMS, CODE_ARMS, STUDY_ARMS
from bench.quality.checkpoints import Checkpoints
from bench.quality.run import Result
from bench.quality.settings import FULL, LATE_OF, LONG, SHORT, SMOKE
from bench.quality.store import Store
from bench.quality.study import Study, study_options
from bench.quality.tried import TRIED_ARMS
from bench.report import Report

RESULTS: Final = Path(__file__).parent / "results" / "noloco_quality"

KNOWN: Final = ARMS | TRIED_ARMS


def main() -> None:
    parser = study_options(__doc__, KNOWN, RESULTS)
    parser.add_argument("--late", action="store_true", help="codes, from a trained checkpoint")
    parser.add_argument("--long", action="store_true", help="four times the steps of the short one")
    arguments = parser.parse_args()
    if arguments.long and (arguments.late or arguments.full):
        parser.error("--long has no late phase, and is not --full: give one of them")
    longer = LONG if arguments.long else FULL if arguments.full else SHORT
    base = SMOKE if arguments.smoke else longer
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


if __name__ == "__main__":
    main()
