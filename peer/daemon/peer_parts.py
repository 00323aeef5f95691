"""What a peer is put together from, and what is particular to it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import trio

from peer.facts import Facts, RoundTiming
from peer.network.pacing import Pacing
from peer.observe.events import EventLog
from peer.ports import Directory, Network, Work
from peer.state.acquaintances import Acquaintances
from peer.state.checkpoints import CheckpointStore
from peer.state.pins import Pins
from protocol.membership.records import Sign
from protocol.membership.view import Roster
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec

from .checkpointing import CheckpointPlan
from .door import Door, Keys
from .hello import Greeter
from .links import Links
from .provision import Provision
from .sources import Sources
from .standing import Standing


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What is particular to this peer.

    Attributes:
        on_ready: called once, as soon as others can join through us.
        check_spec: raises when this peer's options, or its disk, do not fit the run.
        bind_run: makes the home one of this run; raises when it is another's.
        keeps_stage: whether it holds its stage of a pipeline whatever happens.
        checkpoints: where they go, and how often; None keeps none.
        on_finished: called when the run is over, while its state is served; None does nothing.
        max_corpus_bytes: of the disk that pieces of the corpus may take; None for no limit.
        on_run: called with the run spec and the tokens of its corpus, before a state is taken.
        grace_s: from `stop` to the end.
        stop: set when this peer is to end, by whoever wants it: a signal, a command, or itself.
    """

    state_dir: Path
    exit_when_done: bool
    grace_s: float
    on_ready: Callable[[], None]
    check_spec: Callable[[RunSpec], None]
    bind_run: Callable[[SignedSpec], None]
    observe_round: Callable[[RoundTiming], None]
    keeps_stage: bool = False
    checkpoints: CheckpointPlan | None = None
    on_finished: Callable[[], Awaitable[None]] | None = None
    max_corpus_bytes: float | None = None
    on_run: Callable[[RunSpec, int], None] | None = None
    stop: trio.Event = field(default_factory=trio.Event)


@dataclass(frozen=True, slots=True)
class PeerParts:
    """What a peer is put together from.

    Attributes:
        network: paced, and open to peers that are admitted alone.
        checkpoints: those of the home.
    """

    network: Network
    pacing: Pacing
    directory: Directory
    work: Work
    provision: Provision
    facts: Facts
    roster: Roster
    events: EventLog
    acquaintances: Acquaintances
    pins: Pins
    checkpoints: CheckpointStore | None
    keys: Keys
    standing: Standing
    greeter: Greeter
    links: Links
    sources: Sources

    @property
    def sign(self) -> Sign:
        """Signs as this peer."""
        return self.keys.own.sign

    @property
    def door(self) -> Door:
        """The rules of admission."""
        return self.standing.door
