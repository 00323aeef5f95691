"""What gossip without a clock costs in learning: recorded pairings, real text, the real outer step.

Eight machines of unequal speeds and lines (the unequal world of gossip_links.py, seeded) average in
virtual time. Their steps, meetings and delays are recorded, and what they did is then trained again
by eight replicas of a model (quality/replay.py), with the run spec's default: alpha 0.3, int8.

    same round, R   all close each round at the same nominal step, are paired at random, and merge
                    R of a round later: the old condition, if it never failed
    free, R         gossip without a clock, with exchanges of R of a round

    python -m bench.gossip_learning [--smoke | --full] [--arms A,B] [--seeds 0,1,2]

The columns: `mean weights`, held-out loss of the mean of all replicas' weights, which is what the
final averaging leaves; `replicas`, the mean loss of the replicas before it; `apart`, their
deviation; `merges`, averages of a peer per round of H nominal steps; `age`, of an average at its
merge, in rounds. Runs are kept and gone on with as in noloco_quality.py.

Goal: the mean weights of free gossip are within two standard errors (of the differences of equal
seeds) of those of the same rounds with the same delay, up to a ratio of 0.7. A gain is no miss.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from bench.quality.arms import Arm
from bench.quality.measures import mean, standard_error
from bench.quality.pairings import Pairings, free_pairings, machines, same_round_pairings
from bench.quality.replay import train_by
from bench.quality.run import Result
from bench.quality.settings import FULL, SHORT, SMOKE, Setting
from bench.quality.store import Store
from bench.quality.study import Study, study_options
from bench.quality.world import World
from bench.report import Goal, Report, Row

RESULTS: Final = Path(__file__).parent / "results" / "gossip_learning"
DIGITS: Final = 4
Pairing = Literal["free", "same round"]


@dataclass(frozen=True, slots=True)
class PairingArm(Arm):
    """One way to pair the machines.

    Attributes:
        pairing: the rule by which they are paired.
        ratio: of an exchange to a round; the delay of a merge where rounds are shared.
    """

    pairing: Pairing = "free"
    ratio: float = 0.25

    def pairings(self, setting: Setting, seed: int) -> Pairings:
        """The program of the machines of this seed."""
        places = machines(setting.replicas, self.ratio, seed, setting.inner_steps)
        if self.pairing == "free":
            return free_pairings(places, seed, setting.steps)
        return same_round_pairings(places, seed, setting.steps, self.ratio)


def _arm(pairing: Pairing, ratio: float) -> PairingArm:
    name = f"{pairing.replace(' ', '-')}-{ratio}"
    return PairingArm(name, alpha=0.3, code="int8", pairing=pairing, ratio=ratio)


_ALL: Final = (
    _arm("same round", 0.25),
    _arm("free", 0.25),
    _arm("same round", 0.7),
    _arm("free", 0.7),
    _arm("free", 1.5),
)
ARMS: Final[Mapping[str, PairingArm]] = {arm.name: arm for arm in _ALL}
COMPARED: Final = {"free-0.25": "same-round-0.25", "free-0.7": "same-round-0.7"}
"""What free gossip is compared with: the same delay."""


def main() -> None:
    arguments = study_options(__doc__, ARMS, RESULTS).parse_args()
    setting = SMOKE if arguments.smoke else FULL if arguments.full else SHORT
    study = Study(Store(arguments.results, setting, Result), arguments.cache, _train)
    names = arguments.arms or list(ARMS)
    runs = study.gather(
        [ARMS[name] for name in names], arguments.seeds, made_only=arguments.made_only
    )
    report = Report("gossip_learning", f"Learning with recorded pairings, {setting.name}")
    report.settings = asdict(setting)
    report.rows = [row(ARMS[name], setting, runs) for name in names if runs[name]]
    report.goals = goals(runs)
    report.publish(arguments.json)


def _train(world: World, arm: PairingArm) -> Result:
    return train_by(world, arm, arm.pairings(world.setting, world.spec.seed))


Runs = Mapping[str, Mapping[int, Result]]


def row(arm: PairingArm, setting: Setting, all_runs: Runs) -> Row:
    """See the top of the file."""
    runs = all_runs[arm.name]
    found = list(runs.values())
    differences = _differences(arm.name, all_runs)
    per_round = setting.steps / setting.inner_steps * setting.replicas
    programs = [arm.pairings(setting, seed) for seed in runs]
    merges = mean([sum(len(m) for m in each.merges) / per_round for each in programs])
    return {
        "arm": arm.name,
        "seeds": len(found),
        "mean weights": round(mean([result.averaged_loss for result in found]), DIGITS),
        "to same round": f"{mean(differences):+.4f}" if differences else None,
        "s.e.": standard_error(differences) if differences else None,
        "replicas": round(mean([mean(result.losses) for result in found]), DIGITS),
        "apart": mean([result.deviations[-1][2] for result in found]),
        "tokens": round(mean([result.tokens for result in found])),
        "merges": round(merges, 2),
        "age": round(mean([mean(each.ages) for each in programs]), 2),
    }


def _differences(name: str, runs: Runs) -> list[float]:
    """Loss of the mean weights less that of the same rounds, of the seeds that both have."""
    ours, theirs = runs.get(name, {}), runs.get(COMPARED.get(name, ""), {})
    both = sorted(set(ours) & set(theirs))
    return [ours[seed].averaged_loss - theirs[seed].averaged_loss for seed in both]


def goals(runs: Runs) -> list[Goal]:
    """See the top of the file."""
    found = []
    for name in COMPARED:
        differences = _differences(name, runs)
        error = standard_error(differences) if differences else None
        if error:
            what = f"{name}: nats above the same rounds, over their standard error"
            found.append(Goal(what, mean(differences) / error, at_most=2.0))
    return found


if __name__ == "__main__":
    main()
