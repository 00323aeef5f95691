"""Serving pieces of the corpus to other peers: the conversation `/loco/corpus/1`.

What one reader can cost: a place, of which each peer and each network has its share; a first
request comes within FIRST_REQUEST_S, each further one within REQUEST_S, and there are so many of
them. Pieces go at the pace that all bulk has (peer/network/pacing.py).
"""

from typing import Final

import numpy as np

from peer.network.conversation import Conversation
from peer.network.readers import Readers
from peer.ports import Network, Stream, Work
from protocol.limits import (
    MAX_PIECE_READERS,
    MAX_PIECE_READERS_PER_PEER,
    MAX_PIECE_READERS_PER_PREFIX,
    MAX_PIECE_REQUESTS,
)
from protocol.membership.budget import Shares
from protocol.outcomes import RefusalReason
from protocol.wire.corpus_messages import GetHoldings, GetPieces, Holdings, PieceReply
from protocol.wire.versions import CORPUS

from .store import PieceStore

FIRST_REQUEST_S: Final = 5.0
REQUEST_S: Final = 30.0
STALL_S: Final = 15.0
READERS: Final = Shares(MAX_PIECE_READERS, MAX_PIECE_READERS_PER_PEER, MAX_PIECE_READERS_PER_PREFIX)


class PieceService:
    """See the top of the file."""

    def __init__(self, corpus: str, store: PieceStore, network: Network, work: Work) -> None:
        self._corpus = corpus
        self._store = store
        self._network = network
        self._work = work
        self._readers = Readers(READERS)

    def __repr__(self) -> str:
        return f"<PieceService of {self._store!r}, {self._readers.taken} readers>"

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
        await talk.send(Holdings(version, whole), bits, stall_s=STALL_S)

    async def _send(self, talk: Conversation, pieces: tuple[int, ...]) -> None:
        for piece in pieces:
            is_one = piece < self._store.manifest.num_pieces and self._store.here[piece]
            data = await self._work.run(self._store.read, piece) if is_one else None
            if data is None:
                sentence = f"I have no piece {piece}"
                await talk.refuse(RefusalReason.UNAVAILABLE, sentence)
                return
            await talk.send(PieceReply(piece), data, stall_s=STALL_S)
