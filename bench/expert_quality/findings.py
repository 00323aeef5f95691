"""From what was found to a table and goals. Differences are of equal seeds."""

from collections.abc import Iterator, Mapping

from bench.quality.measures import mean, standard_error
from bench.report import Goal, Row
from protocol.experts.ensemble import RULES

from .run import Found
from .settings import ExpertSetting

Runs = Mapping[str, Mapping[int, Found]]
"""Arm to seed to what was found."""
DENSE = "dense"
DEFAULT_RULE = "fixed share"
IN_FULL = ("equal", "anchored")
"""Arms whose row is there for every rule."""


def rows(runs: Runs, setting: ExpertSetting) -> list[Row]:
    """Each arm by the default rule; some by every rule."""
    made = []
    for name, of_seed in runs.items():
        rules = [DEFAULT_RULE, *(r for r in RULES if r != DEFAULT_RULE and name in IN_FULL)]
        made += [_row(name, rule, list(of_seed.values()), runs, setting) for rule in rules]
    return made


def _row(name: str, rule: str, found: list[Found], runs: Runs, setting: ExpertSetting) -> Row:
    apart = differences(name, rule, DENSE, DEFAULT_RULE, runs, _names(setting, is_trained=True))
    new = differences(name, rule, DENSE, DEFAULT_RULE, runs, _names(setting, is_trained=False))
    base = next(iter(runs.get(DENSE, {}).values()), None)
    losses = {
        domain.name: f"{mean([each.together[rule][domain.name] for each in found]):.3f}"
        for domain in setting.domains
    }
    return {
        "arm": name,
        "rule": rule if len(found[0].members) > 1 else "-",
        "seeds": len(found),
        "body FLOPs": base and round(found[0].body_flops / base.body_flops, 2),
        "all FLOPs": base and round(found[0].flops / base.flops, 2),
        **losses,
        "to dense": f"{mean(apart):+.4f}" if apart else None,
        "s.e.": standard_error(apart) if apart else None,
        "new, to dense": f"{mean(new):+.4f}" if new else None,
    }


def _names(setting: ExpertSetting, *, is_trained: bool) -> list[str]:
    return [domain.name for domain in setting.domains if domain.is_trained == is_trained]


def differences(
    name: str, rule: str, reference: str, reference_rule: str, runs: Runs, domains: list[str]
) -> list[float]:
    """Mean loss over these domains less the reference's, for each seed that both have."""
    ours, theirs = runs.get(name, {}), runs.get(reference, {})
    return [
        mean([ours[seed].together[rule][each] for each in domains])
        - mean([theirs[seed].together[reference_rule][each] for each in domains])
        for seed in sorted(set(ours) & set(theirs))
    ]


def goals(runs: Runs, setting: ExpertSetting) -> Iterator[Goal]:
    """The goals that bench/experts.py names, each with its figure."""
    home, new = (_names(setting, is_trained=each) for each in (True, False))
    asked = [
        ("anchored", DEFAULT_RULE, DENSE, DEFAULT_RULE, home, -0.02),
        ("equal", DEFAULT_RULE, DENSE, DEFAULT_RULE, home, 0.0),
        ("sizes", "posterior", "equal", "posterior", home, 0.0),
        ("steps", "posterior", "equal", "posterior", home, 0.0),
        ("gain", "posterior", "equal", "posterior", home, 0.0),
        ("anchored", DEFAULT_RULE, "anchored", "posterior", home, 0.003),
        ("anchored", DEFAULT_RULE, "anchored", "posterior", new, 0.0),
        ("anchored", DEFAULT_RULE, "left-out", DEFAULT_RULE, home, 0.0),
        ("trunk-anchored", DEFAULT_RULE, DENSE, DEFAULT_RULE, home, -0.02),
    ]
    for name, rule, reference, reference_rule, domains, most in asked:
        apart = differences(name, rule, reference, reference_rule, runs, domains)
        where = "trained" if domains is home else "new"
        what = f"{name} ({rule}) less {reference} ({reference_rule}), {where} domains, nats"
        if apart:
            yield Goal(what, mean(apart), at_most=most)


def notes(runs: Runs) -> list[str]:
    """Each model alone; the names tell in which order `gain` gave steps."""
    lines = []
    for name, of_seed in runs.items():
        for seed, found in of_seed.items():
            alone = "; ".join(
                f"{domain} {', '.join(f'{loss:.3f}' for loss in losses)}"
                for domain, losses in found.alone.items()
            )
            if len(found.members) > 1:
                lines.append(f"{name}, seed {seed}: {', '.join(found.members)} alone: {alone}")
    return lines
