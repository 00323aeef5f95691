"""What the rounds of a peer, and its way of averaging, are put together from.

What others bring stands here as they see it: the corpus is with the shares (shares.py), a way of
averaging has a file of its own (way.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from peer.facts import Facts, HeldPart, RoundTiming
from peer.observe.events import EventLog
from peer.ports import Network, PeerId, Work
from peer.state.kept_files import ProofFile
from peer.training.messages import Kept, Load
from protocol.content.samples import Float32Vector
from protocol.gossip.matchmaking import RoundSnapshot
from protocol.membership.book import Fault
from protocol.membership.records import Sign
from protocol.microbatch.trainer_messages import StageEvent
from protocol.run.amendments import AmendedSpec
from protocol.run.run_spec import RunSpec

from .shares import DataShares
from .way import TrainerLine, Way


class Checkpoints(Protocol):
    """What writes them, and what a trainer goes on from after a restart of the daemon.

    Between two rounds nothing is trained, and where a peer is alone nothing is on its way either:
    then a checkpoint is a state from which the same training follows, bit for bit.
    """

    def load(self) -> Load:
        """What the first trainer is told to load; later ones have the slow weights alone."""

    def began(self, line: TrainerLine) -> None:
        """A trainer has started."""

    async def between_rounds(self, way: Way) -> None:
        """Write one, if it is time."""

    async def write(self, way: Way) -> None:
        """Write one now."""

    async def write_last(self, way: Way, until_s: float) -> None:
        """Write one in the midst of a round; the trainer's part is waited for until then."""

    def took(self, kept: Kept) -> None:
        """The trainer's part is written, or is not."""

    def died(self) -> None:
        """The trainer is gone."""


class Microbatches(Protocol):
    """What deals with them, where the trainer holds a stage of a pipeline."""

    def began(self, line: TrainerLine) -> None:
        """A trainer has started; it holds none."""

    async def took(self, event: StageEvent) -> None:
        """The trainer has said something of them."""

    def step_of(self, step: float) -> float:
        """The nominal step at which a round was closed, as it counts for what comes next.

        A relay trains for as long as data peers do, so it is never ahead of them.
        """

    async def wait_unneeded(self) -> None:
        """After the last round: wait until nobody needs our trainer any more, or for long."""


class Company(Protocol):
    """Implemented by `peer.daemon.group.LinkedCompany`."""

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
    """What ways of averaging are put together from.

    Attributes:
        amended: the run spec, as it has been amended so far.
        held: what belongs to our group.
        slow_P: memory for the slow weights.
        company_of: the other peers, seen by what looks for partners for a fragment; 0 where the
            whole model is one vector.
        convict: bans a peer that was proved to have lied.
        proofs: of that, kept in the home.
        microbatches: None where the whole model is trained here.
    """

    amended: AmendedSpec
    held: HeldPart
    slow_P: Float32Vector
    facts: Facts
    company_of: Callable[[int], Company]
    shares: DataShares
    network: Network
    work: Work
    sign: Sign
    events: EventLog
    observe_round: Callable[[RoundTiming], None]
    checkpoints: Checkpoints
    convict: Callable[[PeerId], None]
    proofs: ProofFile
    microbatches: Microbatches | None = None

    @property
    def spec(self) -> RunSpec:
        """What the run was founded by: for all that is never amended."""
        return self.amended.founding
