"""A plan: which machine holds which stage, and the path of each microbatch.

A data peer sends its microbatches in the order of its paths. It has as many tracks as slots:
microbatch i goes on track i modulo slots, and starts when the one before it on that track has come
home. The tracks start one forward after another.

A draft is a plan that the planner is working on, and the parts of it that moves exchange. It is
never changed; a move makes another one that shares what it leaves alone. What is legal by
construction is not checked again (sizes of stages, order of stages, microbatches in all and on each
stage); the memory of waves (TC1) is.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import blake3

from .problem import Problem, canonical
from .simulator import Job, Relays, Simulator

SETTLING: Final = 3
AVERAGED: Final = 6
"""Iterations that are run before, and for, the mean of a pipeline that is never flushed."""


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


def jobs_of(problem: Problem, plan: Plan, iterations: int = 1) -> list[Job]:
    """What the simulator runs for some iterations of a plan, each begun before the last has ended.

    More than one is a pipeline that is never flushed: gradients are applied one update late.
    """
    jobs: list[Job] = []
    for origin, paths in enumerate(plan.paths):
        peer, first = problem.peers[origin], len(jobs)
        for place, relays in enumerate(paths * iterations):
            track = place % peer.slots
            after = first + place - peer.slots if place >= peer.slots else None
            jobs.append(Job(origin, relays, track * peer.forward_us, after))
    return jobs


def steady_us(simulator: Simulator, plan: Plan) -> int | None:
    """What an iteration takes with a delay of one update: the mean of some after the first few.

    None where the paths block each other.
    """
    few, more = (
        simulator.run(jobs_of(simulator.problem, plan, iterations)).makespan_us
        for iterations in (SETTLING, SETTLING + AVERAGED)
    )
    return None if few is None or more is None else (more - few) // AVERAGED


# --- a draft --------------------------------------------------------------------------------------
class Draft(NamedTuple):
    """Stages by machine, and the paths of every data peer."""

    stages: tuple[int, ...]
    paths: Mapping[int, tuple[Relays, ...]]

    def to_plan(self) -> Plan:
        """The same as a plan."""
        return Plan(self.stages, tuple(self.paths.get(m, ()) for m in range(len(self.stages))))

    def with_paths(self, changed: Mapping[int, tuple[Relays, ...]]) -> "Draft":
        """Other paths for some data peers."""
        return Draft(self.stages, {**self.paths, **changed})

    def each(self) -> Iterator[tuple[int, int, Relays]]:
        """Data peer, place in its order, and path of every microbatch."""
        for origin, paths in self.paths.items():
            for place, path in enumerate(paths):
                yield origin, place, path


def fits(problem: Problem, draft: Draft) -> bool:
    """Whether a draft keeps TC1: no wave asks a relay for more than its slots."""
    if not problem.rules.waves_fit:
        return True
    held: Counter[tuple[int, int]] = Counter()
    peers = problem.peers
    for origin, place, path in draft.each():
        wave = place // peers[origin].slots
        held.update((wave, relay) for relay in path)
    return all(count <= peers[relay].slots for (_, relay), count in held.items())


def least_us(simulator: Simulator, origin: int, paths: tuple[Relays, ...]) -> int:
    """A bound: what a data peer's slowest track takes when it meets nobody."""
    peer = simulator.problem.peers[origin]
    tracks = [track * peer.forward_us for track in range(min(peer.slots, len(paths)))]
    for place, path in enumerate(paths):
        tracks[place % peer.slots] += simulator.unloaded_us(origin, path)
    return max(tracks) if paths else 0
