"""How a peer comes back to the run of its home: with the others, or from its own checkpoint.

    come_back    the entry: run spec and data are here, and nobody need be there
    Returned     the beginning: the state of others that train, or our newest good checkpoint; or,
                 where the founder has none, the seed once more

A checkpoint gives way to nothing but a state that is verified, and is set aside where that is far
behind it. Where those that say they train give none within REPLACEMENT_S, the peer goes on from its
own: they may be liars that claim to be far ahead. For STAYS_S it then does not mind who is
(peer/rounds/loop.py).

protocol/membership/returning.py says which peer leads where all come back at once. A run that is
over stays over: its last checkpoint is gone on from without looking around.

The peers that a home remembers are linked, silent, or refuse. A final refusal is reported, but a
single peer must not send us away: while others may admit us, the peer keeps waiting. If all
remembered peers refuse, or some refuse and the others stay silent for as long as we wait, the user
must know it, and the peer must not train alone: the run may have banned us meanwhile. A peer that
was linked once was not refused by all. A temporary refusal (a peer that is full) counts as silence:
that peer may be training, so this one does not lead.
"""

import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import trio

from peer.content.fetching import own_digests
from peer.facts import PeerState
from peer.observe.event_names import EventName
from peer.runtime import PeerId
from peer.state.checkpoints import Checkpoint
from peer.state.home import OtherRun
from peer.training.tensor_file import FileUnusable
from protocol.errors import LocoError, Refused
from protocol.membership.group import Group
from protocol.membership.returning import LISTEN_S, UNREACHED_S, Course, choose_course
from protocol.names import short_id
from protocol.outcomes import RefusalReason
from protocol.run.layout import expert_of_part, part_of_expert, stage_of_part
from protocol.run.signed_spec import SignedSpec
from protocol.schedule.progress import TaskProgress
from protocol.schedule.rounds import is_lost, lost_lag

from .beginning import Beginning, FirstState, StartContext
from .bootstrap import Bootstrap
from .domains import BlobsOfPeers
from .entry import (
    CheckSpec,
    Entered,
    choose_stage,
    enter_swarm,
    expert_of,
    go_by_the_linked,
    stays_at,
)
from .fetched import FromPeers
from .links import Dialler
from .parts import PeerParts
from .provision import ChoosePart
from .report import REPEAT_S
from .services import DaemonServices
from .sources import SOURCE_PAUSE_S, NobodyHelped, NoSource, is_permanent

REPLACEMENT_S: Final = 1800.0
"""How long others that train are asked for their state before we go on from our own."""
STAYS_S: Final = 4 * 3600.0
"""How long a peer then stays with its own, whoever says to be far ahead."""


async def come_back(
    signed: SignedSpec,
    addresses: Sequence[str],
    stage: int | None,
    expert: str | None,
    alone: bool,
    parts: PeerParts,
    check_spec: CheckSpec,
    nursery: trio.Nursery,
) -> Entered:
    """Go on with the run of this home: data and model come from here, if they are here.

    Args:
        signed: the run spec, as the home has kept it.
        addresses: to find the swarm by, if the user gave any.
        stage: of a pipeline, to be held where no checkpoint says one; None lets it choose.
        expert: that this home trains, of a run that has any; None lets it choose.
        alone: whether or not the others of the run can be reached.

    Raises:
        OtherRun: the addresses lead to another run than this home's.
    """
    remembered = RememberedPeers(parts, parts.links.dialler, alone=alone)
    nursery.start_soon(_keep_looking, parts, signed.run_id, addresses, remembered)
    spec, facts = signed.spec(), parts.facts
    parts.admission.entered(signed)
    check_spec(spec, None)
    number = await expert_of(parts, spec, expert, comes_back=True)
    if number is not None:
        check_spec(spec, number)
    facts.now_doing("checking the newest checkpoint", PeerState.RETURNING)
    part = None if number is None else part_of_expert(number)
    own = await _newest_checkpoint(parts, signed.run_id, part)
    facts.now_doing("looking for the others of the run")
    if own is not None and _is_of(own.manifest.part, stage, number):
        facts.chosen_group = Group(signed.run_id, own.manifest.part)
        facts.nominal_step = own.manifest.step
        facts.earlier_tokens = own.manifest.tokens
    else:
        own = None
    known = await parts.work.run(parts.acquaintances.read)
    for peer_id, theirs in known.items():
        parts.roster.introduced(peer_id, theirs)
    remembered.remember(known)
    choose: ChoosePart = partial(choose_stage, parts, spec, signed.run_id, stage)
    kept = number if number is not None or own is None else stage_of_part(own.manifest.part)
    if kept is not None:
        choose = partial(stays_at, kept)
    obtain = partial(parts.provision.obtain, spec, choose_part=choose)
    try:
        supplies = await obtain(NoSource())
    except Refused:
        facts.now_doing("fetching the data")
        supplies = await obtain(BlobsOfPeers(parts, parts.sources, expert=facts.expert))
    founder = parts.keys.founder
    is_founder = founder is not None and founder.public_key == signed.founder_public_key
    remake = supplies.remake if is_founder else None
    if own is not None or remake is not None:
        supplies = replace(supplies, beginning=Returned(parts, own, remembered, remake))
    return signed, supplies


