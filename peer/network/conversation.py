"""A conversation: messages and payloads over one stream.

Frames (protocol/wire/frames.py) are cut out of the stream here, whatever pieces it comes in. No
more is held than the longest header and one read.

- Large payloads go out in writes of at most WRITE_BYTES, each in its turn, and come in straight
  into the caller's buffer, so that progress is visible and a stall is noticed, without a copy.
- Patience: `timeout_s` bounds the wait for a message, `stall_s` each step of a payload (WRITE_BYTES
  out, READ_BYTES in). Both end in `StreamStalled`. No send waits without a bound: a peer that never
  reads is given up after SEND_STALL_S.
- Cancellation: after being cancelled (or out of patience) while waiting for a message, one may
  receive again, and nothing is lost. Cut off in the middle of a frame, the direction is dead, since
  the two sides no longer agree where a frame begins; using it again is a LocalProtocolError.
- Several tasks may send, and several receive: frames never interleave.
- Blame: what they send against the rules is a RemoteProtocolError; a stream that ends, even in
  mid-frame, is a StreamLost, since a machine that was switched off has broken no rule.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Self, TypedDict, TypeVar, Unpack, cast, overload

import trio

from peer.runtime import OnBytes, Stream
from protocol.errors import LocalProtocolError, Refused, RemoteProtocolError, StreamLost
from protocol.limits import MAX_CONTROL_PAYLOAD_BYTES, SEND_STALL_S
from protocol.outcomes import RefusalReason
from protocol.wire.fields import Message
from protocol.wire.frames import PREFIX_BYTES, encode_frame, read_prefix
from protocol.wire.messages import Refusal, decode_message, encode_message, printable_sentence

WRITE_BYTES: Final = 256 * 1024
READ_BYTES: Final = 64 * 1024

A = TypeVar("A", bound=Message)
B = TypeVar("B", bound=Message)
C = TypeVar("C", bound=Message)
Payload = bytes | bytearray | memoryview
Place = Callable[[Any, int], memoryview]
"""Memory for the payload of a message, of this many bytes. May raise RemoteProtocolError."""


class StreamStalled(StreamLost):
    """The other side sent or took nothing for as long as we were willing to wait."""


class ReceiveOptions(TypedDict, total=False):
    """Bounds and callbacks of one receive.

    Attributes:
        into: where the payload goes; its size must be the payload's. Without it the payload is
            returned.
        place: names that place once the message is known.
        max_payload_bytes: longest payload accepted without `into`, if not that of control messages.
        timeout_s, stall_s: the patience for the message, and for each READ_BYTES of its payload.
        on_progress: told how much of the payload is here, as it comes.
    """

    into: memoryview | None
    place: Place
    max_payload_bytes: int
    timeout_s: float
    stall_s: float
    on_progress: OnBytes


async def close(stream: Stream) -> None:
    """Close a stream: also where we are cancelled, and for a second at most."""
    with trio.move_on_after(1, shield=True):
        await stream.aclose()


class Conversation:
    """Messages over an open stream, which it owns: closed by `aclose` or on leaving `async with`.

    Attributes:
        bytes_received: taken from the stream, framing included.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.remote_peer_id: Final = stream.remote_peer_id
        self.remote_address: Final = stream.remote_address
        self._held = memoryview(b"")  # what came with an earlier read, and nobody took yet
        self._send_lock, self._receive_lock = trio.Lock(), trio.Lock()
        self._cut_off_sending = self._cut_off_receiving = False
        self.bytes_received = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await close(self._stream)

    async def send(
        self, message: Message, payload: Payload | None = None, *, stall_s: float = SEND_STALL_S
    ) -> None:
        """Send one message and its payload.

        Raises:
            LocalProtocolError: the message is not allowed, or an earlier send was cut off.
            StreamLost: the stream broke (StreamStalled: nothing was taken for `stall_s`).
        """
        view = memoryview(b"" if payload is None else payload).cast("B")
        if len(view) > message.max_payload_bytes:
            raise LocalProtocolError(f"{len(view)} bytes of payload for {type(message).__name__}")
        frame = encode_frame(encode_message(message), len(view))
        async with self._send_lock:
            if self._cut_off_sending:
                raise LocalProtocolError("an earlier send on this stream was cut off in mid-frame")
            self._cut_off_sending = True
            await self._write(frame, stall_s)
            await self._write_payload(view, stall_s)
            self._cut_off_sending = False

    async def refuse(self, reason: RefusalReason, sentence: str) -> None:
        """Decline, with a sentence for people (made printable, and cut to its bound)."""
        await self.send(Refusal(reason, printable_sentence(sentence)))

    @overload
    async def receive(
        self, a: type[A], /, **options: Unpack[ReceiveOptions]
    ) -> tuple[A, bytes]: ...
    @overload
    async def receive(
        self, a: type[A], b: type[B], /, **options: Unpack[ReceiveOptions]
    ) -> tuple[A | B, bytes]: ...
    @overload
    async def receive(
        self, a: type[A], b: type[B], c: type[C], /, **options: Unpack[ReceiveOptions]
    ) -> tuple[A | B | C, bytes]: ...
    @overload
    async def receive(
        self, *expected: type[Message], **options: Unpack[ReceiveOptions]
    ) -> tuple[Message, bytes]: ...

    async def receive(self, *expected: Any, **options: Any) -> Any:
        """The next message, of one of the expected types, and its payload.

        The payload is `b""` where it went into the given buffer.

        Raises:
            Refused: a Refusal came, and was not among the expected.
            RemoteProtocolError: anything else that we did not ask for, or broken frames.
            LocalProtocolError: an earlier receive was cut off in mid-frame.
            StreamLost: the stream ended (StreamStalled: our patience did).
        """
        message, payload = await self._receive(expected, cast(ReceiveOptions, options))
        if isinstance(message, Refusal) and expected and Refusal not in expected:
            raise Refused(message.reason, message.sentence)
        return message, payload

    async def _receive(
        self, expected: tuple[type[Message], ...], options: ReceiveOptions
    ) -> tuple[Message, bytes]:
        async with self._receive_lock:
            if self._cut_off_receiving:
                raise LocalProtocolError("an earlier receive was cut off in mid-frame")
            header, payload_bytes = await self._wait_frame(options)
            self._cut_off_receiving = True
            message = decode_message(header)
            self._check_expected(message, payload_bytes, expected, options)
            into = options.get("into")
            if "place" in options and message.max_payload_bytes:
                into = options["place"](message, payload_bytes)
            payload = b""
            if payload_bytes:
                payload = await self._read_payload(payload_bytes, into, options)
            self._cut_off_receiving = False
        return message, payload

    def _limit_bytes(self, options: ReceiveOptions) -> int:
        into = options.get("into")
        if into is not None:
            return into.nbytes
        return options.get("max_payload_bytes", MAX_CONTROL_PAYLOAD_BYTES)

    def _check_expected(
        self,
        message: Message,
        payload_bytes: int,
        expected: tuple[type[Message], ...],
        options: ReceiveOptions,
    ) -> None:
        kind = type(message)
        if payload_bytes > min(kind.max_payload_bytes, self._limit_bytes(options)):
            raise RemoteProtocolError(f"{kind.__name__} came with {payload_bytes} bytes of payload")
        if kind is Refusal or not expected:
            return
        if kind not in expected:
            names = " or ".join(kind.__name__ for kind in expected)
            raise RemoteProtocolError(f"expected {names}, got {kind.__name__}")
        into = options.get("into")
        if into is not None and kind.max_payload_bytes and payload_bytes != into.nbytes:
            raise RemoteProtocolError(
                f"{kind.__name__} came with {payload_bytes} bytes of payload, not {into.nbytes}"
            )

    async def _wait_frame(self, options: ReceiveOptions) -> tuple[memoryview, int]:
        """The next header, and how many bytes of payload follow it."""
        timeout_s = options.get("timeout_s", math.inf)
        with trio.move_on_at(trio.current_time() + timeout_s):
            await self._hold(PREFIX_BYTES)
            header_bytes, payload_bytes = read_prefix(self._held, self._limit_bytes(options))
            await self._hold(PREFIX_BYTES + header_bytes)
            return self._take(PREFIX_BYTES + header_bytes)[PREFIX_BYTES:], payload_bytes
        raise self._stalled("sent no message", timeout_s)

    async def _hold(self, num_bytes: int) -> None:
        """Read until so many bytes are held."""
        while len(self._held) < num_bytes:
            self._held = memoryview(bytes(self._held) + await self._read(READ_BYTES))

    def _take(self, num_bytes: int) -> memoryview:
        """Up to so many of the bytes that are held."""
        taken, self._held = self._held[:num_bytes], self._held[num_bytes:]
        return taken

    async def _read(self, max_bytes: int) -> bytes:
        data = await self._stream.receive_some(max_bytes)
        if not data:
            in_frame = self._cut_off_receiving or self._held
            where = "in the middle of a frame" if in_frame else "the conversation"
            raise StreamLost(f"{self.remote_peer_id} ended {where}")
        self.bytes_received += len(data)
        return data

    async def _read_payload(
        self, payload_bytes: int, into: memoryview | None, options: ReceiveOptions
    ) -> bytes:
        on_progress = options.get("on_progress", _ignore)
        stall_s = options.get("stall_s", math.inf)
        # Without a buffer the memory grows with what arrives, not with what was announced.
        place, grown = None if into is None else into.cast("B"), bytearray()
        held = self._take(payload_bytes)
        done_bytes = len(held)
        if place is None:
            grown += held
        else:
            place[:done_bytes] = held
        if done_bytes:
            on_progress(done_bytes)
        with trio.move_on_at(trio.current_time() + stall_s) as patience:
            while done_bytes < payload_bytes:
                patience.deadline = trio.current_time() + stall_s
                end = min(payload_bytes, done_bytes + READ_BYTES)
                if place is None:
                    grown += await self._read(end - done_bytes)
                    done_bytes = len(grown)
                    on_progress(done_bytes)
                else:
                    tell = partial(_tell_further, on_progress, done_bytes)
                    await self._stream.receive_into(place[done_bytes:end], tell)
                    self.bytes_received += end - done_bytes
                    done_bytes = end
            return bytes(grown)
        raise self._stalled("sent nothing", stall_s)

    async def _write_payload(self, view: memoryview, stall_s: float) -> None:
        done_bytes = 0
        while done_bytes < len(view):
            # Waiting for our own turn is no stall of theirs.
            granted_bytes = await self._stream.turn(min(WRITE_BYTES, len(view) - done_bytes))
            await self._write(view[done_bytes : done_bytes + granted_bytes], stall_s)
            done_bytes += granted_bytes

    async def _write(self, data: bytes | memoryview, stall_s: float) -> None:
        with trio.move_on_at(trio.current_time() + stall_s):
            await self._stream.send_all(data)
            return
        raise self._stalled("took nothing", stall_s)

    def _stalled(self, what: str, seconds: float) -> StreamStalled:
        return StreamStalled(f"{self.remote_peer_id} {what} for {seconds:g} s")


def _tell_further(on_progress: OnBytes, done_bytes: int, came_bytes: int) -> None:
    on_progress(done_bytes + came_bytes)


def _ignore(_: int) -> None: ...
