"""The shell around one exchange (protocol/gossip/exchange.py): two vectors and two receipts.

Both directions run at once; only the one who was asked waits for the other's first bytes, since its
yes may have come too late, and a vector sent to nobody costs as much as any. The machine decides;
this file moves bytes, checks what arrived, and reports.

    one stream    a vector follows its head; a receipt waits until our own vector is out
    stripes       the vectors travel in pieces on further streams (stripes.py), which whoever
                  proposed opens; heads and receipts stay on the first stream. Losing any of them
                  before both vectors are through loses the exchange; all stay open until it is over
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final

import trio

from peer.network.conversation import Conversation, StreamStalled
from protocol.errors import LocoError, RemoteProtocolError, StreamLost
from protocol.gossip.exchange import FINAL, Action, Exchange, ExchangeEvent, ExchangeState
from protocol.gossip.matchmaking_events import Snapshot
from protocol.wire.messages import Received, Vector

from .stripes import Stripes

STALL_S: Final = 15.0
"""A stream on which no byte arrives for this long is given up."""

OpenStripe = Callable[[], Awaitable[Conversation]]
"""A further stream to the partner, which has been told what it is for."""
CheckVector = Callable[[memoryview, str], Awaitable[bool]]
"""Whether these bytes have this digest and can be decoded to finite values."""


@dataclass(frozen=True, slots=True)
class OwnVector:
    """What one peer brings to an exchange.

    Attributes:
        round: the peer's own number of the round that it has closed.
        step: the nominal step at which the snapshot was taken.
        final: it belongs to the final averaging.
        payload: codes of theta, and behind them codes of phi where gamma != beta.
        digest: blake3 of the payload.
    """

    round: int
    step: int
    final: bool
    steps: int
    tokens: int
    codec: str
    vectors: int
    digest: str
    payload: memoryview

    @property
    def snapshot(self) -> Snapshot:
        """What is said of it while a partner is looked for."""
        return Snapshot(self.round, self.step, self.final)


class VectorExchange:
    """Runs one `Exchange` over one conversation, and over its stripes if there are any.

    After `run`, the machine is final, or wants to ask how it ended (`must_ask`).

    Args:
        name: of the exchange (`exchange_id`).
        following: we were asked; the other side begins, and opens the stripes.
        num_stripes: further streams agreed on; 0 for none.
        open_stripe: how to open one, for whoever begins.

    Attributes:
        name, following: as given.
        theirs: the head of the partner's vector, once it came.
        over: set when no stream of the exchange is needed any more.
    """

    def __init__(
        self,
        name: str,
        machine: Exchange,
        talk: Conversation,
        own: OwnVector,
        into: memoryview,
        check: CheckVector,
        *,
        following: bool = False,
        num_stripes: int = 0,
        open_stripe: OpenStripe | None = None,
    ) -> None:
        self.name = name
        self.machine = machine
        self.must_ask = False
        self.theirs: Vector | None = None
        self.over = trio.Event()
        self._talk = talk
        self._own = own
        self._into = into
        self._check = check
        self.following = following
        self._num_stripes = num_stripes
        self._open_stripe = open_stripe
        self._head_came = trio.Event()
        self._receipt_due = trio.Event()
        self._receipt_sent = trio.Event()
        self._may_send = trio.Event()
        if not following:
            self._may_send.set()
        self._stripes: Stripes | None = None
        self._joined: list[Conversation] = []
        self._nursery: trio.Nursery | None = None
        self._scope = trio.CancelScope()
        self._listening = trio.CancelScope()

    def __repr__(self) -> str:
        return f"<VectorExchange {self.name} {self.machine!r}>"

    @property
    def talk(self) -> Conversation:
        """The stream on which it was agreed."""
        return self._talk

    async def run(self, deadline_s: float = math.inf) -> None:
        """Exchange until the machine has nothing to wait for on these streams."""
        with trio.CancelScope(deadline=deadline_s) as timer:
            try:
                with self._scope:
                    await self._run_all()
            except* StreamStalled:
                self._step(ExchangeEvent.STALLED)
            except* StreamLost:
                self._step(ExchangeEvent.STREAM_LOST)
            except* LocoError:
                self._step(self._fault())
            finally:
                await self._close_stripes()
                self.end()
        if timer.cancelled_caught:
            self._step(ExchangeEvent.DEADLINE_PASSED)

    def asked(self) -> None:
        """The partner asks how it ended: the stream is dead for it, so it is for us."""
        if not self.machine.is_final:
            self.machine.step(ExchangeEvent.ASKED)
            self._scope.cancel()

    def end(self) -> None:
        """It is over, or never began: let go of what only its streams needed.

        It is remembered for a while (exchanges.py); the payload is as large as a vector, and would
        live as long.
        """
        self.over.set()
        self._own = replace(self._own, payload=memoryview(b""))
        self._stripes = None
        self._joined.clear()

    def takes_stripe(self) -> bool:
        """Whether the partner may open one more stripe."""
        return (
            self.following
            and len(self._joined) < self._num_stripes
            and not self.machine.is_final
            and not self.over.is_set()
        )

    def join(self, talk: Conversation) -> None:
        """The partner has opened a stripe; it must stay open until `over`."""
        self._joined.append(talk)
        if self._stripes is not None and self._nursery is not None:
            self._nursery.start_soon(self._stripes.carry, talk)

    # --- one exchange -----------------------------------------------------------------------------
    async def _run_all(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._send)
            if self._num_stripes:
                stripes = self._stripes = Stripes(self._own.payload, self._into, self._may_send)
                nursery.start_soon(self._take_pieces, stripes)
                for talk in self._joined:  # opened before we came here
                    nursery.start_soon(stripes.carry, talk)
                if self._open_stripe is not None:
                    for _ in range(self._num_stripes):
                        nursery.start_soon(self._carry, stripes, self._open_stripe)
            await self._receive()

    def _fault(self) -> ExchangeEvent:
        """What they sent was wrong: no vector, or, for a receipt, the end of the stream."""
        return (
            ExchangeEvent.STREAM_LOST
            if self.machine.state is ExchangeState.HOLDING
            else ExchangeEvent.VECTOR_BAD
        )

    def _step(self, event: ExchangeEvent) -> None:
        if self.machine.is_final or self.machine.state is ExchangeState.SETTLING:
            return
        action = self.machine.step(event)
        if action is Action.SEND_RECEIPT:
            self._receipt_due.set()
        elif action is Action.ASK:
            self.must_ask = True
        if self.machine.state in FINAL:
            self._listening.cancel()

    async def _send(self) -> None:
        own = self._own
        head = Vector(self.name, own.steps, own.tokens, own.codec, own.vectors, own.digest)
        await self._may_send.wait()
        await self._talk.send(head, None if self._num_stripes else own.payload)
        await self._receipt_due.wait()
        assert self.theirs is not None
        await self._talk.send(Received(self.name, self.theirs.digest))
        self._receipt_sent.set()

    async def _receive(self) -> None:
        with self._listening:
            while not self.machine.is_final:
                await self._receive_message()
        if self.machine.state is ExchangeState.AVERAGED:
            await self._receipt_sent.wait()
        self._scope.cancel()

    async def _receive_message(self) -> None:
        # Both send at once; a receipt takes as long as what is before it on its way.
        message, _ = await self._talk.receive(
            Vector,
            Received,
            into=None if self._num_stripes else self._into,
            max_payload_bytes=0,
            timeout_s=STALL_S if self.theirs is None else math.inf,
            stall_s=STALL_S,
            on_progress=lambda _: self._may_send.set(),
        )
        if isinstance(message, Received):
            self._receipt_arrived(message)
            return
        self._head_arrived(message)
        if not self._num_stripes:
            await self._vector_arrived(message)

    def _head_arrived(self, vector: Vector) -> None:
        own = self._own
        if self.theirs is not None:
            raise RemoteProtocolError("a second vector in one exchange")
        agreed = (self.name, own.codec, own.vectors)
        if (vector.exchange, vector.codec, vector.vectors) != agreed:
            raise RemoteProtocolError("a vector of another exchange or code than agreed")
        self.theirs = vector
        self._may_send.set()
        self._head_came.set()

    async def _vector_arrived(self, vector: Vector) -> None:
        good = await self._check(self._into, vector.digest)
        self._step(ExchangeEvent.VECTOR_ARRIVED if good else ExchangeEvent.VECTOR_BAD)

    def _receipt_arrived(self, receipt: Received) -> None:
        if (receipt.exchange, receipt.digest) != (self.name, self._own.digest):
            raise RemoteProtocolError("a receipt for another vector than ours")
        if self.machine.state in (ExchangeState.EXCHANGING, ExchangeState.HOLDING):
            self._step(ExchangeEvent.RECEIPT_ARRIVED)

    # --- stripes ----------------------------------------------------------------------------------
    async def _take_pieces(self, stripes: Stripes) -> None:
        await stripes.watch(STALL_S)
        await self._head_came.wait()
        assert self.theirs is not None
        await self._vector_arrived(self.theirs)

    async def _carry(self, stripes: Stripes, open_stripe: OpenStripe) -> None:
        talk = await open_stripe()
        self._joined.append(talk)
        await stripes.carry(talk)

    async def _close_stripes(self) -> None:
        """Let go of stripes; those that we opened are closed, others end where they are served."""
        self.over.set()
        self._nursery = None
        if not self.following:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                for talk in self._joined:
                    await talk.aclose()
