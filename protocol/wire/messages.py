"""Everything that peers say to each other, and its codec.

On the wire a message (fields.py) is a msgpack map, `{"t": tag, field: value, ...}`, the header of
one frame (frames.py). A payload of raw bytes may follow only where the message has
`max_payload_bytes`. The dialogues, > from the opener of the stream, < from the other:

    /loco/hello/1     > Hello   < Hello or Refusal   then both, for as long as the link lasts:
                      Beat, PeerList, Statements, AskAlive, AliveReply, Leaving
    /loco/gossip/1    > Propose < Accept or Refusal  then both: Vector + payload, Received
                      packed vectors: Misread + map before Received, answered Blocks + codes
                      > Join    then both: Piece + payload    (a stripe of a long exchange)
                      > AskSettled  < SettledReply    (earlier versions ask so)
    /loco/content/2   > GetSpec < SpecReply + run spec          > GetBlob   < BlobReply + blob
                      > GetState < StateScalars + digests of parts
                      > GetSample < SampleReply + values
                      > GetHoldings < Holdings + a bit for each piece of the corpus
                      > GetParts < Part + bytes, once for each
                      each answer may be a Refusal instead
    /loco/fragment/1  > Contribution + codes, Result + codes, NoResult, FragmentSettled ...
                        nothing comes back on a lasting stream
                      > GetStamps < Stamps           > GetResult < Result + codes
                      > GetChunkState < ChunkStateReply + values     or a Refusal
                      > GetOpening < Opening + leaves   > Doubt, Proof + evidence
    /loco/stage/3     > Hop     < Credit or Refusal  > Boundary + codes  < BoundaryKept
                      > Announcement, Lost    < Noted
                      > GetLinks < LinksReply + vector  > GetSnapshot < SnapshotReply + snapshot
    /loco/experts/1   > GetLogProbs < LogProbs + values
                      > ScoreText + tokens  < LogProbs + values     or a Refusal
    /loco/reach/1     > Whereabouts < Seen or Refusal
    /loco/directory/1 > FindRecords < RecordsFound   > KeepRecord < RecordKept   or a Refusal

Rules:
- Decoding is strict about what a field holds (fields.py), and a missing field is an error.
- Unknown *additional* fields are ignored, so that a minor release may add a field (with a default)
  and still talk to its elders. They cannot hurt: the header is bounded and nothing reads them. What
  an old peer must not overlook takes a new major version instead.
- An unknown type is an error: both sides know every type of a major version. A minor release may
  add one that is said only to who asked for it in an additional field (Join and Piece: stripes).
- Encoding checks by the same rules. Of lists whose items stand for themselves (`ITEMWISE` in
  fields.py) it leaves out what is against them: what cannot be said of one peer, at one address or
  in one statement costs that item, never the message.

Invariants: decode_message(encode_message(m)) == m for each m that can be said whole; the bounds of
the fields keep every header below MAX_HEADER_BYTES.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from enum import StrEnum
from typing import Annotated, Any, Final, TypeVar, Union, get_args

import msgspec
from msgspec import Meta, Struct, structs

from protocol import limits
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.names import printable
from protocol.outcomes import RefusalReason

from . import (  # noqa: F401 - whose messages are among those of the codec
    content_messages,
    directory_messages,
    expert_messages,
    fragment_messages,
    stage_messages,
)
from .fields import (
    ITEMWISE,
    MAX_SENTENCE_CHARS,
    Address,
    Addresses,
    Count,
    Digest,
    FewAddresses,
    Message,
    Name,
    NonNegative,
    PeerIdText,
    Seconds,
    check_printable,
    matching,
)

Protocols = Annotated[
    tuple[Annotated[str, matching(r"[a-z][a-z0-9-]*/[1-9][0-9]{0,5}", 64)], ...],
    Meta(max_length=32),
]
Secret = Annotated[
    bytes, Meta(min_length=limits.RUN_SECRET_BYTES, max_length=limits.RUN_SECRET_BYTES)
]
StripeCount = Annotated[int, Meta(ge=0, le=limits.MAX_STRIPES)]
TriedAddresses = Annotated[
    tuple[Address, ...], Meta(max_length=limits.MAX_DIAL_BACK_ADDRESSES), ITEMWISE
]


# --- hello ----------------------------------------------------------------------------------------
class Hello(Message, frozen=True, tag="hello"):
    """First message of both sides of a link.

    Attributes:
        software: name and version, for people.
        protocols: `name/major` (versions.py).
        run_id: None from a joiner that takes whatever the other one runs.
        incarnation: grows with each start of the same identity.
        swarm_time_s: the sender's idea of the Unix time.
        state: `starting`, `training`, ... as in `status`.
        group: digest of the sender's; None while it is in none.
        step: the nominal one.
        pass_shown: protocol/admission/statements.py; empty where the sender has none.
    """

    software: Annotated[str, Meta(max_length=64)]
    protocols: Protocols
    run_id: Digest | None
    incarnation: Count
    addresses: Addresses
    swarm_time_s: Seconds
    state: Name
    round: Count
    layout_digest: Digest | None
    group: Digest | None = None
    step: Count = 0
    pass_shown: Annotated[bytes, Meta(max_length=limits.MAX_STATEMENT_BYTES)] = b""

    def __post_init__(self) -> None:
        check_printable("software", self.software)


class Refusal(Message, frozen=True, tag="refusal"):
    """The sender declines, in any conversation; `round` is the one it is in, where that matters."""

    reason: RefusalReason
    sentence: Annotated[str, Meta(max_length=MAX_SENTENCE_CHARS)]
    round: Count | None = None

    def __post_init__(self) -> None:
        check_printable("sentence", self.sentence)


class Free(Struct, frozen=True):
    """A vector for which the sender of a beat looks for a partner, and the step of its snapshot.

    Attributes:
        fragment: 0 where the whole model is one vector.
        round: the sender's own number of what it wants averaged.
    """

    fragment: Annotated[int, Meta(ge=0, lt=limits.MAX_FRAGMENTS)]
    round: Count
    step: Count


class AveragedWith(Struct, frozen=True):
    """The sender of a beat has averaged with a peer; the exchange took so long."""

    peer_id: PeerIdText
    seconds: NonNegative


class LossOfDomain(Struct, frozen=True):
    """The loss of the sender of a beat on the held-out blocks of an expert of this number."""

    domain: Annotated[int, Meta(ge=0, lt=limits.MAX_STAGES)]
    loss: NonNegative


class Beat(Message, frozen=True, tag="beat"):
    """A sign of life and progress.

    Attributes:
        state, step, group: as in Hello.
        fraction: part of the round's quota that is done; above 1 past the quota.
        epoch, position: where the sender's data stands.
        tokens: that the sender has trained.
        sent_s: the sender's monotonic clock.
        echo_s: `sent_s` of the newest beat that the sender has received; None before the first.
        echo_hold_s: how long the sender held that beat: round trip = now - echo_s - echo_hold_s.
        received_bytes: what has come from the receiver of this beat, on all streams, since the
            sender's start.
        may_send_bytes_per_s: how fast the receiver may go on; None for as fast as it likes.
        ended: the sender's last round of training is averaged.
        validation_loss: the newest of the sender, nats per token.
        met: whom it has averaged with in pairs since its last beat on this link; for people, and
            nothing is decided by it.
        losses: in a run with experts, the newest of the sender's weights on each domain that it
            has measured, nats per token; for people too.
    """

    sequence: Count
    state: Name
    round: Count
    fraction: NonNegative
    steps_per_s: NonNegative
    epoch: Count
    position: Count
    step: Count
    tokens: Count
    sent_s: Seconds
    echo_s: Seconds | None
    echo_hold_s: NonNegative
    swarm_time_s: Seconds
    received_bytes: Count = 0
    may_send_bytes_per_s: NonNegative | None = None
    free: Annotated[tuple[Free, ...], Meta(max_length=limits.MAX_FRAGMENTS_FREE), ITEMWISE] = ()
    ended: bool = False
    group: Digest | None = None
    validation_loss: NonNegative | None = None
    met: Annotated[
        tuple[AveragedWith, ...], Meta(max_length=limits.MAX_FRAGMENTS_FREE), ITEMWISE
    ] = ()
    losses: Annotated[tuple[LossOfDomain, ...], Meta(max_length=limits.MAX_STAGES), ITEMWISE] = ()


class PeerEntry(Struct, frozen=True):
    """A third peer; few addresses, so that a full PeerList always fits one header."""

    peer_id: PeerIdText
    incarnation: Count
    addresses: FewAddresses


def peer_entry(peer_id: str, incarnation: int, addresses: tuple[str, ...]) -> PeerEntry:
    """An entry with the first, which are the best, of the addresses."""
    return PeerEntry(peer_id, incarnation, addresses[: limits.MAX_RECORD_ADDRESSES])


class PeerList(Message, frozen=True, tag="peers"):
    """Peers that the sender knows to be alive."""

    peers: Annotated[
        tuple[PeerEntry, ...], Meta(max_length=limits.MAX_PEERS_PER_EXCHANGE), ITEMWISE
    ]


class Statements(Message, frozen=True, tag="statements"):
    """The sender's knowledge of who belongs to the run (protocol/admission/register.py).

    Attributes:
        successor: a statement, too; not among the others, for peers that do not know the kind would
            refuse it, and may overlook it.
    """

    statements: Annotated[
        tuple[Annotated[bytes, Meta(max_length=limits.MAX_STATEMENT_BYTES)], ...],
        Meta(max_length=limits.MAX_STATEMENTS_PER_MESSAGE),
        ITEMWISE,
    ]
    secret: Secret | None = None
    successor: Annotated[bytes, Meta(max_length=limits.MAX_STATEMENT_BYTES)] = b""


class AskAlive(Message, frozen=True, tag="ask_alive"):
    """Asks of another life of a peer; earlier versions do, and take silence for a no."""

    peer_id: PeerIdText
    incarnation: Count


class AliveReply(Message, frozen=True, tag="alive"):
    """Whether another incarnation has just shown the sender that it lives."""

    peer_id: PeerIdText
    incarnation: Count
    alive: bool


class Leaving(Message, frozen=True, tag="leaving"):
    """The sender leaves the run on purpose."""


# --- averaging in pairs ---------------------------------------------------------------------------
# `exchange` names one exchange of two peers: the digest of the group and of both ends, each with
# its own number of the round that it brings (`exchange_id` in protocol/gossip/exchange.py). Both
# know it from the answer to a proposal on.


class SettledOutcome(StrEnum):
    """The end of an exchange, as one partner tells it to the other."""

    AVERAGED = "averaged"
    SKIPPED = "skipped"
    UNKNOWN = "unknown"


class Propose(Message, frozen=True, tag="propose"):
    """Let us average.

    Attributes:
        round: the proposer's own number of its round.
        step: the nominal step of its snapshot.
        final: the snapshot belongs to the final averaging.
        codec: how vectors are coded, `int8` for instance.
        vectors: 1 (theta) or 2 (theta and phi).
        steps, tokens: what the proposer has trained in this round.
        stripes: further streams that the proposer would open for the vectors; 0 from a release
            that knows none, or for a short contribution.
        roster, meeting: in the planned part of the final averaging, the digest of the peers that
            the proposer sees take part, and which meeting of the plan this is (final_averaging.py).
    """

    group: Digest
    round: Count
    step: Count
    final: bool
    layout_digest: Digest
    codec: Name
    vectors: Annotated[int, Meta(ge=1, le=2)]
    steps: Count
    tokens: Count
    stripes: StripeCount = 0
    roster: Digest | None = None
    meeting: Count = 0


class Accept(Message, frozen=True, tag="accept"):
    """Agreed: the accepter's own round, and its steps and tokens in it.

    Attributes:
        proposed: the proposer's round, as it was proposed.
        stripes: as many as the proposer may open; at 0 the vectors travel on this stream.
    """

    proposed: Count
    round: Count
    steps: Count
    tokens: Count
    stripes: StripeCount = 0


class Vector(Message, frozen=True, tag="vector"):
    """The sender's codes follow as payload; `digest` is of all codes.

    Where stripes were agreed the payload is empty, and the codes travel in pieces.

    Attributes:
        packed: bytes that the codes take as differences (peer/codec/differences.py), which are what
            travels; 0 for the codes themselves.
    """

    max_payload_bytes = limits.MAX_PAYLOAD_BYTES

    exchange: Digest
    steps: Count
    tokens: Count
    codec: Name
    vectors: Annotated[int, Meta(ge=1, le=2)]
    digest: Digest
    packed: Count = 0


class Received(Message, frozen=True, tag="received"):
    """The receipt: the vector with this digest has arrived whole."""

    exchange: Digest
    digest: Digest


class Misread(Message, frozen=True, tag="misread"):
    """These blocks of the packed vector could not be read: a bit map of all blocks follows."""

    max_payload_bytes = limits.MAX_PAYLOAD_BYTES

    exchange: Digest


class Blocks(Message, frozen=True, tag="blocks"):
    """The codes of the misread blocks follow, without scales, as they are."""

    max_payload_bytes = limits.MAX_PAYLOAD_BYTES

    exchange: Digest


class Join(Message, frozen=True, tag="join"):
    """First message of a stripe: this stream belongs to that exchange of ours."""

    exchange: Digest


class Piece(Message, frozen=True, tag="piece"):
    """The sender's codes from this byte on follow, as many as make a piece (pieces.py)."""

    max_payload_bytes = limits.PIECE_BYTES

    start: Count


