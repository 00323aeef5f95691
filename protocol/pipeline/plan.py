"""A plan: which machine holds which stage, and the path of each microbatch.

A data peer sends its microbatches in the order of its paths. It has as many tracks as slots:
microbatch i goes on track i modulo slots, and starts when the one before it on that track has come
home. The tracks start one forward after another.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import blake3

from .problem import Problem, canonical
from .simulator import Job, Relays


@dataclass(frozen=True, slots=True)
class Plan:
    """Machines are numbered as in the problem.

    Attributes:
        stages: of each machine.
        paths: of each machine, those of the microbatches that it sends; relays send none.
    """

    stages: tuple[int, ...]
    paths: tuple[tuple[Relays, ...], ...]

    def to_json(self, problem: Problem) -> dict[str, Any]:
        """Arrangement and paths by name."""
        names = [peer.name for peer in problem.peers]
        named: Mapping[str, list[list[str]]] = {
            names[origin]: [[names[relay] for relay in path] for path in paths]
            for origin, paths in enumerate(self.paths)
            if self.stages[origin] == 0
        }
        return {"arrangement": dict(zip(names, self.stages, strict=True)), "paths": named}

    def digest(self, problem: Problem) -> str:
        """The plan's name, which depends on the snapshot: 32 hex digits."""
        tree = {"problem": problem.digest(), **self.to_json(problem)}
        return blake3.blake3(canonical(tree)).hexdigest(length=16)


def jobs_of(problem: Problem, plan: Plan) -> list[Job]:
    """What the simulator runs for one iteration of a plan."""
    jobs: list[Job] = []
    for origin, paths in enumerate(plan.paths):
        peer, first = problem.peers[origin], len(jobs)
        for place, relays in enumerate(paths):
            track = place % peer.slots
            after = first + place - peer.slots if place >= peer.slots else None
            jobs.append(Job(origin, relays, track * peer.forward_us, after))
    return jobs
