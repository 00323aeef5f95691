"""From runs of peers of unequal speed to a table, goals and what they wait for each other.

Differences are paired: of equal seeds. Shares of time are means over the fast peers.
"""

from collections.abc import Sequence
from typing import Final

from bench.report import Goal, Row
from bench.simulated_pace import Kept

from .arms import Arm
from .findings import Runs, rounded
from .measures import mean, standard_error
from .pace import Speeds
from .runs import paired
from .settings import Setting
from .unequal import ARMS, OUTER_STEPS, REFERENCE
from .waiting import BLOCKING, EXCHANGE, Pace, Rules, Vector, Waits, waits

MODEL_ROUNDS: Final = 400
LARGEST_WAIT: Final = 0.02
"""Share of their time that fast peers may wait."""
UNEVEN: Final = (0.45, 0.3)
"""Speeds of slow peers that make no whole number of steps of the short setting's H."""
RULES: Final = {
    "blocking": BLOCKING,
    "closing early": Rules(early=True),
    "overlap, closing early": Rules(overlap=True, early=True),
}


def rows(runs: Runs, setting: Setting) -> list[Row]:
    """One row per arm, in the order of the study."""
    return [_row(arm, runs, setting) for name, arm in ARMS.items() if runs.get(name)]


def _row(arm: Arm, runs: Runs, setting: Setting) -> Row:
    found = list(runs[arm.name].values())
    differences = paired(arm.name, runs, reference_of(arm))
    model = model_waits(arm, setting)
    return {
        "arm": arm.name,
        "seeds": len(found),
        "loss": f"{mean([result.loss for result in found]):.4f}",
        "loss of mean": f"{mean([result.averaged_loss for result in found]):.4f}",
        f"to {REFERENCE}": f"{mean(differences):+.4f}" if differences else None,
        "s.e.": rounded(standard_error(differences) if differences else None, 4),
        "deviation": f"{mean([result.deviations[-1][2] for result in found]):.2e}",
        "tokens": f"{mean([result.tokens for result in found]):.0f}",
        "wait, %": _percent(arm, model.for_partner),
        "exchange, %": _percent(arm, model.for_exchange),
    }


def reference_of(arm: Arm) -> str:
    """The arm that another is compared with: the daemon's way, with the same outer step."""
    endings = [ending for ending in OUTER_STEPS if arm.name.endswith(ending)]
    return REFERENCE + "".join(endings)


def model_waits(arm: Arm, setting: Setting, rules: Rules = BLOCKING) -> Waits:
    """The model's answer for an arm. An exchange takes the same time in all of them."""
    inner_steps = arm.inner_steps(setting.inner_steps)
    pace = Pace(
        arm.speeds.of(setting.replicas),
        arm.speeds.quotas(inner_steps, setting.replicas),
        inner_steps,
        exchange=EXCHANGE * setting.inner_steps / inner_steps,
    )
    return waits(pace, MODEL_ROUNDS, seed=0, rules=rules)


def _percent(arm: Arm, shares: Vector) -> float:
    return round(100 * fast_mean(arm, list(shares)), 2)


def fast_mean(arm: Arm, values: Sequence[float]) -> float:
    """Mean over the peers that are not slow, which come first."""
    return mean([float(value) for value in values[: len(values) - len(arm.speeds.slow)]])


def goals(runs: Runs, swarms: Sequence[Sequence[Kept]]) -> list[Goal]:
    """Goals: the chosen way keeps fast peers busy, and no rival has a lower loss, but for noise.

    Of one seed the noise is unknown, and nothing is said.

    Args:
        swarms: what the daemon's own code did with these peers, with overlap.
    """
    busy = min(fast_mean(ARMS[REFERENCE], [peer.busy for peer in kept]) for kept in swarms)
    what = "share of time that fast peers wait, the daemon, worst seed"
    made = [Goal(what, 1 - busy, at_most=LARGEST_WAIT)]
    for name in ARMS:
        differences = paired(name, runs, reference_of(ARMS[name]))
        error = standard_error(differences)
        if name == reference_of(ARMS[name]) or error is None:
            continue
        what = f"loss of {name} less that of {reference_of(ARMS[name])}, paired"
        made.append(Goal(what, mean(differences), at_least=-2 * error))
    return made


def told_waits(setting: Setting) -> list[str]:
    """The model's word on the ways to close a round, for even and for uneven speeds."""
    lines = []
    for arm in (ARMS[REFERENCE], Arm(REFERENCE, speeds=Speeds(slow=UNEVEN))):
        quotas = arm.speeds.quotas(setting.inner_steps, setting.replicas)[-len(arm.speeds.slow) :]
        for name, rules in RULES.items():
            found = model_waits(arm, setting, rules)
            lines.append(
                f"model, speeds {arm.speeds.slow}, quotas {tuple(quotas)}, {name}:"
                f" wait {_percent(arm, found.for_partner)}%,"
                f" exchange {_percent(arm, found.for_exchange)}%,"
                f" {100 * fast_mean(arm, list(found.steps)):.1f}% of the quota done,"
                f" vectors {fast_mean(arm, list(found.age)):.2f} steps old"
            )
    return lines


def told_daemon(kept: Sequence[Kept], how: str) -> str:
    """The figures of the daemon's own code: times, and rounds that found a partner."""
    arm = ARMS[REFERENCE]
    slow = kept[len(kept) - len(arm.speeds.slow) :]
    shares = ", ".join(f"{peer.averaged:.0%}" for peer in slow)
    return (
        f"daemon in simulation, {how}:"
        f" fast peers train {fast_mean(arm, [peer.busy for peer in kept]):.1%} of the time and"
        f" average {fast_mean(arm, [peer.averaged for peer in kept]):.0%} of their rounds,"
        f" the slow ones {shares}"
    )
