"""The codec of messages: what goes in comes out, and what is wrong is named."""

from contextlib import suppress
from typing import Any, get_args, get_origin

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import fields, replace

from protocol import limits
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.outcomes import RefusalReason
from protocol.wire.content_messages import (
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
    StateScalars,
)
from protocol.wire.directory_messages import (
    FindRecords,
    FoundRecord,
    KeepRecord,
    NearNode,
    RecordKept,
    RecordsFound,
)
from protocol.wire.expert_messages import GetLogProbs, LogProbs, ScoreText
from protocol.wire.fields import ITEMWISE, MAX_SENTENCE_CHARS, Message
from protocol.wire.fragment_messages import (
    ChunkResult,
    ChunkStateReply,
    Contribution,
    Doubt,
    FragmentSettled,
    GetChunkState,
    GetOpening,
    GetResult,
    GetStamps,
    NoResult,
    Opening,
    Proof,
    Result,
    Stamp,
    Stamps,
    mask_of,
)
from protocol.wire.messages import (
    TYPES,
    Accept,
    AliveReply,
    AskAlive,
    AskSettled,
    AveragedWith,
    Beat,
    Blocks,
    Free,
    Hello,
    Join,
    Leaving,
    LossOfDomain,
    Misread,
    PeerEntry,
    PeerList,
    Piece,
    Propose,
    Received,
    Refusal,
    Seen,
    SettledOutcome,
    SettledReply,
    Statements,
    Vector,
    Whereabouts,
    decode_message,
    encode_message,
    peer_entry,
    printable_sentence,
)
from protocol.wire.stage_messages import (
    Announcement,
    Boundary,
    BoundaryKept,
    Credit,
    Direction,
    GetLinks,
    GetSnapshot,
    Hop,
    LinksReply,
    Lost,
    Microbatch,
    Noted,
    Path,
    SnapshotReply,
)

RUN = "0123456789abcdef" * 2
GROUP = "fedcba9876543210" * 2
MICROBATCH = Microbatch("data", 4, 2)
DIGEST = "ab" * 16
PEER = "12D3KooWPeer"
ADDRESS = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWPeer"
SHORT = bytes(range(16))
EXCHANGE = "0f1e2d3c4b5a6978" * 2
PROPOSE = Propose(GROUP, 3, 150, False, DIGEST, "int8", 1, 50, 51200)
FREE = {"fragment": 0, "round": 1, "step": 70}
MET = {"peer_id": PEER, "seconds": 1.0}
SETTLED = SettledReply(EXCHANGE, SettledOutcome.AVERAGED)
STATE_REPLY = StateScalars(DIGEST, 3, 190, DIGEST, 0, 40, 4096, 0.75)
STAMP = Stamp(2, 6, 24, SHORT)

