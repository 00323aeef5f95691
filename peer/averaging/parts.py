"""What a way of averaging is put together from, and what the peer sees of it.

Each way has two vectors, the slow weights and an outer momentum, which are what a joiner takes
over; a lock under which they move; rounds, which drive the trainer; and something that serves other
peers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Protocol

import trio

from peer.facts import Facts, HeldPart, RoundTiming
from peer.observe.events import EventLog
from peer.ports import Network, PeerId, Work
from peer.rounds.checkpoints import Checkpoints
from peer.rounds.loop import RoundLoop
from peer.rounds.microbatches import Microbatches
from peer.rounds.shares import DataShares
from peer.rounds.validation import Validation
from peer.rounds.way import Way
from peer.state.kept_proofs import KeptProofs
from peer.training.ports import Float32Vector, StartTrainer
from protocol.gossip.matchmaking_events import RoundSnapshot
from protocol.membership.book import Fault
from protocol.membership.records import Sign
from protocol.run.amendments import AmendedSpec
from protocol.run.run_spec import RunSpec
from protocol.run.ways import WAYS

# --- the other peers of the group, as gossip sees them --------------------------------------------


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


# --- parts ----------------------------------------------------------------------------------------


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
    proofs: KeptProofs
    microbatches: Microbatches | None = None

    @property
    def spec(self) -> RunSpec:
        """What the run was founded by: for all that is never amended."""
        return self.amended.founding

    def validation(self) -> Validation:
        """Validation of the slow weights, as often as the run asks for."""
        return Validation(self.spec.sync.validate_every, self.facts, self.events)

    def loop(self, way: Way, validation: Validation, start_trainer: StartTrainer) -> RoundLoop:
        """The rounds of this way of averaging."""
        return RoundLoop(
            way,
            spec=self.amended,
            facts=self.facts,
            view=self.held.view,
            shares=self.shares,
            validation=validation,
            start_trainer=partial(start_trainer, self.slow_P),
            events=self.events,
            checkpoints=self.checkpoints,
            microbatches=self.microbatches,
        )


class Averaging(Protocol):
    """A way of averaging, before and while rounds run.

    Attributes:
        slow_P, momentum_P: fp32 [P].
        lock: held while they move.
    """

    slow_P: Float32Vector
    momentum_P: Float32Vector
    lock: trio.Lock

    @property
    def round(self) -> int:
        """The round of the last outer step; -1 before the first."""

    @property
    def senders(self) -> int:
        """Peers that send us their weights at the same time."""

    def stands_after(self, round_: int) -> None:
        """The vectors hold our first state, as it stood after this round; -1 before the first."""

    def begin(self, start_trainer: StartTrainer) -> RoundLoop:
        """The rounds."""

    async def serve(self) -> None:
        """Serve other peers until cancelled."""


def averaging_of(parts: AveragingParts) -> Averaging:
    """The way of averaging that the run spec names (protocol/run/ways.py), ready to begin."""
    module, _, name = WAYS[parts.spec.sync.method].daemon.partition(":")
    averaging: Averaging = getattr(import_module(module), name)(parts)
    return averaging
