"""Frames: how messages and their payloads are cut out of a byte stream. Sans-IO, as h11 does it.

    frame   = prefix header payload
    prefix  = magic "loc" (3 bytes), version (1), header length (u32), payload length (u64),
              little-endian: 16 bytes
    header  = one msgpack message (messages.py)
    payload = raw bytes, never copied in this file: sent by itself, and handed on as it arrives

Rules:
- The reader is fed with bytes in any splits, and the events are the same for each of them (but for
  where a payload is cut into chunks).
- A length is checked when the prefix is complete, before a byte of it is waited for. The header's
  bound is fixed; the payload's is given by the caller, who knows what it expects
  (`max_payload_bytes`).
- Only prefix and header are ever buffered. Payload passes through: `next_event` hands out what has
  been fed, and a caller with a buffer of its own takes the rest from the stream directly
  (`skip_payload`). So no more is held than the longest header and what the caller fed last.
- An end of input is clean between two frames and nowhere else. A truncated stream looks like a
  clean end to the transport, so this is where it is found. It is a StreamLost: a peer that was
  killed has broken no rule.
- After an error the reader stays in ERROR and only repeats it.

Invariant: buffered_bytes <= PREFIX_BYTES + MAX_HEADER_BYTES + the longest single feed.
"""

import struct
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from protocol.errors import LocalProtocolError, LocoError, RemoteProtocolError, StreamLost
from protocol.limits import MAX_CONTROL_PAYLOAD_BYTES, MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES

MAGIC: Final = b"loc"
FRAME_VERSION: Final = 1
_PREFIX: Final = struct.Struct("<3sBIQ")
PREFIX_BYTES: Final = _PREFIX.size


class NeedData(Enum):
    """The type of NEED_DATA, the sentinel for "feed me"."""

    NEED_DATA = auto()


NEED_DATA: Final = NeedData.NEED_DATA


@dataclass(frozen=True, slots=True)
class FrameStart:
    """A header is complete; `payload_bytes` of payload follow."""

    header: bytes
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class PayloadChunk:
    """The next bytes of the payload: a view of what was fed, at least one byte."""

    data: memoryview


@dataclass(frozen=True, slots=True)
class FrameEnd:
    """The frame is complete."""


@dataclass(frozen=True, slots=True)
class InputEnded:
    """The other side has ended its stream, between two frames."""


FrameEvent = FrameStart | PayloadChunk | FrameEnd | InputEnded


class FrameState(Enum):
    """Where in a frame the reader is."""

    PREFIX = auto()
    HEADER = auto()
    PAYLOAD = auto()
    ENDED = auto()
    ERROR = auto()


TRANSITIONS: Final[dict[FrameState, dict[type[FrameEvent] | None, FrameState]]] = {
    FrameState.PREFIX: {None: FrameState.HEADER, InputEnded: FrameState.ENDED},
    FrameState.HEADER: {FrameStart: FrameState.PAYLOAD},
    FrameState.PAYLOAD: {PayloadChunk: FrameState.PAYLOAD, FrameEnd: FrameState.PREFIX},
    FrameState.ENDED: {InputEnded: FrameState.ENDED},
    FrameState.ERROR: {},
}
"""State to (event handed out, None for a complete prefix) to next state."""


