"""How an expert's weights begin, where nobody trains it yet.

They are the generalist's, or drawn from the seed, or a checkpoint's that only the founder has. The
founder trains another expert, perhaps: it keeps those first weights as they were when the run was
founded (kept_experts.py), and the signed run spec names their digest. Where an expert's peers have
gone, a checkpoint that any peer has kept is gone on with, if its loss bears it out.
"""

import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Final

import numpy as np
import trio

from peer.content.fetching import ContentClient, ExpectedState, whole_state
from peer.observe.event_names import EventName
from peer.runtime import PeerId
from peer.training.tensor_file import FileUnusable
from protocol.content.samples import Float32Vector
from protocol.errors import Refused, RemoteProtocolError
from protocol.membership.group import Group
from protocol.membership.view import View
from protocol.names import short_id
from protocol.run.layout import part_of_expert
from protocol.wire.content_messages import StateScalars

from .beginning import NOTHING_TRAINED, Beginning, FirstState, StartContext
from .experts import has_begun
from .fetched import FromPeers
from .kept_experts import digest_of_weights
from .sources import DOUBT_PAUSE_S, FETCH_WEIGHTS_S, NobodyHelped, weights_of

LISTEN_S: Final = 6.0
"""How long peers of an expert are looked for, before it is begun: the first looks into the
directory, and the links that they lead to, take a few seconds."""


class FromFounder:
    """First weights that the founder gives; it is waited for, and that is told.

    Where a peer of the expert has come meanwhile, its state is taken.
    """

    goes_stale = False

    async def take(self, context: StartContext) -> FirstState:
        services, told = context.services, False
        expected = ExpectedState(context.held.group.digest, maximum_step=0)

        async def ask(client: ContentClient) -> StateScalars:
            state = await whole_state(client, expected, context.slow_P, context.momentum_P)
            await _check_signed(context)
            return state

        while True:
            services.facts.now_doing("asking for the first weights of this expert")
            try:
                await context.sources.fetch(ask, services.roster, patience_s=DOUBT_PAUSE_S)
            except NobodyHelped:
                if not told:
                    services.events.emit(
                        EventName.FIRST_WEIGHTS_MISSING, expert=services.facts.expert
                    )
                told = True
                if has_begun(context.held.view):
                    return await FromPeers().take(context)
            else:
                return NOTHING_TRAINED


async def _check_signed(context: StartContext) -> None:
    """Raises RemoteProtocolError: the vectors, zeros again then, are not what the founder signed.

    Runs that were founded by earlier versions name no digest.
    """
    frozen, services = context.spec.founding.frozen, context.services
    signed = None if frozen is None else frozen.weights
    is_it = signed is None or signed == await services.work.run(digest_of_weights, context.slow_P)
    if not is_it or context.momentum_P.any():
        context.slow_P[:] = context.momentum_P[:] = 0.0
        raise RemoteProtocolError("these are not the first weights that the founder signed")


@dataclass(frozen=True)
class FreshOrFetched:
    """The state of those that train an expert; where nobody is heard of, it is begun.

    Args:
        first: its first weights.
        seeded: it begins with the generalist's, if these can be had.
        then: called when first weights were made: the process for that is no longer needed, since
            the trainer has begun in another.
    """

    goes_stale = True
    first: Beginning
    _: KW_ONLY
    seeded: bool
    then: Callable[[], Awaitable[None]]

    async def take(self, context: StartContext) -> FirstState:
        context.services.facts.now_doing("looking for peers of this expert")
        with trio.move_on_after(LISTEN_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(context.meet)
                while not has_begun(context.held.view):
                    await context.services.heard.park()
                nursery.cancel_scope.cancel()
        if has_begun(context.held.view):
            return await FromPeers().take(context)
        context.services.facts.now_doing("looking for a checkpoint of this expert")
        kept = await _kept_state(context)
        weights, whence, first = "generalist's", None, NOTHING_TRAINED
        if self.seeded:
            whence = await _seed_weights(context)
        if whence is None:
            given = isinstance(self.first, FromFounder)
            weights = "its checkpoint's" if given else "first"
            with trio.move_on_after(math.inf if kept is None else FETCH_WEIGHTS_S):
                first = await self.first.take(context)
        if first is not NOTHING_TRAINED:
            return first  # others have begun it meanwhile
        lost = [m.progress.step for m in context.held.view.members()]
        why = f"its peers are gone; they told of step {max(lost):,}" if lost else "nobody has it"
        if kept is not None and await _is_better(context, *kept.vectors):
            weights, first = "kept", kept.stands(context)
            whence = f"{short_id(kept.remote)}, of step {kept.state.step:,}"
        context.services.events.emit(
            EventName.EXPERT_BEGUN,
            expert=context.services.facts.expert,
            weights=weights,
            detail=why if whence is None else f"{why}; from {whence}",
        )
        await self.then()
        return first


@dataclass(frozen=True, slots=True, eq=False)
class _LeftBehind:
    """A state of an expert that nobody trains, which a peer has kept."""

    remote: PeerId
    vectors: tuple[Float32Vector, Float32Vector]
    state: StateScalars

    def stands(self, context: StartContext) -> FirstState:
        state = self.state
        epoch, position = context.plan.start_position([(state.epoch, state.position)])
        return FirstState(state.round, state.step, epoch, position)


async def _kept_state(context: StartContext) -> _LeftBehind | None:
    """From any peer that has one; each is asked once."""
    spec, held = context.spec, context.held
    slow_P, momentum_P = np.zeros((2, context.slow_P.size), np.float32)
    expected = ExpectedState(held.group.digest, 1, spec.longest_steps, held.shape.layout_digest)

    async def ask(client: ContentClient) -> _LeftBehind:
        state = await whole_state(client, expected, slow_P, momentum_P)
        return _LeftBehind(client.remote_peer_id, (slow_P, momentum_P), state)

    with trio.move_on_after(FETCH_WEIGHTS_S), suppress(NobodyHelped, Refused):
        return await context.sources.fetch(ask, context.services.roster, patience_s=0.0)
    return None


async def _is_better(
    context: StartContext, slow_P: Float32Vector, momentum_P: Float32Vector
) -> bool:
    """Put these vectors in if their loss is below that of what is there: nobody vouches for it."""
    before, there = await context.measure(), context.slow_P.copy()
    context.slow_P[:] = slow_P
    after = await context.measure()
    before = math.inf if before is None or math.isnan(before) else before
    if before < math.inf and (after is None or not after < before):
        context.slow_P[:] = there
        return False
    context.momentum_P[:] = momentum_P
    return True


async def _seed_weights(context: StartContext) -> str | None:
    """Fill in the generalist's slow weights. Returns whence they are; None: not to be had.

    They are those of our own checkpoint of after the branch, or of peers that train it on.
    """
    services, run_id = context.services, context.held.group.run_id
    run, seed = services.facts.expert_run, Group(run_id, part_of_expert(0))
    assert run is not None
    services.facts.now_doing("beginning with the generalist's weights")
    own = await services.work.run(
        services.checkpoints.newest_whole, run_id, lambda *_: None, seed.part
    )
    if own is not None and own.manifest.step >= run.branch_step:
        with suppress(FileUnusable):
            await services.work.run(own.fill, context.slow_P, np.zeros_like(context.momentum_P))
            return f"our checkpoint of {own.manifest}"
    view = View(services.roster, seed.digest)
    given = await weights_of(context.sources, view, context.slow_P.size)
    if given is None:
        return None
    remote, context.slow_P[:], state = given
    return f"{short_id(remote)}, of step {state.step:,}"
