"""The shell around one exchange (protocol/exchange.py): two vectors and two receipts on one stream.

Both directions run at once; only the one who was asked waits for the other's first bytes, since its
yes may have come too late, and a vector sent to nobody costs as much as any. A receipt is a message
on the same stream as the vector, so it waits until our own vector is out. The machine decides; this
file moves bytes, checks what arrived, and reports.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import trio

from peer.network.conversation import Conversation, StreamStalled
from protocol.errors import LocoError, RemoteProtocolError, StreamLost
from protocol.exchange import Action, Event, Exchange, State
from protocol.messages import Received, Vector

STALL_S: Final = 15.0
"""A stream on which no byte arrives for this long is given up."""

CheckVector = Callable[[memoryview, str], Awaitable[bool]]
"""Whether these bytes have this digest and can be decoded to finite values."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one peer brings to a round.

    Attributes:
        payload: codes of theta, and behind them codes of phi where gamma != beta.
        digest: blake3 of the payload.
    """

    round: int
    steps: int
    tokens: int
    codec: str
    vectors: int
    digest: str
    payload: memoryview


class VectorExchange:
    """Runs one `Exchange` over one conversation.

    After `run`, the machine is final, or wants to ask how it ended (`must_ask`).

    Attributes:
        theirs: the head of the partner's vector, once it came.
    """

    def __init__(
        self,
        machine: Exchange,
        talk: Conversation,
        own: Contribution,
        into: memoryview,
        check: CheckVector,
        *,
        following: bool = False,
    ) -> None:
        self.machine = machine
        self.must_ask = False
        self._talk = talk
        self._own = own
        self._into = into
        self._check = check
        self._receipt_due = trio.Event()
        self._may_send = trio.Event()
        if not following:
            self._may_send.set()
        self.theirs: Vector | None = None
        self._scope = trio.CancelScope()

    def __repr__(self) -> str:
        return f"<VectorExchange round={self._own.round} {self.machine!r}>"

    async def run(self, deadline_s: float = math.inf) -> None:
        """Exchange until the machine has nothing to wait for on this stream."""
        with trio.CancelScope(deadline=deadline_s) as timer:
            try:
                with self._scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._send)
                        await self._receive()
            except* StreamStalled:
                self._step(Event.STALLED)
            except* StreamLost:
                self._step(Event.STREAM_LOST)
            except* LocoError:
                self._step(self._fault())
        if timer.cancelled_caught:
            self._step(Event.DEADLINE_PASSED)

    def asked(self) -> None:
        """The partner asks how it ended: the stream is dead for it, so it is for us."""
        if not self.machine.is_final:
            self.machine.step(Event.ASKED)
            self._scope.cancel()

    def _fault(self) -> Event:
        """What they sent was wrong: no vector, or, for a receipt, the end of the stream."""
        return Event.STREAM_LOST if self.machine.state is State.HOLDING else Event.VECTOR_BAD

    def _step(self, event: Event) -> None:
        if self.machine.is_final or self.machine.state is State.SETTLING:
            return
        action = self.machine.step(event)
        if action is Action.SEND_RECEIPT:
            self._receipt_due.set()
        elif action is Action.ASK:
            self.must_ask = True

    async def _send(self) -> None:
        own = self._own
        head = Vector(own.round, own.steps, own.tokens, own.codec, own.vectors, own.digest)
        await self._may_send.wait()
        await self._talk.send(head, own.payload)
        await self._receipt_due.wait()
        assert self.theirs is not None
        await self._talk.send(Received(own.round, self.theirs.digest))

    async def _receive(self) -> None:
        while not self.machine.is_final:
            # Both send at once; a receipt takes as long as what is before it on its way.
            patience_s = STALL_S if self.theirs is None else math.inf
            message, _ = await self._talk.receive(
                Vector,
                Received,
                into=self._into,
                timeout_s=patience_s,
                stall_s=STALL_S,
                on_progress=lambda _: self._may_send.set(),
            )
            if isinstance(message, Vector):
                await self._vector_arrived(message)
            else:
                self._receipt_arrived(message)
        if self.machine.state is not State.AVERAGED:
            self._scope.cancel()

    async def _vector_arrived(self, vector: Vector) -> None:
        own = self._own
        if self.theirs is not None:
            raise RemoteProtocolError("a second vector in one exchange")
        if (vector.round, vector.codec, vector.vectors) != (own.round, own.codec, own.vectors):
            raise RemoteProtocolError("a vector of another round or code than agreed")
        self.theirs = vector
        good = await self._check(self._into, vector.digest)
        self._step(Event.VECTOR_ARRIVED if good else Event.VECTOR_BAD)

    def _receipt_arrived(self, receipt: Received) -> None:
        if (receipt.round, receipt.digest) != (self._own.round, self._own.digest):
            raise RemoteProtocolError("a receipt for another vector than ours")
        if self.machine.state in (State.EXCHANGING, State.HOLDING):
            self._step(Event.RECEIPT_ARRIVED)
