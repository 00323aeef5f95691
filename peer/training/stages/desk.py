"""The trainer's desk: boundaries come in and go out here, between the steps of the inner loop.

The channel carries two kinds of commands: those of rounds and averaging, which the inner loop takes
between two steps, and those of stages, which are taken within a step. `StageChannel` tells them
apart, and keeps either kind while the other is asked for. `Stop` ends a step at once.

Rules
  1. Gradients go before activations: a backward that has come is done before any forward, so that
     others' forwards never starve it (it frees memory everywhere along its path). A stand-in may
     get a gradient before it has done the forward; then that forward is next.
  2. A desk that waits says so (`Waiting`), every WAITING_S: it is not a hung trainer.

A boundary lies as bytes in a slot: activations or their gradient, coded. Shapes: b sequences of a
microbatch, T tokens, D width of the model.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import torch

from peer.codec import Codec, codes_as_tensor, codes_on
from peer.training.errors import Interrupted
from peer.training.messages import Stop, TrainerCommand, TrainerEvent
from peer.training.ring import BoundaryRing
from protocol.microbatch.trainer_messages import (
    Deliver,
    Drop,
    Finish,
    Produced,
    Release,
    Resend,
    StageCommand,
    Taken,
    Waiting,
)
from protocol.microbatch.trip import Leg

# --- boundary -------------------------------------------------------------------------------------


class BoundaryCoder:
    """Codes boundaries of one shape.

    Args:
        shape: (b, T, D).
    """

    def __init__(self, codec: Codec, shape: tuple[int, int, int], device: torch.device) -> None:
        self._codec = codec
        self._shape = shape
        self._device = device
        self._num_values = shape[0] * shape[1] * shape[2]

    @property
    def code_bytes(self) -> int:
        """Bytes of one boundary."""
        return self._codec.code_bytes(self._num_values)

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


# --- desk -----------------------------------------------------------------------------------------

WAITING_S: Final = 5.0


class PatientChannel(Protocol):
    """Commands in, with a bound on the wait; events out."""

    def next_command(
        self, *, wait: bool, timeout_s: float | None = None
    ) -> TrainerCommand | None: ...

    def emit(self, event: TrainerEvent) -> None: ...


class StageChannel:
    """Tells the two kinds of commands apart. Is the inner loop's `Channel`.

    Attributes:
        between_steps: called when a stage command has come while the inner loop waits.
    """

    def __init__(self, channel: PatientChannel) -> None:
        self._channel = channel
        self._loops: deque[TrainerCommand] = deque()
        self._stages: deque[StageCommand] = deque()
        self.between_steps: Callable[[], None] = lambda: None

    def emit(self, event: TrainerEvent) -> None:
        """Send an event."""
        self._channel.emit(event)

    def next_command(self, *, wait: bool) -> TrainerCommand | None:
        """The next command of rounds and averaging; None when there is none and `wait` is false."""
        while not self._loops:
            command = self._channel.next_command(wait=wait)
            if command is None:
                return None
            self._sort(command)
            if self._stages:
                self.between_steps()
        return self._loops.popleft()

    def stage_commands(self, timeout_s: float) -> list[StageCommand]:
        """All stage commands that have come, in order; waits for the first one, if none has.

        Raises:
            Interrupted: `Stop` has come.
        """
        command = self._channel.next_command(wait=False)
        if command is None and not self._stages:
            command = self._channel.next_command(wait=True, timeout_s=timeout_s)
        while command is not None:
            self._sort(command)
            command = self._channel.next_command(wait=False)
        if any(isinstance(each, Stop) for each in self._loops):
            raise Interrupted
        found = list(self._stages)
        self._stages.clear()
        return found

    def _sort(self, command: TrainerCommand) -> None:
        if isinstance(command, StageCommand):
            self._stages.append(command)
        else:
            self._loops.append(command)


class Desk:
    """Takes stage commands in the order of their urgency, and puts boundaries into slots."""

    def __init__(self, channel: StageChannel, ring: BoundaryRing, coder: BoundaryCoder) -> None:
        self._channel = channel
        self._ring = ring
        self._coder = coder
        self._free = deque(ring.outbound)
        self._waiting: deque[Deliver | Drop | Resend | Finish] = deque()

    def emit(self, event: TrainerEvent) -> None:
        """Send an event."""
        self._channel.emit(event)

    def scores(self) -> list[Deliver]:
        """What has come to be scored, without waiting. Raises Interrupted."""
        self._take_all(self._channel.stage_commands(0.0))
        found = [c for c in self._waiting if isinstance(c, Deliver) and c.leg == Leg.SCORE]
        for command in found:
            self._waiting.remove(command)
        return found

    def next_command(self) -> Deliver | Drop | Resend | Finish:
        """The most urgent command; waits for one. Raises Interrupted."""
        self._take_all(self._channel.stage_commands(0.0))
        while not self._waiting:
            self._wait()
        urgent = self._urgent()
        if urgent is None:
            return self._waiting.popleft()
        self._waiting.remove(urgent)
        return urgent

    def _urgent(self) -> Deliver | None:
        """The first gradient; before it what it belongs to, if that waits too."""
        delivered = [command for command in self._waiting if isinstance(command, Deliver)]
        gradient = next((each for each in delivered if each.leg == Leg.BACKWARD), None)
        if gradient is None:
            return None
        return next(each for each in delivered if each.number == gradient.number)

    def read(self, command: Deliver) -> torch.Tensor:
        """The boundary that has come, [b, T, D]; its slot is free again. Raises ValueError."""
        boundary_bTD = self._coder.read(self._ring.slot(command.slot))
        self.emit(Taken(command.slot))
        return boundary_bTD

    def discard(self, command: Deliver) -> None:
        """Do not look at what has come."""
        self.emit(Taken(command.slot))

    def send(
        self, leg: Leg, microbatch: int, boundary_bTD: torch.Tensor, loss: float | None = None
    ) -> None:
        """Put a boundary into a slot, and say so; waits for a slot. Raises Interrupted."""
        while not self._free:
            self._wait()
        slot = self._free.popleft()
        self._coder.write(boundary_bTD, self._ring.slot(slot))
        self.emit(Produced(leg, microbatch, slot, loss))

    def _wait(self) -> None:
        commands = self._channel.stage_commands(WAITING_S)
        if not commands:
            self.emit(Waiting())
        self._take_all(commands)

    def _take_all(self, commands: Iterable[StageCommand]) -> None:
        for command in commands:
            if isinstance(command, Release):
                self._free.append(command.slot)
            else:
                self._waiting.append(command)
