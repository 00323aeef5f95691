"""Averaging of fragments among all: streams in, streams out, and who keeps what.

The shell around the keepers (one per fragment), the owner's part, the posts and the answers. It
checks what comes from other peers before anybody acts on it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from peer.network.conversation import Conversation
from peer.ports import Network, PeerId, Stream, Work
from protocol.fragment.owners import owners_of_chunks
from protocol.membership.records import Sign
from protocol.outcomes import RefusalReason
from protocol.wire.fragment_messages import ChunkStamp
from protocol.wire.messages import (
    Contribution,
    FragmentSettled,
    GetChunkState,
    GetResult,
    GetStamps,
    NoResult,
    Result,
)
from protocol.wire.versions import FRAGMENT

from .departures import Departures
from .fragment_answers import FragmentAnswers
from .fragment_healing import FragmentHealing, HealingStatistics
from .fragment_inbound import FragmentInbound, Inbound, OtherGroup, Parts
from .fragment_items import Arrived, Passed, Returned, Sent, TrainerSide
from .fragment_keeper import FragmentKeeper
from .fragment_owner import Averages, FragmentOwner, short_digest
from .fragment_posts import Posts
from .nesterov import load_loops
from .outer_fragments import OuterFragments

EQUAL_WEIGHT: Final = 1


@dataclass(frozen=True, slots=True)
class FragmentSurroundings:
    """With whom a peer averages fragments, and by what means.

    Attributes:
        group: digest of ours.
        round: the one that we are in.
        present: peers that hold an outer copy, ourselves among them: those that train, and those
            that have finished.
        expected: those of them that should contribute to a cycle about now.
        is_over: whether we have finished.
        last_sent: the last cycle of each fragment that was sent before our first round; -1 before
            the first.
    """

    group: str
    network: Network
    work: Work
    sign: Sign
    round: Callable[[], int]
    present: Callable[[], set[PeerId]]
    expected: Callable[[int], set[PeerId]]
    is_over: Callable[[], bool]
    last_sent: Sequence[int]


class FragmentExchange:
    """See the top of the file. `run` must be running.

    Attributes:
        refused: contributions of others that were not taken, and whatever is meant for another
            group, by reason.

    Args:
        lock: held while the outer state moves or is read as a whole.
        returned: called with the end of each send.
    """

    def __init__(
        self,
        around: FragmentSurroundings,
        *,
        outer: OuterFragments,
        trainer: TrainerSide,
        lock: trio.Lock,
        returned: Callable[[Returned], None],
    ) -> None:
        self._group, self._round = around.group, around.round
        self._present, self._expected = around.present, around.expected
        self._last_sent = around.last_sent
        self._network, self._work = around.network, around.work
        self._outer = outer
        self._trainer = trainer
        self._lock = lock
        self._acquainted: set[PeerId] = set()
        self._settled_by: dict[tuple[int, PeerId], tuple[int, bytes]] = {}
        self._silent: set[PeerId] = set()
        self._published: dict[int, int] = {}
        self._departures = Departures()
        self.refused: Counter[RefusalReason] = Counter()
        self._posts = Posts(around.network)
        self._owner = FragmentOwner(
            around.group,
            around.network.peer_id,
            outer=outer,
            work=around.work,
            sign=around.sign,
            expected=self._still_expected,
            reached=self._reached,
            publish=self._publish,
            over=self._own_part_is_over,
        )
        self._keepers = [
            FragmentKeeper(
                fragment.index,
                around.network.peer_id,
                outer=outer,
                trainer=trainer,
                others=self,
                write=self._write,
                returned=returned,
            )
            for fragment in outer.fragments
        ]
        self._answers = FragmentAnswers(outer, self._keepers, around.work, lock)
        self._healing = FragmentHealing(
            around.group,
            network=around.network,
            work=around.work,
            outer=outer,
            write=self._write,
            put=lambda fragment, item: self._keepers[fragment].put(item),
            is_over=around.is_over,
        )

    def __repr__(self) -> str:
        return f"<FragmentExchange of {len(self._keepers)} fragments, {self._posts!r}>"

    async def run(self) -> None:
        """Serve, collect, average and keep, until cancelled."""
        async with trio.open_nursery() as nursery:
            if self._outer.is_long:  # before the first contributions wait for it
                nursery.start_soon(self._work.run, load_loops, self._outer.codec)
            nursery.start_soon(self._posts.run)
            nursery.start_soon(self._owner.run)
            await nursery.start(self._healing.run)
            await self._network.serve(FRAGMENT, self._serve)
            await self._healing.adopt_stamps(sorted(self._others()))
            for keeper, cycle in zip(self._keepers, self._last_sent, strict=True):
                if cycle >= 0:
                    keeper.begin(cycle)
            self._introduce(self._others())
            for keeper in self._keepers:
                nursery.start_soon(keeper.run)
            await trio.sleep_forever()

    def sent(self, fragment: int, sent: Sent) -> None:
        """The trainer has sent a fragment."""
        self._departures.sent(fragment)
        self._keepers[fragment].put(sent)

    def statistics(self) -> HealingStatistics:
        """Counts since the start."""
        return self._healing.statistics()

    def _others(self) -> set[PeerId]:
        return self._present() - {self._network.peer_id}

    def _still_expected(self, fragment: int, cycle: int) -> set[PeerId]:
        """Who should contribute, but for those who say that they are through with it."""
        own = self._keepers[fragment].settled
        heard = {peer: at for (of, peer), (at, _) in self._settled_by.items() if of == fragment}
        if own is not None:
            heard[self._network.peer_id] = own[0]
        return {peer for peer in self._expected(cycle) if heard.get(peer, -1) < cycle}

    def _reached(self, fragment: int, without: PeerId) -> int:
        """The newest cycle of a fragment that anybody has come to, ourselves among them."""
        heard = (
            cycle
            for (of, peer), (cycle, _) in self._settled_by.items()
            if of == fragment and peer != without
        )
        return max([self._round(), self._keepers[fragment].cycle, *heard])

    # --- what keepers ask of the others -----------------------------------------------------------
    async def turn_to_contribute(self, fragment: int) -> None:
        """Wait for fragments that were sent before this one."""
        await self._departures.turn(fragment)

    def contribute(self, fragment: int, sent: Sent, *, healing: bool) -> Sequence[PeerId]:
        """Send the codes to their owners, who are returned by chunk.

        While we are healing they get nothing but a word.
        """
        self._departures.left(fragment)
        self._introduce(self._others())
        num_chunks = len(self._outer.fragments[fragment].chunks)
        parts = self._outer.split_codes(fragment, range(num_chunks), sent.codes)
        own = self._network.peer_id
        members = sorted((self._expected(sent.cycle) - self._silent) | {own})
        key = f"{self._group}/{fragment}/{sent.cycle}"
        owners = owners_of_chunks(key, num_chunks, members)
        for owner in members:
            chunks = [chunk for chunk in range(num_chunks) if owners[chunk] == owner]
            if chunks:
                self._contribute_to(owner, fragment, sent, [] if healing else chunks, parts)
        return owners

    def _contribute_to(
        self,
        owner: PeerId,
        fragment: int,
        sent: Sent,
        chunks: Sequence[int],
        parts: dict[int, memoryview],
    ) -> None:
        ledger = self._outer.ledgers[fragment]
        codes = self._outer.spare.take(sum(len(parts[chunk]) for chunk in chunks))
        own = self._outer.split_codes(fragment, chunks, codes)
        for chunk, part in own.items():
            part[:] = parts[chunk]
        contribution = Contribution(
            group=self._group,
            fragment=fragment,
            cycle=sent.cycle,
            weight=EQUAL_WEIGHT if chunks else 0,
            steps=sent.steps,
            tokens=sent.tokens,
            stamps=tuple(ChunkStamp.of(chunk, ledger.stamp(chunk)) for chunk in chunks),
            digest=short_digest(codes),
        )
        if owner == self._network.peer_id:
            if self._owner.contributed(owner, contribution, own) is not None:
                self._own_part_is_over(fragment, sent.cycle)
        else:
            self._posts.post(owner, contribution, codes)

    def unheard(self, owners: set[PeerId]) -> None:
        """Choose these not again before something comes from them."""
        self._silent |= owners - {self._network.peer_id}

    def settled(self, fragment: int, cycle: int, digest: bytes) -> None:
        """Tell all where we are, and look who is elsewhere."""
        self._keep_only(fragment, self._present())
        for peer_id in self._others():
            message = FragmentSettled(self._group, fragment, cycle, digest)
            self._posts.post(peer_id, message)
            if (fragment, peer_id) in self._settled_by:
                self._compare(fragment, peer_id)

    def _keep_only(self, fragment: int, present: set[PeerId]) -> None:
        """Forget who is gone; a fragment's keeper does when nothing of it is in flight."""
        others = present - {self._network.peer_id}
        self._silent &= others
        self._posts.keep_only(others)
        self._settled_by = {key: at for key, at in self._settled_by.items() if key[1] in others}
        self._owner.keep_only(present)
        self._keepers[fragment].keep_only(present)

    def _introduce(self, others: set[PeerId]) -> None:
        """Tell newcomers what we are through with: they would wait for our part of it."""
        for peer_id in others - self._acquainted:
            for keeper in self._keepers:
                self._tell_settled(peer_id, keeper)
        self._acquainted = others

    def _tell_settled(self, peer_id: PeerId, keeper: FragmentKeeper) -> None:
        """Tell one peer where we are with a fragment, if we are anywhere yet."""
        if keeper.settled is not None:
            message = FragmentSettled(self._group, keeper.fragment, *keeper.settled)
            self._posts.post(peer_id, message)

    def heal(self, fragment: int, chunk: int, sender: PeerId) -> None:
        """Fetch a chunk from a peer that has a better state of it."""
        self._healing.heal(fragment, chunk, sender)

    def is_healing(self, fragment: int) -> bool:
        """Whether a chunk is being fetched."""
        return self._healing.is_healing(fragment)

    def _compare(self, fragment: int, peer_id: PeerId) -> None:
        """Ask a peer that ended the same cycle elsewhere."""
        ours, theirs = self._keepers[fragment].settled, self._settled_by[fragment, peer_id]
        if ours is not None and ours[0] == theirs[0] and ours[1] != theirs[1]:
            self._healing.ask(fragment, peer_id)

    def _publish(self, averages: Averages) -> None:
        """Send a result of ours to all, and to our own keeper."""
        result = averages.result
        self._published[result.fragment] = result.cycle
        for peer_id in self._others():
            self._posts.post(peer_id, result, averages.codes)
        parts = self._outer.split_codes(result.fragment, result.carried, averages.codes)
        self._deliver(result, parts, self._network.peer_id)

    def _own_part_is_over(self, fragment: int, cycle: int) -> None:
        """What we own and have no result for will have none: nobody must wait for it."""
        self._keepers[fragment].put(Passed(self._network.peer_id, cycle))
        if self._published.get(fragment) != cycle:
            for peer_id in self._others():
                self._posts.post(peer_id, NoResult(self._group, fragment, cycle))

    def _deliver(self, result: Result, parts: Parts, sender: PeerId) -> None:
        for index, codes in parts.items():
            chunk = result.chunk(index)
            assert chunk is not None
            self._keepers[result.fragment].put(Arrived(result, chunk, codes, sender))

    async def _write(self, function: Callable[..., None], *args: object) -> None:
        """Run something that writes the outer copy, when nobody reads all of it."""
        while True:
            await self._trainer.may_write()
            async with self._lock:
                if self._trainer.can_write:
                    await self._work.run(function, *args)
                    return

    # --- what others ask --------------------------------------------------------------------------
    async def _serve(self, stream: Stream) -> None:
        inbound = FragmentInbound(self._group, self._outer, self._work)
        async with Conversation(stream) as talk:
            try:
                while True:
                    await self._take(talk, *await inbound.next(talk))
            except OtherGroup as stray:
                self.refused[RefusalReason.OTHER_GROUP] += 1
                await talk.refuse(RefusalReason.OTHER_GROUP, str(stray))

    async def _take(self, talk: Conversation, message: Inbound, codes: Parts) -> None:
        sender = talk.remote_peer_id
        self._silent.discard(sender)
        match message:
            case Contribution():
                self._notice(sender, message)
                refused = self._owner.contributed(sender, message, codes)
                if refused is not None:
                    self.refused[refused] += 1
                if refused is RefusalReason.AHEAD:
                    self._tell_that_it_is_over(sender, message)
            case Result():
                self._deliver(message, codes, sender)
                if sender == message.owner:  # it makes one of a cycle
                    self._keepers[message.fragment].put(Passed(sender, message.cycle))
            case NoResult(fragment=fragment, cycle=cycle):
                self._keepers[fragment].put(Passed(sender, cycle))
            case FragmentSettled():
                self._settled_by[message.fragment, sender] = (message.cycle, message.digest)
                self._keepers[message.fragment].put(Passed(sender, message.cycle))
                self._owner.look()
                self._compare(message.fragment, sender)
            case GetStamps() | GetResult() | GetChunkState():
                await self._answers.answer(talk, message)

    def _tell_that_it_is_over(self, sender: PeerId, late: Contribution) -> None:
        """A contribution came too late: what was made without it, as far as we still have it."""
        keeper = self._keepers[late.fragment]
        for stamp in late.stamps:
            kept = keeper.result_of(late.cycle, stamp.chunk)
            if kept is not None:
                self._posts.post(sender, *kept)
        self._tell_settled(sender, keeper)

    def _notice(self, sender: PeerId, contribution: Contribution) -> None:
        """What a contribution stands on shows whether we are where the others are."""
        ledger = self._outer.ledgers[contribution.fragment]
        for theirs in contribution.stamps:
            behind = ledger.cycle(theirs.chunk) < contribution.cycle
            if behind and theirs.stamp.is_ahead_of(ledger.stamp(theirs.chunk)):
                self.heal(contribution.fragment, theirs.chunk, sender)
