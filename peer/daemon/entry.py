"""How a peer comes to its run: it founds one, joins one, or comes back to that of its home.

An entry ends with the signed run spec and with what the run trains with here. Where the first state
comes from is another question (beginning.py).

A peer comes back with the others, or from its own checkpoint.

    Returning    the entry: run spec and data are here, and nobody need be there
    Returned     the beginning: the state of others that train, or our newest good checkpoint; or,
                 where the founder has none, the seed once more

A checkpoint is let go of for nothing but a state that is verified, and set aside where that is far
behind it. Where those that say they train give none within REPLACEMENT_S, the peer goes on from its
own: they may be liars that claim to be far ahead. For STAYS_S it then does not mind who is
(peer/rounds/loop.py).

Which one leads where all come back at once stands in protocol/membership/returning.py. A run that
is over is over: its last checkpoint is gone on from without looking around.
"""

import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

import blake3
import trio

from peer.content.fetching import BlobSource, Fetcher
from peer.content.gathering import own_digests
from peer.facts import Facts, PeerState
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.ports import Work
from peer.stages.company import StageCompany
from peer.state.checkpoints import Checkpoint, CheckpointStore
from peer.state.home import OtherRun
from peer.training.tensor_file import FileUnusable
from protocol.errors import LocoError, Refused
from protocol.membership.group import WHOLE_MODEL, Group
from protocol.membership.returning import Course, choose_course
from protocol.membership.view import Roster
from protocol.outcomes import RefusalReason
from protocol.run.assignment import needed_stage, newcomers_stage
from protocol.run.layout import part_of_stage, stage_of_part
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec
from protocol.schedule.rounds import is_lost, lost_lag

from .beginning import Arrival, Beginning, Fetched, FirstState
from .checkpointing import GoOn
from .joining import Bootstrap
from .neighbours import LOOK_S, Neighbours
from .peer_parts import PeerParts
from .provision import ChosenStage, Supplies
from .sources import NobodyHelped


class Entry(Protocol):
    """One way to come to a run."""

    async def enter(self, check_spec: Callable[[RunSpec], None]) -> tuple[SignedSpec, Supplies]:
        """Get ready for a run; meanwhile, say in status and events what goes on.

        Args:
            check_spec: raises when this peer's options do not fit a run.

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
    """A new run, frozen and signed here with the founder's key of this home."""

    def __init__(self, parts: PeerParts, spec: RunSpec) -> None:
        self._parts = parts
        self._spec = spec

    async def enter(self, check_spec: Callable[[RunSpec], None]) -> tuple[SignedSpec, Supplies]:
        """Prepare its data and first weights."""
        check_spec(self._spec)
        parts, founder = self._parts, self._parts.keys.founder
        assert founder is not None, "a home that founds a run has a founder's key"
        parts.facts.now_doing("preparing the data", PeerState.STARTING)
        frozen, supplies = await parts.provision.found(self._spec)
        signed = SignedSpec.signed_by(parts.door.closed(frozen), founder.public_key, founder.sign)
        parts.door.founded(signed)
        return signed, supplies

    async def keep_looking(self) -> None:
        """Nothing to do: the others come."""


class Joining:
    """The run that a bootstrap address leads to.

    Args:
        stage: of a pipeline, that is to be held; None lets it choose.
    """

    def __init__(self, parts: PeerParts, bootstrap: Bootstrap, stage: int | None) -> None:
        self._parts = parts
        self._bootstrap = bootstrap
        self._stages = StageChoice(parts.facts, parts.roster, stage)

    async def enter(self, check_spec: Callable[[RunSpec], None]) -> tuple[SignedSpec, Supplies]:
        """Find the swarm; take run spec and data from it."""
        parts, facts = self._parts, self._parts.facts
        facts.now_doing("looking for the swarm", PeerState.CONNECTING)
        first, hello = await self._bootstrap.enter()
        parts.greeter.correct_clock()
        await parts.directory.add_peers(hello.addresses)
        facts.now_doing("fetching the run spec", PeerState.DOWNLOADING)
        signed = await parts.sources.fetch(
            lambda fetcher: fetcher.spec(hello.run_id), parts.roster, first
        )
        spec = signed.spec()
        parts.door.entered(signed)
        parts.events.emit(
            EventName.RUN_RECEIVED, remote=first, run_id=signed.run_id, name=spec.name
        )
        check_spec(spec)
        facts.now_doing("fetching the data")

        async def choose_stage() -> ChosenStage:
            return await self._stages.choose(spec, signed.run_id)

        async def obtain(fetcher: Fetcher) -> Supplies:
            return await parts.provision.obtain(spec, fetcher, choose_stage)

        return signed, await parts.sources.fetch(obtain, parts.roster, first)

    async def keep_looking(self) -> None:
        """Nothing to do: it is found."""