EXAMPLES: tuple[Message, ...] = (
    Hello(
        "loco-peer 0.1.0",
        ("hello/1",),
        RUN,
        7,
        (ADDRESS,),
        1.5e9,
        "training",
        3,
        DIGEST,
        GROUP,
        150,
    ),
    Hello("loco-peer 0.1.0", (), None, 7, (), 1.5e9, "starting", 0, None),
    Refusal(RefusalReason.BEHIND, "I am in round 3.", 3),
    Refusal(RefusalReason.BUSY, "Paired."),
    Beat(
        *(1, "training", 2, 0.5, 10.0, 0, 40, 75, 4096, 12.5, 11.5, 0.25, 1.5e9, 8, 1e6),
        *((Free(0, 1, 70), Free(3, 8, 65)), True, GROUP, 2.5, (AveragedWith(PEER, 3.25),)),
        losses=(LossOfDomain(1, 2.25),),
    ),
    Beat(1, "training", 2, 1.5, 10.0, 0, 40, 75, 4096, 12.5, None, 0.0, 1.5e9),
    PeerList((PeerEntry(PEER, 7, (ADDRESS,)), PeerEntry("sim-1", 1, ()))),
    Statements((b"s" * 99, b"")),
    Statements((), b"r" * limits.RUN_SECRET_BYTES),
    Statements((), None, b"s" * limits.MAX_STATEMENT_BYTES),
    AskAlive(PEER, 7),
    AliveReply(PEER, 7, True),
    Leaving(),
    Whereabouts(7, (ADDRESS,), ("/ip4/8.8.8.8/tcp/1",)),
    Seen("/ip4/8.8.8.8/tcp/1", ("/ip4/8.8.8.8/tcp/1",), ()),
    FindRecords(bytes(20)),
    RecordsFound((FoundRecord(PEER, b"value"),), (NearNode(PEER, (ADDRESS,)),)),
    KeepRecord(bytes(20), b"value"),
    RecordKept(True),
    PROPOSE,
    replace(PROPOSE, final=True, stripes=8, roster=RUN, meeting=2),
    Accept(3, 9, 50, 51200),
    Vector(EXCHANGE, 50, 51200, "int8", 2, DIGEST),
    Vector(EXCHANGE, 50, 51200, "int8-diff", 1, DIGEST, packed=12345),
    Misread(EXCHANGE),
    Blocks(EXCHANGE),
    Received(EXCHANGE, DIGEST),
    AskSettled(EXCHANGE),
    SETTLED,
    Join(EXCHANGE),
    Piece(1 << 20),
    GetLogProbs(GROUP, DIGEST),
    ScoreText(GROUP),
    LogProbs(DIGEST, 75),
    GetSpec(),
    SpecReply(b"k" * 32, b"s" * 64),
    GetBlob(DIGEST),
    BlobReply(DIGEST),
    GetState(GROUP, 2),
    STATE_REPLY,
    GetSample(DIGEST, bytes(16)),
    SampleReply(),
    Contribution(GROUP, 1, 7, 1, 50, 51200, (STAMP,), (SHORT,), (0.5,), b"s" * 64),
    Result(
        GROUP,
        1,
        7,
        PEER,
        3,
        (PEER,),
        (1,),
        (SHORT,),
        (ChunkResult(2, 6, 24, SHORT, mask_of([0]), SHORT),),
        (2,),
        b"s" * 64,
    ),
    FragmentSettled(GROUP, 1, 7, SHORT),
    NoResult(GROUP, 1, 7),
    GetStamps(GROUP, 1),
    Stamps(1, (STAMP,), (-1,)),
    GetResult(GROUP, 1, 7, 2),
    GetChunkState(GROUP, 1, 2),
    ChunkStateReply(1, 7, STAMP),
    GetOpening(GROUP, 1, 7, 2, 3),
    Opening(),
    Doubt(GROUP, 1, 7, PEER),
    Proof(GROUP, PEER),
    Hop(MICROBATCH, Direction.BACKWARD, Path(("a", "b"), (2, 1), "cd" * 16), 1, 1),
    Credit(0.25),
    Boundary(2.5),
    BoundaryKept(),
    Announcement(4),
    Noted(5),
    Lost(MICROBATCH, 1, "b", True),
    GetLinks(),
    LinksReply(),
    GetSnapshot("cd" * 16),
    SnapshotReply("cd" * 16),
    GetHoldings("cd" * 16, 3),
    Holdings(4, False),
    GetParts("cd" * 16, (0, 17)),
    Part(17),
)
DEFAULTS = {
    (Hop, "attempt"),
    (Lost, "attempt"),
    (Lost, "failed"),
    (Lost, "refused"),
    (Refusal, "round"),
    (Propose, "stripes"),
    (Propose, "roster"),
    (Propose, "meeting"),
    (Vector, "packed"),
    (Accept, "stripes"),
    (Beat, "received_bytes"),
    (Beat, "may_send_bytes_per_s"),
    (Beat, "free"),
    (Beat, "ended"),
    (Beat, "losses"),
    (Beat, "group"),
    (Beat, "validation_loss"),
    (Beat, "met"),
    (Hello, "group"),
    (Hello, "step"),
    (Hello, "pass_shown"),
    (Statements, "secret"),
    (Statements, "successor"),
    (Whereabouts, "tried"),
    (Seen, "tried"),
    (Seen, "reached"),
}
WITH_FIELDS = tuple(m for m in EXAMPLES if fields(m))


