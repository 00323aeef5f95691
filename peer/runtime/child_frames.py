"""The frames in which the daemon and a child process of its own speak over a socket pair.

A frame is a 4-byte big-endian length and a message as a msgpack map, with its name as `kind`. Each
end decodes only what the other one may say; anything else is a `PipeError`: a bug or a broken
child, never a peer's doing.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from protocol.limits import MAX_CONTROL_PAYLOAD_BYTES

READ_BYTES: Final = 65536
MAX_FAILURE_CHARS: Final = 2000
"""Length at which the detail of a failure is cut, and the last words of standard error."""


class ChildDied(Exception):
    """The child is gone: killed, crashed or hung. The message says which."""


class PipeError(Exception):
    """Bytes that are no message, or a message that fits no state."""


def encode(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    _check_length(len(body))
    return len(body).to_bytes(4, "big") + body


class FrameDecoder:
    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Add received bytes and yield the messages that are complete. Raises PipeError."""
        self._buffer += data
        while len(self._buffer) >= 4:
            end = 4 + _check_length(int.from_bytes(self._buffer[:4], "big"))
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[4:end])
            del self._buffer[:end]
            try:
                yield self._decoder.decode(body)
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                raise PipeError(f"no message: {error}") from error


def _check_length(num_bytes: int) -> int:
    """A run spec, or the 4096 members of a round, have room to spare. Raises PipeError."""
    if num_bytes > (most := MAX_CONTROL_PAYLOAD_BYTES):
        raise PipeError(f"a frame of {num_bytes} bytes; at most {most} are allowed")
    return num_bytes
