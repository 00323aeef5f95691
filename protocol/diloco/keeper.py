"""One fragment's life: sent, averaged, returned, and put right afterwards.

    trainer   FragmentSent(k) ............ merged tau steps later ........ FragmentSent(k+1)
    keeper    | contribute, apply results as they come, Merge | settled: redo, late, heal |

What concerns the fragment comes into one inbox and is taken one after another. While the fragment
is in flight the trainer does not read the outer copy; at any other time the keeper has it hold
still first. Nothing is written but at its command, one write after another.

    AtRest ---Sent---> AwaitingTurn ---> Verifying ---contributions---> InFlight ---> AtRest
    AtRest ---a result, a chunk---> Holding ---TrainerHeld---> Writing ---> AtRest

A flight ends when every chunk has its result or an owner that will bring nothing more, when its
patience ends, or when the trainer sends again (it is a new trainer: the old one's flight is over).

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

What has come and cannot be used yet is kept, bounded; the rest is lost and counted. Results for
sends to come are kept for MAX_EARLY_CYCLES cycles. A joiner does not know which its first send will
be; then the newest are kept. What could not be written because the trainer had just sent the
fragment waits for that send.

Fragments that the trainer has sent together leave in order. An owner averages a fragment as soon as
it has the contributions of all to it. So all peers should contribute to the same one first, but the
checks before it end in an order of chance, another at each peer. A fragment that does not come soon
is waited for no longer than WAIT_S: its keeper may be busy.
"""

from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import blake3

from protocol.fragment.chunk_ledger import ChunkLedger, ResultVerdict, Stamp
from protocol.fragment.owners import owners_of_chunks
from protocol.limits import MAX_CONTRIBUTION_WEIGHT
from protocol.schedule.deadline import ObservedDeadline
from protocol.wire.fragment_messages import DIGEST_BYTES, ChunkStamp

from .chunk_writes import ChunkWrites, Occasion
from .fragment_events import (
    AmendTrainer,
    ChunkFetched,
    Contribute,
    CyclePassed,
    CycleSettled,
    FragmentCommand,
    HoldOutcome,
    HoldTrainer,
    Item,
    MergeIntoTrainer,
    ResultArrived,
    SendEnded,
    Sent,
    Verify,
    Withdrawn,
)
from .healing import Healing
from .peers import Peers, SendPlan

# --- the order of departures ----------------------------------------------------------------------
WAIT_S: Final = 0.5
"""Time that a fragment waits for those that were sent before it."""


class Departures:
    """Fragments that were sent, and have not left."""

    def __init__(self) -> None:
        self._waiting: list[int] = []

    @property
    def first(self) -> int | None:
        """The fragment whose turn it is; None if none waits."""
        return self._waiting[0] if self._waiting else None

    def sent(self, fragment: int) -> None:
        """Note that a fragment is to leave, after those that were sent before."""
        self._waiting.append(fragment)

    def is_turn(self, fragment: int) -> bool:
        """Whether none that was sent before it is still here."""
        return fragment not in self._waiting or self._waiting[0] == fragment

    def left(self, fragment: int) -> None:
        """Note that a fragment is on its way."""
        if fragment in self._waiting:
            self._waiting.remove(fragment)


# --- digests --------------------------------------------------------------------------------------
def short_digest(data: bytes | memoryview) -> bytes:
    """The digest of codes, for messages."""
    return blake3.blake3(data).digest(length=DIGEST_BYTES)


def digest_of_stamps(stamps: Iterable[Stamp]) -> bytes:
    """One digest of the states of all chunks of a fragment."""
    return short_digest(b"".join(stamp.digest for stamp in stamps))


# --- where a fragment is --------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class AtRest:
    """Nothing is under way."""


@dataclass(frozen=True, slots=True)
class AwaitingTurn:
    """It was sent, and waits for fragments that were sent before it."""

    sent: Sent
    began_s: float


@dataclass(frozen=True, slots=True)
class Verifying:
    """Its memory is checked before it leaves."""

    sent: Sent
    began_s: float


@dataclass(slots=True)
class InFlight:
    """Its codes are on their way to the owners, or their results to us.

    Attributes:
        owners: of its chunks, in order.
        answered: chunks for which a result has come, whether it could be applied or not.
        occasion: its time is our patience.
    """

    sent: Sent
    began_s: float
    owners: tuple[str, ...]
    answered: set[int]
    occasion: Occasion


@dataclass(frozen=True, slots=True)
class Holding:
    """Something came that is to be written, and the trainer is told to hold still."""

    item: ResultArrived | ChunkFetched | Withdrawn


@dataclass(frozen=True, slots=True)
class Writing:
    """It is being written."""

    held: HoldOutcome
    occasion: Occasion


