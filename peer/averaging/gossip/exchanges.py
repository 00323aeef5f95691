"""All exchanges of one peer: agree on one, run it, remember how it ended, ask when it broke off.

The decisions are in protocol/gossip/exchange.py; what one exchange does on its stream is in
exchange_io.py. Here is what outlives a stream: a partner may ask later how an exchange ended
(`answer`), and so may we (`_settle`).
"""

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import blake3
import trio

from peer.codec import codes_as_tensor, get_codec
from peer.facts import PackingFacts
from peer.network.conversation import Conversation
from peer.ports import Network, PeerId, Work
from protocol.errors import LocoError, RemoteProtocolError, StreamLost
from protocol.gossip.exchange import Exchange, ExchangeEvent, ExchangeState, exchange_id
from protocol.limits import MAX_STRIPES, PIECE_BYTES, STRIPE_FROM_BYTES
from protocol.membership.group import other_group_sentence
from protocol.outcomes import RefusalReason, SkipReason
from protocol.run.ways import CODECS
from protocol.wire.messages import (
    Accept,
    AskSettled,
    Join,
    Propose,
    Refusal,
    SettledOutcome,
    SettledReply,
)
from protocol.wire.versions import GOSSIP

from .exchange_io import STALL_S, OwnVector, VectorExchange
from .packing import Packer, Reading

# --- how averaging a round ended, and what two peers must agree on before it begins ---------------


@dataclass(frozen=True, slots=True)
class Averaged:
    """Both sides hold each other's vector.

    Attributes:
        payload: the partner's codes; valid until the next exchange.
    """

    partner_id: PeerId
    steps: int
    tokens: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Skipped:
    """The round ended without averaging."""

    reason: SkipReason
    partner_id: PeerId | None = None


RoundOutcome = Averaged | Skipped


