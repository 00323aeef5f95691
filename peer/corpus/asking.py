"""Asking one peer for pieces of the corpus, and for which it has; what comes is checked here."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import numpy as np
import numpy.typing as npt
import trio

from peer.network.conversation import Conversation
from peer.ports import Network, PeerId
from peer.state.steady import slowest_rate, steady
from protocol.corpus.manifest import CorpusManifest
from protocol.errors import RemoteProtocolError
from protocol.limits import MAX_ASKED_PIECES
from protocol.wire.corpus_messages import GetHoldings, GetPieces, Holdings, PieceReply
from protocol.wire.versions import CORPUS

ANSWER_S: Final = 30.0
STALL_S: Final = 15.0


class Asker:
    """One stream to a peer of the run.

    Args:
        corpus: the manifest's digest.
    """

    def __init__(self, talk: Conversation, corpus: str, manifest: CorpusManifest) -> None:
        self._talk = talk
        self._corpus = corpus
        self._manifest = manifest

    async def holdings(self, known: int) -> tuple[int, npt.NDArray[np.bool_] | None]:
        """The version of what the peer has, and what; None where it is the known one.

        Raises:
            StreamLost, Refused, RemoteProtocolError
        """
        total = self._manifest.num_pieces
        await self._talk.send(GetHoldings(self._corpus, known))
        reply, bits = await self._talk.receive(
            Holdings, timeout_s=ANSWER_S, stall_s=STALL_S, max_payload_bytes=-(-total // 8)
        )
        if reply.version == known:
            return known, None
        if reply.whole:
            return reply.version, np.ones(total, bool)
        if len(bits) != -(-total // 8):
            raise RemoteProtocolError(f"{len(bits)} bytes of bits for {total} pieces")
        packed = np.frombuffer(bits, np.uint8)
        return reply.version, np.unpackbits(packed, count=total, bitorder="little").astype(bool)

    async def piece(self, piece: int) -> bytes:
        """A piece, checked.

        Raises:
            StreamLost, Refused, RemoteProtocolError
        """
        size = self._manifest.piece_bytes(piece)
        with steady(self._talk, slowest_rate(size), _sharers) as moved:
            await self._talk.send(GetPieces(self._corpus, (piece,)))
            reply, data = await self._talk.receive(
                PieceReply,
                timeout_s=ANSWER_S,
                stall_s=STALL_S,
                max_payload_bytes=size,
                on_progress=moved,
            )
        if reply.piece != piece or not self._manifest.is_piece(piece, data):
            raise RemoteProtocolError(f"what came is not piece {piece} of the corpus")
        return data


def _sharers() -> int:
    """How many may share the line, ours or the source's, with other readers and averages beside.

    A piece that is cut off has come for nothing, so its source is held to its part of a line on
    which as many are on their way as may be. A source slower than others is not waited for
    long (protocol/corpus/requests.py).
    """
    return MAX_ASKED_PIECES


@asynccontextmanager
async def asking(
    network: Network, peer_id: PeerId, corpus: str, manifest: CorpusManifest
) -> AsyncIterator[Asker]:
    """Open a stream for requests. Raises StreamLost."""
    stream = await network.open_stream(peer_id, CORPUS)
    try:
        yield Asker(Conversation(stream), corpus, manifest)
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
            await stream.aclose()