State = AtRest | AwaitingTurn | Verifying | InFlight | Holding | Writing


# --- what cannot be used yet ----------------------------------------------------------------------
MAX_WAITING: Final = 4096
"""Items that wait for a send on its way."""
MAX_EARLY_CYCLES: Final = 2
"""Results for sends that we have not come to yet are kept this far ahead."""
MAX_EARLY_FOR_A_CHUNK: Final = 4
"""Results kept for a chunk in one cycle: views that differ make several owners of it."""


class WaitingResults:
    """See the top of the file.

    Attributes:
        lost_items: those that did not fit.
    """

    def __init__(self, num_chunks: int) -> None:
        self._max_early = MAX_EARLY_FOR_A_CHUNK * num_chunks
        self._early: dict[int, list[ResultArrived]] = defaultdict(list)
        self._for_send: list[ResultArrived | ChunkFetched] = []
        self.lost_items = 0

    def keep_early(self, item: ResultArrived, cycle: int) -> None:
        """Keep a result for a send to come; the last was of `cycle`, or there was none (-1)."""
        if cycle >= 0 and item.result.cycle > cycle + MAX_EARLY_CYCLES:
            return
        early = self._early[item.result.cycle]
        if len(early) < self._max_early:
            early.append(item)
        else:
            self.lost_items += 1
        while len(self._early) > MAX_EARLY_CYCLES:
            del self._early[min(self._early)]

    def wait_for_send(self, item: ResultArrived | ChunkFetched) -> None:
        """Keep what came while a send was on its way."""
        if len(self._for_send) < MAX_WAITING:
            self._for_send.append(item)
        else:
            self.lost_items += 1

    def due(self, cycle: int) -> list[ResultArrived | ChunkFetched]:
        """Let go what came for this send, or an earlier one, before we were there."""
        for_send, self._for_send = self._for_send, []
        cycles = sorted(early for early in self._early if early <= cycle)
        return [*for_send, *(item for early in cycles for item in self._early.pop(early))]


# --- the keeper -----------------------------------------------------------------------------------
MIN_RETURN_S: Final = 2.0
MAX_RETURN_S: Final = 60.0
MAX_INBOX: Final = 4096

Output = Iterator[FragmentCommand | CycleSettled]


