"""The question to a planner: machines on offer, the work, and the problem that they make.

Links are queued (one boundary at a time), a backward takes two forwards, and a stage is an equal
share of the model; copies and gaps are not counted, so figures are those of a good implementation.
The number of data peers follows from how often relays are visited: with equal slots they are n / L
of n machines.

Between two stages travels one value for each token and hidden unit. Training state is counted in
fp32: weights, gradient and AdamW's two moments of each parameter, or Muon's one of those in the
matrices of the blocks; activations are limited by `slots`.

The time of a simulated iteration grows with the machines, that of a start and of a bound with their
square and cube. So with many machines less is tried; `told` says so to the user.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, get_args

from protocol.errors import LocalProtocolError, Unusable
from protocol.run.needs import (
    FP32_BYTES,
    parameters_of,
    resident_parameters,
    sharding_fault,
    state_bytes_of,
)
from protocol.run.run_spec import RunSpec
from protocol.run.sections import BOUNDARY_BITS, BoundaryCodec, PipelineSection
from protocol.run.ways import CODECS

from .problem import (
    THOUSAND,
    US_PER_S,
    Matrix,
    PathRules,
    PipelinePeer,
    Problem,
    StageWork,
    stage_orders,
)
from .tables import MachineOffer

# --- workload -------------------------------------------------------------------------------------
TRAINING_PER_FORWARD: Final = 3
"""Forward and backward, in forwards."""
BOUNDARY_CODECS: Final[tuple[str, ...]] = get_args(BoundaryCodec)


@dataclass(frozen=True, slots=True)
class Workload:
    """A run, as far as its time and memory depend on it.

    Attributes:
        sequences: of one microbatch.
        batch_microbatches: of one inner step of a replica.
        vector_bytes: the whole model, as replicas send it.
        state_bytes: training state of the whole model.
        resident: parameters that each card has, even where most are shared out; 0 where they
            cannot be.
    """

    parameters: int
    num_layers: int
    hidden_size: int
    context_length: int
    sequences: int
    batch_microbatches: int
    inner_steps: int
    vector_bytes: int
    state_bytes: int
    resident: int = 0

    @property
    def tokens(self) -> int:
        return self.sequences * self.context_length

    def state_bytes_on(self, gpus: int) -> int:
        """Training state on each of the cards: moments are shared out (ZeRO-2)."""
        on_all = 2 * FP32_BYTES * self.parameters  # weights and gradient
        return on_all + -(-(self.state_bytes - on_all) // gpus)

    def sharded_bytes_on(self, gpus: int) -> int:
        """Training state on each card where weights and gradients are shared out, too (ZeRO-3)."""
        if gpus == 1 or not self.resident:
            return self.state_bytes_on(gpus)
        return 2 * FP32_BYTES * self.resident + -(-self.state_bytes // gpus)

    def shards_on(self, offer: MachineOffer) -> bool:
        """Whether its cards share out weights too, since they cannot hold them whole."""
        can = offer.gpus > 1 and self.resident > 0
        return can and bool(too_small_of([offer], self.state_bytes_on(offer.gpus)))

    def step_us(self, offer: MachineOffer) -> int:
        """A step of a machine that trains alone, with its cards' exchanges, which nothing hides."""
        sequences = -(-self.batch_microbatches * self.sequences // offer.gpus)
        computing = sequences * offer.compute_us // self.sequences
        # Each card sends all of the gradient but its own part, and gets as much of new weights.
        forwards, exchanges = TRAINING_PER_FORWARD, 2
        if self.shards_on(offer):  # layers are computed again, each pass gets the weights twice
            forwards, exchanges = forwards + 1, 3 * -(-sequences // self.sequences)
        sent = exchanges * FP32_BYTES * self.parameters * (offer.gpus - 1) // offer.gpus
        return forwards * computing + sent * US_PER_S // offer.gpu_bytes_per_s

    def boundary_bytes(self, codec: str) -> int:
        return self.tokens * self.hidden_size * BOUNDARY_BITS[codec] // 8


def workload_of(spec: RunSpec, sequences: int | None = None) -> Workload:
    """The workload of a run spec, with microbatches of this many sequences if that is given.

    Raises:
        InvalidRunSpec: its model's sizes are not in it.
    """
    each = sequences or spec.microbatch_sequences
    each = min(each, spec.training.batch_size)
    parameters = parameters_of(spec)
    return Workload(
        parameters,
        spec.model.num_layers,
        spec.model.hidden_size,
        spec.model.context_length,
        each,
        max(1, spec.training.batch_size // each),
        spec.sync.round_steps,
        int(parameters * CODECS[spec.sync.codec].bytes_per_value),
        state_bytes_of(spec, parameters),
        0 if sharding_fault(spec) else resident_parameters(spec, parameters),
    )


# --- effort ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Effort:
    """How much a planner tries.

    Attributes:
        machines: the most that get this effort.
        numbers: of data peers; one is the likeliest alone.
        searches: with each of them, with different seeds.
        evaluations: iterations simulated by a search, at most.
        judging: evaluations by which it is mended for other ways of working and for changes.
        places: stages and places at which one more machine is tried.
        brief: evaluations by which these are compared.
        planned_anew: searches by which the best of them are planned anew; 0 mends alone.
        bound: whether the lower bound is computed.
    """

    machines: int
    numbers: int
    searches: int
    evaluations: int
    judging: int
    places: int
    brief: int
    planned_anew: int
    bound: bool = True

    @property
    def simulated(self) -> int:
        return self.numbers * self.searches * self.evaluations

    def told(self, machines: int) -> str:
        """A sentence of what is less than for few machines; empty where nothing is."""
        whole = EFFORTS[0]
        if self.machines == whole.machines:
            return ""
        counts = (
            (self.simulated, whole.simulated, "iterations simulated for a plan"),
            (self.numbers, whole.numbers, "numbers of data peers tried"),
            (self.places, whole.places, "places tried for one more machine"),
        )
        less = [f"{what}: {own:,}, not {usual:,}" for own, usual, what in counts if own < usual]
        if whole.planned_anew and not self.planned_anew:
            less.append("nothing that would help was planned anew")
        if not self.bound:
            less.append("no lower bound")
        return f"{machines} machines are many, so less was tried ({'; '.join(less)})"


EFFORTS: Final = (
    Effort(16, 3, 3, 300, judging=200, places=24, brief=60, planned_anew=2),
    Effort(48, 3, 1, 300, judging=60, places=8, brief=30, planned_anew=1),
    Effort(128, 2, 1, 250, judging=40, places=6, brief=20, planned_anew=0),
    Effort(256, 1, 1, 300, judging=40, places=3, brief=20, planned_anew=0),
    Effort(1024, 1, 1, 40, judging=8, places=1, brief=8, planned_anew=0, bound=False),
)


def effort_for(machines: int, evaluations: int | None = None) -> Effort:
    effort = next((each for each in EFFORTS if machines <= each.machines), EFFORTS[-1])
    return effort if evaluations is None else replace(effort, evaluations=evaluations)


# --- question -------------------------------------------------------------------------------------
MOST_BY_DEFAULT: Final = 256
MAX_MICROBATCHES: Final = 4096


class CannotPlan(Unusable):
    """These machines cannot form this pipeline; the message says what to change."""


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """The machines, the work, and the user's choices.

    Attributes:
        microbatches: of one iteration; None takes two for every slot of the data peers.
        full_every: one iteration in this many skips nothing; 0 is never.
        evaluations: of a search; None is what goes with the number of machines.
    """

    offers: tuple[MachineOffer, ...]
    latency_us: Matrix
    bytes_per_s: Matrix
    workload: Workload
    stages: int
    visited: int
    microbatches: int | None = None
    codec: str = "bf16"
    rules: PathRules = field(default_factory=PathRules)
    full_every: int = 0
    evaluations: int | None = None

    @property
    def stage_state_bytes(self) -> int:
        """Training state of one stage, with a gradient of one microbatch (decision 0042)."""
        whole = self.workload.state_bytes + self.workload.parameters * FP32_BYTES
        return whole // self.stages

    @property
    def too_small(self) -> tuple[MachineOffer, ...]:
        return too_small_of(self.offers, self.stage_state_bytes)

    @property
    def too_small_for_the_whole(self) -> tuple[MachineOffer, ...]:
        each = self.workload.sharded_bytes_on
        return tuple(o for o in self.offers if too_small_of([o], each(o.gpus)))


def too_small_of(offers: Sequence[MachineOffer], state_bytes: int) -> tuple[MachineOffer, ...]:
    """Machines of which a card is known to lack the memory for so much training state."""
    return tuple(o for o in offers if o.memory_bytes is not None and o.memory_bytes < state_bytes)


def rules_of(pipeline: PipelineSection) -> PathRules:
    return PathRules(max_jump=pipeline.max_jump)


def check(question: PlanQuestion) -> None:
    """Raises CannotPlan: no machines can do this, or these cannot."""
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


def _check_memory(question: PlanQuestion) -> None:
    if len(question.too_small) == len(question.offers):
        needed, most = (
            f"{size / 1e9:.1f} GB"
            for size in (
                question.stage_state_bytes,
                max(offer.memory_bytes or 0 for offer in question.offers),
            )
        )
        raise CannotPlan(
            f"no machine can hold a stage, stage 0 or another: its training state takes {needed},"
            f" the largest machine has {most}; choose more stages with --stages, or larger machines"
        )


def numbers_of_data_peers(question: PlanQuestion, visited: int) -> Iterator[int]:
    """How many machines could hold the data; first the most of which each has relays of its own."""
    likely = _likely_data_peers(question, visited)
    near = sorted((likely - 1, likely, likely + 1), key=lambda n: (abs(n - likely), n))
    fitting = [n for n in near if 1 <= n <= len(question.offers) - (question.stages - 1)]
    yield from sorted(fitting, key=lambda number: number * visited > len(question.offers))


def _likely_data_peers(question: PlanQuestion, visited: int) -> int:
    machines = len(question.offers)
    return min(max(1, round(machines / visited)), machines - (question.stages - 1))


def microbatches_of(question: PlanQuestion, visited: int) -> int:
    slots = sorted((offer.slots for offer in question.offers), reverse=True)
    two_waves = 2 * sum(slots[: _likely_data_peers(question, visited)])
    return question.microbatches or min(two_waves, MOST_BY_DEFAULT)


def problem_of(question: PlanQuestion, visited: int, data_peers: int, microbatches: int) -> Problem:
    relays = question.stages - 1
    share, rest = divmod(len(question.offers) - data_peers, relays)
    sizes = (data_peers, *(share + (stage < rest) for stage in range(relays)))
    peers = tuple(
        PipelinePeer(offer.name, max(1, offer.compute_us // question.stages), offer.slots)
        for offer in question.offers
    )
    boundary_bytes = question.workload.boundary_bytes(question.codec)
    work = StageWork(boundary_bytes, backward_permille=2 * THOUSAND)
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