class AskSettled(Message, frozen=True, tag="settle"):
    """Asks how our exchange ended, when it broke before its receipts: earlier versions do."""

    exchange: Digest


class SettledReply(Message, frozen=True, tag="settled"):
    exchange: Digest
    outcome: SettledOutcome


# --- where peers can be reached -------------------------------------------------------------------
# The answerer takes note of where the opener can be dialled, and tries its addresses over
# connections of its own (protocol/membership/dial_back.py).


class Whereabouts(Message, frozen=True, tag="whereabouts"):
    """The sender's addresses, as in its hello, and those (without its peer id) to be tried."""

    incarnation: Count
    addresses: Addresses
    tried: TriedAddresses = ()


class Seen(Message, frozen=True, tag="seen"):
    """How the sender of `Whereabouts` looks from here.

    Attributes:
        observed: the address that its connection comes from, or goes to.
        tried, reached: addresses that were dialled, and those of them where it answered.
    """

    observed: Annotated[str, Meta(max_length=limits.MAX_ADDRESS_CHARS)]
    tried: TriedAddresses = ()
    reached: TriedAddresses = ()

    def __post_init__(self) -> None:
        check_printable("observed", self.observed)


# --- the codec ------------------------------------------------------------------------------------
def _kinds(base: type[Message]) -> Iterator[type[Message]]:
    """All messages that are sent; bases of several are not."""
    for kind in base.__subclasses__():
        yield from _kinds(kind) if kind.__subclasses__() else [kind]


