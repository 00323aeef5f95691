"""What this peer knows of itself: beats, `status`, metrics and events all read it from here.

Each fact is written only by the part that makes it true; everything else reads.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum

import trio

from peer.observe.pipeline_facts import PipelineFacts
from peer.observe.reach_facts import ReachFacts
from peer.observe.status import RECENT_ROUNDS, Outcomes, PeerState
from peer.observe.timing import Durations, RoundPhase, RoundTiming
from peer.state.held_part import HeldPart
from protocol.gossip.matchmaking_events import RoundSnapshot
from protocol.membership.conduct import Fault
from protocol.membership.group import Group
from protocol.microbatch.core import Counted
from protocol.outcomes import AuditOutcome, RefusalReason, SkipReason
from protocol.run.amendments import AmendedSpec
from protocol.run.layout import stage_of_part


class CheckpointOutcome(StrEnum):
    """How a checkpoint ended."""

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
        here: of them on this machine.
        only_here: of them on no other machine that we have asked.
        fetched_bytes: that have come from other peers.
        waited_s: time for which training stood still for pieces.
    """

    pieces: int = 0
    here: int = 0
    only_here: int = 0
    fetched_bytes: int = 0
    waited_s: float = 0.0


@dataclass(slots=True)
class PackingFacts:
    """Vectors that travel packed, counted since the start.

    Attributes:
        packed, plain: partners' vectors that came as differences, and that came as codes though
            the run's codec packs.
        blocks: of those that came packed.
        misread: blocks of these that were read wrongly, found by their sums, and sent again.
        whole: vectors whose digest alone was wrong, and that were sent again as a whole.
        code_bytes, sent_bytes: what the codes of our own vectors take, and what of them travelled.
    """

    packed: int = 0
    plain: int = 0
    blocks: int = 0
    misread: int = 0
    whole: int = 0
    code_bytes: int = 0
    sent_bytes: int = 0


