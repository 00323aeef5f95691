"""The record of what one peer is and does.

The daemon, beats, `status`, metrics and events read it. A field is written by the part that makes
it true, or by a method here.
"""

import bisect
import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Self

import msgspec
import trio
from msgspec import structs

from protocol.admission.statements import Successor
from protocol.errors import InvalidRunSpec
from protocol.gossip.matchmaking import RoundSnapshot
from protocol.limits import MAX_FRAGMENTS_FREE, MAX_LINKS, MAX_MEMBERS
from protocol.membership.book import Fault
from protocol.membership.dial_back import NatKind, Reach
from protocol.membership.group import Group
from protocol.membership.view import View
from protocol.microbatch.core import MicrobatchEvent
from protocol.outcomes import AuditOutcome, RefusalReason, SkipReason
from protocol.routing.measures import LinkTimes, WorkTimes
from protocol.run.amendments import AmendedSpec
from protocol.run.layout import stage_of_part
from protocol.run.run_spec import RunSpec
from protocol.schedule.progress import TaskProgress
from protocol.trainer_messages import TrainerTime

RECENT_ROUNDS: Final = 50
"""Rounds of which the share that was averaged is told."""
RECENT_DEATHS: Final = 3
"""Deaths of the trainer of which the times are kept."""
RECENT_LOSSES: Final = 3
"""Validations whose losses are kept: one may be worse by chance."""


class PeerState(StrEnum):
    STARTING = "starting"
    CONNECTING = "connecting"
    """Looking for the swarm."""
    RETURNING = "returning"
    """Back with a checkpoint of the run, looking for the others."""
    DOWNLOADING = "downloading"
    """Taking run spec, data or weights from peers."""
    TRAINING = "training"
    PAUSED = "paused"
    """Told to rest: trains nothing, and serves others."""
    FINISHED = "finished"
    """The run is over; serving its state."""
    LEAVING = "leaving"


# --- the part of the model that is held -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartShape:
    layout_digest: str
    padded_parameters: int

    @classmethod
    def of_whole_model(cls, spec: RunSpec) -> Self:
        """The shape that the founder froze. Raises InvalidRunSpec: nobody has."""
        frozen = spec.frozen
        if frozen is None:
            raise InvalidRunSpec("the run spec does not say what its model looks like")
        return cls(frozen.layout_digest, frozen.padded_parameters)


@dataclass(frozen=True, slots=True)
class HeldPart:
    """The part of the model that a peer's group holds; `view` holds its other peers."""

    group: Group
    shape: PartShape
    codec: str
    view: View


# --- durations of rounds --------------------------------------------------------------------------

ROUND_SECONDS_BUCKETS: Final = (
    0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0,
)  # fmt: skip


class RoundPhase(StrEnum):
    TRAIN = "train"
    """Inner steps, from opening the round to closing it."""
    MATCH = "match"
    """Finding a partner."""
    EXCHANGE = "exchange"
    """Swapping vectors with the partner."""
    APPLY = "apply"
    """The outer step, and the trainer taking it over."""


