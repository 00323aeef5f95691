"""The trainer's end of the socket pair.

A thread reads commands, so that the end of the daemon (end of input) ends this process at once,
even in the middle of a step that hangs. Nothing is lost by that: what counts is in the daemon's
memory.
"""

import os
import queue
import socket
import threading
from dataclasses import dataclass
from typing import Final, TypeVar, get_args

from . import pipe
from .messages import TrainerCommand, TrainerEvent
from .settings import TrainerSettings

_READ_BYTES: Final = 65536
_MAX_DESCRIPTORS: Final = 4
_EXIT_PARENT_GONE: Final = 0
_EXIT_BAD_PIPE: Final = 70
_COMMANDS: Final = get_args(TrainerCommand)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Task:
    """What the daemon wants of this process, and the memory to do it in."""

    name: str
    settings: TrainerSettings
    descriptors: tuple[int, ...]


class SocketChannel:
    """Commands in, events out, over an inherited socket."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._received: queue.SimpleQueue[pipe.Message] = queue.SimpleQueue()
        self._descriptors: queue.SimpleQueue[int] = queue.SimpleQueue()
        # The daemon sends a handful of commands a round and waits for their effects: the queue
        # stays short.
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def next_task(self) -> Task:
        """Wait for a task. Raises PipeError."""
        begin = self._expect(pipe.Begin)
        settings = self._expect(TrainerSettings)
        # They came no later than the first byte of the order.
        descriptors = [self._descriptors.get_nowait() for _ in range(begin.num_descriptors)]
        return Task(begin.task, settings, tuple(descriptors))

    def _expect(self, kind: type[T]) -> T:
        message = self._received.get()
        if not isinstance(message, kind):
            raise pipe.PipeError(f"expected {kind.__name__}, got {type(message).__name__}")
        return message

    def next_command(self, *, wait: bool, timeout_s: float | None = None) -> TrainerCommand | None:
        """The next command; None when there is none and `wait` is false, or the time is over.

        Raises:
            PipeError
        """
        try:
            message = self._received.get(block=wait, timeout=timeout_s)
        except queue.Empty:
            return None
        if not isinstance(message, _COMMANDS):
            raise pipe.PipeError(f"{type(message).__name__} is no command")
        command: TrainerCommand = message
        return command

    def emit(self, event: TrainerEvent | pipe.ModelCreated) -> None:
        """Send an event; waits while the daemon has not read the ones before."""
        try:
            self._socket.sendall(pipe.encode(event))
        except OSError:
            os._exit(_EXIT_PARENT_GONE)

    def _read(self) -> None:
        decoder = pipe.Decoder()
        try:
            while True:
                data, descriptors, _, _ = socket.recv_fds(
                    self._socket, _READ_BYTES, _MAX_DESCRIPTORS
                )
                if not data:
                    break
                for descriptor in descriptors:
                    os.set_inheritable(descriptor, False)
                    self._descriptors.put(descriptor)
                for message in decoder.feed(data):
                    self._received.put(message)
        except pipe.PipeError as error:
            os.write(2, f"trainer: {error}\n".encode())
            os._exit(_EXIT_BAD_PIPE)
        except OSError:
            pass
        os._exit(_EXIT_PARENT_GONE)
