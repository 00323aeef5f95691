"""What a pipeline is asked for: machines on offer, the work, and the problem that they make.

Links are queued (one boundary at a time), a backward takes two forwards, and a stage is an equal
share of the model; copies and gaps are not counted, so figures are those of a good implementation.
The number of data peers follows from how often relays are visited: with equal slots they are n / L
of n machines.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from protocol.errors import LocalProtocolError, LocoError
from protocol.run.sections import PipelineSection

from .planner import SearchBudget
from .problem import Matrix, PathRules, PipelinePeer, Problem, StageWork
from .stage_orders import stage_orders
from .tables import GB, MachineOffer
from .workload import OF_ONE_MICROBATCH, Workload

REAL_BACKWARD_PERMILLE: Final = 2000
REAL_RULES: Final = PathRules(waves_fit=False)
"""Waves of different data peers are not in step; slots are kept to by the simulation."""
MOST_BY_DEFAULT: Final = 256
MAX_MICROBATCHES: Final = 4096


class CannotPlan(LocoError):
    """These machines cannot form this pipeline; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Question:
    """What to plan for.

    Attributes:
        microbatches: of one iteration; None takes two for every slot of the data peers.
        full_every: every so many iterations one skips nothing; 0 is never.
        budget: of a plan; None is what goes with the number of machines (effort.py).
    """

    offers: tuple[MachineOffer, ...]
    latency_us: Matrix
    bytes_per_s: Matrix
    workload: Workload
    stages: int
    visited: int
    microbatches: int | None = None
    codec: str = "bf16"
    rules: PathRules = REAL_RULES
    full_every: int = 0
    budget: SearchBudget | None = None

    @property
    def stage_state_bytes(self) -> int:
        """Training state of one stage."""
        whole = self.workload.state_bytes + self.workload.parameters * OF_ONE_MICROBATCH
        return whole // self.stages

    @property
    def too_small(self) -> tuple[MachineOffer, ...]:
        """Machines without the memory for a stage, as far as the table says."""
        needed = self.stage_state_bytes
        return tuple(o for o in self.offers if (o.memory_bytes or needed) < needed)


def rules_of(pipeline: PipelineSection) -> PathRules:
    """The limits of paths that a run spec gives to real machines."""
    return replace(
        REAL_RULES,
        max_swaps=pipeline.max_swaps,
        max_swap_distance=pipeline.max_swap_distance,
        max_swap_sum=pipeline.max_swap_sum,
        max_jump=pipeline.max_jump,
    )


def check(question: Question) -> None:
    """Refuse what no machines can do, and what these cannot.

    Raises:
        CannotPlan
    """
    machines, stages, layers = len(question.offers), question.stages, question.workload.num_layers
    if layers < 2:
        raise CannotPlan(f"a model of {layers} layer cannot be cut into stages")
    if not 2 <= stages <= layers:
        raise CannotPlan(f"{stages} stages of {layers} layers; choose 2 to {layers} with --stages")
    if machines < stages:
        fewer = ", or choose fewer stages with --stages" if machines > 1 else ""
        raise CannotPlan(
            f"{machines} machine{'s' * (machines > 1)} cannot hold {stages} stages; add machines"
            + fewer
        )
    if not 2 <= question.visited <= stages:
        raise CannotPlan(f"--visited must be 2 to {stages}, the stages; got {question.visited}")
    try:
        stage_orders(stages, question.visited, question.rules)
    except LocalProtocolError as error:
        raise CannotPlan(str(error)) from error
    microbatches = question.microbatches
    if microbatches is not None and not 1 <= microbatches <= MAX_MICROBATCHES:
        raise CannotPlan(f"--microbatches must be 1 to {MAX_MICROBATCHES}")
    if question.full_every < 0:
        raise CannotPlan(f"--full-every must be 0 (never) or more; got {question.full_every}")
    _check_memory(question)


def _check_memory(question: Question) -> None:
    if len(question.too_small) == len(question.offers):
        needed, most = (
            f"{size / GB:.1f} GB"
            for size in (
                question.stage_state_bytes,
                max(offer.memory_bytes or 0 for offer in question.offers),
            )
        )
        raise CannotPlan(
            f"no machine can hold a stage, stage 0 or another: its training state takes {needed},"
            f" the largest machine has {most}; choose more stages with --stages, or larger machines"
        )


def numbers_of_data_peers(question: Question, visited: int) -> Iterator[int]:
    """How many machines could hold the data; first the most of which each has relays of its own."""
    likely = _likely_data_peers(question, visited)
    near = sorted((likely - 1, likely, likely + 1), key=lambda n: (abs(n - likely), n))
    fitting = [n for n in near if 1 <= n <= len(question.offers) - (question.stages - 1)]
    yield from sorted(fitting, key=lambda number: number * visited > len(question.offers))


def _likely_data_peers(question: Question, visited: int) -> int:
    machines = len(question.offers)
    return min(max(1, round(machines / visited)), machines - (question.stages - 1))


def microbatches_of(question: Question, visited: int) -> int:
    """The microbatches of an iteration: as asked for, or two waves of the likely data peers."""
    slots = sorted((offer.slots for offer in question.offers), reverse=True)
    two_waves = 2 * sum(slots[: _likely_data_peers(question, visited)])
    return question.microbatches or min(two_waves, MOST_BY_DEFAULT)


def problem_of(question: Question, visited: int, data_peers: int, microbatches: int) -> Problem:
    """The problem with this number of data peers, and the relays shared out evenly."""
    relays = question.stages - 1
    share, rest = divmod(len(question.offers) - data_peers, relays)
    sizes = (data_peers, *(share + (stage < rest) for stage in range(relays)))
    peers = tuple(
        PipelinePeer(offer.name, max(1, offer.compute_us // question.stages), offer.slots)
        for offer in question.offers
    )
    work = StageWork(
        question.workload.boundary_bytes(question.codec),
        backward_permille=REAL_BACKWARD_PERMILLE,
    )  # fmt: skip
    return Problem(
        peers,
        question.latency_us,
        question.bytes_per_s,
        work,
        sizes,
        visited,
        microbatches,
        question.rules,
        queued_links=True,
    )
