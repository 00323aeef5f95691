"""Conversations over streams in memory: order, patience, blame, and cancellation at every await."""

import math
import random
import struct
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise

import pytest
import trio
import trio.testing
from pipe_streams import OTHER, PipeStream, pipe

from peer.network.conversation import (
    READ_BYTES,
    WRITE_BYTES,
    Conversation,
    StreamStalled,
)
from peer.runtime import OnBytes
from protocol.content.samples import SAMPLE_BYTES
from protocol.errors import LocalProtocolError, Refused, RemoteProtocolError, StreamLost
from protocol.limits import MAX_CONTROL_PAYLOAD_BYTES, MAX_HEADER_BYTES
from protocol.outcomes import RefusalReason
from protocol.wire.content_messages import BlobReply, GetSpec, Part, SampleReply
from protocol.wire.fields import Message
from protocol.wire.frames import FRAME_VERSION, MAGIC, PREFIX_BYTES, encode_frame
from protocol.wire.messages import Accept, Leaving, Received, Refusal, Vector, encode_message

DIGEST = "ab" * 16
PAYLOAD = bytes(range(256)) * (3 * READ_BYTES // 256) + b"tail"
VECTOR = Vector("cd" * 16, 50, 51200, "int8", 1, DIGEST)
ACCEPT = Accept(3, 7, 50, 51200)


Pair = tuple[Conversation, Conversation]


@pytest.fixture
def pipes() -> tuple[PipeStream, PipeStream]:
    return pipe()


@pytest.fixture
def pair(pipes: tuple[PipeStream, PipeStream]) -> Pair:
    return Conversation(pipes[0]), Conversation(pipes[1])


async def test_messages_arrive_in_order_with_their_types(pair: Pair) -> None:
    await pair[0].send(ACCEPT)
    await pair[0].send(Leaving())
    assert await pair[1].receive(Accept) == (ACCEPT, b"")
    assert await pair[1].receive() == (Leaving(), b"")


async def test_a_payload_comes_back_whole(pair: Pair) -> None:
    await pair[0].send(BlobReply(DIGEST), PAYLOAD)
    await pair[0].send(Leaving())
    assert await pair[1].receive(BlobReply) == (BlobReply(DIGEST), PAYLOAD)
    assert await pair[1].receive(Leaving) == (Leaving(), b"")


async def test_a_payload_goes_into_the_given_buffer_and_progress_shows(pair: Pair) -> None:
    payload = PAYLOAD * 4
    received: list[int] = []
    buffer = bytearray(len(payload))
    await pair[0].send(VECTOR, memoryview(payload))
    await pair[0].send(Leaving())
    got = await pair[1].receive(Vector, into=memoryview(buffer), on_progress=received.append)
    assert got == (VECTOR, b"")
    assert buffer == payload
    assert received == sorted(received)
    assert len(received) >= len(payload) // READ_BYTES
    assert received[-1] == len(payload)
    assert await pair[1].receive(Leaving) == (Leaving(), b"")


async def test_progress_shows_before_a_read_is_full(autojump_clock: trio.testing.MockClock) -> None:
    near, far = pipe()
    received: list[int] = []
    buffer = bytearray(READ_BYTES)

    async def receive() -> None:
        async with Conversation(far) as talk:
            await talk.receive(Vector, into=memoryview(buffer), on_progress=received.append)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await near.send_all(encode_frame(encode_message(VECTOR), READ_BYTES))
        for told in (1000, 3000):
            await near.send_all(bytes(told - max(received, default=0)))
            await trio.sleep(1)
            assert received[-1] == told
        nursery.cancel_scope.cancel()


async def test_payloads_of_any_dtype_are_bytes(pair: Pair) -> None:
    numbers = memoryview(b"\x01\x00\x00\x00" * 5).cast("I")
    buffer = memoryview(bytearray(20)).cast("I")
    await pair[0].send(VECTOR, numbers)
    await pair[1].receive(Vector, into=buffer)
    assert buffer.tolist() == [1] * 5


async def test_bytes_are_counted_with_their_framing(pair: Pair) -> None:
    await pair[0].send(VECTOR, PAYLOAD)
    await pair[0].send(ACCEPT)
    await pair[1].receive(Vector, into=memoryview(bytearray(len(PAYLOAD))))
    await pair[1].receive(Accept)
    total = 2 * PREFIX_BYTES + len(encode_message(VECTOR) + encode_message(ACCEPT)) + len(PAYLOAD)
    assert (pair[0].bytes_received, pair[1].bytes_received) == (0, total)


async def test_a_refusal_raises_unless_expected(pair: Pair) -> None:
    await pair[0].refuse(RefusalReason.BEHIND, "I am\nin round 3.\x1b")
    await pair[0].refuse(RefusalReason.BUSY, "x" * 9999)
    await pair[0].send(ACCEPT)
    with pytest.raises(Refused, match="I am in round 3") as caught:
        await pair[1].receive(Accept, into=memoryview(bytearray(5)))
    assert caught.value.reason is RefusalReason.BEHIND
    refusal, _ = await pair[1].receive(Accept, Refusal)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefusalReason.BUSY
    assert await pair[1].receive(Accept) == (ACCEPT, b"")


async def test_the_unexpected_is_their_fault_and_ends_the_direction(pair: Pair) -> None:
    await pair[0].send(ACCEPT)
    with pytest.raises(RemoteProtocolError, match="expected Vector or Received, got Accept"):
        await pair[1].receive(Vector, Received)
    with pytest.raises(LocalProtocolError, match="cut off"):
        await pair[1].receive()


@pytest.mark.parametrize("size", [len(PAYLOAD) - 1, len(PAYLOAD) + 1, 0])
async def test_a_payload_of_another_size_than_the_buffer_is_refused(pair: Pair, size: int) -> None:
    await pair[0].send(VECTOR, PAYLOAD)
    with pytest.raises(RemoteProtocolError, match=f"payload of {len(PAYLOAD)} bytes|payload, not"):
        await pair[1].receive(Vector, into=memoryview(bytearray(size)))


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not a loco-peer frame"),
        (encode_frame(b"\x91\x01"), "Expected `object`"),
        (encode_frame(b"\xc1"), "MessagePack"),
        (encode_frame(encode_message(GetSpec()), 1) + b"x", "GetSpec came with 1 bytes"),
        (encode_frame(encode_message(BlobReply(DIGEST)), MAX_CONTROL_PAYLOAD_BYTES + 1), "payload"),
        (encode_frame(encode_message(SampleReply()), SAMPLE_BYTES + 1), "SampleReply came with"),
    ],
)
async def test_garbage_and_oversized_frames_are_their_fault(
    pipes: tuple[PipeStream, PipeStream], raw: bytes, sentence: str
) -> None:
    await pipes[0].send_all(raw)
    with pytest.raises(RemoteProtocolError, match=sentence):
        await Conversation(pipes[1]).receive()