async def _keep_looking(
    parts: PeerParts, run_id: str, addresses: Sequence[str], remembered: "RememberedPeers"
) -> None:
    """Enter the swarm, by the addresses that the user gave too, however long that takes."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(remembered.watch)
        nursery.start_soon(go_by_the_linked, parts)
        if not addresses:
            return
        try:
            await enter_swarm(parts, Bootstrap(parts, parts.links, addresses, REPEAT_S))
        except Refused as refused:
            if refused.reason is not RefusalReason.OTHER_RUN:
                raise
            raise OtherRun(
                f"the home belongs to run {run_id}, and a peer at the addresses given says:"
                f" {refused.sentence}"
            ) from refused


async def _newest_checkpoint(parts: PeerParts, run_id: str, part: str | None) -> Checkpoint | None:
    """The newest of this run whose files are what its manifest says; each other is told.

    Args:
        part: of an expert; None takes whatever part was held last.
    """
    refused = list[tuple[Path, str]]()
    found = await parts.work.run(
        parts.checkpoints.newest_whole, run_id, lambda *told: refused.append(told), part
    )
    for path, why in refused:
        parts.events.emit(EventName.CHECKPOINT_REFUSED, path=str(path), detail=why)
    return found


def _is_of(part: str, stage: int | None, expert: int | None) -> bool:
    """Whether a checkpoint is of what this peer is to hold."""
    if expert is not None:
        return expert_of_part(part) == expert
    return stage in (None, stage_of_part(part))


# --- the peers that are remembered ----------------------------------------------------------------


class RememberedPeers:
    """Whether the peers that a home remembers can be reached, are silent, or refuse this one.

    Args:
        dialler: knows why peers could not be reached, or refused us.
        alone: the user wants to continue without them.
    """

    def __init__(self, services: DaemonServices, dialler: Dialler, *, alone: bool) -> None:
        self._roster = services.roster
        self._facts = services.facts
        self._events = services.events
        self._dialler = dialler
        self._alone = alone
        self._remembered = frozenset[PeerId]()
        self._since_s = trio.current_time()
        self._told_s = self._since_s - REPEAT_S
        self._told: dict[PeerId, str] = {}
        self._was_linked = False

    def remember(self, peers: Collection[PeerId]) -> None:
        self._remembered = frozenset(peers)
        self._since_s = trio.current_time()

    def unreached(self) -> bool:
        """Whether there are any and none has admitted us; the user is told why."""
        now_s = trio.current_time()
        if self._alone or not self._remembered or self._linked():
            return False
        if now_s >= self._told_s + REPEAT_S:
            self._told_s = now_s
            self._tell(self._since_s + UNREACHED_S - now_s)
        self._facts.progressed(TaskProgress("", now_s - self._since_s, UNREACHED_S, ""))
        return True

    def _linked(self) -> bool:
        self._was_linked = self._was_linked or bool(self._roster.alive(trio.current_time()))
        return self._was_linked

    def _tell(self, left_s: float) -> None:
        count, whys = len(self._remembered), [*self._dialler.failures.values()]
        why = whys[-1] if whys else "nobody has answered yet"
        self._facts.unlinked.failing[f"{count} remembered peers"] = why
        self._facts.now_doing(
            f"none of {count} remembered peers can be reached ({why}); continues alone after"
            f" {UNREACHED_S / 60:.0f} minutes, at once with --alone"
        )
        self._events.emit(
            EventName.NEIGHBOURS_AWAITED, neighbours=count, detail=why, left_s=max(0.0, left_s)
        )

    def refused(self) -> Refused | None:
        """The last final refusal; None if any peer has admitted us."""
        if self._alone or self._linked():
            return None
        final = self._final()
        return next(reversed(final.values())) if final else None

    def _final(self) -> dict[PeerId, Refused]:
        return {
            peer_id: each for peer_id, each in self._dialler.refusals.items() if is_permanent(each)
        }

    async def watch(self) -> None:
        """Report refusals while this peer is returning. Raises Refused: all refuse."""
        while self._facts.state is PeerState.RETURNING:
            self._tell_refusals()
            refused, waited_s = self.refused(), trio.current_time() - self._since_s
            patience_s = LISTEN_S if self._remembered <= self._final().keys() else UNREACHED_S
            if refused is not None and waited_s >= patience_s:
                raise refused
            await trio.sleep(SOURCE_PAUSE_S)

    def _tell_refusals(self) -> None:
        for peer_id, each in self._final().items():
            if self._told.get(peer_id) != each.sentence:
                self._told[peer_id] = each.sentence
                self._facts.now_doing(
                    f"{short_id(peer_id)} refuses this peer ({each.sentence}); ends when all"
                    f" refuse, or none admits it for {UNREACHED_S / 60:.0f} minutes"
                )
                self._events.emit(EventName.REFUSED_BY_PEER, remote=peer_id, detail=each.sentence)


# --- the first state ------------------------------------------------------------------------------


@dataclass(eq=False)
class Returned:
    """The state of others that train, or that of our own checkpoint, whose files are what it says.

    Args:
        remake: makes the first weights of the run again, where that is ours to do.
    """

    goes_stale = True

    parts: PeerParts
    own: Checkpoint | None
    remembered: RememberedPeers
    remake: Callable[[], Awaitable[Beginning]] | None

    def __post_init__(self) -> None:
        self._facts = self.parts.facts
        self._since_s = trio.current_time()

    async def take(self, context: StartContext) -> FirstState:
        if await self._course(context) is Course.FOLLOW:
            try:
                return await self._follow(context)
            except* NobodyHelped:
                self._facts.stays_until_s = trio.current_time() + STAYS_S
        if self.own is None:
            return await self._begin_anew(context)
        return await self._lead(context, self.own)

    async def _course(self, context: StartContext) -> Course:
        facts, step = self._facts, 0
        if self.own is not None:
            if _is_over(self.own, context):
                return Course.LEAD
            step = int(self.own.manifest.step)
        facts.now_doing("looking for other peers that are back")
        lag, course = _lag_to_lead(context), Course.WAIT
        async with trio.open_nursery() as nursery:
            nursery.start_soon(context.meet)
            while course is Course.WAIT:
                await trio.sleep(SOURCE_PAUSE_S)
                if self.remembered.refused() is None:
                    now_s = trio.current_time()
                    course = choose_course(
                        (step, facts.peer_id),
                        context.held.view.alive(now_s),
                        now_s - self._since_s,
                        now_s,
                        lag,
                        unreached=self.remembered.unreached(),
                    )
            nursery.cancel_scope.cancel()
        return course

    async def _follow(self, context: StartContext) -> FirstState:
        """Take the state of others; what our checkpoint has of it need not come."""
        if self.own is None:
            return await FromPeers(patience_s=REPLACEMENT_S).take(context)
        self._facts.now_doing("reading our checkpoint")
        vectors, own = (context.slow_P, context.momentum_P), None
        with suppress(FileUnusable):
            await self.parts.work.run(self.own.fill, *vectors)
            own = await self.parts.work.run(own_digests, *vectors)
        state = await FromPeers(own, patience_s=REPLACEMENT_S).take(context)
        if is_lost(state.step, [self.own.manifest.step], context.spec.founding.sync.round_steps):
            await self._set_aside(self.own, state.step)
        return state

    async def _set_aside(self, own: Checkpoint, step: float) -> None:
        """Keep our checkpoint, though others go on from one that is far behind it, at `step`.

        Those that follow would take its place otherwise. Where the disk refuses, it stays.
        """
        with suppress(OSError):
            path = await self.parts.work.run(self.parts.checkpoints.set_aside, own, step)
            self.parts.events.emit(
                EventName.CHECKPOINT_SET_ASIDE,
                path=str(path),
                round=own.manifest.round,
                step=int(own.manifest.step),
                followed_step=int(step),
            )

    async def _begin_anew(self, context: StartContext) -> FirstState:
        """Make the first weights anew: nothing of the run was saved, and we founded it."""
        assert self.remake is not None
        why = "this home has no checkpoint of the run it founded, and no peer has a state to give"
        self._facts.now_doing(f"starting the run again from its seed: {why}")
        self.parts.events.emit(EventName.RUN_BEGUN_ANEW, detail=why)
        return await (await self.remake()).take(context)

    async def _lead(self, context: StartContext, own: Checkpoint) -> FirstState:
        facts, manifest = self._facts, own.manifest
        over = _is_over(own, context)
        facts.now_doing(f"continuing from the checkpoint of {manifest}")
        try:
            await self.parts.work.run(own.fill, context.slow_P, context.momentum_P)
        except FileUnusable as error:
            raise LocoError(f"{own.path}: {error}; start again: the one before is tried") from error
        self.parts.events.emit(
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
            go_on=own.trainer_file,
        )


def _is_over(own: Checkpoint, context: StartContext) -> bool:
    """Whether the run had ended, and has not been made longer since."""
    manifest = own.manifest
    return manifest.over and manifest.step >= context.spec.total_steps_at(manifest.step)


def _lag_to_lead(context: StartContext) -> float:
    """Steps behind which a peer takes the state of others, where it may begin by its own."""
    if stage_of_part(context.held.group.part) is not None:
        return math.inf
    return lost_lag(context.spec.founding.sync.round_steps)
