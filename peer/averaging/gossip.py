"""Gossip in pairs: proposals, answers and exchanges, as the matchmaker decides.

The thin shell around `protocol/matchmaking.py`: it turns streams into the matchmaker's events and
the matchmaker's commands into streams. One `Gossip` serves all rounds of one peer. `average` is the
only door for the round loop: it takes the snapshot of a closed round and returns how averaging
ended, `Averaged` or `Skipped`, never an exception of a peer's making.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from peer.network.conversation import Conversation
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.ports import Network, PeerId, Stream, Work
from protocol import matchmaking_events as mm
from protocol.errors import LocoError, Refused, RemoteProtocolError, StreamLost
from protocol.matchmaking import Matchmaker, MatchmakerStatistics
from protocol.messages import Accept, Join, Propose, Settle
from protocol.outcomes import RefusalReason, SkipReason
from protocol.versions import GOSSIP

from .exchange_io import STALL_S, Contribution, VectorExchange
from .exchanges import Exchanges
from .outcome import Agreement, Outcome, Skipped, Timing

FIRST_MESSAGE_S: Final = 10.0
"""How long an inbound stream may stay silent before its first message."""


@dataclass(slots=True)
class _Attempt:
    """Our own closed round, until it is settled."""

    own: Contribution
    exchange_deadline_s: float
    closed_s: float
    done: trio.Event = field(default_factory=trio.Event)
    outcome: Outcome | None = None
    paired_s: float | None = None


@dataclass(slots=True)
class _Held:
    """A proposal of somebody else that waits for our answer."""

    decided: trio.Event = field(default_factory=trio.Event)
    accepted: bool = False
    refusal: RefusalReason | None = None


class Gossip:
    """All proposals and exchanges of one peer. `run` must be running.

    Attributes:
        close_early: called with a round that should be closed now because a partner waits for it.
        refused: proposals that can never be ours to accept, by reason.
    """

    def __init__(
        self,
        agreement: Agreement,
        *,
        network: Network,
        work: Work,
        events: EventLog,
    ) -> None:
        self._agreement = agreement
        self._network = network
        self._events = events
        self.close_early: Callable[[int], None] = lambda _: None
        self.refused: Counter[RefusalReason] = Counter()
        self._matchmaker = Matchmaker(agreement.group, network.peer_id)
        self._attempt: _Attempt | None = None
        self._asking: dict[tuple[PeerId, int], trio.CancelScope] = {}
        self._held: dict[tuple[PeerId, int], _Held] = {}
        self._exchanges = Exchanges(agreement, network, work)
        self._changed = trio.Event()
        self._nursery: trio.Nursery | None = None
        self.last_timing = Timing(0.0, 0.0)

    def __repr__(self) -> str:
        return f"<Gossip {self._matchmaker!r} held={len(self._held)} asking={len(self._asking)}>"

    # --- the round loop's side --------------------------------------------------------------------
    async def run(self) -> None:
        """Serve inbound streams and the matchmaker's timers until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await self._network.serve(GOSSIP, self.serve)
            await self._tick()

    def round_opened(self, round_: int) -> None:
        """The trainer has begun `round_`."""
        self._feed(mm.RoundOpened(round_))

    def round_progressed(self, fraction: float) -> None:
        """This share of our quota is done."""
        self._feed(mm.RoundProgressed(fraction))

    async def average(
        self,
        own: Contribution,
        candidates: Sequence[PeerId],
        *,
        search_s: float,
        exchange_s: float,
    ) -> Outcome:
        """Find a partner for a closed round, and exchange vectors.

        Args:
            own: our contribution; its payload must lie still until this returns.
            candidates: peers that may be in the same round.
            search_s: how long to look for a partner.
            exchange_s: how long the exchange may take.
        """
        now_s = trio.current_time()
        attempt = self._attempt = _Attempt(own, now_s + search_s + exchange_s, closed_s=now_s)
        self._feed(
            mm.RoundClosed(own.round, tuple(candidates), now_s + search_s, patience_s=search_s / 2)
        )
        try:
            await attempt.done.wait()
        finally:
            self._feed(mm.SearchStopped(own.round, SkipReason.LEAVING))
        ended_s = trio.current_time()
        paired_s = ended_s if attempt.paired_s is None else attempt.paired_s
        self.last_timing = Timing(paired_s - now_s, ended_s - paired_s)
        return attempt.outcome or Skipped(SkipReason.LEAVING)

    def round_settled(self, round_: int) -> None:
        """The outer step of `round_` is done: proposals for the next may close it early."""
        self._feed(mm.RoundSettled(round_))

    def statistics(self) -> MatchmakerStatistics:
        """Counts since the start."""
        return self._matchmaker.statistics()

    # --- the matchmaker's side --------------------------------------------------------------------
    async def _tick(self) -> None:
        while True:
            self._changed = trio.Event()
            due_s = self._matchmaker.next_deadline_s
            with trio.move_on_at(trio.current_time() + 3600 if due_s is None else due_s):
                await self._changed.wait()
                continue
            self._feed(mm.Tick())

    def _feed(self, event: mm.Event) -> None:
        for command in self._matchmaker.step(trio.current_time(), event):
            self._carry_out(command)
        self._changed.set()

    def _carry_out(self, command: mm.Command) -> None:
        match command:
            case mm.Propose(peer_id, round_):
                assert self._nursery is not None
                self._events.emit(EventName.PROPOSAL_SENT, round=round_, remote=peer_id)
                self._nursery.start_soon(self._propose, peer_id, round_)
            case mm.Withdraw(peer_id, round_):
                scope = self._asking.get((peer_id, round_))
                if scope is not None:
                    scope.cancel()
            case mm.AcceptProposal(peer_id, round_):
                self._decide(peer_id, round_, None)
            case mm.RefuseProposal(peer_id, round_, reason):
                self._decide(peer_id, round_, reason)
            case mm.CloseEarly(round_):
                self.close_early(round_)
            case mm.Paired(peer_id, round_, _):
                self._paired(peer_id, round_)
            case mm.Unmatched(round_, reason):
                self._finish(round_, Skipped(reason))

    def _decide(self, peer_id: PeerId, round_: int, refusal: RefusalReason | None) -> None:
        held = self._held.get((peer_id, round_))
        if held is not None:
            held.accepted, held.refusal = refusal is None, refusal
            held.decided.set()

    def _paired(self, peer_id: PeerId, round_: int) -> None:
        if self._attempt is not None and self._attempt.own.round == round_:
            self._attempt.paired_s = trio.current_time()
        self._events.emit(EventName.PROPOSAL_ACCEPTED, round=round_, remote=peer_id)

    def _finish(self, round_: int, outcome: Outcome) -> None:
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
                async with self._exchanges.open(peer_id) as talk:
                    await talk.send(self._agreement.proposal(attempt.own), stall_s=STALL_S)
                    answer, _ = await talk.receive(Accept)
                    if answer.round != round_:
                        raise RemoteProtocolError("accepted another round than proposed")
                    if answer.stripes > self._agreement.stripes:
                        raise RemoteProtocolError("accepted more stripes than proposed")
                    self._feed(mm.ProposalAccepted(peer_id, round_))
                    if not scope.cancel_called:
                        exchange = self._exchanges.prepare(
                            talk, attempt.own, num_stripes=answer.stripes, following=False
                        )
                        await self._exchange(exchange, attempt)
            except Refused as refused:
                self._refused(peer_id, round_, refused.reason, refused.sentence)
            except LocoError as error:
                self._refused(peer_id, round_, None, str(error))
            finally:
                self._asking.pop((peer_id, round_), None)

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
    async def serve(self, stream: Stream) -> None:
        """One inbound stream: a proposal, a stripe, or a question about a broken exchange."""
        talk = Conversation(stream)
        message, _ = await talk.receive(Propose, Join, Settle, timeout_s=FIRST_MESSAGE_S)
        if isinstance(message, Settle):
            await talk.send(self._exchanges.answer(stream.remote_peer_id, message), stall_s=STALL_S)
        elif isinstance(message, Join):
            await self._exchanges.join(talk, message)
        else:
            await self._proposed(talk, stream, message)

    async def _proposed(self, talk: Conversation, stream: Stream, proposal: Propose) -> None:
        peer_id, round_ = stream.remote_peer_id, proposal.round
        unfit = self._agreement.unfit(proposal)
        if unfit is not None:
            self.refused[unfit.reason] += 1
            await talk.send(unfit, stall_s=STALL_S)
            return
        if (peer_id, round_) in self._held:
            await talk.refuse(RefusalReason.TOO_MANY, "you have asked for this round already")
            return
        held = self._held[peer_id, round_] = _Held()
        try:
            self._feed(mm.ProposalReceived(peer_id, round_))
            await self._wait_decided(stream, held, peer_id, round_)
        finally:
            self._held.pop((peer_id, round_), None)
            if not held.decided.is_set():
                self._feed(mm.ProposalWithdrawn(peer_id, round_))
        if held.accepted:
            await self._accept(talk, peer_id, min(proposal.stripes, self._agreement.stripes))
        elif held.refusal is not None:
            sentence = f"round {round_} is not possible with me: {held.refusal}"
            await talk.refuse(held.refusal, sentence)

    async def _wait_decided(
        self, stream: Stream, held: _Held, peer_id: PeerId, round_: int
    ) -> None:
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
                self._feed(mm.ProposalWithdrawn(peer_id, round_))
                held.decided.set()

            nursery.start_soon(watch)
            await held.decided.wait()
            nursery.cancel_scope.cancel()

    async def _accept(self, talk: Conversation, peer_id: PeerId, num_stripes: int) -> None:
        attempt = self._attempt
        assert attempt is not None
        own = attempt.own
        # Before the answer is out: a stripe may come as soon as they have it.
        exchange = self._exchanges.prepare(talk, own, num_stripes=num_stripes, following=True)
        try:
            answer = Accept(own.round, own.steps, own.tokens, num_stripes)
            await talk.send(answer, stall_s=STALL_S)
        except StreamLost:
            self._withdrew(attempt, peer_id)
        else:
            await self._exchange(exchange, attempt)
        finally:
            exchange.end()

    async def _exchange(self, exchange: VectorExchange, attempt: _Attempt) -> None:
        talk = exchange.talk
        outcome: Outcome = Skipped(SkipReason.LEAVING, talk.remote_peer_id)
        heard_bytes = talk.bytes_received
        try:
            outcome = await self._exchanges.run(exchange, attempt.exchange_deadline_s)
        finally:
            lost = isinstance(outcome, Skipped) and outcome.reason is SkipReason.PARTNER_LOST
            if exchange.following and lost and talk.bytes_received == heard_bytes:
                self._withdrew(attempt, talk.remote_peer_id)
            else:
                self._finish(attempt.own.round, outcome)

    def _withdrew(self, attempt: _Attempt, peer_id: PeerId) -> None:
        """Our yes came too late: they had gone before they sent anything. Look on."""
        attempt.paired_s = None
        round_ = attempt.own.round
        self._events.emit(
            EventName.PROPOSAL_REFUSED,
            round=round_,
            remote=peer_id,
            reason="withdrawn",
            sentence="they had gone before they sent anything",
        )
        self._feed(mm.ProposalWithdrawn(peer_id, round_))
