"""A long vector each way in pieces, over several streams at once.

What the pieces are, and why, stands in protocol/wire/pieces.py. How long a packed vector is, its
head says, on the first stream; pieces that come before that wait. Each stripe is one stream, used
in both directions: it takes the next piece when it has room, and puts what arrives straight into
its place. The streams are equal, so a stall is judged over all of them: on a slow link one may have
nothing to carry long before the last piece is through on another.
"""

import trio

from peer.network.conversation import Conversation, StreamStalled
from protocol.errors import Refused, StreamLost
from protocol.limits import PIECE_BYTES
from protocol.wire.messages import Piece
from protocol.wire.pieces import Incoming, OutgoingPieces


class Stripes:
    """Moves one vector each way.

    Attributes:
        whole: set when every piece of theirs is here.
    """

    def __init__(self, own: memoryview, may_send: trio.Event) -> None:
        self.whole = trio.Event()
        self._own = own
        self._into = memoryview(b"")
        self._may_send = may_send
        self._outgoing = OutgoingPieces(len(own))
        self._incoming = Incoming(0)
        self._expected = trio.Event()
        self._receiving: list[trio.CancelScope] = []
        self._last_byte_s = trio.current_time()

    def expect(self, into: memoryview) -> None:
        """It is known how long theirs is: pieces of it go there."""
        self._into, self._incoming = into, Incoming(len(into))
        self._expected.set()

    async def carry(self, talk: Conversation) -> None:
        """Use a stream until both vectors are through.

        Raises:
            StreamLost: the stream broke, or the partner does not take it for a stripe.
            RemoteProtocolError: what they sent is no piece of this vector.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, talk)
            nursery.start_soon(self._receive, talk)

    async def watch(self, stall_s: float) -> None:
        """Wait until their vector is whole.

        Raises:
            StreamStalled: no byte came on any stream for so long.
        """
        while not self.whole.is_set():
            stalled_s = self._last_byte_s + stall_s
            if trio.current_time() >= stalled_s:
                raise StreamStalled(f"no piece came for {stall_s:g} s")
            with trio.move_on_at(stalled_s):
                await self.whole.wait()

    async def _send(self, talk: Conversation) -> None:
        await self._may_send.wait()
        while (piece := self._outgoing.take()) is not None:
            start, stop = piece
            await talk.send(Piece(start), self._own[start:stop])

    async def _receive(self, talk: Conversation) -> None:
        with trio.CancelScope() as scope:
            self._receiving.append(scope)
            await self._expected.wait()
            while not self.whole.is_set():
                await self._receive_piece(talk)

    async def _receive_piece(self, talk: Conversation) -> None:
        try:
            piece, _ = await talk.receive(
                Piece,
                place=self._place,
                max_payload_bytes=PIECE_BYTES,
                on_progress=self._progressed,
            )
        except Refused as refused:
            raise StreamLost(f"the stripe was refused: {refused}") from refused
        self._incoming.arrive(piece.start)
        if self._incoming.is_whole:
            self.whole.set()
            for scope in self._receiving:
                scope.cancel()  # nothing comes any more; a stream that waits loses nothing

    def _place(self, piece: Piece, num_bytes: int) -> memoryview:
        self._incoming.announce(piece.start, num_bytes)
        return self._into[piece.start : piece.start + num_bytes]

    def _progressed(self, _: int) -> None:
        self._last_byte_s = trio.current_time()