class Keeper:
    """See the top of the file.

    Attributes:
        ledger: the states of its chunks.
        healing: what it lacks, and which peers are asked for it.
        writes: what is written into it.
        settled: cycle and digest of the last flight that is over; None before. A joiner begins with
            the last cycle that it has no part in.
    """

    def __init__(
        self,
        fragment: int,
        stamps: Iterable[Stamp],
        plan: SendPlan,
        peers: Peers,
        departures: Departures,
    ) -> None:
        self.ledger = ChunkLedger(list(stamps))
        self.healing = Healing(fragment, self.ledger, peers)
        self.writes = ChunkWrites(fragment, peers, self.ledger, self.healing)
        self.settled: tuple[int, bytes] | None = None
        self._fragment = fragment
        self._plan = plan
        self._peers = peers
        self._departures = departures
        self._chunks = range(len(self.ledger.stamps))
        self._state: State = AtRest()
        self._cycle = -1
        self._inbox: deque[Item] = deque()
        self._lost_items = 0
        self._waiting = WaitingResults(len(self._chunks))
        self._passed: dict[str, int] = {}
        self._missed_since_s: float | None = None
        self._patience = ObservedDeadline(floor_s=MIN_RETURN_S, ceiling_s=MAX_RETURN_S)

    @property
    def next_deadline_s(self) -> float | None:
        """When `look` is due; None while nothing waits for a time."""
        if isinstance(self._state, AwaitingTurn):
            return self._state.began_s + WAIT_S
        if isinstance(self._state, InFlight) and not self.writes.is_busy:
            return self._state.occasion.until_s
        return None

    @property
    def awaits_turn(self) -> bool:
        """Whether it waits for fragments that were sent before it."""
        return isinstance(self._state, AwaitingTurn)

    @property
    def lost_items(self) -> int:
        """Number of items that did not fit, since the start."""
        return self._lost_items + self._waiting.lost_items

    @property
    def remembered(self) -> frozenset[str]:
        """The peers of which anything is remembered."""
        return frozenset(self._passed)

    # --- events -----------------------------------------------------------------------------------
    def put(self, now_s: float, *items: Item) -> Output:
        """Take items that came together; what does not fit is lost, and counted."""
        for item in items:
            if len(self._inbox) < MAX_INBOX:
                self._inbox.append(item)
            else:
                self._lost_items += 1
        yield from self._advance(now_s)

    def look(self, now_s: float) -> Output:
        """See whether the fragment's turn has come, or its time is up."""
        state = self._state
        if isinstance(state, AwaitingTurn):
            waited = now_s >= state.began_s + WAIT_S
            if waited or self._departures.is_turn(self._fragment):
                self._state = Verifying(state.sent, state.began_s)
                yield Verify(self._fragment, tuple(self.ledger.cycle(c) for c in self._chunks))
        yield from self._advance(now_s)

    def verified(self, now_s: float, spoilt: Mapping[int, Stamp]) -> Output:
        """Contribute; what stands on a spoilt chunk is behind all others, and left out."""
        assert isinstance(self._state, Verifying)
        self.writes.verified(spoilt)
        yield from self._contribute(now_s, self._state.sent, self._state.began_s)
        yield from self._advance(now_s)

    def trainer_held(self, now_s: float, held: HoldOutcome) -> Output:
        """Write what is to be written, unless the fragment is on its way again."""
        assert isinstance(self._state, Holding)
        item = self._state.item
        if held is HoldOutcome.VOID:
            self._state = AtRest()
            if not isinstance(item, Withdrawn):  # the next send lets the state before go
                self._waiting.wait_for_send(item)
        else:
            self._state = Writing(held, Occasion())
            yield from self._write(now_s, item, self._state.occasion)
        yield from self._advance(now_s)

    def written(self, now_s: float, stamps: Mapping[int, Stamp]) -> Output:
        """Go on behind what was written."""
        self.writes.written(stamps)
        yield from self._advance(now_s)

    def adopt(self, chunk: int, cycle: int, stamp: Stamp) -> None:
        """Take over a stamp of another peer: it is that of the values that we have."""
        if stamp.is_ahead_of(self.ledger.stamp(chunk)):
            self.ledger.healed(chunk, cycle, stamp)

    def begin(self, cycle: int) -> None:
        """Begin after the send of this cycle, with no part in it."""
        self._note_settled(cycle)

    def forget_absent(self) -> None:
        """Forget every peer that is not there: it brings nothing to flights to come."""
        present = self._peers.present
        self._passed = {peer: cycle for peer, cycle in self._passed.items() if peer in present}
        self.healing.forget_absent()

    # --- one after another ------------------------------------------------------------------------
    def _advance(self, now_s: float) -> Output:
        """Go on until something has to be waited for."""
        while not self.writes.is_busy:
            state = self._state
            if self.writes.has_more:
                yield from self.writes.write_on_top(now_s)
            elif isinstance(state, Writing):
                yield from self._end_mending(state)
            elif isinstance(state, InFlight) and self._is_over(now_s, state):
                yield from self._end_flight(now_s, state)
            elif isinstance(state, InFlight) and self._inbox:
                yield from self._take_in_flight(now_s, state, self._inbox.popleft())
            elif isinstance(state, AtRest) and self._inbox:
                yield from self._take_at_rest(now_s, self._inbox.popleft())
            else:
                return

    def _write(
        self, now_s: float, item: ResultArrived | ChunkFetched | Withdrawn, occasion: Occasion
    ) -> Output:
        if isinstance(item, ChunkFetched):
            yield from self.writes.write_chunk(item, occasion)
        elif isinstance(item, Withdrawn):
            yield from self.writes.undo(item, occasion)
        else:
            yield from self.writes.write_results(now_s, [item], occasion)

    def _note_passed(self, passed: CyclePassed) -> None:
        self._passed[passed.peer_id] = max(passed.cycle, self._passed.get(passed.peer_id, -1))

    def _note_settled(self, cycle: int) -> bytes:
        """Note where we are; returned is the digest of that."""
        digest = digest_of_stamps(self.ledger.stamps)
        self.settled = (cycle, digest)
        self._peers.note_settled(self._fragment, self._peers.own_id, cycle, digest)
        return digest

    # --- in flight --------------------------------------------------------------------------------
    def _contribute(self, now_s: float, sent: Sent, began_s: float) -> Output:
        """Have the codes sent to the owners; while we are healing, nothing but a word."""
        self._departures.left(self._fragment)
        members = self._peers.possible_owners(sent.cycle)
        key = self._plan.owners_key(self._fragment, sent.cycle)
        owners = owners_of_chunks(key, len(self._chunks), members)
        for owner in members:
            chunks = [chunk for chunk in self._chunks if owners[chunk] == owner]
            if chunks and self.healing.is_fetching:
                yield Contribute(owner, sent, 0, ())
            elif chunks:
                stamps = (ChunkStamp.of(chunk, self.ledger.stamp(chunk)) for chunk in chunks)
                yield Contribute(owner, sent, MAX_CONTRIBUTION_WEIGHT, tuple(stamps))
        self.writes.sent()
        patience_s = self._patience.current_s * self._plan.sends_at_once(sent.cycle)
        self._state = InFlight(sent, began_s, owners, set(), Occasion(now_s + patience_s))
        self._inbox.extendleft(reversed(self._waiting.due(sent.cycle)))

    def _missing(self, cycle: int) -> set[int]:
        """Chunks that have not come to this cycle."""
        return {chunk for chunk in self._chunks if self.ledger.cycle(chunk) < cycle}

    def _awaited(self, flight: InFlight) -> set[str]:
        """Owners that may still bring something."""
        cycle = flight.sent.cycle
        owners = {flight.owners[chunk] for chunk in self._missing(cycle) - flight.answered}
        return {owner for owner in owners if self._passed.get(owner, -1) < cycle}

    def _is_over(self, now_s: float, flight: InFlight) -> bool:
        if now_s >= flight.occasion.until_s:
            return True
        if self._inbox:
            return isinstance(self._inbox[0], Sent)
        return not self._awaited(flight)

    def _take_in_flight(self, now_s: float, flight: InFlight, item: Item) -> Output:
        if isinstance(item, CyclePassed):
            self._note_passed(item)
        elif isinstance(item, ChunkFetched | Withdrawn):
            yield from self._write(now_s, item, flight.occasion)
        elif isinstance(item, ResultArrived):
            batch = self._batch(item)
            # Perhaps we cannot apply one before we have healed; that may take longer.
            of_cycle = {b.chunk.chunk for b in batch if b.result.cycle == flight.sent.cycle}
            flight.answered |= of_cycle
            yield from self.writes.write_results(now_s, batch, flight.occasion)

    def _batch(self, first: ResultArrived) -> list[ResultArrived]:
        """A result and all behind it of other chunks, to be written at one go."""
        batch = {first.chunk.chunk: first}
        while self._inbox:
            item = self._inbox[0]
            if not isinstance(item, ResultArrived) or item.chunk.chunk in batch:
                break
            batch[item.chunk.chunk] = item
            self._inbox.popleft()
        return list(batch.values())

    def _end_flight(self, now_s: float, flight: InFlight) -> Output:
        cycle, missing = flight.sent.cycle, self._missing(flight.sent.cycle)
        if not missing:
            self._patience.observe(now_s - flight.began_s)
        in_time = now_s < flight.occasion.until_s
        in_vain = set[str]() if in_time else self._awaited(flight)
        self._peers.note_brought_nothing(in_vain)
        self._missed_since_s = flight.began_s if in_vain else None
        self._state = AtRest()
        changes = flight.occasion.changes
        yield MergeIntoTrainer(self._fragment, cycle, changes)
        digest = self._note_settled(cycle)
        yield CycleSettled(self._fragment, cycle, digest)
        yield SendEnded(
            self._fragment,
            cycle,
            flight.occasion.contributors,
            len(missing),
            len(changes.moved),
            digest.hex(),
            now_s - flight.began_s,
        )

    # --- at any other time ------------------------------------------------------------------------
    def _take_at_rest(self, now_s: float, item: Item) -> Output:
        if isinstance(item, Sent):
            self._cycle = item.cycle
            self._peers.note_sent(self._fragment, item.cycle)
            self._state = AwaitingTurn(item, now_s)
            yield from self.look(now_s)
        elif isinstance(item, CyclePassed):
            self._note_passed(item)
        elif isinstance(item, ResultArrived) and item.result.cycle > self._cycle:
            self._waiting.keep_early(item, self._cycle)
        elif isinstance(item, Withdrawn):
            if self.writes.undoable(item):
                self._state = Holding(item)
                yield HoldTrainer(self._fragment)
        elif isinstance(item, ChunkFetched) or (yield from self._is_wanted_late(now_s, item)):
            self._state = Holding(item)
            yield HoldTrainer(self._fragment)

    def _is_wanted_late(
        self, now_s: float, item: ResultArrived
    ) -> Generator[FragmentCommand, None, bool]:
        """Whether a result that came after its flight is to be written."""
        late = item.result.cycle == self._cycle and not item.asked
        if late and self._missed_since_s is not None:
            self._patience.observe(now_s - self._missed_since_s)
            self._missed_since_s = None
        verdict = yield from self.writes.judge(now_s, item)
        return verdict in (ResultVerdict.STEP, ResultVerdict.REDO)

    def _end_mending(self, mending: Writing) -> Output:
        self._state = AtRest()
        if mending.held is HoldOutcome.YIELDED:
            yield AmendTrainer(self._fragment, mending.occasion.changes)
        if mending.occasion.has_written and self.settled is not None:
            cycle = self.settled[0]
            yield CycleSettled(self._fragment, cycle, self._note_settled(cycle))
