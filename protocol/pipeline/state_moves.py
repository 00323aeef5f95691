"""What it costs that machines change their stages.

A machine that takes a stage on fetches its state (weights, gradients' sums, moments) from the
machine that held it before and has the best link to it. With

    F(m)   the fetch of machine m and its start on the new stage, in microseconds; those of
           different machines run at once
    D      until the last one is there: the largest F, or longer where a shared line out carries
           several
    R(m)   how many machines held the stage that m leaves, m among them
    I      the new plan's iteration, J that of the plan that runs meanwhile, with the same machines
           and no moves (there is none if nobody is left of a stage: J is infinite)
    N      the horizon: iterations that the new plan is expected to live

the moves cost

    late   D * (1 - I/J)        the new plan's gain begins after D: D / J iterations are run in D
                                where D / I would have been. Where D is longer than N * J, all
                                N are run without the gain: N * (J - I)
    idle   sum of F(m) / R(m)   a machine has memory for one stage, so it works on none while it
                                fetches, and its old stage runs with the R - 1 others; a newcomer
                                leaves nothing behind

and a plan's price is I + (late + idle) / N. So a move pays if it gains more over N iterations than
it costs once; the longer the horizon, the freer the moves. That boundaries share the links with the
state is not priced, nor that a stage with one machine fewer may not be what holds the pipeline up:
the first makes moves dearer, the second cheaper.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.errors import LocalProtocolError

from .problem import US_PER_S, Problem
from .takeover import NOBODY


@dataclass(frozen=True, slots=True)
class MoveTerms:
    """What moves of stages cost, and what they must gain.

    Attributes:
        state_bytes: of each stage.
        horizon: iterations that a new plan is expected to live.
        restart_us: from having the state to working with it.
        orphan_us: what it takes to get a stage that no machine holds any more, from wherever it is
            kept.
        least_gain_permille: of an iteration; a plan that gains less is not worth a change.
    """

    state_bytes: tuple[int, ...]
    horizon: int
    restart_us: int = 10 * US_PER_S
    orphan_us: int = 600 * US_PER_S
    least_gain_permille: int = 10

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            LocalProtocolError
        """
        least = min(self.restart_us, self.orphan_us, *self.state_bytes)
        if self.horizon < 1 or least < 0:
            raise LocalProtocolError("horizon >= 1; state_bytes, restart_us and orphan_us >= 0")


@dataclass(frozen=True, slots=True)
class StateMove:
    """A machine that takes a stage on.

    Attributes:
        left: the stage that it held before; None for a newcomer.
        source: the machine that it fetches the stage from; None if nobody holds it.
        fetch_us: until it works on the new stage.
    """

    machine: int
    left: int | None
    taken: int
    source: int | None
    fetch_us: int


class StateMoves:
    """Prices of moves away from one arrangement.

    Args:
        before: the stage that each machine of the problem holds; NOBODY for newcomers.
    """

    def __init__(self, problem: Problem, before: Sequence[int], terms: MoveTerms) -> None:
        if len(terms.state_bytes) != problem.num_stages:
            raise LocalProtocolError("state_bytes has one entry for each stage")
        self.problem = problem
        self.before = tuple(before)
        self.terms = terms
        self.meanwhile_us: int | None = None
        self._holders = Counter(self.before)
        self._moves: dict[tuple[int, int], StateMove] = {}
        self._costs: dict[tuple[int, ...], tuple[int, int]] = {}

    def of(self, stages: Sequence[int]) -> list[StateMove]:
        """The moves to this arrangement, by machine."""
        return [
            self._move(machine, stage)
            for machine, (held, stage) in enumerate(zip(self.before, stages, strict=True))
            if stage not in (held, NOBODY)
        ]

    def cost_us(self, stages: Sequence[int], makespan_us: int) -> int:
        """What the moves to an arrangement cost once: late and idle."""
        key = tuple(stages)
        if (found := self._costs.get(key)) is None:
            moves = self.of(stages)
            idle = sum(m.fetch_us // self._holders[m.left] for m in moves if m.left is not None)
            found = self._costs[key] = self._longest_us(moves), idle
        longest, idle = found
        meanwhile_us = self.meanwhile_us
        if meanwhile_us is None:
            return longest + idle
        waited = min(longest, self.terms.horizon * meanwhile_us)
        return waited * max(0, meanwhile_us - makespan_us) // meanwhile_us + idle

    def surcharge(self, stages: Sequence[int], makespan_us: int) -> int:
        """The same for each iteration of the horizon."""
        return self.cost_us(stages, makespan_us) // self.terms.horizon

    def _move(self, machine: int, stage: int) -> StateMove:
        if (found := self._moves.get((machine, stage))) is None:
            size = self.terms.state_bytes[stage]
            found = min(
                (self._from(source, machine, stage, size) for source in self._sources(stage)),
                key=lambda move: (move.fetch_us, move.source),
                default=StateMove(machine, self._left(machine), stage, None, self.terms.orphan_us),
            )
            self._moves[machine, stage] = found
        return found

    def _from(self, source: int, machine: int, stage: int, size: int) -> StateMove:
        way = -(-size * US_PER_S // self.problem.rate(source, machine))
        fetch_us = self.problem.latency_us[source][machine] + way
        return StateMove(
            machine, self._left(machine), stage, source, fetch_us + self.terms.restart_us
        )

    def _left(self, machine: int) -> int | None:
        stage = self.before[machine]
        return None if stage == NOBODY else stage

    def _sources(self, stage: int) -> list[int]:
        return [machine for machine, held in enumerate(self.before) if held == stage]

    def _longest_us(self, moves: Sequence[StateMove]) -> int:
        sent: Counter[int] = Counter()
        for move in moves:
            if move.source is not None:
                sent[move.source] += self.terms.state_bytes[move.taken]
        rates = self.problem.out_bytes_per_s
        shared = [-(-size * US_PER_S // rates[m]) for m, size in sent.items()] if rates else []
        return max([*shared, *(move.fetch_us for move in moves)], default=0)
