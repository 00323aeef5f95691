"""What daemon and trainer say to each other about microbatches, where the trainer holds a stage.

A *boundary* is what travels between two stages: activations on the way forward, their gradient on
the way back. It never passes through the socket: it lies in a slot of shared memory
(peer/training/ring.py), and messages name the slot. A *leg* says which way it travels:
`forward` or `backward`, or `score`, a forward for validation alone, which relays answer between
their steps too.

At the data peer, for each of an iteration's microbatches:

    daemon                              trainer
                                        Begun(n)                  an iteration of n microbatches
                                        Produced(forward, m, s)   embedding and first layers
    Deliver(forward, m, s')             head and loss             (it has come through its path)
                                        Produced(backward, m, s)
    Deliver(backward, m, s')            the first layers' gradient
                                        Returned(m)
    or Resend(m)                        it was lost on its way to head and loss
                                        Produced(forward, m, s)
    or Drop(m)                          it will not come back: it is left out of the step
                                        Stepped(n')               with so many of them

At a relay:

    Deliver(forward, m, s')             through the layers
                                        Produced(forward, m, s)
    Deliver(backward, m, s')            the layers' gradient
                                        Produced(backward, m, s), Returned(m)
    Resend(m)                           another takes the place of the next relay
                                        Produced(forward, m, s)
    Finish                              the iteration is over
                                        Stepped(n')

Slots: `Taken(s')` gives an inbound slot back to the daemon, `Release(s)` an outbound one to the
trainer. `Waiting` is a sign of life while nothing comes. `m` is a number that only the two know.
"""

from msgspec import Struct

from .trip import Leg


class TrainerMessage(Struct, frozen=True, tag=True, tag_field="kind", forbid_unknown_fields=True):
    """What daemon and trainer process say to each other, with its name as its kind."""


class Deliver(TrainerMessage, frozen=True):
    """A boundary has come; it lies in this inbound slot.

    Attributes:
        loss: of the microbatch, nats per token, as its data peer says; on the way back only.
        adds: whether the weights' gradient is to be added; it has been, where a microbatch comes
            back once more.
    """

    leg: Leg
    number: int
    slot: int
    loss: float | None
    adds: bool = True


class Drop(TrainerMessage, frozen=True):
    """Forget this microbatch: it will not come again."""

    number: int


class Resend(TrainerMessage, frozen=True):
    """Produce the activations of this microbatch once more: they were lost, or a relay was."""

    number: int


class Finish(TrainerMessage, frozen=True):
    """The iteration is over for this relay: step with the gradients that are there."""


class Release(TrainerMessage, frozen=True):
    """This outbound slot may be written again."""

    slot: int


class Begun(TrainerMessage, frozen=True):
    """The data peer begins an iteration of so many microbatches."""

    microbatches: int


class Produced(TrainerMessage, frozen=True):
    """A boundary lies in this outbound slot.

    Attributes:
        loss: of the microbatch, nats per token; on the way back only.
    """

    leg: Leg
    number: int
    slot: int
    loss: float | None


class Returned(TrainerMessage, frozen=True):
    """The gradient of this microbatch is in; nothing of it is held any more."""

    number: int


class Taken(TrainerMessage, frozen=True):
    """This inbound slot may be written again."""

    slot: int


class Stepped(TrainerMessage, frozen=True):
    """The iteration's step is taken, with the gradients of so many microbatches.

    Attributes:
        clipped: gradients that were far longer than usual, and counted less or not at all.
    """

    microbatches: int
    clipped: int = 0


class Waiting(TrainerMessage, frozen=True):
    """Nothing has come for a while, and the trainer lives."""


StageCommand = Deliver | Drop | Resend | Finish | Release
StageEvent = Begun | Produced | Returned | Taken | Stepped | Waiting
