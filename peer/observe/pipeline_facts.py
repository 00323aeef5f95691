"""What a peer that holds a stage knows of its pipeline: paths, links, and where the time goes."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from msgspec.structs import asdict

from protocol.routing.vectors import LinkTimes, WorkTimes

UNKNOWN: Final = WorkTimes()


class Spent(StrEnum):
    """What time goes into, summed over microbatches, which are under way at once."""

    COMPUTING = "computing"
    """The trainer works on one."""
    SENDING = "sending"
    """A boundary is on its way to the next peer."""
    WAITING = "waiting"
    """A boundary waits until the next peer has a slot and is in its iteration."""


@dataclass(slots=True)
class PipelineFacts:
    """What a peer that holds a stage knows of its pipeline.

    Attributes:
        snapshot: digest of the snapshot that we plan from; None before the first.
        plan: digest of its plan; None while paths are drawn.
        planned_s: an iteration of that plan.
        iteration_s: our last iterations, measured; the median.
        spent_s: since the start.
        other_plans: microbatches that came here by another plan than those of other data peers.
        links: as measured here.
        work: of a microbatch here.
        paths: our own in the plan, each hop as `stage:peer`.
        replicas_apart: distance of our weights to those of the replica of our stage that we
            averaged with last, over their size. About ten times the relative error of the gradient
            that one of us would make in the other's place (docs/stages.md).
    """

    snapshot: str | None = None
    plan: str | None = None
    planned_s: float | None = None
    iteration_s: float | None = None
    spent_s: dict[Spent, float] = field(default_factory=lambda: dict.fromkeys(Spent, 0.0))
    other_plans: int = 0
    links: tuple[LinkTimes, ...] = ()
    work: WorkTimes = UNKNOWN
    paths: tuple[str, ...] = ()
    replicas_apart: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the status."""
        return {
            "snapshot": self.snapshot,
            "plan": self.plan,
            "planned_s": self.planned_s,
            "iteration_s": self.iteration_s,
            "spent_s": {str(what): round(seconds, 3) for what, seconds in self.spent_s.items()},
            "other_plans": self.other_plans,
            "links": [asdict(link) for link in self.links],
            "work": asdict(self.work),
            "paths": list(self.paths),
            "replicas_apart": self.replicas_apart,
        }
