"""How a peer comes to its run: it founds one, or joins one through a bootstrap address.

An entry ends with the signed run spec and with what the run trains with here. Where the first state
comes from is another question (beginning.py).
"""

from collections.abc import Callable
from typing import Final, Protocol

import blake3
import trio

from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.observe.facts import Facts
from peer.observe.status import PeerState
from peer.ports import Directory
from peer.stages.company import StageCompany
from protocol.membership.group import Group
from protocol.membership.view import Roster
from protocol.run.assignment import needed_stage
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec
from protocol.run.stages import part_of_stage

from .hello import Greeter
from .joining import Bootstrap
from .provision import ChosenStage, Provision, Supplies
from .sources import Sources

LOOK_AROUND_S: Final = 2.0
"""For how long a newcomer to a pipeline listens before it chooses a stage: its first link has told
it of all others, and they beat every second."""
LATECOMERS: Final = 2
"""The longest listening lasts so many times longer."""
CheckSpec = Callable[[RunSpec], None]
"""Raises when this peer's options do not fit a run."""


class Entry(Protocol):
    """One way to come to a run."""

    async def enter(self, check_spec: CheckSpec) -> tuple[SignedSpec, Supplies]:
        """Get ready for a run; meanwhile, say in status and events what goes on.

        Raises:
            Refused: the swarm does not want us, and trying again cannot change that.
            InvalidRunSpec, ConfigError: the run cannot be trained here.
        """


class Founding:
    """A new run, frozen and signed here."""

    def __init__(
        self,
        spec: RunSpec,
        *,
        sign_spec: Callable[[RunSpec], SignedSpec],
        provision: Provision,
        facts: Facts,
    ) -> None:
        self._spec = spec
        self._sign_spec = sign_spec
        self._provision = provision
        self._facts = facts

    def __repr__(self) -> str:
        return f"<Founding {self._spec.name!r}>"

    async def enter(self, check_spec: CheckSpec) -> tuple[SignedSpec, Supplies]:
        """Prepare its data and first weights."""
        check_spec(self._spec)
        self._facts.now_doing("preparing the data", PeerState.STARTING)
        frozen, supplies = await self._provision.found(self._spec)
        return self._sign_spec(frozen), supplies


class Joining:
    """The run that a bootstrap address leads to.

    Args:
        stage: of a pipeline, that this machine shall hold; None chooses.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        *,
        directory: Directory,
        roster: Roster,
        greeter: Greeter,
        sources: Sources,
        provision: Provision,
        facts: Facts,
        events: EventLog,
        stage: int | None = None,
    ) -> None:
        self._bootstrap = bootstrap
        self._directory = directory
        self._roster = roster
        self._greeter = greeter
        self._sources = sources
        self._provision = provision
        self._facts = facts
        self._events = events
        self._stage = stage

    def __repr__(self) -> str:
        return f"<Joining through {self._bootstrap!r}>"

    async def enter(self, check_spec: CheckSpec) -> tuple[SignedSpec, Supplies]:
        """Find the swarm; take run spec and data from it."""
        self._facts.now_doing("looking for the swarm", PeerState.CONNECTING)
        first, hello = await self._bootstrap.enter()
        self._greeter.correct_clock()
        await self._directory.add_peers(hello.addresses)
        self._facts.now_doing("fetching the run spec", PeerState.DOWNLOADING)
        signed = await self._sources.fetch(
            lambda fetcher: fetcher.spec(hello.run_id), self._roster, first
        )
        spec = signed.spec()
        self._events.emit(
            EventName.RUN_RECEIVED, remote=first, run_id=signed.run_id, name=spec.name
        )
        check_spec(spec)
        self._facts.now_doing("fetching the data")

        async def choose_stage() -> ChosenStage:
            return await self._choose_stage(spec, signed.run_id)

        supplies = await self._sources.fetch(
            lambda fetcher: self._provision.obtain(spec, fetcher, choose_stage),
            self._roster,
            first,
        )
        return signed, supplies

    async def _choose_stage(self, spec: RunSpec, run_id: str) -> ChosenStage:
        """Listen, choose the stage that needs us most, unless it is given, and let all know.

        Newcomers that come together listen for different times, so that the later ones hear what
        the earlier ones have chosen.
        """
        facts, stages = self._facts, spec.pipeline.stages
        facts.now_doing("looking which stage needs a peer")
        await trio.sleep(LOOK_AROUND_S * (1 + LATECOMERS * _share(facts.peer_id)))
        company = StageCompany(self._roster, run_id, stages, facts.peer_id)
        holders = [len(others) for others in company.holders()]
        needed = needed_stage(holders, spec.pipeline.num_visited)
        stage = needed if self._stage is None else self._stage
        facts.chosen = Group(run_id, part_of_stage(stage))
        alive = self._roster.alive(trio.current_time())
        return ChosenStage(
            stage,
            has_holders=holders[stage] > 0,
            is_trained=any(member.progress.step for member in alive),
        )


def _share(peer_id: str) -> float:
    """A number in [0, 1) that is a peer's own."""
    return int.from_bytes(blake3.blake3(peer_id.encode()).digest(length=4), "big") / 2**32
