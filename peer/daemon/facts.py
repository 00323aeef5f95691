"""What this peer knows of itself: the one place that beats, `status`, metrics and the events read.

Only the part that makes a fact true writes it. Everything else reads.
"""

from collections import Counter
from dataclasses import dataclass, field

import trio

from peer.observe.status import PeerState
from protocol.outcomes import RefusalReason, SkipReason
from protocol.rounds import nominal_step

from .held_part import HeldPart


@dataclass(slots=True)
class Facts:
    """The present.

    Attributes:
        fraction: share of our quota done in the round in training.
        tokens, inner_steps: trained by this daemon since its start.
        steps_per_s: inner steps per second, smoothed.
        alone_steps_per_s: those of the trainer alone, by its calibration.
        training_since_s: trio's time of the first training; None before.
        stalled_s: time for which training stood still for averages that were late.
        diverged, healed, healed_s: chunks of the outer copy found to differ from a better one,
            those that were fetched, and how long that took.
        held: the part of the model that we hold; None before the run spec is here.
        refused: contributions of others to fragments that were not taken, and whatever was meant
            for another group, by reason.
        lost_blocks, repeated_blocks: of the whole swarm, by changes of its members.
        restarts: trainer restarts by reason.
    """

    peer_id: str
    incarnation: int
    run_id: str | None = None
    state: PeerState = PeerState.STARTING
    round: int = 0
    fraction: float = 0.0
    inner_steps_per_round: int = 1
    tokens: int = 0
    inner_steps: int = 0
    tokens_per_step: int = 0
    epoch: int = 0
    position: int = 0
    steps_per_s: float = 0.0
    alone_steps_per_s: float = 0.0
    training_since_s: float | None = None
    train_loss: float | None = None
    validation_loss: float | None = None
    validation_round: int | None = None
    replica_distance: float | None = None
    held: HeldPart | None = None
    parameters: int | None = None
    averaged: int = 0
    stalled_s: float = 0.0
    diverged: int = 0
    healed: int = 0
    healed_s: float = 0.0
    refused: Counter[RefusalReason] = field(default_factory=Counter)
    lost_blocks: int = 0
    repeated_blocks: int = 0
    skipped: Counter[SkipReason] = field(default_factory=Counter)
    restarts: Counter[str] = field(default_factory=Counter)
    doing: str = "starting"
    doing_since_s: float = 0.0

    def now_doing(self, sentence: str, state: PeerState | None = None) -> None:
        """Say what goes on, and in which state that is."""
        if state is not None:
            self.state = state
        if sentence != self.doing:
            self.doing, self.doing_since_s = sentence, trio.current_time()

    @property
    def group(self) -> str | None:
        """Digest of the group that we are in."""
        return None if self.held is None else self.held.group.digest

    @property
    def layout_digest(self) -> str | None:
        """Of the part that we hold."""
        return None if self.held is None else self.held.shape.layout_digest

    @property
    def step(self) -> int:
        """Nominal inner step."""
        return nominal_step(self.round, self.inner_steps_per_round, self.fraction)

    def compute_utilisation(self) -> float | None:
        """Tokens trained over what the trainer alone would have trained in the same wall time."""
        if self.training_since_s is None or not self.alone_steps_per_s:
            return None
        elapsed_s = trio.current_time() - self.training_since_s
        possible = elapsed_s * self.alone_steps_per_s * self.tokens_per_step
        return self.tokens / possible if possible > 0 else None
