"""Messages between daemon and trainer about microbatches, where the trainer holds a stage.

A *boundary* is what travels between two stages: activations on the way forward, their gradient on
the way back. It never passes through the socket: it lies in a slot of shared memory
(peer/training/shared.py), and messages name the slot. The *direction* of a boundary is `forward` or
`backward`, or `score`, a forward for validation alone, which relays answer between their steps too.

At the data peer, for each of an iteration's microbatches:

    daemon                              trainer
                                        Begun(n)                  an iteration of n microbatches
                                        Filled(forward, m, s)     embedding and first layers
    Filled(forward, m, s')              head and loss             (it has come through its path)
                                        Filled(backward, m, s)
    Filled(backward, m, s')             the first layers' gradient
                                        GradientAdded(m)
    or Resend(m)                        it was lost on its way
                                        Filled(forward, m, s)
    or Drop(m)                          it will not come back: it is left out of the step
                                        Stepped(n')               with n' of them

At a relay:

    Filled(forward, m, s')              through the layers
                                        Filled(forward, m, s)
    Filled(backward, m, s')             the layers' gradient
                                        Filled(backward, m, s), GradientAdded(m)
    Finish                              the iteration is over
                                        Stepped(n')

Slots: the trainer fills outbound ones (`s`) and the daemon inbound ones (`s'`); `Freed` gives one
back to whoever fills it. `m` is a number that only the two know.
"""

from msgspec import field

from protocol.trainer_messages import TrainerMessage
from protocol.wire.stage_messages import Direction


class Filled(TrainerMessage, frozen=True):
    """A boundary lies in this slot.

    Attributes:
        loss: of the microbatch, nats per token, as its data peer says; on the way back only.
        adds: to a relay's trainer: whether the weights' gradient is to be added; it has been, where
            a microbatch comes back once more.
    """

    direction: Direction = field(name="leg")
    number: int
    slot: int
    loss: float | None
    adds: bool = True


class Freed(TrainerMessage, frozen=True):
    """This slot may be written again."""

    slot: int


class Drop(TrainerMessage, frozen=True):
    """Forget this microbatch: it will not come again."""

    number: int


class Resend(TrainerMessage, frozen=True):
    """Produce the activations of this microbatch once more: it was lost."""

    number: int


class Finish(TrainerMessage, frozen=True):
    """The iteration is over for this relay: step with the gradients that are there."""


class Begun(TrainerMessage, frozen=True):
    """The data peer begins an iteration of this many microbatches."""

    microbatches: int


class GradientAdded(TrainerMessage, frozen=True):
    """The gradient of this microbatch is in; nothing of it is held any longer."""

    number: int


class Stepped(TrainerMessage, frozen=True):
    """The iteration's step is taken, with the gradients of this many microbatches.

    Attributes:
        clipped: gradients that were far longer than usual, and counted less or not at all.
    """

    microbatches: int
    clipped: int = 0


StageCommand = Filled | Drop | Resend | Finish | Freed
StageEvent = Begun | Filled | GradientAdded | Freed | Stepped
