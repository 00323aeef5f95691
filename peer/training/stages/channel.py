"""The trainer's end of a stage: commands in, in the order of their urgency; boundaries in and out.

The inner loop takes commands of rounds and averaging between two steps, and commands of stages
within a step. Either kind is kept while the other is asked for. `Stop` ends a step at once.

A backward that has come is done before any forward: it frees memory everywhere along its path.

A boundary lies as bytes in a slot: activations or their gradient, coded. Shapes: b sequences of a
microbatch, T tokens, D width of the model.
"""

import math
from collections import deque
from collections.abc import Callable

import torch

from peer.codec import Codec, codes_as_tensor, codes_on
from peer.training.messages import Said, Stop, TrainerCommand
from peer.training.pipe import SocketChannel
from peer.training.ports import Interrupted
from peer.training.shared import BoundaryRing
from protocol.microbatch.trainer_messages import Drop, Filled, Finish, Freed, Resend, StageCommand
from protocol.wire.stage_messages import Direction


class BoundaryCoder:
    """Codes boundaries of one shape, (b, T, D)."""

    def __init__(self, codec: Codec, shape: tuple[int, int, int], device: torch.device) -> None:
        self._codec = codec
        self._shape = shape
        self._device = device
        self._num_values = math.prod(shape)

    def ring(self, fd: int, slots: int) -> BoundaryRing:
        """Slots for such boundaries, in memory that gets its size here."""
        return BoundaryRing(fd, self._codec, self._num_values, slots)

    def write(self, boundary_bTD: torch.Tensor, slot: memoryview) -> None:
        """Code a boundary into a slot. Raises ValueError when it holds a NaN or an infinity."""
        with codes_on(self._device, slot) as codes:
            self._codec.encode(boundary_bTD.detach().float().contiguous().view(-1), codes)

    def read(self, slot: memoryview) -> torch.Tensor:
        """The boundary in a slot, fp32 [b, T, D]. Raises ValueError when it is no sound one."""
        codes = codes_as_tensor(slot).to(self._device)
        if not self._codec.validate(codes):
            raise ValueError("a boundary with values that are not finite")
        values = torch.empty(self._num_values, device=self._device)
        self._codec.decode(codes, values)
        return values.view(self._shape)


StageTask = Filled | Drop | Resend | Finish


class StageChannel:
    """The commands and boundaries of a stage; implements the inner loop's `Channel`.

    Attributes:
        between_steps: called when something for the stage has come while the inner loop waits.
    """

    def __init__(self, channel: SocketChannel, ring: BoundaryRing, coder: BoundaryCoder) -> None:
        self._channel = channel
        self._ring = ring
        self._coder = coder
        self._free = deque(ring.outbound)
        self._other_commands: deque[TrainerCommand] = deque()
        self._tasks: deque[StageTask] = deque()
        self.between_steps: Callable[[], None] = lambda: None

    def emit(self, event: Said) -> None:
        self._channel.emit(event)

    def next_command(self, *, wait: bool) -> TrainerCommand | None:
        """The next command of rounds and averaging; None where `wait` is false and none is here."""
        while not self._other_commands:
            command = self._channel.next_command(wait=wait)
            if command is None:
                return None
            self._sort(command)
            if self._tasks:
                self.between_steps()
        return self._other_commands.popleft()

    def next_task(self) -> StageTask:
        """The most urgent command of the stage; waits for one. Raises Interrupted."""
        self._gather()
        while not self._tasks:
            self._wait()
        for task in self._tasks:
            if isinstance(task, Filled) and task.direction == Direction.BACKWARD:
                self._tasks.remove(task)
                return task
        return self._tasks.popleft()

    def scores(self) -> list[Filled]:
        """Boundaries that have come to be scored. Raises Interrupted."""
        self._gather()
        found = [
            task
            for task in self._tasks
            if isinstance(task, Filled) and task.direction == Direction.SCORE
        ]
        for task in found:
            self._tasks.remove(task)
        return found

    def _wait(self) -> None:
        command = self._channel.next_command(wait=True)
        assert command is not None
        self._sort(command)
        self._gather()

    def _gather(self) -> None:
        """Take all that has come. Raises Interrupted where `Stop` is among it."""
        while (command := self._channel.next_command(wait=False)) is not None:
            self._sort(command)
        if any(isinstance(each, Stop) for each in self._other_commands):
            raise Interrupted

    def _sort(self, command: TrainerCommand) -> None:
        if isinstance(command, Freed):
            self._free.append(command.slot)
        elif isinstance(command, StageCommand):
            self._tasks.append(command)
        else:
            self._other_commands.append(command)

    def read(self, filled: Filled) -> torch.Tensor:
        """The boundary that has come, [b, T, D]; its slot is free again. Raises ValueError."""
        boundary_bTD = self._coder.read(self._ring.slot(filled.slot))
        self.emit(Freed(filled.slot))
        return boundary_bTD

    def send(
        self,
        direction: Direction,
        microbatch: int,
        boundary_bTD: torch.Tensor,
        loss: float | None = None,
    ) -> None:
        """Put a boundary into a slot, and say so; waits for a slot. Raises Interrupted."""
        while not self._free:
            self._wait()
        slot = self._free.popleft()
        self._coder.write(boundary_bTD, self._ring.slot(slot))
        self.emit(Filled(direction, microbatch, slot, loss))
