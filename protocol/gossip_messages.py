"""What partners say to each other on `/loco/gossip/1`; the codec stands in messages.py.

What is about a group carries its digest (group.py).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from .field_types import Count, Digest, Name, Stripes, Vectors
from .fields import Choice


class SettledOutcome(StrEnum):
    """What became of a round, as one partner tells the other."""

    AVERAGED = "averaged"
    SKIPPED = "skipped"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Propose:
    """Let us average this round.

    Attributes:
        codec: how vectors are coded, `int8` for instance.
        vectors: 1 (theta) or 2 (theta and phi).
        steps, tokens: what the proposer has trained in this round.
        stripes: further streams that the proposer would open for the vectors; 0 from a release
            that knows none, or for a short contribution.
    """

    group: Digest
    round: Count
    layout_digest: Digest
    codec: Name
    vectors: Vectors
    steps: Count
    tokens: Count
    stripes: Stripes = 0


@dataclass(frozen=True, slots=True)
class Accept:
    """Agreed; the accepter's own steps and tokens of the round.

    Attributes:
        stripes: how many the proposer may open, at most those proposed. 0: the vectors travel on
            this stream.
    """

    round: Count
    steps: Count
    tokens: Count
    stripes: Stripes = 0


@dataclass(frozen=True, slots=True)
class Vector:
    """The sender's codes of the round follow as payload; `digest` is of all codes.

    Where stripes were agreed the payload is empty, and the codes travel in pieces.
    """

    round: Count
    steps: Count
    tokens: Count
    codec: Name
    vectors: Vectors
    digest: Digest


@dataclass(frozen=True, slots=True)
class Received:
    """The receipt: the vector with this digest has arrived whole."""

    round: Count
    digest: Digest


@dataclass(frozen=True, slots=True)
class Join:
    """First message of a stripe: this stream belongs to our exchange of that round."""

    group: Digest
    round: Count


@dataclass(frozen=True, slots=True)
class Piece:
    """The sender's codes from this byte on follow, as many as make a piece (pieces.py)."""

    start: Count


@dataclass(frozen=True, slots=True)
class Settle:
    """What did you do with our round? Asked when the exchange broke before its receipts."""

    group: Digest
    round: Count


@dataclass(frozen=True, slots=True)
class Settled:
    """Answer to Settle."""

    round: Count
    outcome: Annotated[SettledOutcome, Choice(SettledOutcome)]