# --- the stage of a newcomer ----------------------------------------------------------------------

LOOK_AROUND_S: Final = 2.0
"""For how long a newcomer to a pipeline listens before it chooses a stage: its first link has told
it of all others, and they beat every second."""
LATECOMERS: Final = 2
"""The longest listening lasts so many times longer."""
LOOKS: Final = 3
"""So often, at most, a newcomer looks again after LOOK_AROUND_S who has chosen what."""


class StageChoice:
    """Chooses the stage that this peer holds.

    Args:
        given: the stage that this machine shall hold; None chooses.

    Attributes:
        given: the same.
    """

    def __init__(self, facts: Facts, roster: Roster, given: int | None = None) -> None:
        self._facts = facts
        self._roster = roster
        self.given = given

    async def choose(self, spec: RunSpec, run_id: str) -> ChosenStage:
        """Listen, choose, and let all know.

        Newcomers that come together listen for different times, so that the later ones hear what
        the earlier ones have chosen; and they look again, for that is heard with a beat.
        """
        facts, pipeline = self._facts, spec.pipeline
        facts.now_doing("checking which stage needs a peer")
        await trio.sleep(LOOK_AROUND_S * (1 + LATECOMERS * _share(facts.peer_id)))
        company = StageCompany(self._roster, run_id, pipeline.stages)
        counts = [len(others) for others in company.holders()]
        needed = needed_stage(counts, pipeline.num_visited)
        stage = needed if self.given is None else self.given
        facts.chosen = Group(run_id, part_of_stage(stage))
        if self.given is None:
            stage = await self._settled(company, stage, pipeline.num_visited)
            facts.chosen = Group(run_id, part_of_stage(stage))
        alive = self._roster.alive(trio.current_time())
        return ChosenStage(
            stage,
            has_holders=bool(company.holders()[stage]),
            is_trained=any(member.progress.step for member in alive),
        )

    async def _settled(self, company: StageCompany, stage: int, visited: int) -> int:
        """The stage to begin with, where others may have chosen at the same time."""
        peer_id = self._facts.peer_id
        for look in range(1, LOOKS + 1):
            await trio.sleep(LOOK_AROUND_S)
            holders = [{*others} for others in company.holders()]
            holders[stage].add(peer_id)
            newcomers = {peer_id, *company.newcomers()}
            settled = newcomers_stage(peer_id, holders, newcomers, visited, look)
            if settled is not None:
                return settled
        return stage


def _share(peer_id: str) -> float:
    """A number in [0, 1) that is a peer's own."""
    return int.from_bytes(blake3.blake3(peer_id.encode()).digest(length=4), "big") / 2**32


# --- coming back ----------------------------------------------------------------------------------

REPLACEMENT_S: Final = 1800.0
"""How long others that train are asked for their state before we go on from our own."""
STAYS_S: Final = 4 * 3600.0
"""How long a peer then stays with its own, whoever says to be far ahead."""


class OwnCheckpoints:
    """The checkpoints of this home that fit the run, and what is wrong with the others."""

    def __init__(self, store: CheckpointStore, work: Work, events: EventLog) -> None:
        self._store = store
        self._work = work
        self._events = events

    async def newest(self, run_id: str) -> Checkpoint | None:
        """The newest of this run whose files are what its manifest says; each other is told."""
        refused = list[tuple[Path, str]]()

        def refuse(path: Path, why: str) -> None:
            refused.append((path, why))

        found = await self._work.run(self._store.newest_whole, run_id, refuse)
        for path, why in refused:
            self._events.emit(EventName.CHECKPOINT_REFUSED, path=str(path), detail=why)
        return found

    async def set_aside(self, checkpoint: Checkpoint, step: float) -> None:
        """Keep it, though others go on from one that is far behind it, at `step`.

        Those that follow would take its place otherwise. Where the disk refuses, it stays.
        """
        with suppress(OSError):
            path = await self._work.run(self._store.set_aside, checkpoint, step)
            manifest = checkpoint.manifest
            self._events.emit(
                EventName.CHECKPOINT_SET_ASIDE,
                path=str(path),
                round=manifest.round,
                step=int(manifest.step),
                followed_step=int(step),
            )


