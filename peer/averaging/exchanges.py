"""All exchanges of one peer: run one, remember how the last ended, ask when one broke off.

The decisions are in protocol/exchange.py; what one exchange does on its stream is in
exchange_io.py. Here is what outlives a stream: a partner may ask later how an exchange ended
(`answer`), and so may we (`_ask`).
"""

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import blake3
import trio

from peer.codec import codes_as_tensor, get_codec
from peer.network.conversation import Conversation
from peer.ports import Network, PeerId, Work
from protocol.errors import LocoError
from protocol.exchange import Event, Exchange, State
from protocol.messages import Join, Settle, Settled, SettledOutcome
from protocol.outcomes import RefusalReason, SkipReason
from protocol.versions import GOSSIP

from .exchange_io import STALL_S, Contribution, VectorExchange
from .outcome import Agreement, Averaged, Outcome, Skipped

SETTLE_S: Final = 5.0
"""How long we try to learn how a broken exchange ended for the partner."""
SETTLE_RETRY_S: Final = 0.5
MAX_REMEMBERED_EXCHANGES: Final = 16
"""Exchanges about which a partner may still ask."""

_TOLD: Final = {
    SettledOutcome.AVERAGED: Event.TOLD_AVERAGED,
    SettledOutcome.SKIPPED: Event.TOLD_SKIPPED,
    SettledOutcome.UNKNOWN: Event.NOT_TOLD,
}


class Exchanges:
    """One at a time is run; its partner's codes lie in one buffer, reused by the next."""

    def __init__(self, agreement: Agreement, network: Network, work: Work) -> None:
        self._agreement = agreement
        self._network = network
        self._work = work
        self._codec = get_codec(agreement.codec)
        self._buffer = bytearray(agreement.payload_bytes)
        self._remembered: OrderedDict[tuple[PeerId, int], VectorExchange] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Exchanges, {len(self._remembered)} remembered>"

    @asynccontextmanager
    async def open(self, peer_id: PeerId) -> AsyncIterator[Conversation]:
        """A new gossip stream to a peer. Raises StreamLost."""
        stream = await self._network.open_stream(peer_id, GOSSIP)
        try:
            yield Conversation(stream)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await stream.aclose()

    def prepare(
        self, talk: Conversation, own: Contribution, *, num_stripes: int, following: bool
    ) -> VectorExchange:
        """An exchange on an agreed stream; from now on the partner may open stripes, and ask.

        Args:
            num_stripes: further streams agreed on.
            following: we were asked; the other side begins.
        """
        peer_id, round_ = talk.remote_peer_id, own.round
        exchange = VectorExchange(
            Exchange(),
            talk,
            own,
            memoryview(self._buffer),
            self._check,
            following=following,
            num_stripes=num_stripes,
            open_stripe=None if following else partial(self._open_stripe, peer_id, round_),
        )
        self._remember(peer_id, round_, exchange)
        return exchange

    async def run(self, exchange: VectorExchange, deadline_s: float) -> Outcome:
        """Exchange vectors, until a defined end."""
        peer_id, machine = exchange.talk.remote_peer_id, exchange.machine
        await exchange.run(deadline_s)
        if exchange.must_ask:
            await self._ask(machine, peer_id, exchange.round)
        if machine.state is State.AVERAGED and exchange.theirs is not None:
            theirs = exchange.theirs
            return Averaged(peer_id, theirs.steps, theirs.tokens, memoryview(self._buffer))
        return Skipped(machine.reason or SkipReason.LEAVING, peer_id)

    async def join(self, talk: Conversation, stripe: Join) -> None:
        """A stream from outside that says it is a stripe: keep it until its exchange is over."""
        exchange = self._remembered.get((talk.remote_peer_id, stripe.round))
        if exchange is None or stripe.group != self._agreement.group:
            await talk.refuse(RefusalReason.UNAVAILABLE, "there is no such exchange")
        elif not exchange.takes_stripe():
            await talk.refuse(RefusalReason.TOO_MANY, "that exchange takes no further stripe")
        else:
            exchange.join(talk)
            await exchange.over.wait()

    def answer(self, peer_id: PeerId, question: Settle) -> Settled:
        """How our exchange with that peer ended.

        Asking is itself news: the stream is dead for them.
        """
        exchange = self._remembered.get((peer_id, question.round))
        if exchange is None or question.group != self._agreement.group:
            return Settled(question.round, SettledOutcome.UNKNOWN)
        exchange.asked()
        averaged = exchange.machine.state is State.AVERAGED
        outcome = SettledOutcome.AVERAGED if averaged else SettledOutcome.SKIPPED
        return Settled(question.round, outcome)

    def _remember(self, peer_id: PeerId, round_: int, exchange: VectorExchange) -> None:
        self._remembered[peer_id, round_] = exchange
        while len(self._remembered) > MAX_REMEMBERED_EXCHANGES:
            self._remembered.popitem(last=False)

    async def _open_stripe(self, peer_id: PeerId, round_: int) -> Conversation:
        stream = await self._network.open_stream(peer_id, GOSSIP)
        try:
            talk = Conversation(stream)
            await talk.send(Join(self._agreement.group, round_))
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
        size = len(payload) // self._agreement.vectors
        parts = (payload[i * size : (i + 1) * size] for i in range(self._agreement.vectors))
        return all(self._codec.validate(codes_as_tensor(part)) for part in parts)

    async def _ask(self, machine: Exchange, peer_id: PeerId, round_: int) -> None:
        told: Event | None = None
        with trio.move_on_after(SETTLE_S):
            while told is None and not machine.is_final:
                told = await self._ask_once(peer_id, round_)
        if not machine.is_final:
            machine.step(told or Event.NOT_TOLD)

    async def _ask_once(self, peer_id: PeerId, round_: int) -> Event | None:
        try:
            async with self.open(peer_id) as talk:
                await talk.send(Settle(self._agreement.group, round_), stall_s=STALL_S)
                answer, _ = await talk.receive(Settled)
        except LocoError:
            await trio.sleep(SETTLE_RETRY_S)
            return None
        return _TOLD[answer.outcome]
