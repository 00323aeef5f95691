"""Everything that peers say to each other, and its codec.

A message is a frozen dataclass; on the wire it is a msgpack map, `{"t": type, field: value, ...}`,
the header of one frame (frames.py). Some of them announce a payload of raw bytes behind the header;
for all others the payload must be empty (`max_payload_bytes`). The dialogues, > from the opener of
the stream, < from the other:

    /loco/hello/1     > Hello   < Hello or Refusal   then both, for as long as the link lasts:
                      Beat, PeerList, Statements, AskAlive, AliveReply, Leaving
    /loco/gossip/1    > Propose < Accept or Refusal  then both: Vector + payload, Received
                      packed vectors: Misread + map before Received, answered Blocks + codes
                      > Join    then both: Piece + payload    (a stripe of a long exchange)
                      > Settle  < Settled            (a later stream, when a receipt was lost)
    /loco/content/1   > GetSpec < SpecReply + run spec          > GetBlob   < BlobReply + blob
                      > GetState < StateReply + digests of parts
                      > GetSample < SampleReply + values
                      > GetHoldings < Holdings + a bit for each piece of the corpus
                      > GetParts < Part + bytes, once for each
                      each answer may be a Refusal instead
    /loco/fragment/1  > Contribution + codes, Result + codes, NoResult, FragmentSettled ...
                        nothing comes back on a lasting stream
                      > GetStamps < Stamps           > GetResult < Result + codes
                      > GetChunkState < ChunkState + values          or a Refusal
                      > GetOpening < Opening + leaves   > Doubt, Proof + evidence
    /loco/stage/1     > Offer   < Credit or Refusal  > Boundary + codes  < Kept
                      > Announcement, Lost, Passed, Resume  < Noted    > Halt  < Halted
                      > GetLinks < LinksReply + vector  > GetSnapshot < SnapshotReply + snapshot
    /loco/reach/1     > Whereabouts < Seen or Refusal

Rules:
- Decoding is strict about what a field holds (kind, bounds: fields.py) and a missing field is an
  error.
- Unknown *additional* fields are ignored, so that a minor release may add a field (with a default)
  and still talk to its elders. They cannot hurt: the header is bounded and nothing reads them. What
  an old peer must not overlook takes a new major version instead.
- An unknown type is an error: both sides know every type of a major version. A minor release may
  add one that is said only to who asked for it in an additional field (Join and Piece: stripes).
- Encoding checks by the same rules. What they send badly is a RemoteProtocolError, what we do a
  LocalProtocolError.

Invariants: decode_message(encode_message(m)) == m for each m that can be encoded; the bounds of the
fields keep every header below MAX_HEADER_BYTES.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgpack

from protocol.content.samples import SAMPLE_BYTES
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.limits import (
    MAX_BLOB_BYTES,
    MAX_CONTROL_PAYLOAD_BYTES,
    MAX_EVIDENCE_BYTES,
    MAX_FRAGMENTS_FREE,
    MAX_HEADER_BYTES,
    MAX_LINK_VECTOR_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_PEERS_PER_EXCHANGE,
    MAX_PIECE_BYTES,
    MAX_RECORD_ADDRESSES,
    MAX_SNAPSHOT_BYTES,
    MAX_SPEC_BYTES,
    MAX_STATEMENT_BYTES,
    MAX_STATEMENTS_PER_MESSAGE,
    PIECE_BYTES,
    RUN_SECRET_BYTES,
)
from protocol.outcomes import RefusalReason

from .content_messages import (
    BlobReply,
    GetBlob,
    GetHoldings,
    GetParts,
    GetSample,
    GetSpec,
    GetState,
    Holdings,
    Part,
    SampleReply,
    SpecReply,
    StateReply,
)
from .fields import (
    MAX_SENTENCE_CHARS,
    Addresses,
    Binary,
    Choice,
    Count,
    FewAddresses,
    Flag,
    Many,
    Maybe,
    MaybeCount,
    MaybeDigest,
    MaybeNonNegative,
    MaybeSeconds,
    Name,
    NonNegative,
    PeerIdText,
    Protocols,
    Record,
    Seconds,
    Sentence,
    Text,
    UpTo,
    read_record,
    write_record,
)
from .fragment_messages import (
    AUDIT_TYPES,
    AuditMessage,
    ChunkState,
    Contribution,
    FragmentSettled,
    GetChunkState,
    GetResult,
    GetStamps,
    NoResult,
    Opening,
    Proof,
    Result,
    Stamps,
)
from .gossip_messages import (
    Accept,
    Blocks,
    Free,
    Join,
    Misread,
    Piece,
    Propose,
    Received,
    Settle,
    Settled,
    SettledOutcome,
    Vector,
)
from .reach_messages import Seen, Whereabouts
from .stage_messages import (
    Announcement,
    Boundary,
    Credit,
    GetLinks,
    GetSnapshot,
    Halt,
    Halted,
    Kept,
    LinksReply,
    Lost,
    Noted,
    Offer,
    Passed,
    Resume,
    SnapshotReply,
)

__all__ = [
    "TYPES", "Accept", "AliveReply", "Announcement", "AskAlive", "Beat", "BlobReply", "Blocks",
    "Boundary", "ChunkState", "Contribution", "Credit", "FragmentSettled", "Free", "GetBlob",
    "GetChunkState", "GetHoldings", "GetLinks", "GetParts", "GetResult", "GetSample", "GetSnapshot",
    "GetSpec", "GetStamps", "GetState", "Halt", "Halted", "Hello", "Holdings", "Join", "Kept",
    "Leaving", "LinksReply", "Lost", "Message", "Misread", "NoResult", "Noted", "Offer", "Part",
    "Passed", "PeerEntry", "PeerList", "Piece", "Propose", "Received", "Refusal", "Result",
    "Resume", "SampleReply", "Seen", "Settle", "Settled", "SettledOutcome", "SnapshotReply",
    "SpecReply", "Stamps", "StateReply", "Statements", "Vector", "Whereabouts", "decode_message",
    "encode_message", "max_payload_bytes", "peer_entry", "printable_sentence",
]  # fmt: skip


# --- hello ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Hello:
    """First message of both sides of a link.

    Attributes:
        software: name and version, for people.
        protocols: what the sender speaks, as `name/major` (versions.py).
        run_id: None from a joiner that takes whatever the other one runs.
        incarnation: grows with each start of the same identity.
        swarm_time_s: the sender's idea of the Unix time.
        state: `starting`, `training`, ... as in `status`.
        round, layout_digest: of the group.
        group: digest of the one that the sender is in; None while it is in none.
        step: the nominal step.
        pass_shown: the sender's (protocol/admission/statements.py); empty where it has none.
    """

    software: Annotated[str, Text(64)]
    protocols: Protocols
    run_id: MaybeDigest
    incarnation: Count
    addresses: Addresses
    swarm_time_s: Seconds
    state: Name
    round: Count
    layout_digest: MaybeDigest
    group: MaybeDigest = None
    step: Count = 0
    pass_shown: Annotated[bytes, UpTo(MAX_STATEMENT_BYTES)] = b""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The sender declines, in any conversation; `round` is the one it is in, where that matters."""

    reason: Annotated[RefusalReason, Choice(RefusalReason)]
    sentence: Sentence
    round: MaybeCount = None


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life and progress.

    Attributes:
        fraction: part of the round's quota that is done; above 1 past the quota.
        group: digest of the one whose progress this is; None while the sender is in none.
        sent_s: the sender's monotonic clock.
        echo_s: `sent_s` of the newest beat that the sender has received; None before the first.
        echo_hold_s: how long the sender held that beat: round trip = now - echo_s - echo_hold_s.
        received_bytes: what has come from the receiver of this beat, on all streams, since the
        sender's start. validation_loss: the newest of the sender, nats per token; None before it.
        may_send_bytes_per_s: how fast it may go on; None for as fast as it likes.
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
    echo_s: MaybeSeconds
    echo_hold_s: NonNegative
    swarm_time_s: Seconds
    received_bytes: Count = 0
    may_send_bytes_per_s: MaybeNonNegative = None
    free: Annotated[tuple[Free, ...], Many(Record(Free), MAX_FRAGMENTS_FREE)] = ()
    ended: Annotated[bool, Flag()] = False
    group: MaybeDigest = None
    validation_loss: MaybeNonNegative = None


