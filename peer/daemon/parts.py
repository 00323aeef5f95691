"""The parts of one peer: the same in a real daemon and in a simulated swarm."""

import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import trio

from peer.facts import RoundTiming
from protocol.admission.statements import Successor
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec

from .admission import Admission, Reputation
from .checkpointing import CheckpointPlan
from .greeting import Greeter
from .links import Links
from .provision import Provision
from .report import Report
from .services import DaemonServices
from .sources import Sources


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """The choices of this peer's user, and the ways in which it is watched.

    Attributes:
        home: its name, for people.
        on_ready: called once, as soon as others can join through us.
        check_spec: raises when this peer's options, or its disk, do not fit the run, or an expert
            of it by its number.
        bind_run: makes the home one of this run; raises when it is another's.
        keeps_stage: whether it holds its stage of a pipeline whatever happens.
        expert: the name of the one that it trains whatever happens.
        follows: whether it joins a run that the founder has named, when its own is over.
        on_finished: called when the run is over, while its state is served.
        most_corpus_bytes: of the disk that pieces of the corpus may take, by what those take that
            are here.
        on_run: called with the run spec and the tokens of its corpus, before a state is taken.
        grace_s: from `stop` to the end.
        stop: set when this peer is to end.
    """

    home: str
    state_dir: Path
    exit_when_done: bool
    grace_s: float
    on_ready: Callable[[], None]
    check_spec: Callable[[RunSpec, int | None], None]
    bind_run: Callable[[SignedSpec], None]
    observe_round: Callable[[RoundTiming], None]
    checkpoints: CheckpointPlan = field(default_factory=CheckpointPlan)
    keeps_stage: bool = False
    expert: str | None = None
    follows: Callable[[Successor], bool] = lambda _: False
    on_finished: Callable[[], Awaitable[None]] | None = None
    most_corpus_bytes: Callable[[int], int] = lambda _: sys.maxsize
    on_run: Callable[[RunSpec, int], None] | None = None
    stop: trio.Event = field(default_factory=trio.Event)


@dataclass(kw_only=True, eq=False)
class PeerParts(DaemonServices):
    provision: Provision

    def __post_init__(self) -> None:
        super().__post_init__()
        services: DaemonServices = self  # complete: each part takes these, and parts made before it
        self.admission = Admission(services)
        self.reputation = Reputation(self.admission, self.facts, self.events)
        self.network.admit_by(self.reputation)
        self.greeter = Greeter(services, self.admission)
        self.links = Links(services, self.greeter, self.reputation)
        self.sources = Sources(self.network, self.facts)
        self.report = Report(services)