@dataclass(frozen=True, slots=True)
class Agreement:
    """What two peers must have in common to average.

    Attributes:
        group: its digest.
        inner_steps: H.
        declined_now: why we take no proposal at present; None when we do.
        max_stripes: further streams that one exchange may have.
    """

    group: str
    inner_steps: int
    layout_digest: str
    codec: str
    vectors: int
    padded_parameters: int
    declined_now: Callable[[], RefusalReason | None] = lambda: None
    max_stripes: int = MAX_STRIPES

    @property
    def payload_bytes(self) -> int:
        """Bytes of one contribution."""
        return self.vectors * CODECS[self.codec].code_bytes(self.padded_parameters)

    @property
    def stripes(self) -> int:
        """Further streams that an exchange of ours may have: none that would carry no piece."""
        if self.payload_bytes < STRIPE_FROM_BYTES:
            return 0
        return min(self.max_stripes, self.payload_bytes // PIECE_BYTES)

    def proposal(self, own: OwnVector, *, roster: str | None = None, meeting: int = 0) -> Propose:
        """What we say when we ask; `roster` and `meeting` of the final averaging's plan."""
        return Propose(
            group=self.group,
            round=own.round,
            step=own.step,
            final=own.final,
            layout_digest=self.layout_digest,
            codec=self.codec,
            vectors=self.vectors,
            steps=own.steps,
            tokens=own.tokens,
            stripes=self.stripes,
            roster=roster,
            meeting=meeting,
        )

    def unfit(self, proposal: Propose) -> Refusal | None:
        """Why a proposal cannot be ours to accept; None when it can."""
        if proposal.group != self.group:
            sentence = other_group_sentence(self.group, proposal.group)
            return Refusal(RefusalReason.OTHER_GROUP, sentence)
        theirs = (proposal.layout_digest, proposal.codec, proposal.vectors)
        ours = (self.layout_digest, self.codec, self.vectors)
        if theirs != ours:
            sentence = f"my model and code are {ours}, yours are {theirs}"
            return Refusal(RefusalReason.OTHER_LAYOUT, sentence)
        reason = self.declined_now()
        return None if reason is None else Refusal(reason, f"I do not average now: {reason}")


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one round's averaging took. Seconds."""

    match_s: float
    exchange_s: float


# --- exchanges ------------------------------------------------------------------------------------

SETTLE_S: Final = 5.0
"""How long we try to learn how a broken exchange ended for the partner."""
SETTLE_RETRY_S: Final = 0.5
MAX_REMEMBERED_EXCHANGES: Final = 16
"""Exchanges about which a partner may still ask."""

_TOLD: Final = {
    SettledOutcome.AVERAGED: ExchangeEvent.TOLD_AVERAGED,
    SettledOutcome.SKIPPED: ExchangeEvent.TOLD_SKIPPED,
    SettledOutcome.UNKNOWN: ExchangeEvent.NOT_TOLD,
}


class Exchanges:
    """One at a time is run; its partner's codes lie in one buffer, reused by the next.

    Attributes:
        agreement: with whom vectors are exchanged at all.
        own_id: our peer id.
    """

    def __init__(
        self,
        agreement: Agreement,
        network: Network,
        work: Work,
        facts: PackingFacts | None = None,
    ) -> None:
        self.agreement = agreement
        self._packer = Packer(agreement.codec, agreement.vectors, work, facts or PackingFacts())
        self.own_id = network.peer_id
        self._network = network
        self._work = work
        self._codec = get_codec(agreement.codec)
        self._buffer = bytearray(agreement.payload_bytes)
        self._remembered: OrderedDict[tuple[PeerId, str], VectorExchange] = OrderedDict()

    @asynccontextmanager
    async def open(self, peer_id: PeerId) -> AsyncIterator[Conversation]:
        """A new gossip stream to a peer. Raises StreamLost."""
        stream = await self._network.open_stream(peer_id, GOSSIP)
        try:
            yield Conversation(stream)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await stream.aclose()

    async def packed(self, own: OwnVector) -> OwnVector:
        """A contribution as it travels: packed, where the run's codec packs and that is shorter."""
        return replace(own, packed=await self._packer.packed(own.payload))

    async def learn(self, own: OwnVector, theirs: memoryview) -> None:
        """We average with these codes: how far they are from ours says how to pack the next."""
        if self._packer.packs:
            await self._work.run(self._packer.learn, own.payload, theirs)

    async def ask(self, talk: Conversation, proposal: Propose) -> Accept:
        """Send a proposal, and take the answer. Raises Refused, StreamLost, RemoteProtocolError."""
        await talk.send(proposal, stall_s=STALL_S)
        answer, _ = await talk.receive(Accept)
        if answer.proposed != proposal.round:
            raise RemoteProtocolError("accepted another round than proposed")
        if answer.stripes > self.agreement.stripes:
            raise RemoteProtocolError("accepted more stripes than proposed")
        return answer

    async def lead(
        self, talk: Conversation, own: OwnVector, answer: Accept, exchange_s: float
    ) -> RoundOutcome:
        """Exchange vectors with a peer that has said yes, until a defined end."""
        exchange = self._prepare(talk, own, answer.round, num_stripes=answer.stripes)
        return await self._run(exchange, trio.current_time() + exchange_s)

    async def accept(
        self, talk: Conversation, own: OwnVector, proposal: Propose, exchange_s: float
    ) -> RoundOutcome | None:
        """Say yes to a proposal, and exchange vectors until a defined end.

        Returns:
            None when they had gone before they sent anything: nothing has happened.
        """
        num_stripes = min(proposal.stripes, self.agreement.stripes)
        # Before the answer is out: a stripe may come as soon as they have it.
        exchange = self._prepare(talk, own, proposal.round, num_stripes=num_stripes, following=True)
        try:
            answer = Accept(proposal.round, own.round, own.steps, own.tokens, num_stripes)
            await talk.send(answer, stall_s=STALL_S)
            heard_bytes = talk.bytes_received
            outcome = await self._run(exchange, trio.current_time() + exchange_s)
        except StreamLost:
            return None
        finally:
            exchange.end()
        lost = isinstance(outcome, Skipped) and outcome.reason is SkipReason.PARTNER_LOST
        return None if lost and talk.bytes_received == heard_bytes else outcome

    def _prepare(
        self,
        talk: Conversation,
        own: OwnVector,
        their_round: int,
        *,
        num_stripes: int,
        following: bool = False,
    ) -> VectorExchange:
        """An exchange on an agreed stream; from now on the partner may open stripes, and ask.

        Args:
            num_stripes: further streams agreed on.
            following: we were asked; the other side begins.
        """
        peer_id = talk.remote_peer_id
        name = exchange_id(self.agreement.group, (self.own_id, own.round), (peer_id, their_round))
        exchange = VectorExchange(
            name,
            Exchange(),
            talk,
            own,
            Reading(self._packer, own.payload, memoryview(self._buffer), self._check),
            following=following,
            num_stripes=num_stripes,
            open_stripe=None if following else partial(self._open_stripe, peer_id, name),
        )
        self._remember(peer_id, exchange)
        return exchange

    async def _run(self, exchange: VectorExchange, deadline_s: float) -> RoundOutcome:
        peer_id, machine = exchange.talk.remote_peer_id, exchange.machine
        await exchange.run(deadline_s)
        if exchange.must_ask:
            await self._settle(machine, peer_id, exchange.name)
        if machine.state is ExchangeState.AVERAGED and exchange.theirs is not None:
            theirs = exchange.theirs
            return Averaged(peer_id, theirs.steps, theirs.tokens, memoryview(self._buffer))
        return Skipped(machine.reason or SkipReason.LEAVING, peer_id)

    def remembers(self, peer_id: PeerId, name: str) -> bool:
        """Whether an exchange of this name is under way with that peer, or was of late."""
        return (peer_id, name) in self._remembered

    async def join(self, talk: Conversation, stripe: Join) -> None:
        """A stream from outside that says it is a stripe: keep it until its exchange is over."""
        exchange = self._remembered.get((talk.remote_peer_id, stripe.exchange))
        if exchange is None:
            await talk.refuse(RefusalReason.UNAVAILABLE, "there is no such exchange")
        elif not exchange.takes_stripe():
            await talk.refuse(RefusalReason.TOO_MANY, "that exchange takes no further stripe")
        else:
            exchange.join(talk)
            await exchange.over.wait()

    def answer(self, peer_id: PeerId, question: AskSettled) -> SettledReply:
        """How our exchange with that peer ended.

        Asking is itself news: the stream is dead for them.
        """
        exchange = self._remembered.get((peer_id, question.exchange))
        if exchange is None:
            return SettledReply(question.exchange, SettledOutcome.UNKNOWN)
        exchange.asked()
        averaged = exchange.machine.state is ExchangeState.AVERAGED
        outcome = SettledOutcome.AVERAGED if averaged else SettledOutcome.SKIPPED
        return SettledReply(question.exchange, outcome)

    def _remember(self, peer_id: PeerId, exchange: VectorExchange) -> None:
        self._remembered[peer_id, exchange.name] = exchange
        while len(self._remembered) > MAX_REMEMBERED_EXCHANGES:
            self._remembered.popitem(last=False)

    async def _open_stripe(self, peer_id: PeerId, name: str) -> Conversation:
        stream = await self._network.open_stream(peer_id, GOSSIP)
        try:
            talk = Conversation(stream)
            await talk.send(Join(name))
        except BaseException:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await stream.aclose()
            raise
        return talk

    async def _check(self, payload: memoryview, digest: str) -> bool:
        return await self._work.run(self._is_good, payload, digest)

    def _is_good(self, payload: memoryview, digest: str) -> bool:
        if blake3.blake3(payload).hexdigest(length=16) != digest:
            return False
        size = len(payload) // self.agreement.vectors
        parts = (payload[i * size : (i + 1) * size] for i in range(self.agreement.vectors))
        return all(self._codec.validate(codes_as_tensor(part)) for part in parts)

    async def _settle(self, machine: Exchange, peer_id: PeerId, name: str) -> None:
        told: ExchangeEvent | None = None
        with trio.move_on_after(SETTLE_S):
            while told is None and not machine.is_final:
                told = await self._settle_once(peer_id, name)
        if not machine.is_final:
            machine.step(told or ExchangeEvent.NOT_TOLD)

    async def _settle_once(self, peer_id: PeerId, name: str) -> ExchangeEvent | None:
        try:
            async with self.open(peer_id) as talk:
                await talk.send(AskSettled(name), stall_s=STALL_S)
                answer, _ = await talk.receive(SettledReply)
        except LocoError:
            await trio.sleep(SETTLE_RETRY_S)
            return None
        return _TOLD[answer.outcome]
