"""What peers say of the pieces of a corpus, on `/loco/corpus/1`; the codec stands in messages.py.

> GetHoldings   < Holdings + a bit for each piece, empty where the asker knows them or all is here
> GetPieces     < PieceReply + piece, once for each; or a Refusal, which ends the answer
"""

from typing import Annotated

from msgspec import Meta

from protocol.limits import (
    MAX_CONTROL_PAYLOAD_BYTES,
    MAX_PIECE_BYTES,
    MAX_PIECES_PER_REQUEST,
)

from .fields import Count, Digest, Message

PieceIndex = Annotated[int, Meta(ge=0, lt=1 << 31)]


class GetHoldings(Message, frozen=True, tag="get_holdings"):
    """Which pieces of this corpus do you have?

    Attributes:
        corpus: the manifest's digest.
        known: `version` of the newest answer that the asker has; 0 before the first.
    """

    corpus: Digest
    known: Count


class Holdings(Message, frozen=True, tag="holdings"):
    """Those whose bits follow, the lowest first.

    Attributes:
        version: grows with each change; above 0.
        whole: all of them; no bits follow.
    """

    max_payload_bytes = MAX_CONTROL_PAYLOAD_BYTES

    version: Count
    whole: bool


class GetPieces(Message, frozen=True, tag="get_pieces"):
    """Send me these pieces, in this order."""

    corpus: Digest
    pieces: Annotated[tuple[PieceIndex, ...], Meta(max_length=MAX_PIECES_PER_REQUEST)]


class PieceReply(Message, frozen=True, tag="piece_of_corpus"):
    """One of them follows."""

    max_payload_bytes = MAX_PIECE_BYTES

    piece: PieceIndex
