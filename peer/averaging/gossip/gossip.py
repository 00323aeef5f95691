"""Gossip in pairs: proposals, answers and exchanges, as the matchmaker decides.

The thin shell around `protocol/gossip/matchmaking.py`: it turns streams and beats into the
matchmaker's events and the matchmaker's commands into streams. One `Gossip` serves all snapshots of
one vector: of the whole model, or of a fragment. `average` is the only door for the outer steps: it
takes a snapshot and returns how averaging ended, `Averaged` or `Skipped`, never an exception of a
peer's making; so does `meet`, for the planned meetings at the end of the run (final_averaging.py).
What comes from outside comes through `GossipServer`.
"""

from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from peer.averaging.parts import Company
from peer.facts import PackingFacts
from peer.network.conversation import Conversation
from peer.observe.event_names import EventName
from peer.observe.events import Events
from peer.ports import Network, PeerId, Stream, Work
from protocol.errors import LocoError, Refused, StreamLost
from protocol.gossip import matchmaking_events as mm
from protocol.gossip.final_averaging import Meeting
from protocol.gossip.matchmaking import Matchmaker
from protocol.membership.book import Fault
from protocol.outcomes import RefusalReason, SkipReason
from protocol.wire.messages import AskSettled, Join, Propose
from protocol.wire.versions import GOSSIP

