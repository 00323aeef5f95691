"""The exchange of fragments among all: told by calls, it answers with commands.

    trainer: Sent --> CycleMachine --Contribute--> owners of the chunks (peers, or our own Owner)
                      CycleMachine <--Result-- owners;  --Merge--> trainer
    Owner: Contribution... --Average--> averaged
                      --Result--> all, and our CycleMachine

There is one `CycleMachine` per fragment (cycle_machine.py), one `Owner` of what others have us
average (collecting.py), and `Peers`, what is known of the others. They know nothing of each other:
what concerns more than one of them is told here.

Rules
  1. A machine that has finished a cycle tells all peers where that has led it, and compares with
     those that have said the same of themselves. A peer that ended elsewhere is asked (healing.py).
  2. A peer that is new is told what we have finished, before we contribute: it would wait for our
     part of it. A peer whose contribution came too late is told too, and gets what was made
     without it.
  3. When our part of a cycle is over our own machine learns of it, and the others if nothing came
     of it: nobody must wait for what will never be.
  4. The stamps of a contribution show whether its sender has a better state than we have. Other
     peers are asked before we act on that. A result may come from anybody, but only the owner of
     its chunks can have made it (owners.py).
  5. Nothing is kept of a peer that is gone, once a fragment has ended a cycle without it; but that
     it has lied (peers.py, rule 3).
  6. Results are audited as they come from their owners; what turns out to be a lie, or cannot be
     shown, is taken back (audits.py).

Time comes in with each call, in order; `next_deadline_s` says when the next `tick` is due. The
caller tells how the group looks before anything else, whenever that changes, and carries out
commands in their order.
Source: docs/decisions/0011-diloco-without-a-coordinator.md.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from protocol.outcomes import AuditOutcome, RefusalReason
from protocol.wire.fragment_messages import (
    Contribution,
    Doubt,
    FragmentSettled,
    GetResult,
    NoResult,
    Result,
    Stamp,
)

from .audits import Audits
from .chunk_ledger import ChunkLedger, can_be
from .collecting import Owner
from .commands import (
    Averages,
    Codes,
    CyclePassed,
    FragmentAnswer,
    FragmentCommand,
    FragmentQuestion,
    GroupSeen,
    HoldOutcome,
    ResultArrived,
    Sent,
    Unasked,
    Withdrawn,
)
from .cycle_machine import CycleMachine
from .owners import Beliefs
from .peers import Context, FragmentCounts, Peers, SendPlan


def parts_of(result: Result, codes: Codes, sender: str) -> list[ResultArrived]:
    return [
        ResultArrived(result, of_chunk, part, sender)
        for chunk, part in codes.items()
        if (of_chunk := result.chunk(chunk)) is not None
    ]


class FragmentCore:
    """One peer's part in the exchange.

    Args:
        stamps: of all chunks of each fragment, at the start.
        seed: 32 bytes that no other peer knows.
        do: has a command carried out.
    """

    def __init__(
        self,
        plan: SendPlan,
        own_id: str,
        stamps: Sequence[Sequence[Stamp]],
        seed: bytes,
        do: Callable[[FragmentCommand], None],
        counts: FragmentCounts | None = None,
    ) -> None:
        self._plan = plan
        self._peers = Peers(own_id, plan.num_fragments)
        self.counts = counts or FragmentCounts()
        self._context = Context(plan, self._peers, do, self.counts)
        self._owner = Owner(self._context)
        self._audits = Audits(self._context, seed)
        self._beliefs = Beliefs(plan, self._peers, [len(of_chunks) for of_chunks in stamps])
        self._machines = [
            CycleMachine(fragment, of_chunks, self._context)
            for fragment, of_chunks in enumerate(stamps)
        ]
        self._acquainted: frozenset[str] = frozenset()
        self._published: dict[int, int] = {}

    # --- what can be asked ------------------------------------------------------------------------
    @property
    def next_deadline_s(self) -> float | None:
        """When a `tick` is due; None while nothing waits."""
        due = (self._owner.next_deadline_s, *(each.next_deadline_s for each in self._machines))
        return min((at_s for at_s in due if at_s is not None), default=None)

    def ledger(self, fragment: int) -> ChunkLedger:
        return self._machines[fragment].ledger

    def result_of(self, fragment: int, cycle: int, chunk: int) -> tuple[Result, memoryview] | None:
        return self._machines[fragment].writes.result_of(cycle, chunk)

    def is_convicted(self, owner: str) -> bool:
        return self._audits.is_convicted(owner)

    # --- time, and the group ----------------------------------------------------------------------
    def at(self, now_s: float) -> None:
        self._context.now_s = now_s

    def see(self, seen: GroupSeen) -> None:
        self._peers.seen = seen
        self.tick()

    def tick(self) -> None:
        """Time has passed, or something else that several parts look at has changed."""
        self._advance_collections()
        for machine in self._machines:
            machine.advance()

    # --- from the trainer, and of the outer copy --------------------------------------------------
    def sent(self, sent: Sent) -> None:
        self._machines[sent.fragment].put(sent)

    def trainer_held(self, fragment: int, held: HoldOutcome) -> None:
        """The end of `Yield`."""
        self._machines[fragment].trainer_held(held)

    def verified(self, fragment: int, corrupted: Mapping[int, Stamp]) -> None:
        """The end of `Verify`: chunks whose memory was corrupted, with their present stamps."""
        self._introduce()  # before we contribute
        self._machines[fragment].verified(corrupted)

    def written(self, fragment: int, stamps: Mapping[int, Stamp]) -> None:
        """The end of any other write: the chunks that it has written, with their stamps."""
        self._machines[fragment].written(stamps)

    # --- from other peers -------------------------------------------------------------------------
    def received(self, sender: str, message: Unasked, codes: Codes) -> None:
        """A message came, checked; or a contribution of our own."""
        self._peers.note_heard(sender)
        machine = self._machines[message.fragment]
        match message:
            case Contribution():
                self._contributed(sender, message, codes)
            case Result():
                self._result_came(sender, message, codes)
            case Doubt():
                self._audits.doubted(message)
            case NoResult():
                machine.put(CyclePassed(sender, message.cycle))
            case FragmentSettled(fragment=fragment, cycle=cycle, digest=digest):
                self._peers.note_settled(fragment, sender, cycle, digest)
                machine.put(CyclePassed(sender, cycle))
                self._advance_collections()
                machine.healing.compare(sender)

    def _contributed(self, sender: str, message: Contribution, codes: Codes) -> None:
        if not all(can_be(stamp, message.cycle) for stamp in message.stamps):
            self.counts.refused[RefusalReason.IMPLAUSIBLE] += 1
            return
        machine = self._machines[message.fragment]
        for theirs in message.stamps:  # is the sender where we are, or ahead? (rule 4)
            behind = machine.ledger.cycle(theirs.chunk) < message.cycle
            if behind and theirs.is_ahead_of(machine.ledger.stamp(theirs.chunk)):
                machine.healing.request(theirs.chunk, sender)
        refusal = self._owner.contributed(sender, message, codes)
        self._end_parts()
        if refusal is not None and sender == self._peers.own_id:
            self._part_over(message.fragment, message.cycle)
        elif refusal is not None:
            self.counts.refused[refusal] += 1
            if refusal is RefusalReason.AHEAD:  # rule 2
                for stamp in message.stamps:
                    if kept := self.result_of(message.fragment, message.cycle, stamp.chunk):
                        self._context.tell(sender, *kept)
                machine.tell_settled(sender)

    def _result_came(self, sender: str, result: Result, codes: Codes) -> None:
        machine = self._machines[result.fragment]
        self._audits.noted(result)
        of_its_life = self._peers.is_of_its_life(result, sender)
        of_our_time = of_its_life and self._beliefs.is_of_our_time(result.cycle)
        parts = parts_of(result, codes, sender) if of_our_time else []
        believed = [part for part in parts if self._is_believed(part)]
        if sender == result.owner:  # it makes one of a cycle
            machine.put(*believed, CyclePassed(sender, result.cycle))
            self._audits.arrived(result, {each.chunk: each.codes for each in believed})
        else:
            machine.put(*believed)
        self._withdraw()

    def _is_believed(self, part: ResultArrived) -> bool:
        """Whether its owner may have made this result; a refusal is counted."""
        if doubt := self._beliefs.doubt(part.result, part.of_chunk):
            self.counts.refused[doubt] += 1
        return doubt is None

    def answered(
        self, peer_id: str, question: FragmentQuestion, answer: FragmentAnswer | None, codes: Codes
    ) -> None:
        """A peer answers an `Ask`; None if it says nothing, or when nothing more is asked.

        Args:
            codes: of the result, or the values of the chunk, by chunk.
        """
        machine = self._machines[question.fragment]
        if not isinstance(question, GetResult):
            machine.put(*machine.healing.answered(peer_id, question, answer, codes))
            return
        part = None
        if isinstance(answer, Result):
            self._audits.noted(answer)
            part = machine.healing.applicable(peer_id, question, answer, codes)
        of_our_time = part is not None and self._beliefs.is_of_our_time(question.cycle)
        if part is not None and of_our_time and self._is_believed(part):
            machine.put(part)
        else:
            machine.healing.no_result_helps(peer_id, question.chunk)
        self._withdraw()

    # --- audits -----------------------------------------------------------------------------------
    def audited(self, result: Result, outcome: AuditOutcome, proof: bytes = b"") -> None:
        self._audits.audited(result, outcome, proof)
        self._withdraw()

    def proved(self, owner: str, proof: bytes) -> None:
        """Another peer has sent a valid proof that an owner has lied."""
        self._audits.proved(owner, proof)
        self._withdraw()

    def _withdraw(self) -> None:
        """Undo what is no longer believed (rule 6)."""
        while self._peers.withdrawn:
            item = Withdrawn(self._peers.withdrawn.pop(0))
            for machine in self._machines:
                machine.put(item)

    # --- our own part -----------------------------------------------------------------------------
    def averaged(self, fragment: int, cycle: int, made: Averages | None) -> None:
        """The end of `Average`; None if the values have no average that codes take.

        A result of ours goes to all, and to our own machine.
        """
        if made is not None:
            self._published[fragment] = cycle
            for peer_id in sorted(self._peers.others):
                self._context.tell(peer_id, made.result, made.codes)
            self._machines[fragment].put(*parts_of(made.result, made.parts, self._peers.own_id))
        self._owner.averaged(fragment, cycle)
        self._end_parts()

    def _advance_collections(self) -> None:
        self._owner.advance()
        self._end_parts()

    def _end_parts(self) -> None:
        while self._owner.over:
            self._part_over(*self._owner.over.popleft())

    def _part_over(self, fragment: int, cycle: int) -> None:
        """Let nobody wait for what we own and have no result for (rule 3)."""
        self._machines[fragment].put(CyclePassed(self._peers.own_id, cycle))
        if self._published.get(fragment) != cycle:
            for peer_id in sorted(self._peers.others):
                self._context.tell(peer_id, NoResult(self._plan.group, fragment, cycle))

    # --- beginning --------------------------------------------------------------------------------
    def adopt(self, fragment: int, states: Iterable[tuple[int, Stamp]]) -> None:
        """A joiner's values have these stamps, each after the step of its cycle."""
        ledger = self.ledger(fragment)
        for cycle, stamp in states:
            if stamp.is_ahead_of(ledger.stamp(stamp.chunk)):
                ledger.healed(stamp.chunk, cycle, stamp)

    def begin(self, last_sent: Sequence[int]) -> None:
        """Begin; `last_sent` is, for each fragment, the last cycle that went without us, or -1."""
        for machine, cycle in zip(self._machines, last_sent, strict=True):
            if cycle >= 0:
                machine.note_settled(cycle)
        self._introduce()

    def _introduce(self) -> None:
        """Tell newcomers what we have finished (rule 2)."""
        others = self._peers.others
        for peer_id in sorted(others - self._acquainted):
            for machine in self._machines:
                machine.tell_settled(peer_id)
            self._audits.tell(peer_id)
        self._acquainted = others