def tree_of(message: Message) -> dict[str, Any]:
    tree: dict[str, Any] = msgpack.unpackb(encode_message(message))
    return tree


def changed(message: Message, **values: Any) -> bytes:
    header: bytes = msgpack.packb(tree_of(message) | values)
    return header


@pytest.mark.parametrize("message", EXAMPLES, ids=repr)
def test_what_goes_in_comes_out(message: Message) -> None:
    assert decode_message(encode_message(message)) == message
    assert decode_message(memoryview(encode_message(message))) == message


def test_there_is_an_example_of_every_message() -> None:
    assert {type(m) for m in EXAMPLES} == set(TYPES.values())


@pytest.mark.parametrize("message", WITH_FIELDS, ids=repr)
def test_a_missing_field_is_named_unless_it_has_a_default(message: Message) -> None:
    needed = [f for f in fields(message) if (type(message), f.name) not in DEFAULTS]
    for name in (f.encode_name for f in needed):
        tree = tree_of(message)
        del tree[name]
        with pytest.raises(RemoteProtocolError, match=f"{type(message).__name__}.*`{name}`"):
            decode_message(msgpack.packb(tree))


def test_who_knows_no_stripes_neither_proposes_nor_accepts_any() -> None:
    for message in (replace(PROPOSE, stripes=8), Accept(3, 9, 50, 51200, 8)):
        tree = tree_of(message)
        del tree["stripes"]
        older = decode_message(msgpack.packb(tree))
        assert isinstance(older, Propose | Accept)
        assert older.stripes == 0


def test_who_says_nothing_of_being_free_is_not_free() -> None:
    tree = tree_of(EXAMPLES[4])
    for name in ("free", "ended"):
        del tree[name]
    beat = decode_message(msgpack.packb(tree))
    assert isinstance(beat, Beat)
    assert (beat.free, beat.ended) == ((), False)


def test_a_hop_has_the_names_that_older_peers_know() -> None:
    tree = tree_of(Hop(MICROBATCH, Direction.BACKWARD, Path(("a",), (1,)), 0))
    assert (tree["t"], tree.get("leg")) == ("trip", "backward")


def test_a_field_with_a_default_may_be_missing() -> None:
    tree = tree_of(Refusal(RefusalReason.BUSY, "Paired."))
    del tree["round"]
    assert decode_message(msgpack.packb(tree)) == Refusal(RefusalReason.BUSY, "Paired.", None)


@pytest.mark.parametrize("message", WITH_FIELDS, ids=repr)
def test_a_field_of_the_wrong_kind_is_named(message: Message) -> None:
    for name in (f.encode_name for f in fields(message)):
        with pytest.raises(RemoteProtocolError, match=rf"\$\.{name}`"):
            decode_message(changed(message, **{name: {"a": "map"}}))


