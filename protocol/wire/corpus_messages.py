"""What peers say of the pieces of a corpus, on `/loco/corpus/1`; the codec stands in messages.py.

> GetHoldings   < Holdings + a bit for each piece, empty where the asker knows them or all is here
> GetPieces     < PieceReply + piece, once for each; or a Refusal, which ends the answer
"""

from dataclasses import dataclass
from typing import Annotated

from protocol.limits import MAX_PIECES_PER_REQUEST

from .fields import Count, Digest, Flag, Integer, Many


@dataclass(frozen=True, slots=True)
class GetHoldings:
    """Which pieces of this corpus do you have?

    Attributes:
        corpus: the manifest's digest.
        known: `version` of the newest answer that the asker has; 0 before the first.
    """

    corpus: Digest
    known: Count


@dataclass(frozen=True, slots=True)
class Holdings:
    """Those whose bits follow, the lowest first.

    Attributes:
        version: grows with each change; above 0.
        whole: all of them; no bits follow.
    """

    version: Count
    whole: Annotated[bool, Flag()]


@dataclass(frozen=True, slots=True)
class GetPieces:
    """Send me these pieces, in this order."""

    corpus: Digest
    pieces: Annotated[tuple[int, ...], Many(Integer(0, (1 << 31) - 1), MAX_PIECES_PER_REQUEST)]


@dataclass(frozen=True, slots=True)
class PieceReply:
    """One of them follows."""

    piece: Annotated[int, Integer(0, (1 << 31) - 1)]
