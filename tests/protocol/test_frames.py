"""Frames: every split of a stream tells the same story, and no bytes do harm."""

import struct
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import LocalProtocolError, RemoteProtocolError, StreamLost
from protocol.limits import MAX_CONTROL_PAYLOAD_BYTES, MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES
from protocol.wire.frames import (
    FRAME_VERSION,
    MAGIC,
    NEED_DATA,
    PREFIX_BYTES,
    TRANSITIONS,
    FrameEnd,
    FrameReader,
    FrameStart,
    FrameState,
    InputEnded,
    NeedData,
    PayloadChunk,
    encode_frame,
)

Frame = tuple[bytes, bytes]
FRAMES = st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=60)), max_size=4)


@dataclass
class Story:
    """What a reader told, with payload chunks joined."""

    frames: list[Frame]
    unfinished: Frame | None = None
    ended: bool = False


def wire(frames: list[Frame]) -> bytes:
    return b"".join(encode_frame(header, len(payload)) + payload for header, payload in frames)


def prefix(
    magic: bytes = MAGIC, version: int = FRAME_VERSION, header: int = 0, payload: int = 0
) -> bytes:
    return struct.pack("<3sBIQ", magic, version, header, payload)


def tell(reader: FrameReader, story: Story) -> None:
    while True:
        event = reader.next_event()
        match event:
            case NeedData():
                return
            case InputEnded():
                story.ended = True
                return
            case FrameStart(header):
                story.unfinished = (header, b"")
            case PayloadChunk(data):
                assert story.unfinished is not None
                assert len(data) > 0
                story.unfinished = (story.unfinished[0], story.unfinished[1] + data)
            case FrameEnd():
                assert story.unfinished is not None
                story.frames.append(story.unfinished)
                story.unfinished = None


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [piece for a, b in pairwise(edges) if (piece := data[a:b])]


@given(FRAMES, st.lists(st.integers(0, 1000), max_size=12))
def test_every_split_tells_the_same_story(frames: list[Frame], places: list[int]) -> None:
    reader, story = FrameReader(), Story([])
    for piece in cut(wire(frames), places):
        reader.feed(piece)
        tell(reader, story)
    reader.feed(b"")
    tell(reader, story)
    assert story == Story(frames, ended=True)


def test_byte_by_byte_tells_the_same_story() -> None:
    frames = [(b"header", b"payload"), (b"", b""), (b"h", b""), (b"", b"p" * 50)]
    reader, story = FrameReader(), Story([])
    for byte in wire(frames):
        reader.feed(bytes([byte]))
        tell(reader, story)
        assert reader.buffered_bytes <= PREFIX_BYTES
    assert story.frames == frames


def test_events_of_one_frame_in_order() -> None:
    reader = FrameReader()
    assert reader.next_event() is NEED_DATA
    reader.feed(wire([(b"abc", b"12345")])[:-2])
    assert reader.next_event() == FrameStart(b"abc", 5)
    assert reader.next_event() == PayloadChunk(memoryview(b"123"))
    assert reader.next_event() is NEED_DATA
    reader.feed(b"45")
    assert reader.next_event() == PayloadChunk(memoryview(b"45"))
    assert reader.next_event() == FrameEnd()
    assert reader.next_event() is NEED_DATA


def test_payload_is_not_copied() -> None:
    fed = wire([(b"abc", b"12345")])
    reader = FrameReader()
    reader.feed(fed)
    reader.next_event()
    chunk = reader.next_event()
    assert isinstance(chunk, PayloadChunk)
    assert chunk.data.obj is fed


def test_the_caller_may_take_the_payload_by_itself() -> None:
    reader = FrameReader()
    reader.feed(encode_frame(b"abc", 10) + b"12")
    reader.next_event()
    with pytest.raises(LocalProtocolError, match="first"):
        reader.skip_payload(1)
    reader.next_event()
    with pytest.raises(LocalProtocolError, match="cannot skip 9"):
        reader.skip_payload(9)
    reader.skip_payload(8)
    assert reader.next_event() == FrameEnd()
    with pytest.raises(LocalProtocolError, match="cannot skip"):
        reader.skip_payload(1)


