"""Serving pieces of the corpus to other peers: the conversation `/loco/corpus/1`.

What one reader can cost: a place, of which each peer and each network has its share; a first
request comes within FIRST_REQUEST_S, each further one within REQUEST_S, and there are so many of
them. Pieces go at the pace that all bulk has (peer/network/pacing.py).

Over a thin line they go one after the other (protocol/corpus/at_once.py): the first is soon where
it can be given to others. A reader that waits for TURN_S is told that the line is busy, and may ask
another.
"""

from typing import Final

import numpy as np
import trio

from peer.network.conversation import Conversation
from peer.network.handlers import Readers
from peer.ports import Network, Stream, Work
from protocol.corpus.at_once import AtOnce
from protocol.limits import (
    MAX_PIECE_READERS,
    MAX_PIECE_READERS_PER_PEER,
    MAX_PIECE_READERS_PER_PREFIX,
    MAX_PIECE_REQUESTS,
)
from protocol.membership.book import Shares
from protocol.outcomes import RefusalReason
from protocol.wire.corpus_messages import GetHoldings, GetPieces, Holdings, PieceReply
from protocol.wire.versions import CORPUS

from .store import PieceStore

FIRST_REQUEST_S: Final = 15.0
"""A request is long under way where the reader gives pieces too, over a thin line."""
REQUEST_S: Final = 30.0
TURN_S: Final = 20.0
"""Longest wait of a reader for its turn: it takes us for dead after ANSWER_S (fetcher.py)."""
LOOK_EVERY_S: Final = 1.0
"""A turn may come with time alone."""
READERS: Final = Shares(MAX_PIECE_READERS, MAX_PIECE_READERS_PER_PEER, MAX_PIECE_READERS_PER_PREFIX)


class PieceService:
    """See the top of the file."""

    def __init__(self, corpus: str, store: PieceStore, network: Network, work: Work) -> None:
        self._corpus = corpus
        self._store = store
        self._network = network
        self._work = work
        self._readers = Readers(READERS)
        self._at_once = AtOnce(MAX_PIECE_READERS)
        self._turns = trio.Lock()
        self._ended = trio.Event()

    async def start(self) -> None:
        """Answer requests from now on."""
        await self._network.serve(CORPUS, self._serve)

    async def _serve(self, stream: Stream) -> None:
        await self._readers.serve(stream, self._answer)

    async def _answer(self, talk: Conversation) -> None:
        patience_s = FIRST_REQUEST_S
        for _ in range(MAX_PIECE_REQUESTS):
            request, _ = await talk.receive(GetHoldings, GetPieces, timeout_s=patience_s)
            patience_s = REQUEST_S
            if request.corpus != self._corpus:
                sentence = f"I have no corpus {request.corpus}"
                await talk.refuse(RefusalReason.UNAVAILABLE, sentence)
            elif isinstance(request, GetHoldings):
                await self._tell(talk, request.known)
            else:
                await self._send(talk, request.pieces)
        sentence = f"{MAX_PIECE_REQUESTS} requests on one stream are enough"
        await talk.refuse(RefusalReason.TOO_MANY, sentence)

    async def _tell(self, talk: Conversation, known: int) -> None:
        here, version = self._store.here, self._store.version
        whole = bool(here.all())
        bits = b"" if whole or known == version else np.packbits(here, bitorder="little").tobytes()
        await talk.send(Holdings(version, whole), bits)

    async def _send(self, talk: Conversation, pieces: tuple[int, ...]) -> None:
        for piece in pieces:
            is_one = piece < self._store.manifest.num_pieces and self._store.here[piece]
            if is_one and not await self._may_begin():
                sentence = "my line is busy with other pieces; ask another, or later"
                await talk.refuse(RefusalReason.TOO_MANY, sentence)
                return
            if not (is_one and await self._send_one(talk, piece)):
                sentence = f"I have no piece {piece}"
                await talk.refuse(RefusalReason.UNAVAILABLE, sentence)
                return

    async def _may_begin(self) -> bool:
        """Wait for a turn, in the order of asking; whether it came, and then it is taken."""
        with trio.move_on_after(TURN_S):
            async with self._turns:
                while not self._at_once.has_room(trio.current_time()):
                    with trio.move_on_after(LOOK_EVERY_S):
                        await self._ended.wait()
                self._at_once.began(trio.current_time())
                return True
        return False

    async def _send_one(self, talk: Conversation, piece: int) -> bool:
        """Send a piece in its turn; False where it is not here after all."""
        ended = self._at_once.lost
        try:
            data = await self._work.run(self._store.read, piece)
            if data is None:
                ended = self._at_once.refused
                return False
            # The usual patience of a send, and no less: many streams of a thin line each take long
            # for one write, though all of them move.
            await talk.send(PieceReply(piece), data)
            ended = self._at_once.came
            return True
        finally:
            ended(trio.current_time())
            self._ended.set()
            self._ended = trio.Event()