@dataclass(frozen=True, slots=True)
class PeerEntry:
    """Where a third peer is; few addresses, so that a full PeerList always fits one header."""

    peer_id: PeerIdText
    incarnation: Count
    addresses: FewAddresses


def peer_entry(peer_id: str, incarnation: int, addresses: tuple[str, ...]) -> PeerEntry:
    """An entry with the first of the addresses (they are sorted, best first)."""
    return PeerEntry(peer_id, incarnation, addresses[:MAX_RECORD_ADDRESSES])


@dataclass(frozen=True, slots=True)
class PeerList:
    """Peers that the sender knows to be alive."""

    peers: Annotated[tuple[PeerEntry, ...], Many(Record(PeerEntry), MAX_PEERS_PER_EXCHANGE)]


@dataclass(frozen=True, slots=True)
class Statements:
    """What the sender knows of who belongs to the run (protocol/admission/register.py).

    Attributes:
        secret: of the run, where it has one (peer/daemon/door.py); None where the sender has none.
    """

    statements: Annotated[
        tuple[bytes, ...], Many(UpTo(MAX_STATEMENT_BYTES), MAX_STATEMENTS_PER_MESSAGE)
    ]
    secret: Annotated[bytes | None, Maybe(Binary(RUN_SECRET_BYTES))] = None


