"""A draft: a plan that the planner is working on, and the parts of it that moves exchange.

A draft is never changed; a move makes another one that shares what it leaves alone. What is legal
by construction is not checked again (sizes of stages, order of stages, microbatches in all and on
each stage); the memory of waves (TC1) is.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .plan import Plan
from .problem import Problem
from .simulator import Relays, Simulator


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
