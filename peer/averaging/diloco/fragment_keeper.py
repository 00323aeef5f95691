"""One fragment's life: sent, averaged, returned, and made right afterwards.

    trainer   FragmentSent(k) ............ merged tau steps later ........ FragmentSent(k+1)
    keeper    | contribute, apply results as they come, Merge | settled: redo, late, heal |

One task per fragment takes everything that concerns it from one inbox, one after another, so that
nothing here needs a lock: the keeper alone writes the fragment's outer copy and talks to the
trainer about it. While the fragment is in flight the trainer does not read the outer copy; at any
other time the keeper asks it to hold still first.

What the trainer is told about each chunk that has changed (its fast weights are theta, the outer
copy was phi when it sent and is phi' now):

    stepped    our codes are in the result            theta <- a theta + (1 - a) phi'
    moved      they are not, or the chunk was healed  theta <- theta + (phi' - phi)
    redone     another result took the place of one   theta <- theta + (1 - a) (phi' - phi)

A chunk that was moved keeps all that was trained on it since the last send, and sends it again with
the next: a peer that was left out loses nothing. A chunk without a result is left alone, which is
the same.

How long results are waited for follows how long they took before. After the run's last step all
fragments are sent at once and share the line, so each is given as many times longer.

Before each contribution the fragment's memory is checked: what was sent as the way from memory that
was spoilt must not reach the others.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final

import blake3
import trio

from peer.ports import PeerId
from protocol.errors import RemoteProtocolError
from protocol.fragment.chunk_ledger import Stamp, Verdict
from protocol.schedule.deadline import ObservedDeadline
from protocol.wire.fragment_messages import DIGEST_BYTES
from protocol.wire.messages import Result

from .fragment_items import (
    Arrived,
    Changes,
    Fetched,
    Held,
    Item,
    Others,
    Passed,
    Returned,
    Sent,
    TrainerSide,
)
from .inbox import Inbox
from .outer_fragments import OuterFragments

MIN_RETURN_S: Final = 2.0
MAX_RETURN_S: Final = 60.0
MAX_INBOX: Final = 4096
MAX_AFTER_HEALING: Final = 8
"""Results kept for a chunk that is being fetched."""
MAX_EARLY_CYCLES: Final = 2
"""Results for sends that we have not come to yet are kept this far ahead."""
MAX_EARLY_FOR_A_CHUNK: Final = 4
"""Results kept for a chunk in one cycle: views that differ make several owners of it."""


class FragmentKeeper:
    """See the top of the file. `run` must be running.

    Attributes:
        cycle: of the last send.
        results: of the last cycle, by chunk: what others may ask for.
        settled: cycle and digest of the last flight that is over; None before. One that begins
            later than the run has the last cycle that it has no part in.
    """

    def __init__(
        self,
        fragment: int,
        peer_id: PeerId,
        *,
        outer: OuterFragments,
        trainer: TrainerSide,
        others: Others,
        write: Callable[..., Awaitable[None]],
        returned: Callable[[Returned], None],
    ) -> None:
        self.fragment = fragment
        self._peer_id = peer_id
        self._outer = outer
        self._trainer = trainer
        self._others = others
        self._write = write
        self._returned = returned
        self._inbox: Inbox[Item] = Inbox(MAX_INBOX)
        self._early: dict[int, list[Arrived]] = defaultdict(list)
        self._waiting: list[Item] = []
        self._after_healing: dict[int, dict[int, Arrived]] = defaultdict(dict)
        self._passed: dict[PeerId, int] = {}
        self._next: Sent | None = None
        self.cycle = -1
        self._missed_since_s: float | None = None
        self._patience = ObservedDeadline(floor_s=MIN_RETURN_S, ceiling_s=MAX_RETURN_S)
        self.results: dict[int, Arrived] = {}
        self.settled: tuple[int, bytes] | None = None
        self._lost_items = 0

    def __repr__(self) -> str:
        return f"<FragmentKeeper {self.fragment} in cycle {self.cycle}, {self._patience!r}>"

    @property
    def lost_items(self) -> int:
        """Number of items that did not fit, since the start."""
        return self._inbox.lost_items + self._lost_items

    def result_of(self, cycle: int, chunk: int) -> tuple[Result, memoryview] | None:
        """What we applied to a chunk in this cycle, carrying nothing else, and its codes."""
        kept = self.results.get(chunk)
        if kept is None or kept.result.cycle != cycle:
            return None
        return replace(kept.result, carried=(chunk,)), kept.codes

    def put(self, item: Item) -> None:
        """Hand it something; what does not fit is lost, and counted."""
        self._inbox.put(item)

    def keep_only(self, peer_ids: AbstractSet[PeerId]) -> None:
        """Forget all other peers: what they were through with concerns no flight to come."""
        self._passed = {peer: cycle for peer, cycle in self._passed.items() if peer in peer_ids}

    def begin(self, cycle: int) -> None:
        """Begin after the send of this cycle, with no part in it."""
        self.settled = (cycle, digest_of(self._outer.ledgers[self.fragment].stamps))

    async def run(self) -> None:
        """Keep the fragment until cancelled."""
        while True:
            item = self._next or await self._inbox.receive()
            self._next = None
            match item:
                case Sent():
                    await self._fly(item)
                case Arrived() | Fetched():
                    await self._make_right(item)
                case Passed():
                    self._note_passed(item)

    # --- in flight --------------------------------------------------------------------------------
    async def _fly(self, sent: Sent) -> None:
        began_s = trio.current_time()
        self.cycle = sent.cycle
        await self._others.turn_to_contribute(self.fragment)
        await self._write(self._outer.verify, self.fragment)
        healing = self._others.is_healing(self.fragment)
        owners = self._others.contribute(self.fragment, sent, healing=healing)
        self._outer.sent(self.fragment)
        self.results = {}
        changes, heard = Changes(), 0
        waiting = self._come_early(sent.cycle)
        missing, answered = self._missing(sent.cycle), set[int]()
        awaited = set(owners) - self._through_with(sent.cycle)
        patience_s = self._patience.current_s * self._outer.sends_at_once(sent.cycle)
        with trio.move_on_after(patience_s) as patience:
            while self._next is None and (waiting or awaited):
                item = waiting.pop(0) if waiting else await self._inbox.receive()
                match item:
                    case Sent():
                        self._next = item  # of a new trainer: the old one's flight is over
                    case Passed():
                        self._note_passed(item)
                    case Arrived():
                        batch = self._batch(item, waiting)
                        # Perhaps we cannot apply one before we have healed; that may take longer.
                        answered |= {b.chunk.chunk for b in batch if b.result.cycle == sent.cycle}
                        for applied in await self._apply_all(batch, changes):
                            heard = max(heard, applied.chunk.mask.bit_count())
                    case Fetched():
                        await self._apply(item, changes)
                missing = self._missing(sent.cycle)
                awaited = {owners[chunk] for chunk in missing - answered}
                awaited -= self._through_with(sent.cycle)
        if not missing:
            self._patience.observe(trio.current_time() - began_s)
        self._missed_since_s = began_s if patience.cancelled_caught else None
        if patience.cancelled_caught:
            self._others.unheard(awaited)
        await self._trainer.merge(self.fragment, sent.cycle, changes)
        digest = self._settle(sent.cycle)
        self._returned(
            Returned(
                self.fragment,
                sent.cycle,
                heard,
                len(missing),
                len(changes.moved),
                digest.hex(),
                trio.current_time() - began_s,
            )
        )

    def _note_passed(self, passed: Passed) -> None:
        self._passed[passed.peer_id] = max(passed.cycle, self._passed.get(passed.peer_id, -1))

    def _through_with(self, cycle: int) -> set[PeerId]:
        """The peers that will bring nothing more for this cycle."""
        return {peer_id for peer_id, newest in self._passed.items() if newest >= cycle}

    def _missing(self, cycle: int) -> set[int]:
        """Chunks that have not come to this cycle."""
        ledger = self._outer.ledgers[self.fragment]
        return {chunk for chunk in range(len(ledger.stamps)) if ledger.cycle(chunk) < cycle}

    def _come_early(self, cycle: int) -> list[Item]:
        """Items that came for this send, or an earlier one, before we were there."""
        due = sorted(early for early in self._early if early <= cycle)
        come, self._waiting = self._waiting, []
        return [*come, *(item for early in due for item in self._early.pop(early))]

    def _batch(self, first: Arrived, waiting: list[Item]) -> list[Arrived]:
        """A result and all behind it of other chunks, to be written at one go."""
        batch = {first.chunk.chunk: first}
        while True:
            item = waiting[0] if waiting else self._inbox.look()
            if not isinstance(item, Arrived) or item.chunk.chunk in batch:
                return list(batch.values())
            batch[item.chunk.chunk] = item
            if waiting:
                del waiting[0]
            else:
                self._inbox.drop()

    # --- at any other time ------------------------------------------------------------------------
    async def _make_right(self, item: Arrived | Fetched) -> None:
        if isinstance(item, Arrived):
            if item.result.cycle > self.cycle:
                self._keep_early(item)
                return
            late = item.result.cycle == self.cycle and not item.asked
            if late and self._missed_since_s is not None:
                self._patience.observe(trio.current_time() - self._missed_since_s)
                self._missed_since_s = None
            if self._judge(item) in (Verdict.IGNORE, Verdict.HEAL):
                return
        changes, held = Changes(), await self._trainer.hold(self.fragment)
        if held is Held.VOID:
            self._wait_for_send(item)
            return
        written = False
        try:
            written = await self._apply(item, changes)
        finally:
            if held is Held.YIELDED:
                with trio.CancelScope(shield=True):
                    await self._trainer.amend(self.fragment, changes)
        if written and self.settled is not None:
            self._settle(self.settled[0])

    def _wait_for_send(self, item: Arrived | Fetched) -> None:
        if len(self._waiting) < MAX_INBOX:
            self._waiting.append(item)
        else:
            self._lost_items += 1

    def _keep_early(self, item: Arrived) -> None:
        """Keep a result for a send to come. A joiner does not know which its first send will be."""
        cycle = item.result.cycle
        if self.cycle >= 0 and cycle > self.cycle + MAX_EARLY_CYCLES:
            return
        early = self._early[cycle]
        if len(early) < MAX_EARLY_FOR_A_CHUNK * len(self._outer.ledgers[self.fragment].stamps):
            early.append(item)
        else:
            self._lost_items += 1
        while len(self._early) > MAX_EARLY_CYCLES:
            del self._early[min(self._early)]

    def _judge(self, item: Arrived) -> Verdict:
        """What a result means; a chunk that has to be healed is asked for, the result kept."""
        ledger, chunk = self._outer.ledgers[self.fragment], item.chunk
        outcome = item.result.outcome(chunk)
        verdict = ledger.judge(chunk.chunk, item.result.cycle, chunk.base_stamp, outcome)
        if verdict is Verdict.HEAL:
            self._keep_for_after_healing(item)
            known = [item.sender, *item.result.contributors_of(chunk)]
            source = next((peer_id for peer_id in known if peer_id != self._peer_id), None)
            if source is not None:
                self._others.heal(self.fragment, chunk.chunk, source)
        return verdict

    async def _apply(self, item: Item, changes: Changes) -> bool:
        """Write what came into the outer copy. Returns whether anything was written."""
        if isinstance(item, Fetched):
            return await self._heal(item, self._told_of(item.chunk, changes))
        assert isinstance(item, Arrived)
        return bool(await self._apply_all([item], changes))

    async def _apply_all(self, items: Sequence[Arrived], changes: Changes) -> list[Arrived]:
        """Write results for different chunks. Returns those that were written."""
        judged = [(item, self._judge(item)) for item in items]
        wanted = [each for each in judged if each[1] in (Verdict.STEP, Verdict.REDO)]
        if wanted:  # one thread for all: handing over costs more than a small chunk's step
            await self._write(self._write_all, wanted)
        for item, verdict in wanted:
            self._note(item, verdict, changes)
            self.results[item.chunk.chunk] = item
        return [item for item, _ in wanted]

    def _write_all(self, wanted: Sequence[tuple[Arrived, Verdict]]) -> None:
        """Write results into the outer copy, in a worker thread."""
        for item, verdict in wanted:
            outcome, cycle = item.result.outcome(item.chunk), item.result.cycle
            chunk = item.chunk.chunk
            if verdict is Verdict.STEP:
                self._outer.step(self.fragment, chunk, cycle, item.codes, outcome)
            else:
                self._outer.redo(self.fragment, chunk, item.codes, outcome)

    def _note(self, item: Arrived, verdict: Verdict, changes: Changes) -> None:
        """What the trainer has to do about a result that was written."""
        chunk = item.chunk.chunk
        new_here = chunk in changes.stepped or chunk not in changes.moved
        if verdict is Verdict.REDO and chunk not in changes.stepped | changes.moved:
            changes.redone.add(chunk)
        elif self._peer_id in item.result.contributors_of(item.chunk) and new_here:
            changes.stepped.add(chunk)
        else:
            changes.stepped.discard(chunk)
            changes.moved.add(chunk)

    def _told_of(self, chunk: int, changes: Changes) -> Changes:
        """Where to note what a chunk becomes; of a spoilt one the trainer is told nothing.

        The way from a spoilt phi leads nowhere: theta stays where it is.
        """
        return Changes() if self._outer.is_spoilt(self.fragment, chunk) else changes

    async def _heal(self, item: Fetched, changes: Changes) -> bool:
        ledger = self._outer.ledgers[self.fragment]
        ours = ledger.stamp(item.chunk)
        if item.stamp == ours or ours.is_ahead_of(item.stamp):
            return False
        try:
            await self._write(
                self._outer.heal, self.fragment, item.chunk, item.cycle, item.stamp, item.values
            )
        except RemoteProtocolError:
            return False  # not what its stamp says: somebody else will have it
        changes.stepped.discard(item.chunk)
        changes.redone.discard(item.chunk)
        changes.moved.add(item.chunk)
        kept = self._after_healing.pop(item.chunk, {})
        for cycle in sorted(kept):
            await self._apply(kept[cycle], changes)
        return True

    def _keep_for_after_healing(self, item: Arrived) -> None:
        """What comes while a chunk is fetched belongs on top of it, however long that takes."""
        kept = self._after_healing[item.chunk.chunk]
        kept[item.result.cycle] = item
        while len(kept) > MAX_AFTER_HEALING:
            del kept[min(kept)]

    def _settle(self, cycle: int) -> bytes:
        """Note where we are, and tell it; returned is the digest of that."""
        digest = digest_of(self._outer.ledgers[self.fragment].stamps)
        self.settled = (cycle, digest)
        self._others.settled(self.fragment, cycle, digest)
        return digest


def digest_of(stamps: Iterable[Stamp]) -> bytes:
    """One digest of all chunks' states."""
    joined = b"".join(stamp.digest for stamp in stamps)
    return blake3.blake3(joined).digest(length=DIGEST_BYTES)
