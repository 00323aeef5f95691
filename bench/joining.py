"""What a joiner's start costs: one state or chunks of several, moments of its optimizer or none.

Four replicas average in pairs (the run spec's default: alpha 0.3, int8), a fifth joins after 104
steps of 256, and all are watched for 104 more (quality/joiners.py).

    python -m bench.joining [--smoke] [--arms A,B] [--seeds 0,1,2]

The columns: `first`, held-out loss of the weights that the joiner begins with; `100 steps`, the
mean loss of its fast weights over the steps watched; `to whole`, the same less that of `whole`,
with its standard error; `end`, loss of its slow weights at the end, and `others`, the mean of the
others'; `bytes`, per parameter, that it fetches. Runs are kept and gone on with as in
noloco_quality.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from bench.quality.joiners import (
    JOIN_SHORT,
    JOIN_SMOKE,
    STARTS,
    JoinResult,
    JoinSetting,
    JoinStudy,
    Start,
)
from bench.quality.measures import mean, standard_error
from bench.quality.store import Store
from bench.quality.study import Study, study_options
from bench.quality.world import World
from bench.report import Report, Row

RESULTS: Final = Path(__file__).parent / "results" / "joining"
REFERENCE: Final = "whole"
DIGITS: Final = 4
Runs = Mapping[str, Mapping[int, JoinResult]]


def main() -> None:
    arguments = study_options(__doc__, STARTS, RESULTS).parse_args()
    setting = JOIN_SMOKE if arguments.smoke else JOIN_SHORT
    study = Study(_store(arguments.results, setting), arguments.cache, trainer(setting))
    names = arguments.arms or list(STARTS)
    runs = study.gather(
        [STARTS[name] for name in names], arguments.seeds, made_only=arguments.made_only
    )
    report = Report("joining", f"Starts of a joiner, {setting.base.name}")
    report.settings = asdict(setting)
    report.rows = [row(name, runs) for name in names if runs[name]]
    report.publish(arguments.json)


def _store(folder: Path, setting: JoinSetting) -> Store[JoinResult]:
    return Store(folder, setting.base, JoinResult)


def trainer(setting: JoinSetting) -> Callable[[World, Start], JoinResult]:
    """Makes one run; the four that the joiner comes to are trained once for a seed."""
    made: dict[int, JoinStudy] = {}

    def train(world: World, start: Start) -> JoinResult:
        seed = world.spec.seed
        if seed not in made:
            made.clear()
            made[seed] = JoinStudy(world, setting)
        return made[seed].run(start)

    return train


def row(name: str, runs: Runs) -> Row:
    """See the top of the file."""
    found = list(runs[name].values())
    both = sorted(set(runs[name]) & set(runs.get(REFERENCE, {})))
    differences = [runs[name][seed].loss - runs[REFERENCE][seed].loss for seed in both]
    return {
        "start": name,
        "seeds": len(found),
        "first": round(mean([result.first for result in found]), DIGITS),
        "100 steps": round(mean([result.loss for result in found]), DIGITS),
        "to whole": f"{mean(differences):+.4f}" if differences else None,
        "s.e.": standard_error(differences) if differences else None,
        "end": round(mean([result.slow for result in found]), DIGITS),
        "others": round(mean([result.others for result in found]), DIGITS),
        "bytes": round(found[0].bytes_per_parameter, 2),
    }


if __name__ == "__main__":
    main()