class Scripted:
    """A stream that gives these pieces, then ends."""

    remote_peer_id, remote_address = OTHER, ""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = [piece for piece in pieces if piece]

    async def turn(self, num_bytes: int) -> int:
        return num_bytes

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        raise AssertionError

    async def receive_some(self, max_bytes: int = 65536) -> bytes:
        first = self._pieces.pop(0) if self._pieces else b""
        if first[max_bytes:]:
            self._pieces.insert(0, first[max_bytes:])
        return first[:max_bytes]

    async def receive_into(self, buffer: memoryview, arrived: OnBytes | None = None) -> None:
        done = 0
        while done < len(buffer):
            piece = await self.receive_some(len(buffer) - done)
            if not piece:
                raise StreamLost("it ended")
            buffer[done : done + len(piece)] = piece
            done += len(piece)

    async def aclose(self) -> None: ...


def cut(data: bytes, drawn: random.Random) -> list[bytes]:
    edges = [0, *sorted(drawn.choices(range(len(data) + 1), k=drawn.randrange(12))), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


async def told_by(pieces: list[bytes], with_buffers: list[int]) -> list[tuple[Message, bytes]]:
    """What a conversation says until it ends; payloads of these sizes go into buffers."""
    talk, told = Conversation(Scripted(pieces)), list[tuple[Message, bytes]]()
    for size in with_buffers:
        buffer = bytearray(max(0, size))
        into = memoryview(buffer) if size >= 0 else None
        message, payload = await talk.receive(BlobReply, Leaving, into=into)
        told.append((message, payload or bytes(buffer)))
        assert len(talk._held) <= READ_BYTES + PREFIX_BYTES + MAX_HEADER_BYTES
    with pytest.raises(StreamLost, match="ended the conversation"):
        await talk.receive()
    return told


async def test_every_split_tells_the_same_story() -> None:
    drawn = random.Random(3)
    for _ in range(60):
        said: list[tuple[Message, bytes]] = [
            (Leaving(), b"")
            if drawn.random() < 0.3
            else (BlobReply(DIGEST), drawn.randbytes(drawn.randrange(60)))
            for _ in range(drawn.randrange(5))
        ]
        wire = b"".join(encode_frame(encode_message(m), len(p)) + p for m, p in said)
        buffered = drawn.random() < 0.5
        sizes = [len(p) if buffered and isinstance(m, BlobReply) else -1 for m, p in said]
        for pieces in (cut(wire, drawn), [bytes([byte]) for byte in wire]):
            assert await told_by(pieces, sizes) == said


FRAME = encode_frame(encode_message(BlobReply(DIGEST)), 5) + b"12345"


@pytest.mark.parametrize("kept_bytes", range(1, len(FRAME)))
async def test_an_end_in_mid_frame_is_found(kept_bytes: int) -> None:
    talk = Conversation(Scripted([FRAME[:kept_bytes]]))
    with pytest.raises(StreamLost, match="middle of a frame"):
        await talk.receive()
    with pytest.raises((StreamLost, LocalProtocolError), match="middle of a frame|cut off"):
        await talk.receive()


@pytest.mark.parametrize("head", [b"", struct.pack("<3sBIQ", MAGIC, FRAME_VERSION, 30, 70)])
async def test_garbage_raises_nothing_but_blame(head: bytes) -> None:
    drawn = random.Random(4)
    for _ in range(40):
        pieces = [drawn.randbytes(drawn.randrange(1, 64)) for _ in range(drawn.randrange(8))]
        with pytest.raises((RemoteProtocolError, StreamLost)):
            await Conversation(Scripted([head, *pieces])).receive()


async def test_the_bound_of_a_payload_can_be_raised(pair: Pair) -> None:
    blob = bytes(MAX_CONTROL_PAYLOAD_BYTES + 1)
    await pair[0].send(BlobReply(DIGEST), blob)
    _, payload = await pair[1].receive(BlobReply, max_payload_bytes=len(blob))
    assert payload == blob


@pytest.mark.parametrize("with_buffer", [False, True])
@pytest.mark.parametrize("kept_bytes", [0, 5, PREFIX_BYTES, PREFIX_BYTES + 9, -READ_BYTES, -1])
async def test_a_stream_that_ends_is_lost_and_nobodys_fault(
    pipes: tuple[PipeStream, PipeStream], kept_bytes: int, with_buffer: bool
) -> None:
    raw = encode_frame(encode_message(VECTOR), len(PAYLOAD)) + PAYLOAD
    if kept_bytes:
        await pipes[0].send_all(raw[:kept_bytes])
    await pipes[0].aclose()
    into = memoryview(bytearray(len(PAYLOAD))) if with_buffer else None
    with pytest.raises(StreamLost, match="ended"):
        await Conversation(pipes[1]).receive(Vector, into=into)


async def test_we_may_not_send_a_payload_where_none_belongs(pair: Pair) -> None:
    with pytest.raises(LocalProtocolError, match="1 bytes of payload for Accept"):
        await pair[0].send(ACCEPT, b"x")
    await pair[0].send(ACCEPT)
    assert await pair[1].receive(Accept) == (ACCEPT, b"")


async def test_waiting_for_a_message_ends_and_may_be_resumed(
    pipes: tuple[PipeStream, PipeStream], autojump_clock: trio.testing.MockClock
) -> None:
    talk, raw = Conversation(pipes[1]), encode_frame(encode_message(ACCEPT))
    await pipes[0].send_all(raw[:7])
    with pytest.raises(StreamStalled, match="sent no message for 5 s"):
        await talk.receive(Accept, timeout_s=5)
    assert trio.current_time() == pytest.approx(5)
    await pipes[0].send_all(raw[7:])
    assert await talk.receive(Accept, timeout_s=5) == (ACCEPT, b"")


@pytest.mark.parametrize("with_buffer", [False, True])
async def test_a_payload_that_stops_arriving_is_a_stall(
    pipes: tuple[PipeStream, PipeStream], autojump_clock: trio.testing.MockClock, with_buffer: bool
) -> None:
    raw = encode_frame(encode_message(VECTOR), len(PAYLOAD)) + PAYLOAD
    talk = Conversation(pipes[1])
    into = memoryview(bytearray(len(PAYLOAD))) if with_buffer else None

    async def drip() -> None:
        for start in range(0, 2 * READ_BYTES, READ_BYTES):
            await trio.sleep(4)
            await pipes[0].send_all(raw[start : start + READ_BYTES])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(drip)
        with pytest.raises(StreamStalled, match="sent nothing for 5 s"):
            await talk.receive(Vector, into=into, stall_s=5)
    assert trio.current_time() == pytest.approx(13)
    with pytest.raises(LocalProtocolError, match="cut off"):
        await talk.receive()


async def test_a_peer_that_takes_nothing_is_a_stall(
    autojump_clock: trio.testing.MockClock,
) -> None:
    ours, _ = trio.testing.lockstep_stream_pair()
    talk = Conversation(PipeStream(ours))
    with pytest.raises(StreamStalled, match="took nothing for 3 s"):
        await talk.send(VECTOR, PAYLOAD, stall_s=3)
    with pytest.raises(LocalProtocolError, match="cut off"):
        await talk.send(ACCEPT)


async def test_frames_of_several_senders_do_not_interleave() -> None:
    ours, theirs = trio.testing.lockstep_stream_pair()
    talk, other = Conversation(PipeStream(ours)), Conversation(PipeStream(theirs))
    payload = bytes(WRITE_BYTES + 1)
    async with trio.open_nursery() as nursery:
        for index in range(3):
            nursery.start_soon(talk.send, Part(index), payload)
        got = [await other.receive(Part) for _ in range(3)]
    assert sorted(message.index for message, _ in got) == [0, 1, 2]
    assert {part for _, part in got} == {payload}


async def test_leaving_the_block_closes_the_stream(pair: Pair) -> None:
    async with pair[0] as talk:
        await talk.send(ACCEPT)
    await pair[1].receive(Accept)
    with pytest.raises(StreamLost, match="12D3KooWOther ended the conversation"):
        await pair[1].receive(Accept)


Step = Callable[[Conversation], Awaitable[object]]


async def receive_into_buffer(talk: Conversation) -> object:
    return await talk.receive(Vector, into=memoryview(bytearray(len(PAYLOAD))))


async def receive_grown(talk: Conversation) -> object:
    return await talk.receive(Vector)


async def send_vector(talk: Conversation) -> object:
    await talk.send(VECTOR, PAYLOAD * 3)
    return None


def feeds(message: Message, payload: bytes) -> Iterator[bytes]:
    raw = encode_frame(encode_message(message), len(payload)) + payload
    yield raw[:5]
    yield raw[5 : PREFIX_BYTES + 3]
    yield raw[PREFIX_BYTES + 3 :]


async def cancelled_at(number: int, step: Step) -> tuple[Conversation, PipeStream] | None:
    """Run `step`, and cancel it where its stream stops before await `number`; None if it ended."""
    ours, theirs = trio.testing.memory_stream_pair()
    stream = PipeStream(ours, stop_at=number)
    talk = Conversation(stream)
    for piece in feeds(VECTOR, PAYLOAD):
        await theirs.send_all(piece)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def cancel_when_stopped() -> None:
                await stream.stopped.wait()
                scope.cancel()

            nursery.start_soon(cancel_when_stopped)
            await step(talk)
            nursery.cancel_scope.cancel()
    stream.stop_at = math.inf
    return (talk, stream) if scope.cancelled_caught else None


@pytest.mark.parametrize("step", [receive_into_buffer, receive_grown, send_vector])
async def test_cancelled_at_any_await_it_goes_on_or_says_that_it_cannot(
    step: Step, autojump_clock: trio.testing.MockClock
) -> None:
    number = 0
    while (left := await cancelled_at(number, step)) is not None:
        talk, _ = left
        with trio.fail_after(60):  # a lock that was left behind would show here
            if step is not send_vector and number == 0:
                await step(talk)
            else:
                with pytest.raises(LocalProtocolError, match="cut off in mid-frame"):
                    await step(talk)
            await talk.aclose()
        number += 1
    assert number >= 3


async def test_a_link_cancelled_between_frames_goes_on(
    pair: Pair, autojump_clock: trio.testing.MockClock
) -> None:
    for _ in range(3):
        with trio.move_on_after(1) as scope:
            await pair[1].receive(Accept)
        assert scope.cancelled_caught
        await pair[0].send(ACCEPT)
        assert await pair[1].receive(Accept) == (ACCEPT, b"")
