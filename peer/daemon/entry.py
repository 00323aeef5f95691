"""How a peer comes to its run: it founds one, or joins one through a bootstrap address.

An entry ends with the signed run spec and with what the run trains with here. Where the first state
comes from is another question (beginning.py).
"""

from collections.abc import Callable
from typing import Protocol

from peer.facts import Facts, PeerState
from peer.network.identity import Identity
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.ports import Directory
from protocol.membership.view import Roster
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec

from .door import Door
from .hello import Greeter
from .joining import Bootstrap
from .provision import ChosenStage, Provision, Supplies
from .sources import Sources
from .stage_choice import StageChoice

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

    async def keep_looking(self) -> None:
        """Go on looking for the swarm while the run is trained; returns when it is found.

        Raises:
            Refused: as `enter`.
        """


class Founding:
    """A new run, frozen and signed here.

    Args:
        founder: whose key signs the run spec.
    """

    def __init__(
        self,
        spec: RunSpec,
        founder: Identity,
        *,
        door: Door,
        provision: Provision,
        facts: Facts,
    ) -> None:
        self._spec = spec
        self._founder = founder
        self._door = door
        self._provision = provision
        self._facts = facts

    async def enter(self, check_spec: CheckSpec) -> tuple[SignedSpec, Supplies]:
        """Prepare its data and first weights."""
        check_spec(self._spec)
        self._facts.now_doing("preparing the data", PeerState.STARTING)
        frozen, supplies = await self._provision.found(self._spec)
        founder = self._founder
        signed = SignedSpec.signed_by(self._door.closed(frozen), founder.public_key, founder.sign)
        self._door.founded(signed)
        return signed, supplies

    async def keep_looking(self) -> None:
        """Nothing to do: the others come."""


class Joining:
    """The run that a bootstrap address leads to.

    Args:
        stages: says which stage of a pipeline is to be held.
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
        door: Door,
        stages: StageChoice,
    ) -> None:
        self._bootstrap = bootstrap
        self._directory = directory
        self._roster = roster
        self._greeter = greeter
        self._sources = sources
        self._provision = provision
        self._facts = facts
        self._events = events
        self._door = door
        self._stages = stages

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
        self._door.entered(signed)
        self._events.emit(
            EventName.RUN_RECEIVED, remote=first, run_id=signed.run_id, name=spec.name
        )
        check_spec(spec)
        self._facts.now_doing("fetching the data")

        async def choose_stage() -> ChosenStage:
            return await self._stages.choose(spec, signed.run_id)

        supplies = await self._sources.fetch(
            lambda fetcher: self._provision.obtain(spec, fetcher, choose_stage),
            self._roster,
            first,
        )
        return signed, supplies

    async def keep_looking(self) -> None:
        """Nothing to do: it is found."""
