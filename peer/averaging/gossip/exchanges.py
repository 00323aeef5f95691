"""All exchanges of one vector, one after another: agree on one, and run it.

The decisions are in protocol/gossip/exchange.py; what one exchange does on its streams is in
exchange_session.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import trio

from peer.network.conversation import Conversation
from peer.observe.event_names import EventName
from peer.observe.events import Events
from peer.runtime import Network, PeerId, Stream
from protocol.errors import RemoteProtocolError, StreamLost
from protocol.gossip.exchange import exchange_id
from protocol.limits import MAX_STRIPES, PIECE_BYTES, STRIPE_FROM_BYTES
from protocol.membership.group import other_group_sentence
from protocol.outcomes import RefusalReason, SkipReason
from protocol.run.ways import CODECS
from protocol.wire.messages import Accept, Join, Propose, Refusal

from .exchange_session import GOSSIP_STALL_S, ExchangeSession, OwnVector, RoundOutcome, Skipped
from .packing import Packer, Reading


@dataclass(frozen=True, slots=True)
class Agreement:
    """Terms that two peers must have in common before they average.

    Attributes:
        inner_steps: H, the nominal steps of a round.
        declined_now: why we take no proposal at present; None when we do.
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
        return self.vectors * CODECS[self.codec].code_bytes(self.padded_parameters)

    @property
    def stripes(self) -> int:
        """Further streams that an exchange may have: none that would carry no piece."""
        if self.payload_bytes < STRIPE_FROM_BYTES:
            return 0
        return min(self.max_stripes, self.payload_bytes // PIECE_BYTES)

    def proposal(self, own: OwnVector, *, roster: str | None = None, meeting: int = 0) -> Propose:
        """`roster` and `meeting` are of the final averaging's plan."""
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

    def refusal_of(self, proposal: Propose) -> Refusal | None:
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


def note_refused(events: Events, round_: int, peer_id: PeerId, reason: str, sentence: str) -> None:
    events.emit(
        EventName.PROPOSAL_REFUSED, round=round_, remote=peer_id, reason=reason, sentence=sentence
    )


@dataclass(slots=True)
class HeldProposal:
    """A proposal of another peer that waits for our answer.

    Attributes:
        decided: set when it is answered, or its proposer has gone.
        own: what we bring; None unless we accept.
    """

    proposal: Propose
    decided: trio.Event = field(default_factory=trio.Event)
    own: OwnVector | None = None
    exchange_s: float = 0.0
    refusal: RefusalReason | None = None

    def accept(self, own: OwnVector, exchange_s: float) -> None:
        self.own, self.exchange_s = own, exchange_s
        self.decided.set()

    def refuse(self, reason: RefusalReason) -> None:
        self.refusal = reason
        self.decided.set()

    async def send_refusal(self, talk: Conversation) -> None:
        assert self.refusal is not None
        sentence = f"your round {self.proposal.round} is not possible with me: {self.refusal}"
        await talk.refuse(self.refusal, sentence)

    async def wait_decided(self, stream: Stream, on_gone: Callable[[], None]) -> None:
        """Wait for our answer; `on_gone` is called at the moment when the proposer goes away."""
        if self.decided.is_set():
            return
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                with suppress(StreamLost):
                    await stream.receive_some(1)  # a proposer that waits sends nothing
                on_gone()
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await self.decided.wait()
            nursery.cancel_scope.cancel()


class Exchanges:
    """The exchanges of one vector. One runs at a time, so all share one receive buffer."""

    def __init__(self, agreement: Agreement, network: Network, packer: Packer) -> None:
        self.agreement = agreement
        self.packer = packer
        self.network = network
        self._buffer = bytearray(agreement.payload_bytes)
        self._running: ExchangeSession | None = None

    async def ask(self, talk: Conversation, proposal: Propose) -> Accept:
        """Send a proposal, and take the answer. Raises Refused, StreamLost, RemoteProtocolError."""
        await talk.send(proposal, stall_s=GOSSIP_STALL_S)
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
        with self._session(talk, own, answer.round, answer.stripes, following=False) as exchange:
            return await exchange.run(trio.current_time() + exchange_s)

    async def accept(
        self, talk: Conversation, proposal: Propose, own: OwnVector, exchange_s: float
    ) -> RoundOutcome | None:
        """Say yes, and exchange vectors; None where they had gone before they sent anything."""
        num_stripes = min(proposal.stripes, self.agreement.stripes)
        answer = Accept(proposal.round, own.round, own.steps, own.tokens, num_stripes)
        # Before the answer is out: a stripe may come as soon as they have it.
        with self._session(talk, own, proposal.round, num_stripes, following=True) as exchange:
            try:
                await talk.send(answer, stall_s=GOSSIP_STALL_S)
            except StreamLost:
                return None
            heard_bytes = talk.bytes_received
            outcome = await exchange.run(trio.current_time() + exchange_s)
        lost = isinstance(outcome, Skipped) and outcome.reason is SkipReason.PARTNER_LOST
        return None if lost and talk.bytes_received == heard_bytes else outcome

    @contextmanager
    def _session(
        self,
        talk: Conversation,
        own: OwnVector,
        their_round: int,
        num_stripes: int,
        *,
        following: bool,
    ) -> Iterator[ExchangeSession]:
        """An exchange of which the partner may open stripes from now on."""
        peer_id, own_id = talk.remote_peer_id, self.network.peer_id
        name = exchange_id(self.agreement.group, (own_id, own.round), (peer_id, their_round))
        exchange = self._running = ExchangeSession(
            name,
            talk,
            own,
            Reading(self.packer, own.payload, memoryview(self._buffer)),
            self.network,
            following=following,
            num_stripes=num_stripes,
        )
        try:
            yield exchange
        finally:
            self._running = None
            exchange.over.set()

    def runs(self, peer_id: PeerId, name: str) -> bool:
        """Whether an exchange of this name with that peer is under way."""
        exchange = self._running
        return exchange is not None and (exchange.partner_id, exchange.name) == (peer_id, name)

    async def join(self, talk: Conversation, stripe: Join) -> None:
        """A partner has opened a stripe: keep it until its exchange is over."""
        exchange = self._running
        if exchange is None or not self.runs(talk.remote_peer_id, stripe.exchange):
            await talk.refuse(RefusalReason.UNAVAILABLE, "there is no such exchange")
        elif not exchange.takes_stripe():
            await talk.refuse(RefusalReason.TOO_MANY, "that exchange takes no further stripe")
        else:
            exchange.join(talk)
            await exchange.over.wait()