from .exchange_io import STALL_S, OwnVector
from .exchanges import Agreement, Exchanges, RoundOutcome, Skipped, Timing
from .final_averaging import FinalMeetings


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long averaging one round may take. Seconds.

    Attributes:
        fresh_s: how long only a partner that was not met of late will do.
        search_s: how long to look for a partner.
        exchange_s: how long the exchange may take.
    """

    fresh_s: float
    search_s: float
    exchange_s: float


@dataclass(slots=True)
class _Attempt:
    """Our own closed round, until it is settled."""

    own: OwnVector
    exchange_s: float
    done: trio.Event = field(default_factory=trio.Event)
    outcome: RoundOutcome | None = None
    paired_s: float | None = None


@dataclass(slots=True)
class _Held:
    """A proposal of somebody else that waits for our answer."""

    decided: trio.Event = field(default_factory=trio.Event)
    accepted: bool = False
    refusal: RefusalReason | None = None


class Gossip:
    """All proposals and exchanges of one vector. `run` must be running.

    Args:
        refused: counts proposals that can never be ours to accept, by reason.

    Attributes:
        group: digest of the group that averages this vector.
        exchanges: where stripes belong, and questions after broken exchanges.
        meetings: the planned ones at the end of the run.
    """

    def __init__(
        self,
        agreement: Agreement,
        network: Network,
        work: Work,
        *,
        company: Company,
        events: Events,
        refused: Counter[RefusalReason],
        packing: PackingFacts | None = None,
    ) -> None:
        self._agreement = agreement
        self._company = company
        self.group = agreement.group
        self.exchanges = Exchanges(agreement, network, work, packing)
        self.meetings = FinalMeetings(self.exchanges, company=company, events=events)
        self._events = events
        self._refused_for_good = refused
        self._matchmaker = Matchmaker(agreement.group, network.peer_id, agreement.inner_steps)
        self._attempt: _Attempt | None = None
        self._asking: dict[tuple[PeerId, int], trio.CancelScope] = {}
        self._held: dict[PeerId, _Held] = {}
        self._changed = trio.Event()
        self._nursery: trio.Nursery | None = None

    # --- the outer steps' side --------------------------------------------------------------------
    async def run(self) -> None:
        """Serve the matchmaker's timers until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._watch)
            await self._tick()

    async def average(self, own: OwnVector, bounds: Bounds) -> tuple[RoundOutcome, Timing]:
        """Find a partner for a closed round, and exchange vectors.

        Args:
            own: our contribution; its payload must lie still until this returns.
        """
        own = await self.exchanges.packed(own)
        freed_s = trio.current_time()
        attempt = self._attempt = _Attempt(own, bounds.exchange_s)
        self._company.announce(own.snapshot)
        self._feed(self._seen(own.snapshot))
        self._feed(mm.BecameFree(own.snapshot, freed_s + bounds.fresh_s, freed_s + bounds.search_s))
        try:
            await attempt.done.wait()
        finally:
            self._feed(mm.SearchStopped(own.round, SkipReason.LEAVING))
            self._feed(mm.RoundSettled(own.round))
            self._company.announce(None)
        ended_s = trio.current_time()
        paired_s = ended_s if attempt.paired_s is None else attempt.paired_s
        outcome = attempt.outcome or Skipped(SkipReason.LEAVING)
        return outcome, Timing(paired_s - freed_s, ended_s - paired_s)

    async def meet(
        self, own: OwnVector, meeting: Meeting, wait_s: float
    ) -> tuple[RoundOutcome, Timing]:
        """Hold a planned meeting; as `FinalMeetings.meet`."""
        return await self.meetings.meet(await self.exchanges.packed(own), meeting, wait_s)

    def doubt(self, peer_id: PeerId, fault: Fault) -> None:
        """What came from a peer could not be used: let it rest."""
        self._company.blame(peer_id, fault)
        self._feed(mm.PartnerDoubted(peer_id))

    async def believe(self, own: OwnVector, theirs: memoryview) -> None:
        """A partner's codes are averaged with: they tell how near partners are."""
        await self.exchanges.learn(own, theirs)

    # --- the matchmaker's side --------------------------------------------------------------------
    async def _tick(self) -> None:
        while True:
            self._changed = trio.Event()
            due_s = self._matchmaker.next_deadline_s
            with trio.move_on_at(trio.current_time() + 3600 if due_s is None else due_s):
                await self._changed.wait()
                continue
            self._feed(mm.Tick())

    async def _watch(self) -> None:
        """Tell the matchmaker of the others, while it looks for a partner."""
        while True:
            await self._company.changed()
            if self._attempt is not None and self._matchmaker.is_looking:
                self._feed(self._seen(self._attempt.own.snapshot))

    def _seen(self, own: mm.RoundSnapshot) -> mm.PeersSeen:
        present = self._company.present(ended=own.final)
        return mm.PeersSeen(tuple(self._company.free()), len(present))

    def _feed(self, event: mm.MatchEvent) -> None:
        for command in self._matchmaker.step(trio.current_time(), event):
            self._carry_out(command)
        self._changed.set()

    def _carry_out(self, command: mm.MatchCommand) -> None:
        match command:
            case mm.SendProposal(peer_id, round_):
                assert self._nursery is not None
                self._events.emit(EventName.PROPOSAL_SENT, round=round_, remote=peer_id)
                self._nursery.start_soon(self._propose, peer_id, round_)
            case mm.Withdraw(peer_id, round_):
                scope = self._asking.get((peer_id, round_))
                if scope is not None:
                    scope.cancel()
            case mm.AcceptProposal(peer_id, _):
                self._decide(peer_id, None)
            case mm.RefuseProposal(peer_id, _, reason):
                self._decide(peer_id, reason)
            case mm.Paired(peer_id, round_, _):
                self._paired(peer_id, round_)
            case mm.Unmatched(round_, reason):
                self._finish(round_, Skipped(reason))

    def _decide(self, peer_id: PeerId, refusal: RefusalReason | None) -> None:
        held = self._held.get(peer_id)
        if held is not None:
            held.accepted, held.refusal = refusal is None, refusal
            held.decided.set()

    def _paired(self, peer_id: PeerId, round_: int) -> None:
        if self._attempt is not None and self._attempt.own.round == round_:
            self._attempt.paired_s = trio.current_time()
        self._company.announce(None)
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
                async with self.exchanges.open(peer_id) as talk:
                    answer = await self.exchanges.ask(talk, self._agreement.proposal(attempt.own))
                    self._feed(mm.ProposalAccepted(peer_id, round_))
                    if not scope.cancel_called:
                        lead = self.exchanges.lead(talk, attempt.own, answer, attempt.exchange_s)
                        await self._finish_with(attempt, peer_id, lead)
            except Refused as refused:
                self._refused(peer_id, round_, refused.reason, refused.sentence)
            except LocoError as error:
                self._refused(peer_id, round_, None, str(error))
            finally:
                self._asking.pop((peer_id, round_), None)

    async def _finish_with(
        self, attempt: _Attempt, peer_id: PeerId, exchange: Awaitable[RoundOutcome | None]
    ) -> bool:
        """Run an exchange: it ends the attempt, unless they had gone before. Whether it did."""
        outcome: RoundOutcome | None = Skipped(SkipReason.LEAVING, peer_id)
        try:
            outcome = await exchange
        finally:
            if outcome is not None:
                self._finish(attempt.own.round, outcome)
        return outcome is not None

    def _refused(
        self, peer_id: PeerId, round_: int, reason: RefusalReason | None, sentence: str
    ) -> None:
        self._events.emit(
            EventName.PROPOSAL_REFUSED,
            round=round_,
            remote=peer_id,
            reason=reason or "unreachable",
            sentence=sentence,
        )
        self._feed(mm.ProposalRefused(peer_id, round_, reason))

    # --- being asked ------------------------------------------------------------------------------
    async def proposed(self, talk: Conversation, stream: Stream, proposal: Propose) -> None:
        """A proposal has come: serve it to the end of what comes of it."""
        if (unfit := self._agreement.unfit(proposal)) is not None:
            self._refused_for_good[unfit.reason] += 1
            await talk.send(unfit, stall_s=STALL_S)
        elif proposal.roster is not None:
            await self.meetings.called(talk, stream, proposal)
        else:
            await self._proposed(talk, stream, proposal)

    async def _proposed(self, talk: Conversation, stream: Stream, proposal: Propose) -> None:
        peer_id = stream.remote_peer_id
        if peer_id in self._held:
            await talk.refuse(RefusalReason.TOO_MANY, "you have asked already, and wait")
            return
        held = self._held[peer_id] = _Held()
        try:
            snapshot = mm.RoundSnapshot(proposal.round, proposal.step, proposal.final)
            self._feed(mm.ProposalReceived(peer_id, snapshot))
            await self._wait_decided(stream, held, proposal.round)
        finally:
            self._held.pop(peer_id, None)
            if not held.decided.is_set():
                self._feed(mm.ProposalWithdrawn(peer_id, proposal.round))
        if held.accepted:
            await self._accept(talk, proposal)
        elif held.refusal is not None:
            sentence = f"your round {proposal.round} is not possible with me: {held.refusal}"
            await talk.refuse(held.refusal, sentence)

    async def _wait_decided(self, stream: Stream, held: _Held, round_: int) -> None:
        """Wait for the matchmaker, and watch whether the proposer goes away meanwhile."""
        if held.decided.is_set():
            return
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                try:
                    await stream.receive_some(1)  # a proposer that waits sends nothing
                except StreamLost:
                    pass
                held.accepted = False
                self._feed(mm.ProposalWithdrawn(stream.remote_peer_id, round_))
                held.decided.set()

            nursery.start_soon(watch)
            await held.decided.wait()
            nursery.cancel_scope.cancel()

    async def _accept(self, talk: Conversation, proposal: Propose) -> None:
        attempt, peer_id = self._attempt, talk.remote_peer_id
        assert attempt is not None
        accept = self.exchanges.accept(talk, attempt.own, proposal, attempt.exchange_s)
        if not await self._finish_with(attempt, peer_id, accept):
            self._withdrew(attempt, peer_id, proposal.round)

    def _withdrew(self, attempt: _Attempt, peer_id: PeerId, proposed: int) -> None:
        """Our yes came too late: they had gone before they sent anything. Look on."""
        attempt.paired_s = None
        self._events.emit(
            EventName.PROPOSAL_REFUSED,
            round=attempt.own.round,
            remote=peer_id,
            reason="withdrawn",
            sentence="they had gone before they sent anything",
        )
        self._company.announce(attempt.own.snapshot)
        self._feed(mm.ProposalWithdrawn(peer_id, proposed))


