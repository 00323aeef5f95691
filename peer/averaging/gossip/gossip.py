"""Gossip in pairs: proposals, answers and exchanges, as the matchmaker decides.

A shell around `protocol/gossip/matchmaking.py`: it tells the matchmaker what streams and beats
bring, and does what that says. One `Gossip` serves all snapshots of one vector: of the whole model,
or of a fragment. The outer steps call `average`, and `meet` of the planned meetings at the end of
the run (final_rounds.py); both return how averaging ended, and raise nothing of a peer's making.
Other peers come in through `GossipServer`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import trio

from peer.facts import PackingFacts
from peer.network.conversation import Conversation
from peer.observe.event_names import EventName
from peer.observe.events import Events
from peer.rounds.way import Candidates
from peer.runtime import Network, PeerId, Stream, Work
from protocol.errors import LocoError, Refused
from protocol.gossip import matchmaking as mm
from protocol.membership.book import Fault
from protocol.outcomes import RefusalReason, SkipReason
from protocol.wire.messages import AskSettled, Join, Propose, SettledOutcome, SettledReply
from protocol.wire.versions import GOSSIP

from .exchange_session import GOSSIP_STALL_S, AverageEnded, OwnVector, RoundOutcome, Skipped
from .exchanges import Agreement, Exchanges, HeldProposal, note_refused
from .final_rounds import FinalMeetings
from .packing import Packer


@dataclass(slots=True)
class _Attempt:
    """Our own closed round, until its average has ended."""

    own: OwnVector
    exchange_s: float
    on_paired: Callable[[], None] | None
    done: trio.Event = field(default_factory=trio.Event)
    outcome: RoundOutcome | None = None
    paired_s: float | None = None


class Gossip:
    """The proposals and exchanges of one vector. `run` must be running.

    Args:
        refused: counts proposals that were refused before the matchmaker saw them, by reason.

    Attributes:
        packer: to be told what our vectors are averaged with.
        meetings: the planned ones at the end of the run.
    """

    def __init__(
        self,
        agreement: Agreement,
        network: Network,
        work: Work,
        *,
        candidates: Candidates,
        events: Events,
        refused: Counter[RefusalReason],
        packing: PackingFacts | None = None,
    ) -> None:
        self.agreement = agreement
        self.packer = Packer(agreement.codec, agreement.vectors, work, packing or PackingFacts())
        self.exchanges = Exchanges(agreement, network, self.packer)
        self.meetings = FinalMeetings(self.exchanges, candidates=candidates, events=events)
        self._candidates = candidates
        self._events = events
        self._refused_proposals = refused
        self._matchmaker = mm.Matchmaker(agreement.group, network.peer_id, agreement.inner_steps)
        self._attempt: _Attempt | None = None
        self._asking: dict[tuple[PeerId, int], trio.CancelScope] = {}
        self._held: dict[PeerId, HeldProposal] = {}
        self._changed = trio.Event()
        self._nursery: trio.Nursery | None = None

    # --- the outer steps' side --------------------------------------------------------------------
    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._watch)
            while True:
                self._changed = trio.Event()
                due_s = self._matchmaker.next_deadline_s
                with trio.move_on_at(trio.current_time() + 3600 if due_s is None else due_s):
                    await self._changed.wait()
                    continue
                self._do(self._matchmaker.tick(trio.current_time()))

    async def average(
        self,
        own: OwnVector,
        *,
        fresh_s: float,
        search_s: float,
        exchange_s: float,
        on_paired: Callable[[], None] | None = None,
    ) -> AverageEnded:
        """Find a partner for a closed round, and exchange vectors.

        Args:
            own: our contribution; its payload must lie still until this returns.
            fresh_s: how long only a partner that was not met recently will do.
        """
        packed = replace(own, packed=await self.packer.packed(own.payload))
        freed_s = trio.current_time()
        attempt = self._attempt = _Attempt(packed, exchange_s, on_paired)
        self._candidates.announce(own.snapshot)
        self._see(own.snapshot)
        fresh_until_s, search_until_s = freed_s + fresh_s, freed_s + search_s
        self._do(self._matchmaker.search(freed_s, own.snapshot, fresh_until_s, search_until_s))
        try:
            await attempt.done.wait()
        finally:
            self._do(self._matchmaker.end(own.round))
            self._candidates.announce(None)
        ended_s = trio.current_time()
        paired_s = ended_s if attempt.paired_s is None else attempt.paired_s
        outcome = attempt.outcome or Skipped(SkipReason.LEAVING)
        return AverageEnded(own, outcome, paired_s - freed_s, ended_s - paired_s)

    def doubt(self, peer_id: PeerId, fault: Fault | None) -> None:
        """Let a peer rest; without a fault nothing is held against it."""
        if fault is not None:
            self._candidates.blame(peer_id, fault)
        self._matchmaker.doubt(trio.current_time(), peer_id)

    # --- the matchmaker's side --------------------------------------------------------------------
    async def _watch(self) -> None:
        while True:
            await self._candidates.changed()
            if self._attempt is not None and self._matchmaker.is_looking:
                self._see(self._attempt.own.snapshot)

    def _see(self, own: mm.RoundSnapshot) -> None:
        free, present = self._candidates.free(), self._candidates.present(ended=own.final)
        self._do(self._matchmaker.seen(trio.current_time(), free, len(present)))

    def _do(self, commands: Iterable[mm.MatchCommand]) -> None:
        for command in commands:
            match command:
                case mm.SendProposal(peer_id, round_):
                    assert self._nursery is not None
                    self._events.emit(EventName.PROPOSAL_SENT, round=round_, remote=peer_id)
                    self._nursery.start_soon(self._propose, peer_id, round_)
                case mm.Withdraw(peer_id, round_):
                    if (scope := self._asking.get((peer_id, round_))) is not None:
                        scope.cancel()
                case mm.RefuseProposal(peer_id, _, reason):
                    if (held := self._held.get(peer_id)) is not None:
                        held.refuse(reason)
                case mm.Paired(peer_id, round_, proposed):
                    self._paired(peer_id, round_, proposed)
                case mm.Unmatched(round_, reason):
                    self._finish(round_, Skipped(reason))
        self._changed.set()

    def _paired(self, peer_id: PeerId, round_: int, proposed: int | None) -> None:
        attempt = self._attempt
        assert attempt is not None
        attempt.paired_s = trio.current_time()
        if attempt.on_paired is not None:
            attempt.on_paired()
        if proposed is not None and (held := self._held.get(peer_id)) is not None:
            held.accept(attempt.own, attempt.exchange_s)
        self._candidates.announce(None)
        self._events.emit(EventName.PROPOSAL_ACCEPTED, round=round_, remote=peer_id)

    def _finish(self, round_: int, outcome: RoundOutcome) -> None:
        attempt = self._attempt
        if attempt is not None and attempt.own.round == round_ and not attempt.done.is_set():
            attempt.outcome = outcome
            attempt.done.set()

    # --- asking -----------------------------------------------------------------------------------
    async def _propose(self, peer_id: PeerId, round_: int) -> None:
        attempt = self._attempt
        assert attempt is not None
        with trio.CancelScope() as scope:
            self._asking[peer_id, round_] = scope
            try:
                stream = await self.exchanges.network.open_stream(peer_id, GOSSIP)
                async with Conversation(stream) as talk:
                    proposal = self.agreement.proposal(attempt.own)
                    answer = await self.exchanges.ask(talk, proposal)
                    self._do(self._matchmaker.accepted(peer_id, round_))
                    if not scope.cancel_called:
                        outcome: RoundOutcome = Skipped(SkipReason.LEAVING, peer_id)
                        try:
                            outcome = await self.exchanges.lead(
                                talk, attempt.own, answer, attempt.exchange_s
                            )
                        finally:
                            self._finish(round_, outcome)
            except Refused as refused:
                self._refused(peer_id, round_, refused.reason, refused.sentence)
            except LocoError as error:
                self._refused(peer_id, round_, None, str(error))
            finally:
                self._asking.pop((peer_id, round_), None)

    def _refused(
        self, peer_id: PeerId, round_: int, reason: RefusalReason | None, sentence: str
    ) -> None:
        note_refused(self._events, round_, peer_id, reason or "unreachable", sentence)
        self._do(self._matchmaker.refused(trio.current_time(), peer_id, round_, reason))

    # --- being asked ------------------------------------------------------------------------------
    async def proposed(self, talk: Conversation, stream: Stream, proposal: Propose) -> None:
        """Answer a proposal, and exchange vectors if that is yes."""
        if (refusal := self.agreement.refusal_of(proposal)) is not None:
            self._refused_proposals[refusal.reason] += 1
            await talk.send(refusal, stall_s=GOSSIP_STALL_S)
        elif proposal.roster is not None:
            await self.meetings.called(talk, stream, proposal)
        elif stream.remote_peer_id in self._held:
            await talk.refuse(RefusalReason.TOO_MANY, "you have asked already, and wait")
        else:
            await self._proposed(talk, stream, proposal)

    async def _proposed(self, talk: Conversation, stream: Stream, proposal: Propose) -> None:
        peer_id, now_s = stream.remote_peer_id, trio.current_time()
        held = self._held[peer_id] = HeldProposal(proposal)
        on_gone = partial(self._proposer_left, peer_id, held)
        try:
            snapshot = mm.RoundSnapshot(proposal.round, proposal.step, proposal.final)
            self._do(self._matchmaker.asked(now_s, peer_id, snapshot))
            await held.wait_decided(stream, on_gone)
        finally:
            del self._held[peer_id]
            if not held.decided.is_set():
                on_gone()
        if held.refusal is not None:
            await held.send_refusal(talk)
        elif held.own is not None:
            outcome: RoundOutcome | None = Skipped(SkipReason.LEAVING, peer_id)
            try:
                outcome = await self.exchanges.accept(talk, proposal, held.own, held.exchange_s)
            finally:
                if outcome is not None:
                    self._finish(held.own.round, outcome)
            if outcome is None:
                self._look_on(peer_id, proposal.round)

    def _proposer_left(self, peer_id: PeerId, held: HeldProposal) -> None:
        if held.own is None:
            self._withdrawn(peer_id, held.proposal.round)
        else:  # in the very tick in which it was accepted
            held.own = None
            self._look_on(peer_id, held.proposal.round)
        held.decided.set()

    def _look_on(self, peer_id: PeerId, proposed: int) -> None:
        """Our yes came too late: they had gone before they sent anything."""
        attempt = self._attempt
        assert attempt is not None
        attempt.paired_s = None
        sentence = "they had gone before they sent anything"
        note_refused(self._events, attempt.own.round, peer_id, "withdrawn", sentence)
        self._candidates.announce(attempt.own.snapshot)
        self._withdrawn(peer_id, proposed)

    def _withdrawn(self, peer_id: PeerId, proposed: int) -> None:
        self._do(self._matchmaker.withdrawn(trio.current_time(), peer_id, proposed))


class GossipServer:
    """Serves the gossip of all vectors of one peer: each stream goes to the vector it is about.

    A proposal names the group that averages the vector, a stripe its exchange. The first vector
    refuses what names none of ours.
    """

    def __init__(self, network: Network, gossips: Sequence[Gossip]) -> None:
        self._network = network
        self._gossips = tuple(gossips)
        self._by_group = {gossip.agreement.group: gossip for gossip in gossips}

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for gossip in self._gossips:
                nursery.start_soon(gossip.run)
            await self._network.serve(GOSSIP, self._serve)

    async def _serve(self, stream: Stream) -> None:
        talk, peer_id = Conversation(stream), stream.remote_peer_id
        message, _ = await talk.receive(Propose, Join, AskSettled, timeout_s=GOSSIP_STALL_S)
        match message:
            case Propose():
                gossip = self._by_group.get(message.group, self._gossips[0])
                await gossip.proposed(talk, stream, message)
            case Join():
                every = [gossip.exchanges for gossip in self._gossips]
                runs = [one for one in every if one.runs(peer_id, message.exchange)]
                await (runs or every)[0].join(talk, message)
            case AskSettled():  # by an earlier version, which skips then, as we do
                answer = SettledReply(message.exchange, SettledOutcome.UNKNOWN)
                await talk.send(answer, stall_s=GOSSIP_STALL_S)
