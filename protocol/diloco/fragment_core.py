"""The exchange of fragments among all: events in, commands out.

    trainer: Sent --> Keeper --Contribute--> owners of the chunks (peers, or our own Owner)
                      Keeper <--MessageReceived(Result)-- owners;  --MergeIntoTrainer--> trainer
    Owner: MessageReceived(Contribution)... --Average--> AveragesMade
                      --SendMessage(Result)--> all, and our Keeper

The parts: one `Keeper` per fragment, which knows what becomes of it (keeper.py); one `Owner` of
what others have us average (owner.py); `Departures`, the order in which fragments leave; and
`Peers`, what is known of the others. Keepers and the owner share the last two, and know nothing of
each other: what concerns more than one of them passes through here.

Rules
  1. A keeper that is through with a cycle tells all peers where that has led it, and compares with
     those that have said the same of themselves. A peer that ended elsewhere is asked (healing.py).
  2. A peer that is new is told what we are through with, before we contribute: it would wait for
     our part of it. So is a peer whose contribution came too late; it gets what was made without.
  3. When our part of a cycle is over our own keeper learns of it, and the others if nothing came of
     it: nobody must wait for what will never be.
  4. What a contribution stands on shows whether its sender has a better state than we. Others are
     asked before that is believed; results are believed of their owners alone (beliefs.py).
  5. Of a peer that is gone nothing is kept, once a fragment has settled without it.
  6. Results are audited as they come from their owners; what turns out to be a lie, or cannot be
     shown, is taken back (audits.py).

Time comes in with each event, in order; `next_deadline_s` says when the next `FragmentTick` is due.
The caller tells `GroupSeen` whenever that changes, looks at least every so often whether it has,
and carries out the commands in their order.
Source: docs/decisions/0011-diloco-without-a-coordinator.md.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final

from protocol.fragment.chunk_ledger import ChunkLedger, Stamp
from protocol.outcomes import RefusalReason
from protocol.wire.fragment_messages import (
    Contribution,
    Doubt,
    FragmentSettled,
    NoResult,
    Result,
)

from .audits import Audits
from .beliefs import Beliefs, can_stand
from .fragment_events import (
    Audited,
    AveragesMade,
    Began,
    ChunkFetched,
    Contribute,
    ContributionRefused,
    CountRefusal,
    CyclePassed,
    CycleSettled,
    FetchFailed,
    ForgetOthers,
    FragmentCommand,
    FragmentEvent,
    FragmentTick,
    GroupSeen,
    MessageReceived,
    PartOver,
    Parts,
    Proved,
    QuestionsEnded,
    ResultAnswered,
    ResultArrived,
    SendMessage,
    Sent,
    Signal,
    StampsAdopted,
    StampsAnswered,
    TrainerHeld,
    Verified,
    Withdrawn,
    WithdrawOwner,
    Written,
    arrived_parts,
)
from .healing import HealingStatistics
from .keeper import Departures, Keeper
from .owner import Owner, OwnerStatistics
from .peers import Peers, SendPlan


@dataclass(frozen=True, slots=True)
class FragmentCoreStatistics:
    """Counts since the start.

    Attributes:
        lost_items: what came for a fragment and did not fit.
    """

    healing: HealingStatistics
    owner: OwnerStatistics
    lost_items: int


Output = Iterable[FragmentCommand | Signal]


class FragmentCore:
    """One peer's part in the exchange. See the top of the file.

    Args:
        stamps: of all chunks of each fragment, at the start.
        seed: 32 bytes that no other peer knows.
    """

    def __init__(
        self, plan: SendPlan, own_id: str, stamps: Sequence[Sequence[Stamp]], seed: bytes
    ) -> None:
        self._plan = plan
        self._peers = Peers(own_id, plan.num_fragments)
        self._departures = Departures()
        self._owner = Owner(plan, self._peers)
        self._audits = Audits(plan.group, self._peers, seed)
        self._beliefs = Beliefs(plan, self._peers, [len(of_chunks) for of_chunks in stamps])
        self._keepers = [
            Keeper(fragment, of_chunks, plan, self._peers, self._departures)
            for fragment, of_chunks in enumerate(stamps)
        ]
        self._acquainted: frozenset[str] = frozenset()
        self._published: dict[int, int] = {}

    # --- what can be asked ------------------------------------------------------------------------
    @property
    def next_deadline_s(self) -> float | None:
        """When a `FragmentTick` is due, in the time of `step`; None while nothing waits."""
        due = (self._owner.next_deadline_s, *(keeper.next_deadline_s for keeper in self._keepers))
        return min((at_s for at_s in due if at_s is not None), default=None)

    @property
    def remembered(self) -> frozenset[str]:
        """The peers of which anything is remembered."""
        of_keepers = (keeper.remembered for keeper in self._keepers)
        return frozenset().union(
            self._acquainted, self._peers.remembered, self._owner.late, *of_keepers
        )

    def ledger(self, fragment: int) -> ChunkLedger:
        """The states of a fragment's chunks; not to be written to."""
        return self._keepers[fragment].ledger

    def result_of(self, fragment: int, cycle: int, chunk: int) -> tuple[Result, memoryview] | None:
        """The result that we applied to a chunk in this cycle, with its codes and no others."""
        return self._keepers[fragment].writes.result_of(cycle, chunk)

    def is_convicted(self, owner: str) -> bool:
        """Whether an owner was proved to have lied."""
        return self._audits.is_convicted(owner)

    def contributors_by_chunk(self, fragment: int) -> dict[int, int]:
        """The number of peers in the result of each chunk, of the last cycle."""
        return self._keepers[fragment].writes.contributors_by_chunk()

    def statistics(self) -> FragmentCoreStatistics:
        """Counts since the start."""
        healing = (keeper.healing.statistics() for keeper in self._keepers)
        return FragmentCoreStatistics(
            reduce(HealingStatistics.__add__, healing, HealingStatistics(0, 0, 0.0)),
            self._owner.statistics(),
            sum(keeper.lost_items for keeper in self._keepers),
        )

    def step(self, now_s: float, event: FragmentEvent) -> tuple[FragmentCommand, ...]:
        """Take one event; say what to do."""
        return tuple(self._step(now_s, event))

    def _step(self, now_s: float, event: FragmentEvent) -> Iterator[FragmentCommand]:
        yield from self._routed(now_s, _HANDLERS[type(event)](self, now_s, event))
        while (first := self._departures.first) is not None and self._keepers[first].awaits_turn:
            yield from self._routed(now_s, self._keepers[first].look(now_s))

    # --- to and from the parts --------------------------------------------------------------------
    def _routed(self, now_s: float, output: Output) -> Iterator[FragmentCommand]:
        """Commands go out; what one part tells reaches the others, when the part is done."""
        for each in tuple(output):
            match each:
                case CycleSettled():
                    yield from self._routed(now_s, self._settled(each))
                case PartOver():
                    yield from self._routed(now_s, self._part_over(now_s, each))
                case ContributionRefused():
                    yield from self._routed(now_s, self._refused(each))
                case WithdrawOwner(owner):
                    for keeper in self._keepers:
                        yield from self._routed(now_s, keeper.put(now_s, Withdrawn(owner)))
                case Contribute():
                    yield from self._introduced()
                    yield each
                case _:
                    yield each

    # --- from other peers -------------------------------------------------------------------------
    def _received(self, now_s: float, event: MessageReceived) -> Output:
        sender, message = event.peer_id, event.message
        self._peers.note_heard(sender)
        keeper = self._keepers[message.fragment]
        match message:
            case Contribution() if not can_stand(message):
                yield CountRefusal(RefusalReason.IMPLAUSIBLE)
            case Contribution():
                yield from self._fetch_what_is_ahead(now_s, sender, message)
                yield from self._owner.contributed(now_s, sender, message, event.codes)
            case Result():
                yield from self._audits.noted(message)
                arrived = yield from self._believed(message, event.codes, sender)
                if sender == message.owner:  # it makes one of a cycle
                    yield from keeper.put(now_s, *arrived, CyclePassed(sender, message.cycle))
                    believed = {each.chunk.chunk: each.codes for each in arrived}
                    yield from self._audits.arrived(message, believed)
                else:
                    yield from keeper.put(now_s, *arrived)
            case Doubt():
                yield from self._audits.doubted(message)
            case NoResult():
                yield from keeper.put(now_s, CyclePassed(sender, message.cycle))
            case FragmentSettled(fragment=fragment, cycle=cycle, digest=digest):
                self._peers.note_settled(fragment, sender, cycle, digest)
                yield from keeper.put(now_s, CyclePassed(sender, cycle))
                yield from self._owner.look(now_s)
                yield from keeper.healing.compare(sender)

    def _fetch_what_is_ahead(self, now_s: float, sender: str, message: Contribution) -> Output:
        """See from what a contribution stands on whether we are where the others are (rule 4)."""
        keeper = self._keepers[message.fragment]
        for theirs in message.stamps:
            behind = keeper.ledger.cycle(theirs.chunk) < message.cycle
            if behind and theirs.stamp.is_ahead_of(keeper.ledger.stamp(theirs.chunk)):
                yield from keeper.healing.wish(now_s, theirs.chunk, sender)

    def _believed(
        self, result: Result, codes: Parts, sender: str
    ) -> Generator[CountRefusal, None, list[ResultArrived]]:
        """The parts of a result that we believe; those that are lies are counted."""
        of_its_life = self._peers.is_of_its_life(result, sender)
        if not of_its_life or not self._beliefs.is_of_our_time(result.cycle):
            return []
        believed = []
        for part in arrived_parts(result, codes, sender):
            if doubt := self._beliefs.doubt(result, part.chunk):
                yield CountRefusal(doubt)
            else:
                believed.append(part)
        return believed

    # --- our own part -----------------------------------------------------------------------------
    def _averaged(self, now_s: float, event: AveragesMade) -> Output:
        """Send a result of ours to all, and to our own keeper."""
        if event.averages is not None:
            result = event.averages.result
            self._published[result.fragment] = result.cycle
            for peer_id in sorted(self._peers.others):
                yield SendMessage(peer_id, result, event.averages.codes)
            arrived = arrived_parts(result, event.averages.parts, self._peers.own_id)
            yield from self._keepers[result.fragment].put(now_s, *arrived)
        yield from self._owner.averaged(event.fragment, event.cycle)

    def _part_over(self, now_s: float, over: PartOver) -> Output:
        """Let nobody wait for what we own and have no result for (rule 3)."""
        passed = CyclePassed(self._peers.own_id, over.cycle)
        yield from self._keepers[over.fragment].put(now_s, passed)
        if self._published.get(over.fragment) != over.cycle:
            for peer_id in sorted(self._peers.others):
                yield SendMessage(peer_id, NoResult(self._plan.group, over.fragment, over.cycle))

    def _refused(self, refused: ContributionRefused) -> Output:
        sender, late = refused.peer_id, refused.contribution
        if sender == self._peers.own_id:
            yield PartOver(late.fragment, late.cycle)
            return
        yield CountRefusal(refused.reason)
        if refused.reason is RefusalReason.AHEAD:  # rule 2
            for stamp in late.stamps:
                kept = self.result_of(late.fragment, late.cycle, stamp.chunk)
                if kept is not None:
                    yield SendMessage(sender, *kept)
            yield from self._told_settled(sender, late.fragment)

    # --- telling others ---------------------------------------------------------------------------
    def _settled(self, settled: CycleSettled) -> Output:
        """Tell all where we are, and look who is elsewhere (rules 1 and 5)."""
        fragment = settled.fragment
        self._peers.forget_absent()
        self._owner.forget_absent()
        self._keepers[fragment].forget_absent()
        yield ForgetOthers(self._peers.present)
        for peer_id in sorted(self._peers.others):
            yield from self._told_settled(peer_id, fragment)
            yield from self._keepers[fragment].healing.compare(peer_id)

    def _introduced(self) -> Iterator[FragmentCommand]:
        """Tell newcomers what we are through with (rule 2)."""
        others = self._peers.others
        for peer_id in sorted(others - self._acquainted):
            for fragment in range(len(self._keepers)):
                yield from self._told_settled(peer_id, fragment)
            yield from self._audits.told(peer_id)
        self._acquainted = others

    def _told_settled(self, peer_id: str, fragment: int) -> Iterator[SendMessage]:
        """Tell one peer where we are with a fragment, if we are anywhere yet."""
        settled = self._keepers[fragment].settled
        if settled is not None:
            yield SendMessage(peer_id, FragmentSettled(self._plan.group, fragment, *settled))

    def _audited(self, _now_s: float, event: Audited) -> Output:
        return self._audits.audited(event)

    def _proved(self, _now_s: float, event: Proved) -> Output:
        return self._audits.proved(event.message.owner, event.proof)

    # --- what concerns one part alone -------------------------------------------------------------
    def _peers_seen(self, now_s: float, event: GroupSeen) -> Output:
        self._peers.note_seen(event)
        yield from self._owner.look(now_s)

    def _ticked(self, now_s: float, _event: FragmentTick) -> Output:
        yield from self._owner.look(now_s)
        for keeper in self._keepers:
            yield from keeper.look(now_s)

    def _sent(self, now_s: float, event: Sent) -> Output:
        self._departures.sent(event.fragment)
        yield from self._keepers[event.fragment].put(now_s, event)

    def _verified(self, now_s: float, event: Verified) -> Output:
        yield from self._keepers[event.fragment].verified(now_s, event.spoilt)

    def _trainer_held(self, now_s: float, event: TrainerHeld) -> Output:
        yield from self._keepers[event.fragment].trainer_held(now_s, event.held)

    def _written(self, now_s: float, event: Written) -> Output:
        yield from self._keepers[event.fragment].written(now_s, event.stamps)

    def _stamps_answered(self, now_s: float, event: StampsAnswered) -> Output:
        keeper = self._keepers[event.fragment]
        yield from keeper.healing.stamps_answered(now_s, event)
        yield from keeper.put(now_s, *keeper.healing.confirmed())

    def _result_answered(self, now_s: float, event: ResultAnswered) -> Output:
        keeper = self._keepers[event.fragment]
        if event.result is not None:
            yield from self._audits.noted(event.result)
        arrived = keeper.healing.applicable(event)
        if arrived is not None and not self._beliefs.is_of_our_time(event.cycle):
            arrived = None
        elif arrived is not None and (doubt := self._beliefs.doubt(arrived.result, arrived.chunk)):
            yield CountRefusal(doubt)
            arrived = None
        if arrived is not None:
            yield from keeper.put(now_s, arrived)
        else:
            yield from keeper.healing.no_result_helps(now_s, event)

    def _questions_ended(self, now_s: float, event: QuestionsEnded) -> Output:
        keeper = self._keepers[event.fragment]
        yield from keeper.healing.questions_ended(now_s, event.peer_id)
        yield from keeper.put(now_s, *keeper.healing.confirmed())

    def _fetched(self, now_s: float, event: ChunkFetched) -> Output:
        keeper = self._keepers[event.fragment]
        yield from keeper.healing.fetched(now_s, event)
        yield from keeper.put(now_s, *keeper.healing.confirmed())

    def _fetch_failed(self, _now_s: float, event: FetchFailed) -> Output:
        self._keepers[event.fragment].healing.fetch_failed(event.chunk)
        yield from ()

    # --- beginning --------------------------------------------------------------------------------
    def _adopted(self, _now_s: float, event: StampsAdopted) -> Output:
        for chunk, (cycle, stamp) in event.stamps.items():
            self._keepers[event.fragment].adopt(chunk, cycle, stamp)
        yield from ()

    def _began(self, _now_s: float, event: Began) -> Output:
        for keeper, cycle in zip(self._keepers, event.last_sent, strict=True):
            if cycle >= 0:
                keeper.begin(cycle)
        yield from self._introduced()


_HANDLERS: Final[dict[type[FragmentEvent], Callable[..., Output]]] = {
    GroupSeen: FragmentCore._peers_seen,
    MessageReceived: FragmentCore._received,
    Sent: FragmentCore._sent,
    TrainerHeld: FragmentCore._trainer_held,
    AveragesMade: FragmentCore._averaged,
    Verified: FragmentCore._verified,
    Written: FragmentCore._written,
    Audited: FragmentCore._audited,
    Proved: FragmentCore._proved,
    StampsAnswered: FragmentCore._stamps_answered,
    ResultAnswered: FragmentCore._result_answered,
    QuestionsEnded: FragmentCore._questions_ended,
    ChunkFetched: FragmentCore._fetched,
    FetchFailed: FragmentCore._fetch_failed,
    StampsAdopted: FragmentCore._adopted,
    Began: FragmentCore._began,
    FragmentTick: FragmentCore._ticked,
}
