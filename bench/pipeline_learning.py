"""The effect of skipped stages on learning: real text, the trainer's own stages, paths and codecs.

    python -m bench.pipeline_learning [--full | --long] [--arms A,B] [--seeds 0,1] [--picture FILE]

Six stages of a layer each, in one process (bench/stage_quality/pipeline.py): the modules, compute
and optimizer of the trainer, boundaries through its codecs, paths by the data peers' own rule. The
arms are in stage_quality/arms.py, sizes in stage_quality/settings.py: a minute without `--full`.
Each run (arm and seed) leaves one line in the results file and is not made again; a study that
was stopped goes on where it was.

`loss` is with all stages, of the weights as they are; `clock` is how long the arm trains on the
planner's 20 simulated machines (stage_quality/clocks.py). Differences are of equal seeds.

Goals, stated before the study was run (nats are of the held-out loss; 0.02 are 2% perplexity):

    skipping is harmless   skip at most 0.02 nats above full, after as many steps
    it pays                skip below full at equal time, and below small at equal compute per token
    rules matter           each violation at least 0.02 above skip
    mending helps          every tenth iteration in full: no worse than skip
    boundaries             int8 at most 0.01 above bf16
    delay                  late at most 0.02 above skip: else `async` stays off
    clipping               each stage by itself within 0.01 of the global norm
    stages left out        perplexity of skip at most 2% up with 5 of 6 stages and 7% with 3
                           (SkipPipe claims 2% at 75%, 7% at 50%), and rising less than full's
    random routes          with gossip at most 4% perplexity above columns; without, replicas at
                           least 10% nearer (NoLoCo's paper: up to 4% and 10 to 15%)
"""

from dataclasses import asdict
from pathlib import Path
from typing import Final

from bench.quality.settings import Setting
from bench.quality.store import Store
from bench.quality.study import Study, study_options
from bench.report import Report
from bench.stage_quality import findings
from bench.stage_quality.arms import ARMS, DECIDING_ARMS, MAIN_ARMS, QUICK_ARMS
from bench.stage_quality.picture import draw
from bench.stage_quality.run import StageResult, train_stages
from bench.stage_quality.settings import FULL, LONG, QUICK, SMOKE

RESULTS: Final = Path(__file__).parent / "results" / "pipeline_learning.jsonl"
Runs = dict[str, dict[int, StageResult]]


def main() -> None:
    parser = study_options(__doc__, ARMS, RESULTS)
    parser.set_defaults(seeds=None)
    parser.add_argument("--long", action="store_true", help="four times the steps of --full")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the losses there")
    arguments = parser.parse_args()
    longer = LONG if arguments.long else FULL if arguments.full else QUICK
    setting = SMOKE if arguments.smoke else longer
    store = Store(arguments.results, setting, StageResult)
    study = Study(store, arguments.cache, train_stages)
    runs: Runs = {}
    for names, seeds in _parts(setting, arguments.arms, arguments.seeds):
        found = study.gather([ARMS[name] for name in names], seeds, made_only=arguments.made_only)
        for name, of_seed in found.items():
            runs.setdefault(name, {}).update(of_seed)
    if arguments.picture:
        draw(runs, arguments.picture)
    report = Report("pipeline_learning", f"Training over stages, {setting.name}")
    report.settings = asdict(setting)
    report.rows = findings.rows(runs)
    report.goals = findings.goals(runs)
    report.notes = findings.notes(runs)
    report.publish(arguments.json)


def _parts(
    setting: Setting, names: list[str] | None, seeds: list[int] | None
) -> list[tuple[list[str], list[int]]]:
    """The arms and seeds to train, in this order: those asked for, or the study's."""
    if names or seeds is not None:
        return [(names or list(MAIN_ARMS), seeds or [0])]
    if setting is not FULL:
        return [(list(QUICK_ARMS), [0])]
    others = [name for name in ARMS if name not in MAIN_ARMS]
    return [(list(MAIN_ARMS), [0]), (others, [0]), (list(DECIDING_ARMS), [0, 1, 2])]


if __name__ == "__main__":
    main()
