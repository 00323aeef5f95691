"""Experts of domains, and what they say together, beside one model that had the same compute.

    python -m bench.experts [--full] [--arms A,B] [--seeds 1,2,3]

Three domains (Python, headers, package descriptions) and two that nobody trains, in bytes, by
models of 0.9M parameters. Arms are in expert_quality/arms.py, those with a shared trunk in
trunk.py, texts in domains.py, sizes in settings.py. Every model is annealed over its own steps.
Rules of combination are those of protocol/experts/ensemble.py, computed from log-probabilities of
true tokens. Each arm and seed leaves one line in the results file and is not made again; models
that are trained lie in the cache, so a study that was stopped goes on where it was.

FLOPs are told twice, over those of the dense model: the blocks' alone, as HDEE counts them, and
with the head. Both hold all that was trained for an arm, seeds too.

Goals, stated before the study was run (nats per byte, mean over the domains):

    the ensemble pays          anchored at least 0.02 below dense, on trained domains
    Branch-Train-Merge, HDEE   equal, without a generalist, below dense
    unequal sizes, steps       each below equal (HDEE: in 20 of 21 domains)
    steps by gain              below equal
    the default rule           at most 0.003 above the posterior at home, below it on new domains
    the generalist             anchored below the same experts without it
    a shared trunk             trunk-anchored at least 0.02 below dense, on trained domains
"""

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from bench.expert_quality import findings
from bench.expert_quality.arms import ARMS, BY_GAIN, ENSEMBLES, Ensemble
from bench.expert_quality.run import Found, Studio
from bench.expert_quality.settings import FULL, SHORT, SMOKE, ExpertSetting
from bench.expert_quality.trunk import TRUNKS, Trunk
from bench.quality.store import Store
from bench.quality.study import study_options
from bench.report import Report

RESULTS: Final = Path(__file__).parent / "results" / "experts.jsonl"


def main() -> None:
    parser = study_options(__doc__, dict.fromkeys((*ARMS, *TRUNKS), ENSEMBLES["equal"]), RESULTS)
    parser.set_defaults(seeds=[1])
    arguments = parser.parse_args()
    setting = SMOKE if arguments.smoke else FULL if arguments.full else SHORT
    runs = gather(setting, arguments.arms or (*ARMS, *TRUNKS), arguments)
    report = Report("experts", f"Experts and one model of the mix, {setting.name}")
    report.settings = asdict(setting)
    report.rows = findings.rows(runs, setting)
    report.goals = list(findings.goals(runs, setting))
    report.notes = findings.notes(runs)
    report.publish(arguments.json)


def gather(
    setting: ExpertSetting, names: Iterable[str], arguments: argparse.Namespace
) -> dict[str, dict[int, Found]]:
    """Findings by arm and seed; what is missing is made."""
    store = Store(arguments.results, setting, Found)
    runs: dict[str, dict[int, Found]] = {}
    for seed in arguments.seeds:
        studio = Studio(setting, seed, arguments.cache)
        for name in names:
            found = _found(store, studio, name, seed, made_only=arguments.made_only)
            if found is not None:
                runs.setdefault(name, {})[seed] = found
    return runs


def _found(
    store: Store[Found], studio: Studio, name: str, seed: int, *, made_only: bool
) -> Found | None:
    """From the results file, else made; the arm by gain is told by what it came to."""
    arm = TRUNKS.get(name) or ENSEMBLES.get(name, Ensemble(name, ()))
    found = store.load(arm, seed)
    if found is not None or made_only:
        return found
    if isinstance(arm, Trunk):
        found = studio.found_trunk(arm)
    elif name == BY_GAIN:
        found = studio.found(studio.by_gain(BY_GAIN, ENSEMBLES["equal"]))
    else:
        found = studio.found(arm)
    found.arm = asdict(arm)
    store.save(arm, found)
    print(f"{name}, seed {seed}: {found.loss:.4f}", flush=True)
    return found


if __name__ == "__main__":
    main()
