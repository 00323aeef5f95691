"""The trainer's end of the socket pair over which it speaks with its daemon.

A thread reads commands, so that the end of the daemon (end of input) ends this process at once,
even in a step that hangs. Nothing is lost by that: the slow weights are in the daemon's memory.
"""

import os
import queue
import socket
import threading
from typing import Final

import msgspec

from peer.runtime.child_frames import READ_BYTES, FrameDecoder, PipeError, encode

from .messages import Begin, Said, TrainerCommand, Waiting

WAITING_S: Final = 5.0
"""Interval at which a trainer that waits says so."""
TO_TRAINER: Final = msgspec.msgpack.Decoder(Begin | TrainerCommand)
FROM_TRAINER: Final = msgspec.msgpack.Decoder(Said)


class SocketChannel:
    """Tasks and commands in, events out, over an inherited socket."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._sending = threading.Lock()
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
            with self._sending:  # a thread tells of the end of another rank
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
