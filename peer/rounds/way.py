"""A way of averaging, as the round loop sees it, and the trainer, as a way of averaging sees it.

    RoundLoop (loop.py)         lives of the trainer, rounds, validation, the end of the run
      has a Way                 what is exchanged with the other peers, and when
        PairRounds              NoLoCo: whole models, or fragments, each with a partner of its own
        FragmentRounds          Streaming DiLoCo: fragments, each at its own moment, with all

Events go into a way; it commands the trainer through the `TrainerLine` of the current life, and
delays the next round by not returning.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from peer.facts import HeldPart, RoundTiming
from peer.runtime import PeerId
from peer.state.kept_files import ProofFile
from peer.training.messages import Kept, Load, Ready, RoundClosed, SyncEvent, TrainerCommand
from peer.training.ports import Trainer, TrainerDied
from protocol.content.samples import Float32Vector
from protocol.gossip.matchmaking import RoundSnapshot
from protocol.membership.book import Fault
from protocol.membership.view import Member
from protocol.microbatch.trainer_messages import StageEvent
from protocol.run.amendments import AmendedSpec
from protocol.run.run_spec import RunSpec
from protocol.schedule.rounds import RoundPlan

from .domains import MeasuredDomains
from .services import Services
from .shares import DataShares


class TrainerLine:
    """One life of the trainer, with which `nursery` ends."""

    def __init__(self, trainer: Trainer, nursery: trio.Nursery) -> None:
        self.trainer = trainer
        self.nursery = nursery

    async def send(self, command: TrainerCommand) -> None:
        """Send; if the trainer is gone, the reader of its events learns of it."""
        try:
            await self.trainer.send(command)
        except TrainerDied:
            pass


class Way(Protocol):
    """A way of averaging while rounds run."""

    def enter(self, others: Sequence[Member]) -> None:
        """A life of the trainer begins: go on where the others are."""

    def next_round(self, others: Sequence[Member]) -> RoundPlan | None:
        """The next round of training; None when the training is over."""

    def closes_early(self, steps: int, others: Sequence[Member]) -> bool:
        """Whether the round in training, so far, should be closed before its quota is done."""

    async def next_final_round(self) -> RoundPlan | None:
        """After the training: the next round without steps; None when averaging is over.

        Raises:
            JoinAgain: the others have ended the run without us.
        """

    def on_trainer_started(self, line: TrainerLine, ready: Ready) -> None:
        """A trainer has started; it has nothing loaded."""

    def on_progress(self) -> None:
        """The trainer tells how far it is: it has taken what it loaded."""

    async def on_round_closed(self, closed: RoundClosed, others: Sequence[Member]) -> None:
        """Have the work of a closed round averaged; returns when the next may begin."""

    async def on_event(self, event: SyncEvent) -> None:
        """Handle an event about a send or a merge."""

    async def on_trainer_died(self) -> None:
        """The trainer is gone: end what needs one."""

    def leave(self) -> None:
        """Begin no further exchange: this peer is going."""

    async def wait_idle(self) -> None:
        """Wait until no exchange is under way that is worth waiting for."""


class Checkpoints(Protocol):
    """Writes checkpoints; tells what a trainer goes on from after a restart of the daemon.

    Between two rounds of a peer alone nothing is trained or on its way: a checkpoint of then is a
    state from which the same training follows, bit for bit.
    """

    def load(self) -> Load:
        """The state that the first trainer loads; later ones have the slow weights alone."""

    def on_trainer_started(self, line: TrainerLine) -> None: ...

    async def between_rounds(self, way: Way) -> None:
        """Write a checkpoint, if it is time."""

    async def write(self, way: Way) -> None:
        """Write a checkpoint now."""

    async def write_last(self, way: Way, until_s: float) -> None:
        """Write a checkpoint during a round; the trainer's part is waited for until then."""

    def on_kept(self, kept: Kept) -> None:
        """The trainer has written its part, or could not."""

    def on_trainer_died(self) -> None:
        """Forget what the trainer had in hand."""


class Microbatches(Protocol):
    """Deals with microbatches, where the trainer holds a stage of a pipeline."""

    def began(self, line: TrainerLine) -> None:
        """A trainer has started; it holds none."""

    async def took(self, event: StageEvent) -> None:
        """The trainer has said something of them."""

    def step_of(self, step: float) -> float:
        """Where a round was closed: a relay trains as long as data peers, never ahead of them."""

    async def wait_unneeded(self) -> None:
        """After the last round: wait until nobody needs our trainer any longer, or for long."""


class Candidates(Protocol):
    """The other peers, as the search for partners sees them."""

    def free(self) -> Sequence[tuple[PeerId, RoundSnapshot]]:
        """The others that say they look for a partner, and what they bring."""

    def present(self, *, ended: bool) -> Sequence[PeerId]:
        """The others that train and have not ended, or those that have ended and not finished."""

    def announce(self, snapshot: RoundSnapshot | None) -> None:
        """Tell all that we look for a partner with this snapshot, or that we look for none."""

    def blame(self, peer_id: PeerId, fault: Fault) -> None:
        """Hold a fault against a peer."""

    async def changed(self) -> None:
        """Wait until any of this may have changed."""


@dataclass(frozen=True, slots=True)
class AveragingParts:
    """The parts that ways of averaging are put together from.

    Attributes:
        slow_P: memory for the slow weights.
        candidates_of: for a fragment; 0 where the whole model is one vector.
        convict: bans a peer that was proved to have lied; `proofs` of that are kept in the home.
        microbatches: None where the whole model is trained here.
        domains: None without experts.
    """

    services: Services
    amended: AmendedSpec
    held: HeldPart
    slow_P: Float32Vector
    candidates_of: Callable[[int], Candidates]
    shares: DataShares
    observe_round: Callable[[RoundTiming], None]
    checkpoints: Checkpoints
    convict: Callable[[PeerId], None]
    proofs: ProofFile
    microbatches: Microbatches | None = None
    domains: MeasuredDomains | None = None

    @property
    def spec(self) -> RunSpec:
        return self.amended.founding