@pytest.mark.parametrize("kept_bytes", range(1, PREFIX_BYTES + 3 + 5))
def test_an_end_in_mid_frame_is_found(kept_bytes: int) -> None:
    reader = FrameReader()
    reader.feed(wire([(b"abc", b"12345")])[:kept_bytes])
    reader.feed(b"")
    with pytest.raises(StreamLost, match="middle of a frame"):
        tell(reader, Story([]))
    with pytest.raises(StreamLost, match="middle of a frame"):
        reader.next_event()
    assert reader.state is FrameState.ERROR


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (prefix(magic=b"GET"), "not a loco-peer frame"),
        (prefix(version=2), "frame version 2"),
        (prefix(header=MAX_HEADER_BYTES + 1), "header of"),
        (prefix(payload=MAX_CONTROL_PAYLOAD_BYTES + 1), "payload of"),
    ],
)
def test_a_bad_prefix_is_refused_before_anything_is_waited_for(bad: bytes, sentence: str) -> None:
    reader = FrameReader()
    reader.feed(bad)
    for _ in range(2):
        with pytest.raises(RemoteProtocolError, match=sentence):
            reader.next_event()
    assert reader.buffered_bytes == 0
    assert reader.state is FrameState.ERROR


def test_the_payload_bound_is_the_callers() -> None:
    reader = FrameReader(max_payload_bytes=10)
    reader.feed(prefix(payload=10) + b"x" * 10 + prefix(payload=11))
    story = Story([])
    with pytest.raises(RemoteProtocolError, match="payload of 11 bytes"):
        tell(reader, story)
    assert story.frames == [(b"", b"x" * 10)]
    wide = FrameReader(max_payload_bytes=MAX_PAYLOAD_BYTES * 4)
    wide.feed(prefix(payload=MAX_PAYLOAD_BYTES + 1))
    with pytest.raises(RemoteProtocolError, match="payload of"):
        wide.next_event()


@settings(max_examples=40)
@given(st.lists(st.binary(min_size=1, max_size=64), max_size=8), st.booleans(), st.booleans())
def test_garbage_raises_nothing_but_blame(pieces: list[bytes], framed: bool, ended: bool) -> None:
    reader = FrameReader()
    feeds = [prefix(header=30, payload=70), *pieces] if framed else pieces
    story = Story([])
    blamed = (RemoteProtocolError, StreamLost) if ended else (RemoteProtocolError,)
    with suppress(*blamed):
        for piece in [*feeds, b""] if ended else feeds:
            reader.feed(piece)
            tell(reader, story)
            assert reader.buffered_bytes <= PREFIX_BYTES + MAX_HEADER_BYTES
    assert reader.state is not FrameState.ERROR or reader.buffered_bytes == 0


def test_what_we_may_not_send() -> None:
    with pytest.raises(LocalProtocolError, match="header"):
        encode_frame(b"x" * (MAX_HEADER_BYTES + 1))
    with pytest.raises(LocalProtocolError, match="payload"):
        encode_frame(b"", MAX_PAYLOAD_BYTES + 1)
    with pytest.raises(LocalProtocolError, match="payload"):
        encode_frame(b"", -1)


def test_nothing_is_fed_after_the_end() -> None:
    reader = FrameReader()
    reader.feed(b"")
    assert [reader.next_event() for _ in range(2)] == [InputEnded()] * 2
    with pytest.raises(LocalProtocolError, match="after the end"):
        reader.feed(b"x")


def test_every_state_has_its_transitions_and_a_readable_reader() -> None:
    assert set(TRANSITIONS) == set(FrameState)
    reader = FrameReader()
    reader.feed(encode_frame(b"abc", 5) + b"12")
    reader.next_event()
    assert repr(reader) == "<FrameReader PAYLOAD, 2 bytes buffered, 5 of payload left>"
    assert reader.payload_left_bytes == 5
