"""One fragment's life: sent, averaged, returned, and put right afterwards.

    trainer   FragmentSent(k) ............ merged tau steps later ........ FragmentSent(k+1)
    machine   | contribute, apply results as they come, Merge | settled: redo, late, heal |

What concerns the fragment comes into one inbox and is taken one after another. While the fragment
is in flight the trainer does not read the outer copy; at any other time the machine has it
hold still first. Nothing is written but at its command, one write after another.

    at rest --Sent--> Verify, verified --contributions--> away --Merge--> at rest
    at rest --a result, a chunk--> Yield --trainer_held--> LateWrite --Merge--> at rest

A send ends when each chunk has a result, or an owner that cannot bring one (it said so, or left);
at its deadline; or when a new trainer sends the fragment again.

The trainer is told about each chunk that has changed (its fast weights are theta, the outer copy
was phi when it sent and is phi' now):

    stepped    our codes are in the result            theta <- a theta + (1 - a) phi'
    moved      they are not, or the chunk was healed  theta <- theta + (phi' - phi)
    redone     another result took the place of one   theta <- theta + (1 - a) (phi' - phi)

A chunk that was moved keeps all that was trained on it since the last send, and sends it again with
the next: a peer that was left out loses nothing. A chunk without a result is left alone, which is
the same.

The deadline follows how long earlier results took, within twice the bounds of an owner's collection
(collecting.py), since results come after it. If some owner failed in every send, it follows the
other owners' times. After the run's last step all fragments are sent at once and share the line, so
each is given as many times longer.

Before each contribution the fragment's memory is checked: a difference from corrupted memory must
not reach other peers.

What has come and cannot be used yet is kept, bounded; the rest is lost. Results for
sends to come are kept for MAX_EARLY_CYCLES cycles. A joiner does not know which its first send will
be; then the newest are kept. What could not be written because the trainer had just sent the
fragment waits for that send.

Fragments that the trainer has sent together leave in that order, because their checks are made one
after another. An owner averages a fragment as soon as it has the contributions of all to it; so all
peers should contribute to the same one first.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

import blake3

from protocol.schedule.deadline import ObservedDeadline
from protocol.trainer_messages import Yield
from protocol.wire.fragment_messages import DIGEST_BYTES, FragmentSettled, Stamp

from .chunk_ledger import ChunkLedger, ResultVerdict
from .chunk_writes import ChunkWrites, TrainerUpdate
from .collecting import MAX_COLLECT_S, MIN_COLLECT_S
from .commands import (
    ChunkFetched,
    Contribute,
    CyclePassed,
    ForgetOthers,
    HoldOutcome,
    Item,
    ResultArrived,
    SendEnded,
    Sent,
    Verify,
    Withdrawn,
)
from .healing import Healing
from .owners import owners_of_chunks
from .peers import Context

ItemT = TypeVar("ItemT")

MAX_WAITING: Final = 4096
"""Items in the inbox, items for a send on its way, and parts of our own codes to be sent."""
MAX_EARLY_CYCLES: Final = 2
"""Results for sends to come are kept this far ahead."""
MAX_EARLY_FOR_A_CHUNK: Final = 4
"""Results kept for a chunk in one cycle: views that differ make several owners of it."""


def _keep(where: deque[ItemT] | list[ItemT], item: ItemT, most: int) -> None:
    if len(where) < most:
        where.append(item)


def short_digest(data: bytes | memoryview) -> bytes:
    return blake3.blake3(data).digest(length=DIGEST_BYTES)


def digest_of_stamps(stamps: Iterable[Stamp]) -> bytes:
    """One digest of the states of all chunks of a fragment."""
    return short_digest(b"".join(stamp.digest for stamp in stamps))


@dataclass(slots=True)
class SendInProgress:
    """A send, until it is merged.

    Attributes:
        owners: of the fragment's chunks; none before it leaves: its memory is checked.
        answered: chunks for which a result has come, whether it could be applied or not.
        came_s: when the last of another owner came.
        update: its time is the deadline.
    """

    sent: Sent
    began_s: float
    owners: tuple[str, ...] = ()
    answered: set[int] = field(default_factory=set)
    came_s: float | None = None
    update: TrainerUpdate = field(default_factory=TrainerUpdate)

    @property
    def is_away(self) -> bool:
        """Whether its codes are on their way to the owners, or their results to us."""
        return bool(self.owners)


@dataclass(slots=True)
class LateWrite:
    """Something came that is to be written at another time.

    Attributes:
        held: None while the trainer is told to hold still.
    """

    item: ResultArrived | ChunkFetched | Withdrawn
    held: HoldOutcome | None = None
    update: TrainerUpdate = field(default_factory=TrainerUpdate)


class CycleMachine:
    """The state machine of one fragment."""

    def __init__(self, fragment: int, stamps: Iterable[Stamp], context: Context) -> None:
        self.ledger = ChunkLedger(stamps)
        self.healing = Healing(fragment, self.ledger, context)
        self.writes = ChunkWrites(fragment, self.ledger, self.healing, context)
        self._fragment = fragment
        self._context = context
        self._peers = context.peers
        self._chunks = range(len(self.ledger.stamps))
        self._state: SendInProgress | LateWrite | None = None
        self._inbox: deque[Item] = deque()
        self._early: dict[int, list[ResultArrived]] = defaultdict(list)
        self._for_send: list[ResultArrived | ChunkFetched] = []
        self._passed: dict[str, int] = {}
        self._missed_since_s: float | None = None
        self._patience = ObservedDeadline(floor_s=2 * MIN_COLLECT_S, ceiling_s=2 * MAX_COLLECT_S)

    @property
    def _cycle(self) -> int:
        return self._peers.own_cycles[self._fragment]

    @property
    def next_deadline_s(self) -> float | None:
        match self._state:
            case SendInProgress(is_away=True, update=update) if not self.writes.is_busy:
                return update.until_s
        return None

    # --- what is told -----------------------------------------------------------------------------
    def put(self, *items: Item) -> None:
        for item in items:
            _keep(self._inbox, item, MAX_WAITING)
        self.advance()

    def verified(self, corrupted: Mapping[int, Stamp]) -> None:
        """Contribute; what stands on a corrupted chunk is behind all others, and left out."""
        assert isinstance(self._state, SendInProgress)
        self.writes.verified(corrupted)
        self._contribute(self._state)
        self.advance()

    def trainer_held(self, held: HoldOutcome) -> None:
        """Write what is to be written, unless the fragment is on its way again."""
        late = self._state
        assert isinstance(late, LateWrite)
        if held is HoldOutcome.VOID:
            self._state = None
            if not isinstance(late.item, Withdrawn):  # the next send lets the state before go
                _keep(self._for_send, late.item, MAX_WAITING)
        else:
            late.held = held
            self._write(late.item, late.update)
        self.advance()

    def written(self, stamps: Mapping[int, Stamp]) -> None:
        self.writes.written(stamps)
        self.advance()

    # --- one after another ------------------------------------------------------------------------
    def advance(self) -> None:
        while not self.writes.is_busy:
            match self._state:
                case _ if self.writes.has_more:
                    self.writes.write_on_top()
                case LateWrite(held=HoldOutcome()) as late:
                    self._end_late_write(late)
                case SendInProgress(is_away=True) as send if self._is_over(send):
                    self._end_send(send)
                case SendInProgress(is_away=True) as send if self._inbox:
                    self._take_in_flight(send, self._inbox.popleft())
                case None if self._inbox:
                    self._take_at_rest(self._inbox.popleft())
                case _:
                    return

    def _write(self, item: ResultArrived | ChunkFetched | Withdrawn, update: TrainerUpdate) -> None:
        if isinstance(item, ChunkFetched):
            self.writes.write_chunk(item, update)
        elif isinstance(item, Withdrawn):
            self.writes.undo(item, update)
        else:
            self.writes.write_results([item], update)

    def _note_passed(self, passed: CyclePassed) -> None:
        self._passed[passed.peer_id] = max(passed.cycle, self._passed.get(passed.peer_id, -1))

    # --- in flight --------------------------------------------------------------------------------
    def _contribute(self, send: SendInProgress) -> None:
        """Have the codes sent to the owners; while we are healing, nothing but a word."""
        sent, plan = send.sent, self._context.plan
        members = self._peers.possible_owners(sent.cycle)
        key, is_fetching = plan.owners_key(self._fragment, sent.cycle), self.healing.is_fetching
        send.owners = owners_of_chunks(key, len(self._chunks), members)
        for owner in members:
            chunks = [chunk for chunk in self._chunks if send.owners[chunk] == owner]
            if chunks:
                stamps = (self.ledger.stamp(chunk) for chunk in chunks if not is_fetching)
                self._context.do(Contribute(owner, sent, tuple(stamps)))
        self.writes.sent()
        patience_s = self._patience.bound_s(self._context.others_s)
        patience_s *= plan.sends_at_once(sent.cycle)
        send.update.until_s = self._context.now_s + patience_s
        self._inbox.extendleft(reversed(self._due(sent.cycle)))

    def _due(self, cycle: int) -> list[ResultArrived | ChunkFetched]:
        """Take out what came for this send, or an earlier one, before we were there."""
        for_send, self._for_send = self._for_send, []
        cycles = sorted(early for early in self._early if early <= cycle)
        return [*for_send, *(item for early in cycles for item in self._early.pop(early))]

    def _missing(self, cycle: int) -> set[int]:
        return {chunk for chunk in self._chunks if self.ledger.cycle(chunk) < cycle}

    def _owing(self, send: SendInProgress) -> set[str]:
        """Owners that have brought nothing yet, and may still."""
        cycle = send.sent.cycle
        owners = {send.owners[chunk] for chunk in self._missing(cycle) - send.answered}
        return {owner for owner in owners if self._passed.get(owner, -1) < cycle}

    def _is_over(self, send: SendInProgress) -> bool:
        if self._context.now_s >= send.update.until_s:
            return True
        if self._inbox:
            return isinstance(self._inbox[0], Sent)
        # A present owner that has not finished the cycle may still send a result.
        return self._owing(send).isdisjoint(self._peers.seen.present)

    def _take_in_flight(self, send: SendInProgress, item: Item) -> None:
        if isinstance(item, CyclePassed):
            self._note_passed(item)
        elif isinstance(item, ChunkFetched | Withdrawn):
            self._write(item, send.update)
        elif isinstance(item, ResultArrived):
            batch = self._batch(item)
            # Perhaps we cannot apply one before we have healed; that may take longer.
            of_this = [each for each in batch if each.cycle == send.sent.cycle]
            send.answered |= {each.chunk for each in of_this}
            if any(each.result.owner != self._peers.own_id for each in of_this):
                send.came_s = self._context.now_s
            self.writes.write_results(batch, send.update)

    def _batch(self, first: ResultArrived) -> list[ResultArrived]:
        """A result and all behind it of other chunks, to be written at one go."""
        batch = {first.chunk: first}
        while self._inbox:
            item = self._inbox[0]
            if not isinstance(item, ResultArrived) or item.chunk in batch:
                break
            batch[item.chunk] = item
            self._inbox.popleft()
        return list(batch.values())

    def _end_send(self, send: SendInProgress) -> None:
        now_s, cycle, update = self._context.now_s, send.sent.cycle, send.update
        missing = self._missing(cycle)
        if not missing:
            self._patience.observe(now_s - send.began_s)
        in_vain = self._owing(send)
        if now_s < update.until_s:
            in_vain -= self._peers.seen.present  # they may still bring it; who is stuck, hardly
        elif send.came_s is not None:
            self._context.others_s = send.came_s - send.began_s
        self._peers.note_brought_nothing(in_vain)
        self._missed_since_s = send.began_s if in_vain else None
        self._state = None
        self._context.do(update.merge(self._fragment, cycle))
        digest = self._settle(cycle)
        self._context.do(
            SendEnded(
                self._fragment,
                cycle,
                update.contributors,
                len(missing),
                len(update.moved),
                digest.hex(),
                now_s - send.began_s,
            )
        )

    # --- at any other time ------------------------------------------------------------------------
    def _take_at_rest(self, item: Item) -> None:
        match item:
            case Sent():
                self._peers.own_cycles[self._fragment] = item.cycle
                self._state = SendInProgress(item, self._context.now_s)
                self._context.do(Verify(self._fragment, tuple(self.ledger.cycles)))
            case CyclePassed():
                self._note_passed(item)
            case ResultArrived() if item.cycle > self._cycle:
                self._keep_early(item)
            case Withdrawn() if not self.writes.undoable(item):
                pass
            case ResultArrived() if not self._is_wanted_late(item):
                pass
            case _:
                self._state = LateWrite(item)
                self._context.do(Yield(self._fragment))

    def _keep_early(self, item: ResultArrived) -> None:
        cycle = item.cycle
        if self._cycle >= 0 and cycle > self._cycle + MAX_EARLY_CYCLES:
            return
        _keep(self._early[cycle], item, MAX_EARLY_FOR_A_CHUNK * len(self._chunks))
        while len(self._early) > MAX_EARLY_CYCLES:
            del self._early[min(self._early)]

    def _is_wanted_late(self, item: ResultArrived) -> bool:
        late = item.cycle == self._cycle and not item.asked
        if late and self._missed_since_s is not None:
            self._patience.observe(self._context.now_s - self._missed_since_s)
            self._missed_since_s = None
        return self.writes.judge(item) in (ResultVerdict.STEP, ResultVerdict.REDO)

    def _end_late_write(self, late: LateWrite) -> None:
        self._state = None
        if late.held is HoldOutcome.YIELDED:
            self._context.do(late.update.merge(self._fragment, None))
        if late.update.has_written and self.settled is not None:
            self._settle(self.settled[0])

    # --- where we are -----------------------------------------------------------------------------
    @property
    def settled(self) -> tuple[int, bytes] | None:
        """Cycle and digest of the last send that is over; a joiner has no part in its first."""
        return self._peers.settled(self._fragment, self._peers.own_id)

    def note_settled(self, cycle: int) -> bytes:
        digest = digest_of_stamps(self.ledger.stamps)
        self._peers.note_settled(self._fragment, self._peers.own_id, cycle, digest)
        return digest

    def _settle(self, cycle: int) -> bytes:
        """Tell all where we are, see who is elsewhere; forget the absent."""
        digest = self.note_settled(cycle)
        self._peers.forget_absent()
        self.forget_absent()
        self._context.do(ForgetOthers(self._peers.seen.present))
        for peer_id in sorted(self._peers.others):
            self.tell_settled(peer_id)
            self.healing.compare(peer_id)
        return digest

    def tell_settled(self, peer_id: str) -> None:
        if self.settled is not None:
            group = self._context.plan.group
            self._context.tell(peer_id, FragmentSettled(group, self._fragment, *self.settled))

    def forget_absent(self) -> None:
        present = self._peers.seen.present
        self._passed = {peer: cycle for peer, cycle in self._passed.items() if peer in present}
        self.healing.forget_absent()