class NoSource:
    """Nobody to fetch from: what is not here is not to be had. Implements `BlobSource`."""

    async def blob(self, digest: str) -> bytes:
        """Always raises Refused: there is no peer to fetch from."""
        await trio.lowlevel.checkpoint()
        raise Refused(RefusalReason.UNAVAILABLE, f"blob {digest} is not in this home")


class Returning:
    """The run that this home belongs to.

    Args:
        signed: the run spec, as the home has kept it.
        bootstrap: tries the addresses that the user gave; None when there are none.
        stage: of a pipeline, that is to be held where no checkpoint says one; None lets it choose.
        alone: whether or not the others of the run can be reached.
    """

    def __init__(
        self,
        parts: PeerParts,
        signed: SignedSpec,
        bootstrap: Bootstrap | None,
        stage: int | None,
        *,
        alone: bool,
    ) -> None:
        assert parts.checkpoints is not None
        self._parts = parts
        self._signed = signed
        self._bootstrap = bootstrap
        self._stages = StageChoice(parts.facts, parts.roster, stage)
        self._own = OwnCheckpoints(parts.checkpoints, parts.work, parts.events)
        dialler = parts.links.dialler
        self._neighbours = Neighbours(
            parts.roster,
            parts.facts,
            parts.events,
            alone=alone,
            refusals=dialler.refusals,
            failures=dialler.failures,
        )

    async def enter(self, check_spec: Callable[[RunSpec], None]) -> tuple[SignedSpec, Supplies]:
        """Say how far our checkpoint is, and get data and model ready, from here if they are."""
        signed, facts = self._signed, self._parts.facts
        spec, facts.run_id = signed.spec(), signed.run_id
        self._parts.door.entered(signed)
        check_spec(spec)
        facts.now_doing("looking for the others of the run", PeerState.RETURNING)
        own = await self._own.newest(signed.run_id)
        if own is not None and self._stages.given in (None, stage_of_part(own.manifest.part)):
            facts.chosen = Group(signed.run_id, own.manifest.part)
            facts.nominal_step = own.manifest.step
            facts.earlier_tokens = own.manifest.tokens
        else:
            own = None
        known = await self._parts.work.run(self._parts.acquaintances.read)
        for peer_id, addresses in known.items():
            self._parts.roster.introduced(trio.current_time(), peer_id, addresses)
        self._neighbours.remember(known)
        supplies = await self._supplies(spec, own)
        founder = self._parts.keys.founder
        is_founder = founder is not None and founder.public_key == signed.founder_public_key
        remake = supplies.remake if is_founder else None
        if own is not None or remake is not None:
            back = Returned(own, self._own, self._parts.work, self._neighbours, remake)
            supplies = replace(supplies, beginning=back)
        return signed, supplies

    async def keep_looking(self) -> None:
        """Enter the swarm by the addresses that the user gave, however long that takes.

        Raises:
            OtherRun: the addresses lead to another run than this home's.
            Refused: it does not want us, and trying again cannot change that.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._neighbours.watch)
            if self._bootstrap is not None:
                await self._enter(self._bootstrap)

    async def _enter(self, bootstrap: Bootstrap) -> None:
        try:
            _, hello = await bootstrap.enter()
        except Refused as refused:
            if refused.reason is not RefusalReason.OTHER_RUN:
                raise
            raise OtherRun(
                f"the home belongs to run {self._signed.run_id}, and a peer at the addresses given"
                f" says: {refused.sentence}"
            ) from refused
        self._parts.greeter.correct_clock()
        await self._parts.directory.add_peers(hello.addresses)

    async def _supplies(self, spec: RunSpec, own: Checkpoint | None) -> Supplies:
        async def choose_stage() -> ChosenStage:
            stage = None if own is None else stage_of_part(own.manifest.part)
            if stage is None:
                return await self._stages.choose(spec, self._signed.run_id)
            return ChosenStage(stage, has_holders=True, is_trained=True)

        async def obtain(source: BlobSource) -> Supplies:
            return await self._parts.provision.obtain(spec, source, choose_stage)

        try:
            return await obtain(NoSource())
        except Refused:
            self._parts.facts.now_doing("fetching the data")
            return await self._parts.sources.fetch(obtain, self._parts.roster)


class Returned:
    """The state of others that train, or that of our own checkpoint. Implements `Beginning`.

    Args:
        own: its files are what its manifest says; None where there is none.
        checkpoints: all that are in the home.
        remake: makes the first weights of the run again, where that is ours to do.
    """

    ages = True

    def __init__(
        self,
        own: Checkpoint | None,
        checkpoints: OwnCheckpoints,
        work: Work,
        neighbours: Neighbours,
        remake: Callable[[], Awaitable[Beginning]] | None = None,
    ) -> None:
        self._own = own
        self._checkpoints = checkpoints
        self._work = work
        self._neighbours = neighbours
        self._remake = remake
        self._since_s = trio.current_time()

    async def take(self, arrival: Arrival) -> FirstState:
        """Look who else is back until it is clear who leads, and follow, or lead."""
        if await self._course(arrival) is Course.FOLLOW:
            try:
                return await self._follow(arrival)
            except* NobodyHelped:
                arrival.facts.stays_until_s = trio.current_time() + STAYS_S
        if self._own is None:
            return await self._begin_anew(arrival)
        return await self._lead(arrival, self._own)

    async def _course(self, arrival: Arrival) -> Course:
        facts, step = arrival.facts, 0
        if self._own is not None:
            if _is_over(self._own, arrival):
                return Course.LEAD
            step = int(self._own.manifest.step)
        facts.now_doing("looking for other peers that are back")
        lag, course = _lag_to_lead(arrival), Course.WAIT
        async with trio.open_nursery() as nursery:
            nursery.start_soon(arrival.meet)
            while course is Course.WAIT:
                await trio.sleep(LOOK_S)
                if self._neighbours.refused() is None:
                    now_s = trio.current_time()
                    course = choose_course(
                        (step, facts.peer_id),
                        arrival.held.view.alive(now_s),
                        now_s - self._since_s,
                        now_s,
                        lag,
                        unreached=self._neighbours.unreached(),
                    )
            nursery.cancel_scope.cancel()
        return course

    async def _follow(self, arrival: Arrival) -> FirstState:
        """Take the state of others; what our checkpoint has of it need not come."""
        if self._own is None:
            return await Fetched(patience_s=REPLACEMENT_S).take(arrival)
        arrival.facts.now_doing("reading our checkpoint")
        vectors, own = (arrival.slow_P, arrival.momentum_P), None
        with suppress(FileUnusable):
            await self._work.run(self._own.fill, *vectors)
            own = await self._work.run(own_digests, *vectors)
        state = await Fetched(own, patience_s=REPLACEMENT_S).take(arrival)
        if is_lost(state.step, [self._own.manifest.step], arrival.spec.founding.sync.round_steps):
            await self._checkpoints.set_aside(self._own, state.step)
        return state

    async def _begin_anew(self, arrival: Arrival) -> FirstState:
        """Nothing of the run was saved: the founder makes its first weights again."""
        assert self._remake is not None
        why = "this home has no checkpoint of the run it founded, and no peer has a state to give"
        arrival.facts.now_doing(f"starting the run again from its seed: {why}")
        arrival.events.emit(EventName.RUN_BEGUN_ANEW, detail=why)
        return await (await self._remake()).take(arrival)

    async def _lead(self, arrival: Arrival, own: Checkpoint) -> FirstState:
        facts, manifest = arrival.facts, own.manifest
        over = _is_over(own, arrival)
        facts.now_doing(f"continuing from the checkpoint of {manifest}")
        try:
            await self._work.run(own.fill, arrival.slow_P, arrival.momentum_P)
        except FileUnusable as error:
            raise LocoError(f"{own.path}: {error}; start again: the one before is tried") from error
        arrival.events.emit(
            EventName.RUN_RESUMED,
            path=str(own.path),
            round=manifest.round,
            step=int(manifest.step),
            over=manifest.over,
            tokens=manifest.tokens,
        )
        return FirstState(
            manifest.round,
            manifest.step,
            manifest.epoch,
            manifest.position,
            debt=manifest.debt,
            over=over,
            go_on=GoOn(own.trainer_file, with_weights=True, over=over),
        )


def _is_over(own: Checkpoint, arrival: Arrival) -> bool:
    """Whether the run had ended, and has not been made longer since."""
    manifest = own.manifest
    return manifest.over and manifest.step >= arrival.spec.total_steps_at(manifest.step)


def _lag_to_lead(arrival: Arrival) -> float:
    """Steps behind which a peer takes the state of others, where it may begin by its own."""
    if arrival.held.group.part != WHOLE_MODEL:
        return math.inf
    return lost_lag(arrival.spec.founding.sync.round_steps)