class Durations:
    """A histogram. The library's own would read the wall clock, and expose it."""

    def __init__(self) -> None:
        self._in_bucket = [0] * (len(ROUND_SECONDS_BUCKETS) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._in_bucket[bisect.bisect_left(ROUND_SECONDS_BUCKETS, seconds)] += 1
        self.sum_s += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Upper bounds, and the number of durations up to each."""
        bounds = [str(bound) for bound in ROUND_SECONDS_BUCKETS] + ["+Inf"]
        return list(zip(bounds, itertools.accumulate(self._in_bucket), strict=True))


@dataclass(frozen=True, slots=True)
class RoundTiming:
    train_s: float
    match_s: float
    exchange_s: float
    apply_s: float


def _plain(record: "PipelineFacts | ReachFacts") -> dict[str, Any]:
    tree: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(record))
    return tree


# --- pipelines ------------------------------------------------------------------------------------


class MicrobatchTime(StrEnum):
    """Kinds of time, summed over microbatches that are under way at once."""

    COMPUTING = "computing"
    """The trainer works on one."""
    SENDING = "sending"
    """A boundary is on its way to the next peer."""
    WAITING = "waiting"
    """A boundary waits until the next peer has a slot and is in its iteration."""


@dataclass(slots=True)
class PipelineFacts:
    """A pipeline, as a peer that holds a stage of it knows it.

    Attributes:
        snapshot: digest of the snapshot that we plan from; None before the first.
        plan: digest of its plan; None while paths are drawn.
        planned_s: an iteration of that plan.
        iteration_s: the median of our last iterations.
        spent_s: since the start.
        other_plans: microbatches that came here by another plan than those of other data peers.
        paths: our own in the plan, each hop as `stage:peer`.
        replicas_apart: distance of our weights to those of the replica of our stage that we
            averaged with last, over their size. About ten times the relative error of the gradient
            that one of us would make in the other's place (docs/stages.md).
    """

    snapshot: str | None = None
    plan: str | None = None
    planned_s: float | None = None
    iteration_s: float | None = None
    spent_s: dict[MicrobatchTime, float] = field(
        default_factory=lambda: dict.fromkeys(MicrobatchTime, 0.0)
    )
    other_plans: int = 0
    links: tuple[LinkTimes, ...] = ()
    work: WorkTimes = field(default_factory=WorkTimes)
    paths: tuple[str, ...] = ()
    replicas_apart: float | None = None

    def to_json(self) -> dict[str, Any]:
        return _plain(self) | {
            "spent_s": {str(what): round(seconds, 3) for what, seconds in self.spent_s.items()},
            "links": [structs.asdict(link) for link in self.links],
            "work": structs.asdict(self.work),
        }


# --- reach ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class ReachFacts:
    """Whether and how others can reach this peer now.

    Attributes:
        reach: by any family of addresses.
        given: addresses that the user or the machine's provider has named, and where they stand.
        working: ours at which others get through.
        observed: the IP addresses that others see.
        relays: peers that relay for us.
        answers: number of peers that have told us.
        relayed_peers: those that we are connected to through relays alone.
        reservations, circuits, carried_bytes: of our own relay.
    """

    reach: Reach = Reach.UNKNOWN
    v4: Reach = Reach.UNKNOWN
    v6: Reach = Reach.UNKNOWN
    nat: NatKind = NatKind.UNKNOWN
    given: Mapping[str, str] = field(default_factory=dict)
    working: tuple[str, ...] = ()
    observed: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()
    answers: int = 0
    relayed_peers: int = 0
    reservations: int = 0
    circuits: int = 0
    carried_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        tree = _plain(self)
        del tree["given"], tree["working"]
        return {"reachable": tree.pop("reach"), **tree}


# --- the record -----------------------------------------------------------------------------------


class CheckpointOutcome(StrEnum):
    WRITTEN = "written"
    FAILED = "failed"
    """The disk refused, or the trainer died over it."""
    COPIED = "copied"
    """To `--checkpoint-upload`."""
    NOT_COPIED = "not_copied"


@dataclass(slots=True)
class CorpusFacts:
    """Where the pieces of the corpus are.

    Attributes:
        pieces: of the whole corpus; 0 before it is known.
        only_here: on no other machine that we have asked.
        fetched_bytes: from other peers.
        waited_s: time for which training stood still for pieces.
        unheld: what we wait for and nobody has, in a sentence; empty where somebody has it.
    """

    pieces: int = 0
    here: int = 0
    only_here: int = 0
    fetched_bytes: int = 0
    waited_s: float = 0.0
    unheld: str = ""


@dataclass(slots=True)
class DiskFacts:
    """The disk of the home, as the newest checkpoint has found it.

    Attributes:
        free_bytes: after it.
        checkpoint_bytes: of it.
        refusal: why the disk did not take the last checkpoint, or takes no piece of the corpus;
            empty where it did.
    """

    free_bytes: float = math.inf
    checkpoint_bytes: int = 0
    refusal: str = ""


@dataclass(slots=True)
class UnlinkedPeers:
    """Peers with which there is no link.

    Attributes:
        unreached: peers that most linked ones name as alive, and that we have failed to link with:
            since when, and why.
        refusing: peers that do not take us in, and why.
        turned_away: the last peer that we did not take in: when, who, why.
        failing: addresses to join by that nobody was reached at, and why.
    """

    unreached: dict[str, tuple[float, str]] = field(default_factory=dict)
    refusing: dict[str, str] = field(default_factory=dict)
    turned_away: tuple[float, str, str] | None = None
    failing: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class PackingFacts:
    """Vectors that travel packed, counted since the start.

    Attributes:
        packed, plain: partners' vectors that came as differences, and as codes.
        blocks: of those that came packed.
        misread: blocks of these whose sums showed a misreading, and that were sent again.
        whole: vectors of which only the digest was wrong, and that were sent again as a whole.
        code_bytes, sent_bytes: of our own vectors: what their codes take, and what was sent.
        seconds: what was spent on making our own vectors shorter.
    """

    packed: int = 0
    plain: int = 0
    blocks: int = 0
    misread: int = 0
    whole: int = 0
    code_bytes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class PartnerRecord:
    """Rounds that were averaged with one partner, and how long the exchanges took together."""

    averages: int = 0
    seconds: float = 0.0

    @property
    def average_s(self) -> float | None:
        return self.seconds / self.averages if self.averages else None


def _count_partner(
    partners: dict[str, PartnerRecord], partner_id: str, seconds: float, most: int
) -> None:
    """Count one more; of more than `most` partners those are kept that were first met last."""
    if partner_id not in partners and len(partners) >= most:
        del partners[next(iter(partners))]
    met = partners.setdefault(partner_id, PartnerRecord())
    met.averages += 1
    met.seconds += seconds


@dataclass(slots=True)
class Facts:
    """The current state of this peer. Counts are since the start; None is not known yet.

    Attributes:
        fraction: share of our quota done in the round in training.
        free: the snapshots that we look for partners with, by fragment; 0 where the whole model is
            one vector.
        training_averaged: our last round of training is averaged.
        run_over: the final averaging is done, too, in this life or before.
        recent: whether each of the last RECENT_ROUNDS rounds was averaged, oldest first.
        distances: `replica_distance` after each of the last averages, with its nominal step.
        deaths: trio's time of the trainer's last deaths, and their reasons, oldest first.
        micro_batches: sequences that the first and the newest trainer take at a time.
        losses_of_domains: of an expert's slow weights, by the number of the domain's expert;
            losses_together those of the ensemble, by the last `eval` here.
        losses: the newest of `validation_loss`, oldest first; `lowest_loss` of all.
        clock_ahead_s: how far the clocks of the peers that we have dialled are ahead of ours.
        replica_loss: validation loss of our own replica before the final averaging.
        inner_steps_per_round: of a nominal round.
        chosen_inner_steps: H, where each peer chooses its own; None where the run names one.
        earlier_tokens: trained before the start, by the newest checkpoint that the home had.
        debt: nominal steps that rounds have trained more than their lengths.
        checkpoint_at_s, training_since_s: trio's time of the last, and of the first training.
        steps_per_s: inner steps, smoothed.
        alone_steps_per_s: those of the trainer alone, by its calibration.
        gradient_norm: of an inner step, before clipping; 0 before the first.
        held: the part of the model that we hold.
        expert_run: the whole run, where it has experts; `spec` is then that of our expert.
        expert: the name of our expert.
        successor: the run that our founder has named to follow ours.
        fitting_experts: numbers of the experts that this machine can train.
        chosen_group: the group that we shall be in, before `held` is set.
        partners: averages in pairs, by partner; of MAX_MEMBERS, those that were first met last.
        num_pair_averages, newest_pair_averages: all of them; partners and seconds of the last.
        others_partners: what linked peers tell of theirs, by teller and partner.
        spent_s: the time of the trainer; its parts add up to what has passed since it was ready.
        stalled_s: time for which training stood still for averages that were late.
        diverged: chunks of the outer copy found to differ from a better one.
        healed, healed_s: those that were fetched, and how long that took.
        refused: contributions to fragments that were not taken, proposals refused at once,
            and all for another group.
        convicted: peers that were proved to have lied.
        stays_until_s: until then we keep our weights, whoever claims to be far ahead.
        lost_blocks, repeated_blocks: of the whole swarm, by changes of its members.
        progress: how far that is which we are doing, where somebody knows.
        ranks: processes of this machine that train as one; None before they do.
        loops: what codes vectors, for `trainer` and `daemon` (`peer.codec.Codec.loops_for`).
    """

    peer_id: str
    incarnation: int
    run_id: str | None = None
    state: PeerState = PeerState.STARTING
    round: int = 0
    fraction: float = 0.0
    nominal_step: float = 0.0
    free: dict[int, RoundSnapshot] = field(default_factory=dict)
    training_averaged: bool = False
    run_over: bool = False
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT_ROUNDS))
    distances: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT_ROUNDS))
    deaths: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=RECENT_DEATHS))
    micro_batches: tuple[int, int] | None = None
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_LOSSES))
    lowest_loss: float = math.inf
    clock_ahead_s: float = 0.0
    disk: DiskFacts = field(default_factory=DiskFacts)
    unlinked: UnlinkedPeers = field(default_factory=UnlinkedPeers)
    replica_loss: float | None = None
    inner_steps_per_round: int = 1
    chosen_inner_steps: int | None = None
    tokens: int = 0
    inner_steps: int = 0
    earlier_tokens: int = 0
    debt: float = 0.0
    checkpoints: Counter[CheckpointOutcome] = field(default_factory=Counter)
    checkpoint_at_s: float | None = None
    tokens_per_step: int = 0
    epoch: int = 0
    position: int = 0
    steps_per_s: float = 0.0
    alone_steps_per_s: float = 0.0
    training_since_s: float | None = None
    train_loss: float | None = None
    gradient_norm: float = 0.0
    validation_loss: float | None = None
    losses_of_domains: dict[int, float] = field(default_factory=dict)
    losses_together: dict[int, float] = field(default_factory=dict)
    replica_distance: float | None = None
    spec: AmendedSpec | None = None
    held: HeldPart | None = None
    chosen_group: Group | None = None
    expert_run: RunSpec | None = None
    successor: Successor | None = None
    expert: str | None = None
    fitting_experts: frozenset[int] = frozenset()
    parameters: int | None = None
    averaged: int = 0
    partners: dict[str, PartnerRecord] = field(default_factory=dict)
    num_pair_averages: int = 0
    newest_pair_averages: deque[tuple[str, float]] = field(
        default_factory=lambda: deque(maxlen=MAX_FRAGMENTS_FREE)
    )
    others_partners: dict[str, dict[str, PartnerRecord]] = field(default_factory=dict)
    spent_s: dict[TrainerTime, float] = field(
        default_factory=lambda: dict.fromkeys(TrainerTime, 0.0)
    )
    stalled_s: float = 0.0
    diverged: int = 0
    healed: int = 0
    healed_s: float = 0.0
    refused: Counter[RefusalReason] = field(default_factory=Counter)
    faults: Counter[Fault] = field(default_factory=Counter)
    audits: Counter[AuditOutcome] = field(default_factory=Counter)
    convicted: int = 0
    stays_until_s: float = -math.inf
    lost_blocks: int = 0
    repeated_blocks: int = 0
    corpus: CorpusFacts = field(default_factory=CorpusFacts)
    packing: PackingFacts = field(default_factory=PackingFacts)
    skipped: Counter[SkipReason] = field(default_factory=Counter)
    restarts: Counter[str] = field(default_factory=Counter)
    directory_restarts: int = 0
    phases: dict[RoundPhase, Durations] = field(
        default_factory=lambda: {phase: Durations() for phase in RoundPhase}
    )
    microbatches: Counter[MicrobatchEvent] = field(default_factory=Counter)
    pipeline: PipelineFacts = field(default_factory=PipelineFacts)
    codec: str | None = None
    ranks: int | None = None
    loops: dict[str, str] = field(default_factory=dict)
    reach: ReachFacts = field(default_factory=ReachFacts)
    doing: str = "starting"
    doing_since_s: float = 0.0
    progress: TaskProgress | None = None

    def now_doing(self, sentence: str, state: PeerState | None = None) -> None:
        if state is not None:
            self.state = state
        self.progress = None
        if sentence != self.doing:
            self.doing, self.doing_since_s = sentence, trio.current_time()

    def starts_trainer(self) -> None:
        compiles = False if self.spec is None else self.spec.founding.training.compile
        longer = ", which may take a minute to compile the model" if compiles else ""
        longer += " for a GPU" if compiles == "auto" else ""
        self.now_doing(f"starting the trainer{longer}")

    def progressed(self, progress: TaskProgress) -> None:
        """Note how far what we are doing is; threads may."""
        self.progress = progress

    @property
    def group(self) -> str | None:
        """Digest of the group that we are in, or shall be in."""
        group = self.chosen_group if self.held is None else self.held.group
        return None if group is None else group.digest

    @property
    def layout_digest(self) -> str | None:
        return None if self.held is None else self.held.shape.layout_digest

    @property
    def round_over(self) -> int:
        """The last round that is over, where steps are taken within rounds."""
        return self.round if self.state is PeerState.FINISHED else self.round - 1

    @property
    def step(self) -> int:
        return int(self.nominal_step)

    @property
    def inner_steps_per_average(self) -> int | None:
        if self.chosen_inner_steps is not None or self.spec is None:
            return self.chosen_inner_steps
        return self.spec.founding.sync.round_steps

    @property
    def round_s(self) -> float:
        """How long a nominal round takes at our speed; 0 before it is known."""
        return self.inner_steps_per_round / self.steps_per_s if self.steps_per_s else 0.0

    @property
    def own_round_s(self) -> float:
        """How long one of our own rounds takes, where it is longer than a nominal one."""
        steps = max(self.inner_steps_per_round, self.chosen_inner_steps or 0)
        return steps / self.steps_per_s if self.steps_per_s else 0.0

    def count_averaged(self) -> None:
        self.averaged += 1
        self.recent.append(True)

    def count_partner(self, partner_id: str, seconds: float) -> None:
        _count_partner(self.partners, partner_id, seconds, MAX_MEMBERS)
        self.num_pair_averages += 1
        self.newest_pair_averages.append((partner_id, seconds))

    def count_others_partners(self, teller_id: str, met: Iterable[tuple[str, float]]) -> None:
        """Count what a linked peer tells, partners and seconds; none takes more than its share."""
        others = self.others_partners
        if teller_id not in others and len(others) >= MAX_LINKS:
            return
        for partner_id, seconds in met:
            _count_partner(others.setdefault(teller_id, {}), partner_id, seconds, MAX_LINKS)

    def forget_others_partners(self, teller_id: str) -> None:
        """We are linked no longer: what is told counts from the next link on."""
        self.others_partners.pop(teller_id, None)

    def count_skipped(self, reason: SkipReason) -> None:
        self.skipped[reason] += 1
        self.recent.append(False)

    def count_death(self, reason: str) -> None:
        self.restarts[reason] += 1
        self.deaths.append((trio.current_time(), reason))

    def count_validation(self, loss: float) -> None:
        self.validation_loss = loss
        self.losses.append(loss)
        self.lowest_loss = min(self.lowest_loss, loss)

    def count_spent(self, seconds: Mapping[TrainerTime, float]) -> None:
        for into, more_s in seconds.items():
            self.spent_s[into] += more_s

    def count_timing(self, timing: RoundTiming) -> None:
        for phase in RoundPhase:
            self.phases[phase].observe(getattr(timing, f"{phase}_s"))

    @property
    def seconds(self) -> dict[str, float]:
        """Time by its use: first the trainer's, then what is done for averages beside it."""
        beside = {str(p): d.sum_s for p, d in self.phases.items() if p is not RoundPhase.TRAIN}
        trainer = {str(into): spent_s for into, spent_s in self.spent_s.items()}
        return {**trainer, "pack": self.packing.seconds, **beside}

    @property
    def averaged_share(self) -> float | None:
        """Share of the last RECENT_ROUNDS rounds; None before the first."""
        return sum(self.recent) / len(self.recent) if self.recent else None

    @property
    def holds_stage(self) -> bool:
        return self.held is not None and stage_of_part(self.held.group.part) is not None

    def compute_utilisation(self, now_s: float) -> float | None:
        """Tokens trained, over those that the trainer alone would have trained meanwhile."""
        if self.training_since_s is None or not self.alone_steps_per_s:
            return None
        possible = (now_s - self.training_since_s) * self.alone_steps_per_s * self.tokens_per_step
        return self.tokens / possible if possible > 0 else None