@dataclass(frozen=True, slots=True)
class AskAlive:
    """Is that peer alive in another incarnation than this one? Please see whether it beats."""

    peer_id: PeerIdText
    incarnation: Count


@dataclass(frozen=True, slots=True)
class AliveReply:
    """Answer to AskAlive: whether another incarnation has just shown the sender that it lives."""

    peer_id: PeerIdText
    incarnation: Count
    alive: Annotated[bool, Flag()]


@dataclass(frozen=True, slots=True)
class Leaving:
    """The sender leaves the run on purpose."""


Message = (
    Hello | Refusal | Beat | PeerList | Statements | AskAlive | AliveReply | Leaving
    | Propose | Accept | Vector | Misread | Blocks | Received | Join | Piece | Settle | Settled
    | GetSpec | SpecReply | GetBlob | BlobReply | GetState | StateReply | GetParts | Part
    | GetHoldings | Holdings | GetSample | SampleReply
    | Contribution | Result | NoResult | FragmentSettled | GetStamps | Stamps
    | GetResult | GetChunkState | ChunkState
    | Offer | Credit | Boundary | Kept | Announcement | Noted | Lost | Passed | Halt | Halted
    | Resume | GetLinks | LinksReply | GetSnapshot | SnapshotReply | Whereabouts | Seen
    | AuditMessage
)  # fmt: skip

TYPES: Final[dict[str, type[Message]]] = {
    "hello": Hello, "refusal": Refusal, "beat": Beat, "peers": PeerList,
    "statements": Statements, "ask_alive": AskAlive, "alive": AliveReply, "leaving": Leaving,
    "propose": Propose, "accept": Accept, "vector": Vector, "received": Received,
    "join": Join, "piece": Piece, "settle": Settle, "settled": Settled,
    "misread": Misread, "blocks": Blocks,
    "get_spec": GetSpec, "spec": SpecReply, "get_blob": GetBlob, "blob": BlobReply,
    "get_state": GetState, "state": StateReply, "get_parts": GetParts, "part": Part,
    "get_sample": GetSample, "sample": SampleReply,
    "contribution": Contribution, "result": Result, "no_result": NoResult,
    "fragment_settled": FragmentSettled,
    "get_stamps": GetStamps, "stamps": Stamps, "get_result": GetResult,
    "get_chunk_state": GetChunkState, "chunk_state": ChunkState,
    "offer": Offer, "credit": Credit, "boundary": Boundary, "kept": Kept,
    "announcement": Announcement, "noted": Noted, "lost": Lost, "passed": Passed,
    "halt": Halt, "halted": Halted, "resume": Resume,
    "get_links": GetLinks, "links": LinksReply,
    "get_snapshot": GetSnapshot, "snapshot": SnapshotReply, **AUDIT_TYPES,
    "whereabouts": Whereabouts, "seen": Seen,
    "get_holdings": GetHoldings, "holdings": Holdings,
}  # fmt: skip
"""Every message, by its name on the wire."""