FIRST_MESSAGE_S: Final = 10.0
"""How long an inbound stream may stay silent before its first message."""


class GossipServer:
    """Serves the gossip of all vectors of one peer: each stream goes to the vector it is about.

    A proposal names the group that averages the vector; a stripe, or a question after a broken
    exchange, names its exchange. What names none of ours goes to the first vector, which refuses it
    with the reason.

    Args:
        gossips: of each vector; one at least.
    """

    def __init__(self, network: Network, gossips: Sequence[Gossip]) -> None:
        self._network = network
        self._gossips = tuple(gossips)
        self._by_group = {gossip.group: gossip for gossip in gossips}

    async def run(self) -> None:
        """Let all of them look for partners and be asked, until cancelled."""
        async with trio.open_nursery() as nursery:
            for gossip in self._gossips:
                nursery.start_soon(gossip.run)
            await self._network.serve(GOSSIP, self._serve)

    async def _serve(self, stream: Stream) -> None:
        talk, peer_id = Conversation(stream), stream.remote_peer_id
        message, _ = await talk.receive(Propose, Join, AskSettled, timeout_s=FIRST_MESSAGE_S)
        match message:
            case Propose():
                gossip = self._by_group.get(message.group, self._gossips[0])
                await gossip.proposed(talk, stream, message)
            case Join():
                await self._exchanges(peer_id, message.exchange).join(talk, message)
            case AskSettled():
                answer = self._exchanges(peer_id, message.exchange).answer(peer_id, message)
                await talk.send(answer, stall_s=STALL_S)

    def _exchanges(self, peer_id: PeerId, name: str) -> Exchanges:
        """Those that know the exchange of this name with that peer; if nobody does, the first."""
        every = [gossip.exchanges for gossip in self._gossips]
        return next((one for one in every if one.remembers(peer_id, name)), every[0])