TYPES: Final = {str(kind.__struct_config__.tag): kind for kind in _kinds(Message)}
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Union[*TYPES.values()]).decode
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""Errors of bytes that are no message: wrong values, broken msgpack, too deep."""
_UNSAYABLE: Final = (*_UNREADABLE, OverflowError, TypeError)
S = TypeVar("S", bound=Struct)


class _Tag(Struct):
    t: str


def encode_message(message: Message) -> bytes:
    """The header of a frame.

    Raises:
        LocalProtocolError: a field, which is named, holds what the other side would not take.
    """
    try:
        return _checked(message, _decode)
    except _UNSAYABLE:
        pass
    try:
        return _checked(sayable(message), _decode)
    except _UNSAYABLE as error:
        raise LocalProtocolError(f"cannot send {type(message).__name__}: {error}") from None


def _checked(value: Any, decode: Callable[[bytes], Any]) -> bytes:
    encoded = _encode(value)
    decode(encoded)
    return encoded


def sayable(value: S) -> S:
    """A message without those items of its lists that the other side would not take."""
    kept = {}
    for field in structs.fields(value):
        kind, *rules = get_args(field.type) or (None,)
        if ITEMWISE in rules:
            items = _sayable_items(getattr(value, field.name), get_args(kind)[0])
            kept[field.name] = tuple(items)[: rules[0].max_length]
    return structs.replace(value, **kept)


def _sayable_items(items: Iterable[Any], kind: Any) -> Iterator[Any]:
    decode = msgspec.msgpack.Decoder(kind).decode
    for item in items:
        with suppress(*_UNSAYABLE):
            one = sayable(item) if isinstance(item, Struct) else item
            _checked(one, decode)
            yield one


def decode_message(header: bytes | bytearray | memoryview) -> Message:
    """The message in a header.

    Raises:
        RemoteProtocolError: not msgpack, not a map, an unknown type, or a field (which is named)
            that is missing or wrong.
    """
    if len(header) > limits.MAX_HEADER_BYTES:
        raise RemoteProtocolError(
            f"header of {len(header)} bytes; at most {limits.MAX_HEADER_BYTES}"
        )
    try:
        message: Message = _decode(header)
    except _UNREADABLE as error:
        raise RemoteProtocolError(
            f"{_type_name(header)}: {printable_sentence(str(error))}"
        ) from None
    return message


def _type_name(header: bytes | bytearray | memoryview) -> str:
    try:
        return TYPES[msgspec.msgpack.decode(header, type=_Tag).t].__name__
    except (*_UNREADABLE, KeyError):
        return "no message"


def printable_sentence(text: str) -> str:
    """`text` as a Refusal can carry it: one line, printable, bounded."""
    return printable(" ".join(text.split()))[:MAX_SENTENCE_CHARS]
