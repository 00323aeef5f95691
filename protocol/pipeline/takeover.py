"""What becomes of the work of a machine that goes, and what a machine that comes is given.

Idea: a plan is repaired by changing nothing but the work of one stage.

    relieve   every visit to the machine goes to the replica of its stage that would have it done
              first: detour + what that replica does in the iteration already. A data peer's
              microbatches go, with their relays, one by one to the data peer that would be home
              first
    employ    every visit to the stage is dealt out anew in the same way, once, in order: it stays
              where it is or comes to the machine that has come. A new data peer takes microbatches
              from those that are home last, as long as that makes the last one earlier

A replica without a free slot in the visit's wave (TC1) is taken only if none has one. Stages,
number of stages on a path and the share of each stage (CC1, CC2, CC3) stay as they were, because
one replica takes the place of another.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from .draft import Draft, least_us
from .problem import THOUSAND, Problem
from .simulator import Relays, Simulator

NOBODY: Final = -1
"""Stands for the stage of a machine that has none yet."""


class Takeover:
    """Repairs drafts of one problem.

    A draft may have machines behind those of the problem: they are gone, but their stages and paths
    are still in it.
    """

    def __init__(
        self, problem: Problem, simulator: Simulator, prices: Sequence[Sequence[int]]
    ) -> None:
        work = problem.work
        self.problem = problem
        self.simulator = simulator
        self.prices = prices
        permille = THOUSAND + work.backward_permille
        self.work_us = [
            peer.forward_us * permille // THOUSAND + 2 * work.gap_us for peer in problem.peers
        ]

    def holders(self, draft: Draft, stage: int) -> list[int]:
        """The machines that are there and hold a stage."""
        return [m for m, held in enumerate(draft.stages[: len(self.work_us)]) if held == stage]

    def relieve(self, draft: Draft, machine: int) -> Draft | None:
        """Hand all that a machine does to others of its stage; None if there is none.

        The machine has no stage afterwards.
        """
        stage = draft.stages[machine]
        free = Draft(_with(draft.stages, machine, NOBODY), draft.paths)
        if stage == NOBODY:
            return free
        if not self.holders(free, stage):
            return None
        return self._shared_out(free, machine) if stage == 0 else self._dealt(free, stage, machine)

    def employ(self, draft: Draft, machine: int, stage: int) -> Draft:
        """Give a machine without a stage this one, and a part of its work."""
        placed = self.place(draft, machine, stage)
        if stage == 0:
            return self._drawn_off(placed, machine)
        return self._dealt(placed, stage)

    def place(self, draft: Draft, machine: int, stage: int) -> Draft:
        """Let a machine without a stage hold this one, without any work yet."""
        paths = {**draft.paths, machine: ()} if stage == 0 else draft.paths
        return Draft(_with(draft.stages, machine, stage), paths)

    def move(self, draft: Draft, machine: int, stage: int) -> Draft | None:
        """Let a machine leave its stage for another one; None if nobody else holds it."""
        free = self.relieve(draft, machine)
        return None if free is None else self.employ(free, machine, stage)

    def _dealt(self, draft: Draft, stage: int, leaver: int | None = None) -> Draft:
        """Deal the visits to a stage, or to the leaver alone, to the machines that hold it."""
        holders = self.holders(draft, stage)
        load, held = self._loads(draft)
        changed = {origin: list(paths) for origin, paths in draft.paths.items()}
        for origin, place, path in draft.each():
            wave = self._wave(origin, place)
            for at, relay in enumerate(path):
                if relay != leaver and (leaver is not None or draft.stages[relay] != stage):
                    continue
                load[relay] -= 1
                held[wave, relay] -= 1
                hops = ((origin, *path)[at], (*path, origin)[at + 1])
                taker = self._soonest(holders, hops, wave, load, held)
                load[taker] += 1
                held[wave, taker] += 1
                changed[origin][place] = (*path[:at], taker, *path[at + 1 :])
        return draft.with_paths({origin: tuple(paths) for origin, paths in changed.items()})

    def _loads(self, draft: Draft) -> tuple[Counter[int], Counter[tuple[int, int]]]:
        load: Counter[int] = Counter()
        held: Counter[tuple[int, int]] = Counter()
        for origin, place, path in draft.each():
            load.update(path)
            held.update((self._wave(origin, place), relay) for relay in path)
        return load, held

    def _wave(self, origin: int, place: int) -> int:
        there = origin < len(self.work_us)
        return place // self.problem.peers[origin].slots if there else 0

    def _soonest(
        self,
        holders: Sequence[int],
        hops: tuple[int, int],
        wave: int,
        load: Counter[int],
        held: Counter[tuple[int, int]],
    ) -> int:
        before, after = hops
        there = len(self.work_us)
        peers, prices = self.problem.peers, self.prices

        def cost(machine: int) -> tuple[bool, int, int]:
            full = self.problem.rules.waves_fit and held[wave, machine] >= peers[machine].slots
            come = prices[before][machine] if before < there else 0
            go = prices[machine][after] if after < there else 0
            return full, come + go + load[machine] * self.work_us[machine], machine

        return min(holders, key=cost)

    def _shared_out(self, draft: Draft, leaver: int) -> Draft:
        """Deal a data peer's microbatches to the others."""
        paths = {origin: kept for origin, kept in draft.paths.items() if origin != leaver}
        takers = self.holders(draft, 0)
        for origin in takers:
            paths.setdefault(origin, ())
        for path in draft.paths.get(leaver, ()):
            taker = min(takers, key=lambda o: (self._least(o, (*paths[o], path)), o))
            paths[taker] = (*paths[taker], path)
        return Draft(draft.stages, paths)

    def _drawn_off(self, draft: Draft, newcomer: int) -> Draft:
        """Give a new data peer the last microbatches of those that are home last."""
        paths = dict(draft.paths)
        for _ in range(self.problem.microbatches):
            late = max(paths, key=lambda o: (self._least(o, paths[o]), -o))
            if late == newcomer or not paths[late]:
                break
            taken = (*paths[newcomer], paths[late][-1])
            if self._least(newcomer, taken) >= self._least(late, paths[late]):
                break
            paths[late], paths[newcomer] = paths[late][:-1], taken
        return Draft(draft.stages, paths)

    def _least(self, origin: int, paths: tuple[Relays, ...]) -> int:
        """A bound on when a data peer is home; relays that are gone cost nothing."""
        there = len(self.work_us)
        here = [tuple(relay for relay in path if relay < there) for path in paths]
        return least_us(self.simulator, origin, tuple(path for path in here if path))


def _with(stages: tuple[int, ...], machine: int, stage: int) -> tuple[int, ...]:
    return (*stages[:machine], stage, *stages[machine + 1 :])