def encode_frame(header: bytes, payload_bytes: int = 0) -> bytes:
    """Prefix and header of a frame; the payload is to follow.

    Raises:
        LocalProtocolError: header or payload is longer than the protocol allows.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise LocalProtocolError(f"header of {len(header)} bytes; at most {MAX_HEADER_BYTES}")
    if not 0 <= payload_bytes <= MAX_PAYLOAD_BYTES:
        raise LocalProtocolError(f"payload of {payload_bytes} bytes; at most {MAX_PAYLOAD_BYTES}")
    return _PREFIX.pack(MAGIC, FRAME_VERSION, len(header), payload_bytes) + header


class FrameReader:
    """Turns fed bytes into events; one reader for one direction of one stream.

    Attributes:
        max_payload_bytes: longest payload accepted from the next prefix on.
    """

    def __init__(self, max_payload_bytes: int = MAX_CONTROL_PAYLOAD_BYTES) -> None:
        self.max_payload_bytes = max_payload_bytes
        self._state = FrameState.PREFIX
        self._fed: deque[memoryview] = deque()
        self._fed_bytes = 0
        self._partial = bytearray()
        self._header_bytes = 0
        self._payload_left_bytes = 0
        self._input_ended = False
        self._error: LocoError | None = None

    def __repr__(self) -> str:
        return (
            f"<FrameReader {self._state.name}, {self.buffered_bytes} bytes buffered, "
            f"{self._payload_left_bytes} of payload left>"
        )

    @property
    def state(self) -> FrameState:
        """Where in a frame the reader is."""
        return self._state

    @property
    def buffered_bytes(self) -> int:
        """Bytes fed and not yet handed out."""
        return self._fed_bytes + len(self._partial)

    @property
    def payload_left_bytes(self) -> int:
        """Bytes of the current payload that have not been handed out."""
        return self._payload_left_bytes

    def feed(self, data: bytes) -> None:
        """Add bytes from the stream; `b""` says that it has ended. Views of them are handed out.

        Raises:
            LocalProtocolError: fed after the end.
        """
        if self._input_ended:
            raise LocalProtocolError("fed after the end of input")
        if data:
            self._fed.append(memoryview(data))
            self._fed_bytes += len(data)
        else:
            self._input_ended = True

    def next_event(self) -> FrameEvent | NeedData:
        """The next event, or NEED_DATA.

        Raises:
            RemoteProtocolError: not our frames, or a length out of bounds.
            StreamLost: the stream ended in mid-frame.
        """
        if self._state is FrameState.PREFIX and not self._read_prefix():
            return self._wait_or_end()
        if self._state is FrameState.HEADER:
            return self._read_header()
        if self._state is FrameState.PAYLOAD:
            return self._read_payload()
        if self._state is FrameState.ENDED:
            return InputEnded()
        assert self._error is not None
        raise self._error

    def skip_payload(self, num_bytes: int) -> None:
        """Say that the caller took the next bytes of the payload from the stream by itself.

        Raises:
            LocalProtocolError: the payload is not that long, or fed bytes come first.
        """
        if self._state is not FrameState.PAYLOAD or num_bytes > self._payload_left_bytes:
            raise LocalProtocolError(f"cannot skip {num_bytes} bytes of payload: {self!r}")
        if self._fed_bytes:
            raise LocalProtocolError(f"take what was fed first: {self!r}")
        self._payload_left_bytes -= num_bytes

    def _move(self, event: type[FrameEvent] | None) -> None:
        self._state = TRANSITIONS[self._state][event]

    def _fail(self, error: LocoError) -> LocoError:
        self._state = FrameState.ERROR
        self._error = error
        self._fed.clear()
        self._fed_bytes = 0
        self._partial.clear()
        return error

    def _read_prefix(self) -> bool:
        prefix = self._gather(PREFIX_BYTES)
        if prefix is None:
            return False
        magic, version, header_bytes, payload_bytes = _PREFIX.unpack(prefix)
        problem = self._problem(magic, version, header_bytes, payload_bytes)
        if problem:
            raise self._fail(RemoteProtocolError(problem))
        self._header_bytes, self._payload_left_bytes = header_bytes, payload_bytes
        self._move(None)
        return True

    def _problem(self, magic: bytes, version: int, header_bytes: int, payload_bytes: int) -> str:
        if magic != MAGIC:
            return f"not a loco-peer frame: it begins with {magic.hex()}"
        if version != FRAME_VERSION:
            return f"frame version {version}; this side speaks {FRAME_VERSION}"
        if header_bytes > MAX_HEADER_BYTES:
            return f"header of {header_bytes} bytes; at most {MAX_HEADER_BYTES}"
        if payload_bytes > min(self.max_payload_bytes, MAX_PAYLOAD_BYTES):
            return f"payload of {payload_bytes} bytes; at most {self.max_payload_bytes} expected"
        return ""

    def _read_header(self) -> FrameEvent | NeedData:
        header = self._gather(self._header_bytes)
        if header is None:
            return self._wait_or_end()
        self._move(FrameStart)
        return FrameStart(header, self._payload_left_bytes)

    def _read_payload(self) -> FrameEvent | NeedData:
        if self._payload_left_bytes == 0:
            self._move(FrameEnd)
            return FrameEnd()
        if not self._fed:
            return self._wait_or_end()
        data = self._take(self._payload_left_bytes)
        self._payload_left_bytes -= len(data)
        self._move(PayloadChunk)
        return PayloadChunk(data)

    def _wait_or_end(self) -> FrameEvent | NeedData:
        if not self._input_ended:
            return NEED_DATA
        if self._state is FrameState.PREFIX and not self._partial:
            self._move(InputEnded)
            return InputEnded()
        raise self._fail(
            StreamLost(f"the stream ended in the middle of a frame ({self._state.name.lower()})")
        )

    def _gather(self, num_bytes: int) -> bytes | None:
        while self._fed and len(self._partial) < num_bytes:
            self._partial += self._take(num_bytes - len(self._partial))
        if len(self._partial) < num_bytes:
            return None
        gathered = bytes(self._partial)
        self._partial.clear()
        return gathered

    def _take(self, max_bytes: int) -> memoryview:
        first = self._fed.popleft()
        data, rest = first[:max_bytes], first[max_bytes:]
        if rest:
            self._fed.appendleft(rest)
        self._fed_bytes -= len(data)
        return data
