"""A state fetched from one peer that leads and some that help, and compared with what others hold.

    fragments    all peers hold the same state: helpers give the bytes that most of them name, and
                 the root that the leader has named is compared
    pairs        each source gives chunks of its own replica. A source whose chunks are unlike the
                 witnesses' is dropped, and its chunks are fetched from the others

A source is compared with its witnesses: other peers, which are asked for samples of their weights,
and whose losses are read in their beats (protocol/content/samples.py). A source that lies about all
its weights is found, however little of the state it gave; what the others gave is kept. Then the
whole is compared with the witnesses of the leader, and its loss with the losses that others tell.

Rules
  1. The loss of the whole is compared once for each source: with what the others told, without that
     source, when it named its root.
  2. In pairs a source helps only when two witnesses of its state have answered: else its lies could
     not be found out.
  3. Where the whole is odd or worse, but no source by itself, nobody can be blamed. The whole is
     thrown away, and from then on one source at a time is asked. Thus a lie that only the whole
     shows holds up a joiner once.
  4. A small state comes from one source, because each helper would write it to a file.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median_high
from typing import Final

import blake3
import trio

from peer.content.fetching import ContentClient, ExpectedState, StateDownload, fetch_from
from peer.content.state_file import StateManifest
from peer.facts import PeerState
from peer.observe.event_names import EventName
from peer.runtime import PeerId
from protocol.content.samples import (
    BLOCK_VALUES,
    LEAST_BLOCKS,
    LEAST_WITNESSES,
    NUM_WITNESSES,
    SEED_BYTES,
    Float32Vector,
    block_starts,
    blocks_of,
    is_unlike,
    is_worse,
    sample_of,
)
from protocol.errors import LocoError, RemoteProtocolError
from protocol.limits import MAX_ASKED_PER_SOURCE
from protocol.membership.view import View, known_positions, trusted
from protocol.run.amendments import AmendedSpec
from protocol.schedule.progress import TaskProgress
from protocol.schedule.rounds import lost_lag, middle, oldest_useful
from protocol.wire.content_messages import StateScalars

from .beginning import FirstState, StartContext
from .services import DaemonServices
from .sources import ready_or_resting

# --- witnesses ------------------------------------------------------------------------------------

WITNESS_S: Final = 5.0
"""A slower one does not count. Less than PINNED_REQUEST_S of content/service.py: the source is
not asked for anything meanwhile."""

Turns = Mapping[PeerId, trio.Lock]
"""A peer serves few readers at once: witnesses of several sources take turns with it."""


class Witnesses:
    """Samples and losses of others, to compare with the state that one source is about to send.

    Args:
        root: of that state, as its source has named it.
    """

    def __init__(self, services: DaemonServices, view: View, source: PeerId, root: str) -> None:
        self._network = services.network
        self._view = view
        self._source = source
        # Nobody else can sign so: nobody else knows the seed beforehand.
        drawn = services.sign(f"loco/v1/witnesses/{source}/{root}".encode())
        self._seed = blake3.blake3(drawn).digest(length=SEED_BYTES)
        self.samples: list[Float32Vector] = []
        self.losses: list[float] = []
        self.asked = trio.Event()

    async def ask(self, turns: Turns) -> None:
        """Ask some of the others; witnesses that cannot help, or are slow, do not count."""
        training = [
            member
            for member in self._view.members_training(trio.current_time())
            if member.peer_id != self._source
        ]
        losses = [m.progress.validation_loss for m in trusted(training, trio.current_time())]
        self.losses = [loss for loss in losses if loss is not None]
        others = [member.peer_id for member in training]
        others.sort(key=lambda peer_id: blake3.blake3(self._seed + peer_id.encode()).digest())
        with trio.move_on_after(WITNESS_S):
            async with trio.open_nursery() as nursery:
                for peer_id in others[:NUM_WITNESSES]:
                    nursery.start_soon(self._ask, peer_id, turns[peer_id])
        self.asked.set()

    async def _ask(self, peer_id: PeerId, turn: trio.Lock) -> None:
        try:
            async with turn, fetch_from(self._network, peer_id) as client:
                self.samples.append(await client.sample(self._view.group, self._seed))
        except LocoError:
            return

    def find_odd(self, slow_P: Float32Vector, gave: Callable[[range], bool]) -> bool:
        """Whether the weights are unlike theirs where these values came from the source."""
        places = block_starts(self._seed, slow_P.size)
        blocks = [n for n, at in enumerate(places) if gave(range(at, at + BLOCK_VALUES))]
        sample, *others = (
            blocks_of(values, blocks) for values in (sample_of(slow_P, self._seed), *self.samples)
        )
        return len(blocks) >= LEAST_BLOCKS and is_unlike(sample, others)


# --- the transfer ---------------------------------------------------------------------------------

MAX_HELPERS: Final = 3
"""Further peers that a state is taken from at once. After as many odd sources one at a time is
taken: many identities gain no more."""
TELL_EVERY_S: Final = 10.0


class VerifiedDownload:
    """Fetches a state from a leader and helpers until it is believed; `own`: see `FromPeers`."""

    _nursery: trio.Nursery

    def __init__(self, context: StartContext, own: Mapping[int, bytes] | None) -> None:
        sync = context.spec.founding.sync
        self._context = context
        self._facts = context.services.facts
        self._view = context.held.view
        self._takes_any_replica = sync.diloco is None
        self._download = StateDownload(
            context.slow_P,
            context.momentum_P,
            own,
            takes_any_replica=self._takes_any_replica,
            lost_lag=lost_lag(sync.round_steps),
        )
        self._download.on_progress = self._moved
        self._witnesses: dict[PeerId, Witnesses] = {}
        self._turns = defaultdict[PeerId, trio.Lock](trio.Lock)
        self._doubted: set[PeerId] = set()
        self._alone = False
        self._began_s = self._told_s = trio.current_time()

    async def run(self, patience_s: float) -> StateScalars:
        """Ask one source after another to lead, until a state is believed.

        Raises NobodyHelped: nobody gave one that is right; both vectors may be half written.
        """
        context = self._context
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(context.look_around)
            state = await context.sources.fetch(
                self._fetch_led_by, self._view, patience_s=patience_s
            )
            self._nursery.cancel_scope.cancel()
        self._emit_received(state.round)
        return state

    async def _fetch_led_by(self, client: ContentClient) -> StateScalars:
        """Fetch a state that this source leads, and compare it.

        Raises:
            StreamLost, Refused, RemoteProtocolError: this source failed; another one may lead.
        """
        leader, download = client.remote_peer_id, self._download
        described = await self._described_by(client)
        kept = (source for source in download.remotes if source in self._witnesses)
        self._witnesses = {source: self._witnesses[source] for source in kept}
        self._ask_about(leader, described)
        while True:
            state = await self._gather(client, described)
            odd = await self._odd_ones() if self._takes_any_replica else []
            for source in odd:
                download.plan.gone(source, believed=False)
            self._doubted.update(odd)
            if leader in odd:
                raise RemoteProtocolError(f"what {leader} gave is unlike what others have")
            if not odd:
                break
        try:
            await self._check_whole(leader)
        except RemoteProtocolError:
            download.plan.forget()
            self._alone = self._takes_any_replica
            raise
        return state

    async def _described_by(self, client: ContentClient) -> StateManifest:
        context, held = self._context, self._context.held
        heard = _heard_steps(context.spec, held.view)
        round_steps = context.spec.founding.sync.round_steps
        expected = ExpectedState(
            held.group.digest,
            minimum_step=oldest_useful(heard, round_steps),
            maximum_step=median_high(heard) + lost_lag(round_steps) if heard else None,
            layout_digest=held.shape.layout_digest,
        )
        return await client.description(expected, context.slow_P.size)

    async def _gather(self, client: ContentClient, described: StateManifest) -> StateScalars:
        helping, apart_from = trio.CancelScope(), {client.remote_peer_id, *self._doubted}

        async def be_helped() -> None:
            with helping:
                sources = self._context.sources
                await sources.help_with(self._help, self._view, apart_from, MAX_HELPERS)

        if self._may_be_helped(described):
            self._nursery.start_soon(be_helped)
        try:
            return await self._download.follow(client, described)
        finally:
            helping.cancel()

    def _may_be_helped(self, described: StateManifest) -> bool:
        if not self._takes_any_replica:
            return True
        training = self._view.members_training(trio.current_time())
        return (
            not self._alone
            and len(self._doubted) < MAX_HELPERS
            and len(training) > LEAST_WITNESSES
            and len(described.digests) > 2 * MAX_ASKED_PER_SOURCE  # weights and momentum
        )

    async def _help(self, client: ContentClient) -> bool:
        """Take a part from this source, if rule 2 allows it. Returns whether it does.

        False also where its state is of another time than what was fetched.
        """
        described = await self._described_by(client)
        if not self._download.plan.is_of_one_time(described.scalars.step):
            return False
        name = client.remote_peer_id
        try:
            if self._takes_any_replica:
                self._ask_about(name, described)
                witnesses = self._witnesses[name]
                await witnesses.asked.wait()
                if len(witnesses.samples) < LEAST_WITNESSES:
                    return False
            await self._download.help(client, described)
        finally:
            if name not in self._download.remotes:
                self._witnesses.pop(name, None)
        return True

    # --- comparing ----------------------------------------------------------------------------
    def _ask_about(self, source: PeerId, described: StateManifest) -> None:
        root, services = described.root, self._context.services
        self._witnesses[source] = witnesses = Witnesses(services, self._view, source, root)
        self._nursery.start_soon(witnesses.ask, self._turns)

    async def _odd_ones(self) -> list[PeerId]:
        odd = []
        for source in self._download.remotes:
            witnesses = self._witnesses[source]
            await witnesses.asked.wait()
            if witnesses.find_odd(self._context.slow_P, partial(self._download.gave, source)):
                odd.append(source)
        return odd

    async def _check_whole(self, leader: PeerId) -> None:
        """Compare the whole, and its loss where others' are known.

        Raises:
            RemoteProtocolError: the state is unlike theirs, or worse.
        """
        witnesses = self._witnesses[leader]
        await witnesses.asked.wait()
        if witnesses.find_odd(self._context.slow_P, lambda _: True):
            raise RemoteProtocolError(
                f"the state of {leader} is unlike those of {len(witnesses.samples)} others"
            )
        losses = [each.losses for each in self._witnesses.values()]
        known = [told for told in losses if len(told) >= LEAST_WITNESSES]
        if not known or (loss := await self._context.measure()) is None:
            return
        for told in known:
            if is_worse(loss, told):
                others = ", ".join(f"{each:.3f}" for each in sorted(told))
                raise RemoteProtocolError(
                    f"the state of {leader} has a loss of {loss:.3f}, where others tell {others}"
                )

    # --- telling ------------------------------------------------------------------------------
    def _moved(self) -> None:
        """A chunk came: say how far it is, and how long the rest will take at this pace."""
        download, now_s = self._download, trio.current_time()
        sources, elapsed_s = download.num_sources, now_s - self._began_s
        left_s = download.missing_bytes / max(1, download.fetched_bytes) * elapsed_s
        peers = "1 peer" if sources == 1 else f"{sources} peers"
        total = download.total_bytes
        self._facts.progressed(TaskProgress(f"from {peers}", download.share * total, total))
        if now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            self._context.services.events.emit(
                EventName.STATE_PROGRESSED,
                share=round(download.share, 4),
                remotes=download.remotes,
                bytes=download.fetched_bytes,
                left_s=round(left_s, 1),
            )

    def _emit_received(self, round_: int) -> None:
        download = self._download
        self._context.services.events.emit(
            EventName.STATE_RECEIVED,
            round=round_,
            remotes=download.remotes,
            bytes=download.fetched_bytes,
            kept_bytes=download.kept_bytes,
            seconds=trio.current_time() - self._began_s,
        )


# --- the beginning --------------------------------------------------------------------------------


@dataclass(frozen=True)
class FromPeers:
    """The state of a peer of the group, or of several.

    Args:
        own: digests of the chunks of a checkpoint of ours that the vectors hold already.
        patience_s: how long peers are asked.
    """

    goes_stale = True
    own: Mapping[int, bytes] | None = None
    patience_s: float = math.inf

    async def take(self, context: StartContext) -> FirstState:
        """Fetch it, verified; what only its source says of the schedule moves nothing.

        Raises:
            NobodyHelped: nobody gave one that is right; both vectors may be half written.
        """
        view, spec = context.held.view, context.spec
        context.services.facts.now_doing("fetching the state")
        state = await VerifiedDownload(context, self.own).run(self.patience_s)
        now_s = trio.current_time()
        heard = known_positions(view.members_training(now_s), now_s)
        epoch, position = context.plan.start_position([*heard, (state.epoch, state.position)])
        # No further than the middle of the others; while none of them is heard it is 0, and where
        # they are is gone to when they are.
        step = min(state.step, int(middle(_heard_steps(spec, view), 0)))
        members = view.alive(now_s)
        ended = [member.progress.state == PeerState.FINISHED for member in members]
        over = step >= spec.total_steps_at(step) and bool(ended) and all(ended)
        return FirstState(state.round, step, epoch, position, over=over)


def _heard_steps(spec: AmendedSpec, view: View) -> list[int]:
    """Nominal steps of those that train, or have, and are not past the end.

    Those that are paused count where there are no others: they stand somewhere in the past.
    """
    now_s = trio.current_time()
    members = [m for m in view.alive(now_s) if m.progress.step <= spec.longest_steps]
    return [m.progress.step for m in trusted(ready_or_resting(members), now_s)]
