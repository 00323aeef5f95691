"""The experts of a run as one peer sees them: their losses, and where more steps would pay.

It is made of what all tell in their beats, and of the ensemble's losses that `loco-peer eval` has
found here last. Curves begin with this daemon.
"""

from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Any

from peer.facts import Facts
from protocol.experts.matrix import (
    ENSEMBLE,
    LossCurve,
    advice_at_one_share,
    lines_of_table,
    losses_of_expert,
)
from protocol.membership.group import Group
from protocol.membership.view import Member
from protocol.run.layout import part_of_expert
from protocol.run.needs import training_flops
from protocol.run.run_spec import RunSpec

StepAndLosses = tuple[int, Mapping[int, float]]
"""Nominal step of a peer, and the losses of its expert by domain."""


class ExpertBoard:
    def __init__(self) -> None:
        self._curves = dict[str, LossCurve]()

    def matrix(self, facts: Facts, alive: Sequence[Member]) -> dict[str, Any] | None:
        """The losses that are known now (docs/experts.md); None where the run has no experts."""
        run, amended = facts.expert_run, facts.spec
        if run is None or amended is None:
            return None
        names = tuple(expert.name for expert in run.experts)
        told = [self._told(facts, alive, number) for number in range(len(names))]
        rows = [losses_of_expert([losses for _, losses in each], len(names)) for each in told]
        for number, (name, each) in enumerate(zip(names, told, strict=True)):
            if each:
                self._note(amended.models[number], name, each, rows[number][number])
        gains = [self._curves[name].gain if name in self._curves else None for name in names]
        advice = advice_at_one_share(self._curves)
        return {
            "names": names,
            "losses": rows,
            "together": [facts.losses_together.get(number) for number in range(len(names))],
            "gains": [gain and gain.per_flop for gain in gains],
            "advice": advice and [advice.source, advice.target],
        }

    def _told(self, facts: Facts, alive: Sequence[Member], number: int) -> list[StepAndLosses]:
        group = Group(facts.run_id or "", part_of_expert(number)).digest
        others = [member.progress for member in alive if member.progress.group == group]
        told = [(each.step, each.losses) for each in others]
        own = [(facts.step, facts.losses_of_domains)] if facts.group == group else []
        return [*own, *told]

    def _note(
        self, spec: RunSpec, name: str, told: Sequence[StepAndLosses], loss: float | None
    ) -> None:
        share = min(1.0, median_low([step for step, _ in told]) / spec.training.total_steps)
        self._curves.setdefault(name, LossCurve()).note(share, training_flops(spec), loss)


def matrix_lines(experts: Mapping[str, Any]) -> list[str]:
    """The table for people, of what `matrix` gives."""
    names = experts["names"]
    rows = zip((*names, ENSEMBLE), (*experts["losses"], experts["together"]), strict=True)
    lines = list(lines_of_table(names, list(rows), experts["gains"]))
    if experts["advice"]:
        source, target = experts["advice"]
        lines.append(f"steps would pay more with {target} than with {source} (docs/experts.md):")
        lines.append(f"  more training.total_steps of {target}, then: loco-peer amend RUN.toml")
    return lines
