"""Messages as bytes, between the daemon and its trainer over a socket pair.

A frame is a 4-byte big-endian length and a message (messages.py) as a msgpack map, with its name as
`kind`. Each end decodes only what the other one may say; anything else is a `PipeError`: a bug or a
broken child, never a peer's doing.

At the trainer's end (`SocketChannel`) a thread reads commands, so that the end of the daemon (end
of input) ends this process at once, even in a step that hangs. Nothing is lost by that: the slow
weights are in the daemon's memory.
"""

import os
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from protocol.limits import MAX_CONTROL_PAYLOAD_BYTES
from protocol.trainer_messages import TrainerMessage

from .messages import Begin, Said, TrainerCommand, Waiting

MAX_FRAME_BYTES: Final = MAX_CONTROL_PAYLOAD_BYTES
"""Longest frame: a run spec, or the members of a round (4096 of them), with room to spare."""
READ_BYTES: Final = 65536
WAITING_S: Final = 5.0
"""Interval at which a trainer that waits says so."""
TO_TRAINER: Final = msgspec.msgpack.Decoder(Begin | TrainerCommand)
FROM_TRAINER: Final = msgspec.msgpack.Decoder(Said)


class PipeError(Exception):
    """Bytes that are no message, or a message that fits no state."""


def encode(message: TrainerMessage) -> bytes:
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
    if num_bytes > MAX_FRAME_BYTES:
        raise PipeError(f"a frame of {num_bytes} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return num_bytes


class SocketChannel:
    """Tasks and commands in, events out, over an inherited socket."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._received: queue.SimpleQueue[Begin | TrainerCommand] = queue.SimpleQueue()
        self._descriptors: queue.SimpleQueue[int] = queue.SimpleQueue()
        # The daemon waits for the effects of its commands, so the queue stays short.
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def next_task(self) -> tuple[Begin, tuple[int, ...]]:
        """Wait for a task, and the descriptors of its memory. Raises PipeError."""
        task = self._received.get()
        if not isinstance(task, Begin):
            raise PipeError(f"{task} before there is a task")
        # They came no later than the first byte of the task.
        return task, tuple(self._descriptors.get_nowait() for _ in range(task.num_descriptors))

    def next_command(self, *, wait: bool) -> TrainerCommand | None:
        """The next command; None when there is none and `wait` is false. Raises PipeError."""
        while True:
            try:
                command = self._received.get(block=wait, timeout=WAITING_S)
                break
            except queue.Empty:
                if not wait:
                    return None
                self.emit(Waiting())
        if isinstance(command, Begin):
            raise PipeError(f"{command.task} in the middle of a task")
        return command

    def emit(self, event: Said) -> None:
        """Send an event; waits while the daemon has not read the ones before."""
        try:
            self._socket.sendall(encode(event))
        except OSError:
            os._exit(os.EX_OK)  # the daemon is gone

    def _read(self) -> None:
        frames = FrameDecoder(TO_TRAINER)
        try:
            while True:
                data, descriptors, _, _ = socket.recv_fds(self._socket, READ_BYTES, maxfds=4)
                if not data:
                    break
                for descriptor in descriptors:
                    os.set_inheritable(descriptor, False)
                    self._descriptors.put(descriptor)
                for message in frames.feed(data):
                    self._received.put(message)
        except PipeError as error:
            os.write(2, f"trainer: {error}\n".encode())
            os._exit(os.EX_SOFTWARE)
        except OSError:
            pass
        os._exit(os.EX_OK)  # the daemon is gone
