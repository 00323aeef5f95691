"""Stages that find their machines while these go and come: our rules and SWARM's.

The worlds, prices and the first three policies are those of bench/planner_churn.py: SkipPipe's 20
machines, a stage's state of 4 GB, hours in which so many machines of a hundred go and come back.
Between two events an arrangement trains at the pace of its simulated iteration. Policies:

  anew        planned from nothing at every change, moves are free: the ideal
  re-planned  `replan`, which moves machines where that pays
  left        never planned again: replicas do the work of what is gone
  swarm       SWARM (Ryabinin et al. 2023, arXiv 2301.11913, section 3). Senders spread microbatches
              over the machines of the next stage by the time that these take (bench/pipeline/
              wiring.py). Every 300 s one machine of the least loaded stage goes over to the most
              loaded one, the first by the digest of its name; a newcomer takes the most loaded one.
              The load is work over machines. In its favour a machine goes only where the stage that
              it leaves is then less loaded than the other one was: as described it goes each time
  swarm, planned
              SWARM's stages with our paths
  ours        what peers do (protocol/run/assignment.py): a newcomer takes the stage that needs it
              most, and one machine goes over when a stage has had nobody for 30 s, or too many for
              300 s. Data peers plan paths for the stages as they are (protocol/routing/plans.py).
              A stage with nobody is left out: paths visit as many of the others

A machine that takes a stage fetches its state from the machine with the best line that works on it,
and needs 10 s to start; a stage that nobody holds is 600 s away. Meanwhile it works on nothing.

In the published setting a boundary takes 132 s between NL and London, where all else takes 4 s or
less. A policy that looks at no lines between relays stands or falls with that pair, so all is
played once more with the rate that the table of regions has for it ("mended").

    python -m bench.planner_policies [--json FILE]
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import blake3

from bench.pipeline.wiring import swarm
from bench.planner_churn import (
    ANEW,
    CHURN_HORIZON,
    CHURNS,
    HOURS,
    SECONDS_PER_HOUR,
    Account,
    Change,
    anew,
    changes_of,
    left,
    replanned,
    terms,
)
from bench.planner_settings import PLACES, links_between, published_problem
from bench.report import Report, options
from protocol.errors import LocalProtocolError
from protocol.pipeline.assignment import NoPlan
from protocol.pipeline.mending import mended
from protocol.pipeline.plan import Plan, jobs_of
from protocol.pipeline.planner import even_quotas, plan, plan_paths
from protocol.pipeline.problem import THOUSAND, US_PER_S, PathRules, Problem
from protocol.pipeline.simulator import Simulator
from protocol.routing.plans import BUDGET, MENDING, SLACKS
from protocol.run.assignment import CROWDED_S, EMPTY_S, Move, needed_move, needed_stage

PERIOD_S: Final = 300.0
Stages = Mapping[int, int]
"""The stage of each machine that is there."""


class Policy(Protocol):
    """Decides which machine goes where, and over which paths microbatches go."""

    skips: bool
    """Whether a stage with nobody is left out."""

    def stage_for(self, held: Stages) -> int:
        """The stage of a newcomer."""

    def move(self, held: Stages, now_s: float) -> tuple[int, int] | None:
        """A machine that goes over now, and where to."""

    def next_s(self, now_s: float) -> float:
        """When it may want to move again."""

    def routed(self, problem: Problem, stages: tuple[int, ...]) -> Plan | None:
        """Paths for an arrangement; None where there are none."""


class Swarm:
    """See the top of the file."""

    skips = False

    def __init__(self, problem: Problem, *, plans: bool = False) -> None:
        self._plans, self._moved_s = plans, 0.0
        work, relays = problem.work, problem.num_stages - 1
        visit = THOUSAND + work.backward_permille
        share = visit * (problem.visited - 1) // relays
        self._demand = [visit + work.loss_permille, *[share] * relays]
        self._names = [peer.name for peer in problem.peers]

    def stage_for(self, held: Stages) -> int:
        """The most loaded one."""
        return max(range(len(self._demand)), key=lambda stage: (self._load(held, stage), -stage))

    def move(self, held: Stages, now_s: float) -> tuple[int, int] | None:
        """From the least loaded stage to the most loaded one, every period."""
        if now_s % PERIOD_S or now_s == self._moved_s:
            return None
        stages = range(len(self._demand))
        several = [s for s in stages if list(held.values()).count(s) > 1]
        target = self.stage_for(held)
        if not several:
            return None
        source = min(several, key=lambda stage: (self._load(held, stage), stage))
        after = self._load(held, source, fewer=1)
        if source == target or after >= self._load(held, target):
            return None
        self._moved_s = now_s
        return _first(self._names, [m for m, stage in held.items() if stage == source]), target

    def next_s(self, now_s: float) -> float:
        """At the next period."""
        return (now_s // PERIOD_S + 1) * PERIOD_S

    def routed(self, problem: Problem, stages: tuple[int, ...]) -> Plan | None:
        """Every sender for itself, unless it is to plan as ours do."""
        return planned(problem, stages) if self._plans else swarm(problem, stages)

    def _load(self, held: Stages, stage: int, fewer: int = 0) -> float:
        machines = list(held.values()).count(stage) - fewer
        return self._demand[stage] / machines if machines else float("inf")


class Ours:
    """See the top of the file."""

    skips = True

    def __init__(self, problem: Problem) -> None:
        self._stages, self._visited = problem.num_stages, problem.visited
        self._names = [peer.name for peer in problem.peers]
        self._move: Move | None = None
        self._due_s = float("inf")

    def stage_for(self, held: Stages) -> int:
        """The one that needs it most."""
        return needed_stage(self._counts(held), self._visited)

    def move(self, held: Stages, now_s: float) -> tuple[int, int] | None:
        """The move that has been needed for long enough."""
        counts = self._counts(held)
        move = needed_move(counts, self._visited)
        if move != self._move:
            self._move, self._due_s = move, float("inf")
            if move is not None:
                self._due_s = now_s + (CROWDED_S if counts[move.target] else EMPTY_S)
        if move is None or now_s < self._due_s:
            return None
        self._move = None
        source = [m for m, stage in held.items() if stage == move.source]
        return _first(self._names, source), move.target

    def next_s(self, now_s: float) -> float:
        """When the move that is needed is due."""
        return self._due_s if self._due_s > now_s else float("inf")

    def routed(self, problem: Problem, stages: tuple[int, ...]) -> Plan | None:
        """Paths as data peers plan them."""
        return planned(problem, stages)

    def _counts(self, held: Stages) -> list[int]:
        return [list(held.values()).count(stage) for stage in range(self._stages)]


def planned(problem: Problem, stages: tuple[int, ...]) -> Plan | None:
    """The paths of protocol/routing/plans.py."""
    quotas = even_quotas(problem, stages)
    for slack in SLACKS:
        looser = replace(problem, rules=replace(problem.rules, stage_slack=slack))
        try:
            found = plan_paths(looser, stages, quotas, BUDGET)
        except NoPlan:
            continue
        return (mended(looser, found.plan, MENDING) or found).plan
    return None


def _first(names: Sequence[str], machines: Sequence[int]) -> int:
    """The machine that goes first, by the digests of names."""
    return min(machines, key=lambda machine: blake3.blake3(names[machine].encode()).digest())


@dataclass
class World:
    """Machines that hold stages, and an account of what they train.

    Attributes:
        held: the stage of each machine that is there, also while it fetches that.
        ready_s: when it works on it.
        without_s: time in which a stage was left out.
        standing_s: time in which nothing was trained.
        paces: microseconds of an iteration, by arrangement.
    """

    problem: Problem
    policy: Policy
    held: dict[int, int]
    ready_s: dict[int, float] = field(default_factory=dict)
    account: Account = field(default_factory=Account)
    paces: dict[tuple[tuple[int, int], ...], int | None] = field(default_factory=dict)
    without_s: float = 0.0
    standing_s: float = 0.0

    def play(self, changes: Sequence[Change]) -> None:
        """All hours."""
        end_s, now_s = float(HOURS * SECONDS_PER_HOUR), 0.0
        left = list(changes)
        while now_s < end_s:
            while left and left[0].at_s <= now_s:
                self._change(left.pop(0).there, now_s)
            while (move := self.policy.move(self.held, now_s)) is not None:
                self._take(*move, now_s)
            later = [s for s in self.ready_s.values() if s > now_s]
            moments = [end_s, self.policy.next_s(now_s), *later, *(c.at_s for c in left[:1])]
            then_s = min(moments)
            self._train(then_s - now_s, now_s)
            now_s = then_s

    def _change(self, there: Sequence[int], now_s: float) -> None:
        self.account.changes += 1
        for machine in [m for m in self.held if m not in there]:
            del self.held[machine]
            self.ready_s.pop(machine, None)
        for machine in [m for m in there if m not in self.held]:
            self._take(machine, self.policy.stage_for(self.held), now_s)

    def _take(self, machine: int, stage: int, now_s: float) -> None:
        """A machine takes a stage on."""
        cost = terms(self.problem, CHURN_HORIZON)
        sources = [m for m in self._working(now_s) if self.held[m] == stage and m != machine]
        rates = [self.problem.rate(source, machine) for source in sources]
        fetch_us = cost.orphan_us
        if rates:
            fetch_us = cost.state_bytes[stage] * US_PER_S // max(rates) + cost.restart_us
        self.held[machine] = stage
        self.ready_s[machine] = now_s + fetch_us / US_PER_S
        self.account.moves += 1

    def _working(self, now_s: float) -> list[int]:
        return sorted(m for m in self.held if self.ready_s.get(m, 0.0) <= now_s)

    def _train(self, span_s: float, now_s: float) -> None:
        key = tuple((m, self.held[m]) for m in self._working(now_s))
        if key not in self.paces:
            self.paces[key] = pace_us(self.problem, dict(key), self.policy)
        found = self.paces[key]
        if found is None:
            self.standing_s += span_s
            return
        self.without_s += span_s * (len({stage for _, stage in key}) < self.problem.num_stages)
        self.account.iterations += span_s * US_PER_S / found


def pace_us(problem: Problem, held: Stages, policy: Policy) -> int | None:
    """An iteration of these machines; None where they cannot train."""
    there = sorted(set(held.values()))
    if not there or there[0] or len(there) < problem.visited:
        return None
    if len(there) < problem.num_stages and not policy.skips:
        return None
    machines = sorted(held)
    stages = tuple(there.index(held[m]) for m in machines)
    now = replace(
        problem,
        peers=tuple(problem.peers[m] for m in machines),
        latency_us=tuple(tuple(problem.latency_us[a][b] for b in machines) for a in machines),
        bytes_per_s=tuple(tuple(problem.bytes_per_s[a][b] for b in machines) for a in machines),
        stage_sizes=tuple(stages.count(stage) for stage in range(len(there))),
    )
    try:
        found = policy.routed(now, stages)
    except (LocalProtocolError, ValueError):
        return None
    return None if found is None else Simulator(now).run(jobs_of(now, found)).makespan_us


def main() -> None:
    arguments = options(__doc__).parse_args()
    report = Report(
        "planner_policies", "Stages that find their machines under churn", {"hours": HOURS}
    )
    published = replace(published_problem(), rules=PathRules(waves_fit=False))
    mended_line = replace(published, bytes_per_s=links_between(PLACES)[1])
    for world, problem in (("published", published), ("mended", mended_line)):
        start = plan(problem, ANEW).plan
        for percent in CHURNS:
            churn(report, f"{world}, {percent}%/h", problem, start, percent)
    report.publish(arguments.json)


Planner = Callable[[Account, Problem, Plan, Sequence[Change], Sequence[float]], None]
PLANNERS: Final[Mapping[str, Planner]] = {"anew": anew, "re-planned": replanned, "left": left}


def churn(report: Report, setting: str, problem: Problem, start: Plan, percent: int) -> None:
    """The hours of one world, by every policy."""
    changes = list(changes_of(len(problem.peers), percent))
    ends = [change.at_s for change in changes[1:]] + [float(HOURS * SECONDS_PER_HOUR)]
    spans = [end - change.at_s for change, end in zip(changes, ends, strict=True)]
    ideal = 0.0
    for name, planner in PLANNERS.items():
        account = Account()
        planner(account, problem, start, changes, spans)
        ideal = ideal or account.iterations
        report.rows.append(_row(setting, name, account, ideal, 0.0, 0.0))
    policies: dict[str, Policy] = {
        "swarm": Swarm(problem),
        "swarm, planned": Swarm(problem, plans=True),
        "ours": Ours(problem),
    }
    for name, policy in policies.items():
        world = World(problem, policy, dict(enumerate(start.stages)))
        world.play(changes)
        hourly = world.without_s / HOURS, world.standing_s / HOURS
        report.rows.append(_row(setting, name, world.account, ideal, *hourly))


def _row(
    setting: str, name: str, account: Account, ideal: float, without_s: float, standing_s: float
) -> dict[str, str | float]:
    return {
        "setting": setting,
        "policy": name,
        "iteration s": HOURS * SECONDS_PER_HOUR / account.iterations,
        "of anew": account.iterations / ideal,
        "moves an hour": account.moves / HOURS,
        "without a stage, s/h": without_s,
        "standing, s/h": standing_s,
    }


if __name__ == "__main__":
    main()