_NAMES: Final = {kind: name for name, kind in TYPES.items()}

_MAX_PAYLOAD_BYTES: Final[dict[type[Message], int]] = {
    Vector: MAX_PAYLOAD_BYTES, Misread: MAX_PAYLOAD_BYTES, Blocks: MAX_PAYLOAD_BYTES,
    Piece: PIECE_BYTES, SpecReply: MAX_SPEC_BYTES,
    BlobReply: MAX_BLOB_BYTES, StateReply: MAX_CONTROL_PAYLOAD_BYTES, SampleReply: SAMPLE_BYTES,
    Part: MAX_PIECE_BYTES, Contribution: MAX_PAYLOAD_BYTES, Result: MAX_PAYLOAD_BYTES,
    ChunkState: MAX_PAYLOAD_BYTES, Boundary: MAX_PAYLOAD_BYTES, LinksReply: MAX_LINK_VECTOR_BYTES,
    SnapshotReply: MAX_SNAPSHOT_BYTES, Opening: MAX_EVIDENCE_BYTES, Proof: MAX_EVIDENCE_BYTES,
    Holdings: MAX_CONTROL_PAYLOAD_BYTES,
}  # fmt: skip


def max_payload_bytes(kind: type[Message]) -> int:
    """The longest payload that may follow a message of this type; 0 for most."""
    return _MAX_PAYLOAD_BYTES.get(kind, 0)


def encode_message(message: Message) -> bytes:
    """The header of a frame.

    Raises:
        LocalProtocolError: a field, which is named, holds what the other side would not take.
    """
    tree = {"t": _NAMES[type(message)], **write_record(message)}
    try:
        read_record(type(message), tree)
    except ValueError as error:
        raise LocalProtocolError(f"cannot send {type(message).__name__}: {error}") from None
    header: bytes = msgpack.packb(tree)
    return header


def decode_message(header: bytes | bytearray | memoryview) -> Message:
    """The message in a header.

    Raises:
        RemoteProtocolError: not msgpack, not a map, an unknown type, or a field (named) that is
        missing or wrong.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise RemoteProtocolError(f"header of {len(header)} bytes; at most {MAX_HEADER_BYTES}")
    tree = _unpack(header)
    if not isinstance(tree, dict) or not isinstance(tree.get("t"), str):
        raise RemoteProtocolError("header is not a map with a message type 't'")
    kind = TYPES.get(tree["t"])
    if kind is None:
        raise RemoteProtocolError(f"unknown message type {tree['t'][:64]!r}")
    try:
        message: Message = read_record(kind, tree)
    except ValueError as error:
        raise RemoteProtocolError(f"{kind.__name__}: {error}") from None
    return message


def printable_sentence(text: str) -> str:
    """`text` as a Refusal can carry it: one line, printable, bounded."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in line)[:MAX_SENTENCE_CHARS]


def _unpack(header: bytes | bytearray | memoryview) -> Any:
    try:
        return msgpack.unpackb(header, raw=False, strict_map_key=True)
    except ValueError as error:
        # msgpack's own errors (too deep, too long, cut off) and bad UTF-8 are all ValueErrors.
        raise RemoteProtocolError(f"header is not msgpack: {error}") from None
