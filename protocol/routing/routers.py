"""Routers: which paths the microbatches of one data peer take, and the router of a run.

Random paths do not look at latencies, and use every stage alike: which stages a microbatch leaves
out decides what it trains, so all relay stages must be visited equally often (CC2,
protocol/pipeline/problem.py). Each microbatch takes the stages that its data peer has used least in
this iteration, as far as the limits of paths allow (CC3); ties and the relay of a stage are drawn.
Draws are seeded with the run's seed, the data peer and the iteration: data peers do not move in
step, and a run can be repeated.

A stage that nobody holds is left out, as long as others are left for paths of that length. An
iteration that would skip nothing then has paths like all others.

Invariant: within an iteration of one data peer no two stages differ by more than one visit, unless
the limits of paths forbid it; nor do two relays of a stage.

The plan of a snapshot is the same for all that hold it. Machines keep their stages, and each data
peer the microbatches of its own batch (protocol/pipeline/planner.py). Where the stages cannot be
shared out evenly to the last microbatch, more is allowed (`stage_slack`), until there is a plan.

Planned paths: those of the newest plan, mended where relays are not there, else random ones.
  1. An iteration takes the data peer's paths in the plan that holds when it sets out.
  2. A relay that is not there is replaced by one of its stage, the one that this iteration uses
     least. Where its stage has nobody, that microbatch's path is drawn.
  3. Without a plan, or with one that leaves us out, all paths are drawn; so they are while a relay
     is suspected of a lie (protocol/microbatch/checks.py).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from protocol.errors import LocalProtocolError
from protocol.pipeline.planner import NoPlan, Planned, plan_paths
from protocol.pipeline.problem import US_PER_S, Draws, PathRules, Problem, Stages, within
from protocol.pipeline.question import rules_of
from protocol.pipeline.simulator import Order, Plan
from protocol.run.run_spec import RunSpec
from protocol.run.ways import CODECS
from protocol.wire.stage_messages import Path, RelaysByStage

from .snapshots import LinkSnapshot, Terms

TRIES: Final = 16
"""Choices of stages drawn for a path, until one is within the limits."""


Used = Counter[int | str]
"""How often each stage, and each relay, is used by the paths that are drawn together."""


class RandomRouter:
    """Draws paths at random, among the peers that hold each stage. A path has no relay twice.

    Args:
        visited: stages of a path, the data peer's among them.
        full_every: in one iteration of this many paths visit all; 0 is never.

    Attributes:
        draws_all: whether no plan is followed for now.
    """

    draws_all = False

    def __init__(
        self, origin: str, seed: int, visited: int, rules: PathRules, *, full_every: int = 0
    ) -> None:
        self._origin, self._name = origin, f"{seed}/{origin}"
        self._visited = visited
        self._rules = rules
        self._full_every = full_every

    def is_full(self, iteration: int, relays: RelaysByStage) -> bool:
        return self._full_every > 0 and iteration % self._full_every == 0 and all(relays)

    def paths(self, iteration: int, microbatches: int, relays: RelaysByStage) -> Sequence[Path]:
        """A path for each microbatch; none at all where a path finds no relay."""
        draws, used = Draws(f"{self._name}/{iteration}"), Used()
        found: list[Path] = []
        for number in range(iteration * microbatches, (iteration + 1) * microbatches):
            path = self._next(iteration, number, microbatches, relays, draws, used)
            if path is None:
                return []
            used.update((*path.stages, *path.relays))
            found.append(path)
        return found

    def _next(
        self, iteration: int, number: int, of: int, relays: RelaysByStage, draws: Draws, used: Used
    ) -> Path | None:
        """The path of a microbatch, by its number in the run; an iteration has `of`."""
        if self.is_full(iteration, relays):
            return _through(tuple(range(1, len(relays) + 1)), relays, draws, used)
        return self._drawn(self._visited - 1, relays, draws, used)

    def another(
        self, before: Path, turn: int, relays: RelaysByStage, *, reached_loss: bool = False
    ) -> Path | None:
        """Over the same stages and relays, if all have some; else over as many as are usual.

        Args:
            reached_loss: relays may have added its gradient, so all that are still there are kept.
        """
        draws, used = Draws(f"{self._name}/again/{turn}"), Used()
        kept = {stage for stage in before.stages if reached_loss and relays[stage - 1]}
        used.update(dict.fromkeys(kept, -TRIES))
        path = _through(before.stages, relays, draws, used, before.relays) or self._drawn(
            max(self._visited - 1, len(kept)), relays, draws, used, before.relays
        )
        return path if path is not None and kept.issubset(path.stages) else None

    def whole(self, turn: int, relays: RelaysByStage) -> Path | None:
        draws = Draws(f"{self._name}/whole/{turn}")
        return _through(tuple(range(1, len(relays) + 1)), relays, draws, Used())

    def _drawn(
        self, hops: int, relays: RelaysByStage, draws: Draws, used: Used, kept: Sequence[str] = ()
    ) -> Path | None:
        """A path over `hops` of the stages that have a relay; None where none is legal."""
        there = [stage for stage, peers in enumerate(relays, 1) if peers]
        for attempt in range(TRIES):
            rank = {s: (used[s] + draws.below(1 + attempt), draws.below(1 << 32), s)
                    for s in there}  # fmt: skip
            stages = tuple(sorted(sorted(there, key=rank.__getitem__)[:hops]))
            if len(stages) == hops and within(stages, self._rules):
                return _through(stages, relays, draws, used, kept)
        stages = tuple(there[:hops])
        fits = len(stages) == hops and within(stages, self._rules)
        return _through(stages, relays, draws, used, kept) if fits else None


def _through(
    stages: Stages, relays: RelaysByStage, draws: Draws, used: Used, kept: Sequence[str] = ()
) -> Path | None:
    """A path through these stages, by relays that are kept, or used least; None if one has none."""
    chosen = []
    for stage in stages:
        peers = relays[stage - 1]
        if not peers:
            return None
        least = min(used[peer] for peer in peers)
        likely = [peer for peer in peers if peer in kept]
        chosen.append(draws.of(likely or [peer for peer in peers if used[peer] == least]))
    return Path(tuple(chosen), stages)


EVALUATIONS: Final = 400


@dataclass(frozen=True, slots=True)
class PlannedPaths:
    """A plan, as its data peers use it.

    Attributes:
        snapshot: digest of the one that it is made from.
        paths: of each data peer, in the order in which its microbatches set out.
    """

    snapshot: str
    digest: str
    iteration_us: int
    paths: Mapping[str, tuple[Path, ...]]

    @property
    def iteration_s(self) -> float:
        return self.iteration_us / US_PER_S


def plan_of(snapshot: LinkSnapshot, terms: Terms, visited: int) -> PlannedPaths | None:
    """The plan; None where no plan is legal, or there are too many ways to choose from."""
    problem = snapshot.problem(terms, visited)
    if problem is None:
        return None
    stages = snapshot.stages
    quotas = {peer: terms.microbatches for peer, stage in enumerate(stages) if stage == 0}
    # A slack as large as the iteration is no limit.
    for slack in (0, *(1 << power for power in range(problem.microbatches.bit_length() + 1))):
        looser = replace(problem, rules=replace(problem.rules, stage_slack=slack))
        try:
            found = plan_paths(looser, stages, quotas, EVALUATIONS, order=Order.BACKWARD_FIRST)
        except NoPlan:
            continue
        except LocalProtocolError:
            return None
        return _told(snapshot, looser, found)
    return None


def _told(snapshot: LinkSnapshot, problem: Problem, planned: Planned) -> PlannedPaths:
    plan = planned.plan
    digest = plan.digest(problem)
    names = [peer.name for peer in problem.peers]
    paths = {
        names[origin]: tuple(_path(plan, relays, names, digest) for relays in own)
        for origin, own in enumerate(plan.paths)
        if plan.stages[origin] == 0
    }
    return PlannedPaths(snapshot.digest, digest, planned.makespan_us, paths)


def _path(plan: Plan, relays: tuple[int, ...], names: list[str], digest: str) -> Path:
    stages = tuple(plan.stages[relay] for relay in relays)
    return Path(tuple(names[relay] for relay in relays), stages, digest)


class PlannedRouter(RandomRouter):
    """Takes the paths of a plan. Draws what sets out again: what the plan says of it has failed.

    Attributes:
        plan: the one that holds; None before the first.
        full: the plan of iterations that skip nothing; None where all skip.
    """

    plan: PlannedPaths | None = None
    full: PlannedPaths | None = None

    def own(self, iteration: int, relays: RelaysByStage) -> tuple[Path, ...]:
        plan = self.full if self.is_full(iteration, relays) else self.plan
        if plan is None or self.draws_all:
            return ()
        return plan.paths.get(self._origin, ())

    def _next(
        self, iteration: int, number: int, of: int, relays: RelaysByStage, draws: Draws, used: Used
    ) -> Path | None:
        own = self.own(iteration, relays)
        if not own:
            return super()._next(iteration, number, of, relays, draws, used)
        before = own[number % of % len(own)]
        path = _through(before.stages, relays, draws, used, before.relays)
        if path is None:
            return self.another(before, number, relays)
        return Path(path.relays, path.stages, before.plan)


def terms_of(spec: RunSpec) -> Terms:
    sequences, model = spec.microbatch_sequences, spec.model
    values = prod((sequences, model.context_length, model.hidden_size))
    return Terms(
        stages=spec.pipeline.stages,
        visited=spec.pipeline.num_visited,
        microbatches=-(-spec.training.batch_size // sequences),
        boundary_bytes=CODECS[spec.pipeline.codec].code_bytes(values),
        rules=rules_of(spec.pipeline),
    )


def router_of(spec: RunSpec, origin: str) -> RandomRouter:
    """The router of one data peer."""
    pipeline, rules = spec.pipeline, rules_of(spec.pipeline)
    kind = PlannedRouter if pipeline.routing == "planned" else RandomRouter
    return kind(origin, spec.seed, pipeline.num_visited, rules, full_every=pipeline.full_every)