@dataclass(slots=True)
class Facts:
    """The current state of this peer.

    Attributes:
        fraction: share of our quota done in the round in training.
        nominal_step: as last told by the trainer.
        free: the snapshots that we look for partners with, by fragment; 0 where the whole model is
            one vector.
        ended: our last round of training is averaged.
        over: so is the final averaging, in this life or before.
        recent: whether each of the last RECENT_ROUNDS rounds was averaged, oldest first.
        replica_loss: validation loss of our own replica at the end of the training, before the
            final averaging.
        inner_steps_per_round: of a nominal round.
        chosen_inner_steps: H, where each peer chooses its own; None where the run names one.
        tokens, inner_steps: trained by this daemon since its start.
        earlier_tokens: trained before that, by the newest checkpoint that the home had.
        debt: nominal steps that rounds have trained more than their lengths.
        checkpoints: by how they ended.
        checkpoint_at_s: trio's time of the last; None before the first.
        steps_per_s: inner steps per second, smoothed.
        alone_steps_per_s: those of the trainer alone, by its calibration.
        gradient_norm: of an inner step, before clipping; 0 before the first.
        training_since_s: trio's time of the first training; None before.
        stalled_s: time for which training stood still for averages that were late.
        diverged, healed, healed_s: chunks of the outer copy found to differ from a better one,
            those that were fetched, and how long that took.
        spec: of the run, as amended so far; None before it is here.
        held: the part of the model that we hold; None before the run spec is here.
        chosen: the group that we shall be in, as soon as we know.
        refused: contributions of others to fragments that were not taken, and whatever was meant
            for another group, by reason.
        audits: of averages that other peers have signed, by outcome.
        convicted: peers that were proved to have lied.
        stays_until_s: until then we stay with our weights, whoever says to be far ahead.
        lost_blocks, repeated_blocks: of the whole swarm, by changes of its members.
        corpus: where its pieces come one by one.
        packing: of vectors that travel as differences.
        restarts: trainer restarts by reason.
        p2pd_restarts, directory_restarts: of what else the daemon supervises.
        phases: how long each phase of a round took.
        microbatches, pipeline: where we hold a stage.
        codec: of the run; None while unknown.
        reach: how others reach us.
        loops: what codes in it, for `trainer` and `daemon` (`peer.codec.Codec.loops_for`).
    """

    peer_id: str
    incarnation: int
    run_id: str | None = None
    state: PeerState = PeerState.STARTING
    round: int = 0
    fraction: float = 0.0
    nominal_step: float = 0.0
    free: dict[int, RoundSnapshot] = field(default_factory=dict)
    ended: bool = False
    over: bool = False
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT_ROUNDS))
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
    validation_round: int | None = None
    replica_distance: float | None = None
    spec: AmendedSpec | None = None
    held: HeldPart | None = None
    chosen: Group | None = None
    parameters: int | None = None
    averaged: int = 0
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
    p2pd_restarts: int = 0
    directory_restarts: int = 0
    phases: dict[RoundPhase, Durations] = field(
        default_factory=lambda: {phase: Durations() for phase in RoundPhase}
    )
    microbatches: Counter[Counted] = field(default_factory=Counter)
    pipeline: PipelineFacts = field(default_factory=PipelineFacts)
    codec: str | None = None
    loops: dict[str, str] = field(default_factory=dict)
    reach: ReachFacts = field(default_factory=ReachFacts)
    doing: str = "starting"
    doing_since_s: float = 0.0

    def now_doing(self, sentence: str, state: PeerState | None = None) -> None:
        """Set what this peer is doing, and its state."""
        if state is not None:
            self.state = state
        if sentence != self.doing:
            self.doing, self.doing_since_s = sentence, trio.current_time()

    @property
    def group(self) -> str | None:
        """Digest of the group that we are in, or are about to enter."""
        group = self.chosen if self.held is None else self.held.group
        return None if group is None else group.digest

    @property
    def layout_digest(self) -> str | None:
        """Digest of the layout of the part that we hold."""
        return None if self.held is None else self.held.shape.layout_digest

    @property
    def step(self) -> int:
        """Nominal inner step, in whole ones."""
        return int(self.nominal_step)

    @property
    def inner_steps_per_average(self) -> int | None:
        """H, chosen or of the run; None before it is known."""
        if self.chosen_inner_steps is not None or self.spec is None:
            return self.chosen_inner_steps
        return self.spec.founding.sync.round_steps

    @property
    def round_s(self) -> float:
        """How long a nominal round takes at our speed; 0 before it is known."""
        return self.inner_steps_per_round / self.steps_per_s if self.steps_per_s else 0.0

    @property
    def own_round_s(self) -> float:
        """The same of a round of our own, where that is longer."""
        steps = max(self.inner_steps_per_round, self.chosen_inner_steps or 0)
        return steps / self.steps_per_s if self.steps_per_s else 0.0

    def count_averaged(self) -> None:
        """A round was averaged."""
        self.averaged += 1
        self.recent.append(True)

    def count_skipped(self, reason: SkipReason) -> None:
        """A round was not averaged."""
        self.skipped[reason] += 1
        self.recent.append(False)

    def count_timing(self, timing: RoundTiming) -> None:
        """A round is over that took so long."""
        for phase in RoundPhase:
            self.phases[phase].observe(getattr(timing, f"{phase}_s"))

    def outcomes(self) -> Outcomes:
        """How rounds have ended."""
        share = sum(self.recent) / len(self.recent) if self.recent else None
        return Outcomes(self.averaged, dict(self.skipped), share)

    @property
    def holds_stage(self) -> bool:
        """Whether the part that we hold is a stage of a pipeline."""
        return self.held is not None and stage_of_part(self.held.group.part) is not None

    def compute_utilisation(self, now_s: float) -> float | None:
        """Tokens trained over what the trainer alone would have trained in the same wall time."""
        if self.training_since_s is None or not self.alone_steps_per_s:
            return None
        possible = (now_s - self.training_since_s) * self.alone_steps_per_s * self.tokens_per_step
        return self.tokens / possible if possible > 0 else None
