"""What partners say to each other on `/loco/gossip/1`; the codec stands in messages.py.

`exchange` names one exchange of two peers: the digest of the group and of both ends, each with its
own number of the round that it brings (`exchange_id` in exchange.py). Both know it from the answer
to a proposal on.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from protocol.limits import MAX_FRAGMENTS

from .fields import Choice, Count, Digest, Flag, Integer, MaybeDigest, Name, Stripes, Vectors


class SettledOutcome(StrEnum):
    """What became of an exchange, as one partner tells the other."""

    AVERAGED = "averaged"
    SKIPPED = "skipped"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Free:
    """A vector for which the sender of a beat looks for a partner.

    Attributes:
        fragment: its number; 0 where the whole model is one vector.
        round: the sender's own number of what it wants averaged.
        step: the nominal step of its snapshot.
    """

    fragment: Annotated[int, Integer(0, MAX_FRAGMENTS - 1)]
    round: Count
    step: Count


@dataclass(frozen=True, slots=True)
class Propose:
    """Let us average.

    Attributes:
        group: its digest.
        round: the proposer's own number of its round.
        step: the nominal step of its snapshot.
        final: the snapshot belongs to the final averaging.
        codec: how vectors are coded, `int8` for instance.
        vectors: 1 (theta) or 2 (theta and phi).
        steps, tokens: what the proposer has trained in this round.
        stripes: further streams that the proposer would open for the vectors; 0 from a release
            that knows none, or for a short contribution.
        roster, meeting: in the planned part of the final averaging, the peers that the proposer
            sees take part, and which meeting of the plan this is (final_averaging.py).
    """

    group: Digest
    round: Count
    step: Count
    final: Annotated[bool, Flag()]
    layout_digest: Digest
    codec: Name
    vectors: Vectors
    steps: Count
    tokens: Count
    stripes: Stripes = 0
    roster: MaybeDigest = None
    meeting: Count = 0


@dataclass(frozen=True, slots=True)
class Accept:
    """Agreed: the accepter's own round, and its steps and tokens in it.

    Attributes:
        proposed: the proposer's round, as it was proposed.
        stripes: how many the proposer may open, at most those proposed. 0: the vectors travel on
            this stream.
    """

    proposed: Count
    round: Count
    steps: Count
    tokens: Count
    stripes: Stripes = 0


@dataclass(frozen=True, slots=True)
class Vector:
    """The sender's codes follow as payload; `digest` is of all codes.

    Where stripes were agreed the payload is empty, and the codes travel in pieces.

    Attributes:
        packed: bytes that the codes take as differences (peer/codec/differences.py), which are what
            travels; 0 for the codes themselves.
    """

    exchange: Digest
    steps: Count
    tokens: Count
    codec: Name
    vectors: Vectors
    digest: Digest
    packed: Count = 0


@dataclass(frozen=True, slots=True)
class Received:
    """The receipt: the vector with this digest has arrived whole."""

    exchange: Digest
    digest: Digest


@dataclass(frozen=True, slots=True)
class Misread:
    """These blocks of the packed vector could not be read: a bit map of all blocks follows."""

    exchange: Digest


@dataclass(frozen=True, slots=True)
class Blocks:
    """Answer to Misread: the codes of those blocks follow, without scales, as they are."""

    exchange: Digest


@dataclass(frozen=True, slots=True)
class Join:
    """First message of a stripe: this stream belongs to that exchange of ours."""

    exchange: Digest


@dataclass(frozen=True, slots=True)
class Piece:
    """The sender's codes from this byte on follow, as many as make a piece (pieces.py)."""

    start: Count


@dataclass(frozen=True, slots=True)
class Settle:
    """What did you do with our exchange? Asked when it broke before its receipts."""

    exchange: Digest


@dataclass(frozen=True, slots=True)
class Settled:
    """Answer to Settle."""

    exchange: Digest
    outcome: Annotated[SettledOutcome, Choice(SettledOutcome)]