@pytest.mark.parametrize("message", EXAMPLES, ids=repr)
def test_an_unknown_extra_field_is_ignored(message: Message) -> None:
    assert decode_message(changed(message, added_later=[1, {"two": 3}])) == message


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (Accept(3, 9, 1, 1), "round", -1),
        (Accept(3, 9, 1, 1), "round", 1 << 63),
        (Accept(3, 9, 1, 1), "round", True),
        (Accept(3, 9, 1, 1), "round", 3.0),
        (Accept(3, 9, 1, 1), "stripes", limits.MAX_STRIPES + 1),
        (Accept(3, 9, 1, 1), "stripes", -1),
        (Accept(3, 9, 1, 1), "proposed", -1),
        (PROPOSE, "step", -1),
        (PROPOSE, "step", 1 << 63),
        (PROPOSE, "step", 150.5),
        (PROPOSE, "final", 1),
        (PROPOSE, "final", None),
        (PROPOSE, "roster", "no-hex"),
        (PROPOSE, "roster", "ab" * 33),
        (PROPOSE, "meeting", -1),
        (PROPOSE, "meeting", None),
        (PROPOSE, "vectors", 3),
        (PROPOSE, "vectors", 0),
        (PROPOSE, "codec", "INT 8"),
        (PROPOSE, "group", "no-hex"),
        (PROPOSE, "group", "ab" * 33),
        (Received(EXCHANGE, DIGEST), "exchange", 3),
        (Received(EXCHANGE, DIGEST), "exchange", "ab" * 8),
        (AskSettled(EXCHANGE), "exchange", None),
        (Join(EXCHANGE), "exchange", "AB" * 16),
        (EXAMPLES[4], "free", [{"fragment": 0, "round": -1, "step": 0}]),
        (EXAMPLES[4], "free", [{"fragment": 0, "round": 1, "step": None}]),
        (EXAMPLES[4], "free", [{"fragment": limits.MAX_FRAGMENTS, "round": 1, "step": 0}]),
        (EXAMPLES[4], "free", [{"fragment": 0, "round": 1}]),
        (EXAMPLES[4], "free", [FREE] * (limits.MAX_FRAGMENTS_FREE + 1)),
        (EXAMPLES[4], "met", [{"peer_id": "no id", "seconds": 1.0}]),
        (EXAMPLES[4], "met", [{"peer_id": PEER, "seconds": -1.0}]),
        (EXAMPLES[4], "met", [{"peer_id": PEER}]),
        (EXAMPLES[4], "met", [MET] * (limits.MAX_FRAGMENTS_FREE + 1)),
        (EXAMPLES[4], "ended", 0),
        (EXAMPLES[0], "step", -1),
        (EXAMPLES[4], "sent_s", float("nan")),
        (EXAMPLES[4], "sent_s", float("inf")),
        (EXAMPLES[4], "sent_s", "1.0"),
        (EXAMPLES[4], "steps_per_s", -0.5),
        (EXAMPLES[0], "software", "red \x1b[31m"),
        (EXAMPLES[0], "software", "x" * 65),
        (EXAMPLES[0], "protocols", ["hello"]),
        (EXAMPLES[0], "protocols", ["hello/1"] * 33),
        (EXAMPLES[0], "addresses", ["no-slash"]),
        (EXAMPLES[0], "addresses", ["/dns4/b\u00fccher.example/tcp/1"]),
        (EXAMPLES[0], "addresses", [ADDRESS] * (limits.MAX_ADDRESSES_PER_PEER + 1)),
        (EXAMPLES[2], "reason", 1),
        (EXAMPLES[2], "sentence", "x" * (MAX_SENTENCE_CHARS + 1)),
        (SETTLED, "outcome", "perhaps"),
        (AliveReply(PEER, 7, True), "alive", 1),
        (SpecReply(b"k" * 32, b"s" * 64), "signature", b"s" * 63),
        (SpecReply(b"k" * 32, b"s" * 64), "signature", "s" * 64),
        (PeerList(()), "peers", [{}]),
        (Statements(()), "statements", [b"s" * (limits.MAX_STATEMENT_BYTES + 1)]),
        (Statements(()), "statements", ["s"]),
        (Statements(()), "secret", b"s"),
        (Statements(()), "successor", b"s" * (limits.MAX_STATEMENT_BYTES + 1)),
        (PeerList(()), "peers", [[]]),
        (PeerList(()), "peers", [tree_of(AskAlive(PEER, 1)) | {"addresses": [ADDRESS] * 4}]),
        (GetBlob(DIGEST), "digest", "../identity.key"),
        (GetParts(DIGEST, (0,)), "parts", [-1]),
        (STATE_REPLY, "round", -2),
    ],
)
def test_a_value_out_of_bounds_is_named(message: Message, field: str, value: Any) -> None:
    with pytest.raises(
        RemoteProtocolError, match=rf"{type(message).__name__}.*(\$\.{field}[`\[]|{field} ')"
    ):
        decode_message(changed(message, **{field: value}))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        msgpack.packb([1]),
        msgpack.packb({}),
        msgpack.packb({"t": 1}),
        msgpack.packb({"t": "shout"}),
        msgpack.packb({1: 2}),
        encode_message(Leaving()) + b"x",
        encode_message(Leaving())[:-1],
        b"\x81\xa1t\xa2\xff\xfe",
        b"\x91" * 5000,
        msgpack.packb({"t": "leaving", "padding": b"x" * limits.MAX_HEADER_BYTES}),
    ],
)
def test_what_is_no_message_is_their_fault(header: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_message(header)


@given(st.binary(max_size=300))
def test_garbage_raises_nothing_else(header: bytes) -> None:
    with suppress(RemoteProtocolError):
        decode_message(header)


@given(st.sampled_from(EXAMPLES), st.data())
def test_damaged_messages_raise_nothing_else(message: Message, data: st.DataObject) -> None:
    header = bytearray(encode_message(message))
    header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    with suppress(RemoteProtocolError):
        decode_message(header)


def test_what_we_send_badly_is_our_fault() -> None:
    with pytest.raises(LocalProtocolError, match=r"Accept: .*\$\.steps`"):
        encode_message(Accept(1, 2, -1, 0))
    with pytest.raises(LocalProtocolError, match=r"\$\.sent_s`"):
        encode_message(Beat(1, "x", 2, 0, 0, 0, 0, 0, 0, 1e13, None, 0, 0))
    with pytest.raises(LocalProtocolError, match="Beat"):
        encode_message(Beat(1, "x", 2, 0, 0, 0, 0, 0, 0, 10**400, None, 0, 0))
    with pytest.raises(LocalProtocolError, match="Beat"):
        encode_message(Beat(1, "\ud800", 2, 0, 0, 0, 0, 0, 0, 0, None, 0, 0))


UNSAYABLE: tuple[Any, ...] = (
    "/" + "p2p-circuit/" * 30,
    "no slash",
    "\ud800",
    b"s" * 600,
    None,
    -1,
    10**400,
    [],
)
"""What is no item of any list that can be said."""
ALIGNED = {
    *("Contribution.stamps", "Contribution.digests", "Contribution.lengths"),
    *("Result.contributors", "Result.weights", "Result.statements"),
    *("Result.chunks", "Result.carried", "Stamps.stamps", "Stamps.cycles"),
    *("Path.relays", "Path.stages"),
}
"""Lists that are signed, or belong to each other item by item: less of one would be a lie."""
OURS = {"Hello.protocols", "GetParts.parts"}


def lists_of(kind: type[Struct]) -> dict[str, bool]:
    """The lists in a message, and whether the items of each stand for themselves."""
    found = {}
    for field in fields(kind):
        name, annotated = f"{kind.__name__}.{field.name}", get_args(field.type)
        if annotated and get_origin(annotated[0]) is tuple:
            found[name] = ITEMWISE in annotated[1:]
            (item, _) = get_args(annotated[0])
            if isinstance(item, type) and issubclass(item, Struct):
                found |= lists_of(item)
    return found


def test_every_list_either_loses_an_item_or_may_not() -> None:
    lists = lists_of(Path)
    for kind in TYPES.values():
        lists |= lists_of(kind)
    assert {name for name, apart in lists.items() if not apart} == ALIGNED | OURS
    assert {name for name, apart in lists.items() if apart} == {
        *("Hello.addresses", "Whereabouts.addresses", "Whereabouts.tried", "Seen.tried"),
        *("Seen.reached", "PeerList.peers", "PeerEntry.addresses", "Statements.statements"),
        *(
            "Beat.free",
            "Beat.losses",
            "Beat.met",
            "RecordsFound.records",
            "RecordsFound.nearest",
            "NearNode.addresses",
        ),
    }


@pytest.mark.parametrize("bad", UNSAYABLE)
@pytest.mark.parametrize(
    ("message", "field", "good"),
    [
        (EXAMPLES[0], "addresses", ADDRESS),
        (EXAMPLES[4], "free", Free(1, 2, 3)),
        (Whereabouts(7, ()), "addresses", ADDRESS),
        (Whereabouts(7, ()), "tried", ADDRESS),
        (Seen(ADDRESS), "tried", ADDRESS),
        (Seen(ADDRESS), "reached", ADDRESS),
        (PeerList(()), "peers", PeerEntry(PEER, 1, (ADDRESS,))),
        (Statements(()), "statements", b"signed"),
    ],
)
def test_an_item_that_cannot_be_said_costs_that_item(
    message: Message, field: str, good: Any, bad: Any
) -> None:
    told = decode_message(encode_message(replace(message, **{field: (bad, good, bad)})))
    assert told == replace(message, **{field: (good,)})


def test_an_address_that_cannot_be_said_costs_no_peer_and_a_list_is_cut_to_its_bound() -> None:
    entry, named = PeerEntry(PEER, 1, (UNSAYABLE[0], ADDRESS)), PeerEntry(PEER, 1, (ADDRESS,))
    most = limits.MAX_PEERS_PER_EXCHANGE
    told = decode_message(encode_message(PeerList((entry,) * (most + 1))))
    assert told == PeerList((named,) * most)


def test_whole_numbers_are_taken_for_seconds() -> None:
    beat = decode_message(encode_message(Beat(1, "training", 2, 0, 1, 0, 0, 0, 0, 3, None, 0, 0)))
    assert isinstance(beat, Beat)
    assert type(beat.sent_s) is float


def test_the_longest_peer_list_fits_one_header() -> None:
    entry = peer_entry("1" * 128, 1 << 62, ("/" + "a" * 255,) * 9)
    assert len(entry.addresses) == limits.MAX_RECORD_ADDRESSES
    message = PeerList((entry,) * limits.MAX_PEERS_PER_EXCHANGE)
    assert decode_message(encode_message(message)) == message


def test_the_most_statements_fit_one_header() -> None:
    longest = bytes(limits.MAX_STATEMENT_BYTES)
    message = Statements((longest,) * limits.MAX_STATEMENTS_PER_MESSAGE)
    assert decode_message(encode_message(message)) == message


def test_payloads_have_a_bound_by_type() -> None:
    assert Accept.max_payload_bytes == 0
    assert Vector.max_payload_bytes == limits.MAX_PAYLOAD_BYTES
    assert Misread.max_payload_bytes == Blocks.max_payload_bytes == limits.MAX_PAYLOAD_BYTES
    assert Piece.max_payload_bytes == limits.PIECE_BYTES
    assert Part.max_payload_bytes == limits.MAX_PIECE_BYTES
    assert SpecReply.max_payload_bytes == limits.MAX_SPEC_BYTES
    assert BlobReply.max_payload_bytes == limits.MAX_BLOB_BYTES
    assert StateScalars.max_payload_bytes == limits.MAX_CONTROL_PAYLOAD_BYTES


def test_a_long_sentence_is_cut_to_one_printable_line() -> None:
    sentence = printable_sentence("one\n\ttwo\x1b " + "x" * 2 * MAX_SENTENCE_CHARS)
    assert sentence.startswith(r"one two\x1b xxx")
    assert len(sentence) == MAX_SENTENCE_CHARS


@given(st.text(st.characters(max_codepoint=0x17F)))
def test_any_sentence_can_be_made_sendable(text: str) -> None:
    refusal = Refusal(RefusalReason.BUSY, printable_sentence(text))
    assert decode_message(encode_message(refusal)) == refusal
