"""What the daemon and its trainer say to each other.

The trainer is a child process with one socket pair and three pieces of shared memory. Commands go
down, events come up; both are msgpack maps with a length prefix (see `pipe.py`). The large things
never pass through the socket: slow weights and codes lie in shared memory (see `shared.py`), and a
message names the slot and carries the digest.

The order of things:

    daemon                              trainer
                                        Ready
    Load(version)                       theta := phi
    TrainRound(r, ...)                  Progress ... Progress
                                        RoundClosed(r, slot)          codes are in `slot`
    TrainRound(r+1, ...)                Progress ...
    Apply(r)                            theta += phi' - decoded(r)
                                        Applied(r)
    Evaluate(r)                         Evaluated(r, loss)

A round is closed by the trainer itself when its quota is done and no earlier snapshot waits for its
`Apply`; while one does, the trainer trains on past its quota. It waits only when it has no round to
train.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """Start from the slow weights: theta := phi, fresh optimizer state, no snapshot pending."""

    version: int


@dataclass(frozen=True, slots=True)
class TrainRound:
    """Train this round once the one before it is closed.

    Attributes:
        round: number of the round; nominal step = round * H.
        quota: inner steps after which the round is closed.
        members: (peer id, weight) of everyone who takes data in this round, sorted, ourselves
        included.
        epoch: epoch to take data from.
        position: place in the epoch's order up to which our blocks are done (see
        protocol/data_plan.py).
    """

    round: int
    quota: int
    members: tuple[tuple[str, int], ...]
    epoch: int
    position: int


@dataclass(frozen=True, slots=True)
class CloseRound:
    """Close this round after the step in progress. Ignored when it is closed already."""

    round: int


@dataclass(frozen=True, slots=True)
class Apply:
    """The slow weights have moved after `round`: carry the difference into the fast weights."""

    round: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Measure the validation loss of the slow weights on the run's fixed blocks."""

    round: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Exit."""


TrainerCommand = Load | TrainRound | CloseRound | Apply | Evaluate | Stop


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is built and calibrated.

    Attributes:
        parameters: trainable parameters, tied ones once.
        steps_per_s: inner steps per second of the trainer alone.
    """

    parameters: int
    padded_parameters: int
    layout_digest: str
    device: str
    precision: str
    micro_batch: int
    steps_per_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the trainer is; at most every 0.2 s, and once at half the quota.

    Attributes:
        loss: mean training loss of the steps since the last event, nats per token.
        tokens: tokens trained in this round so far.
        step_s: mean duration of those steps.
    """

    round: int
    steps: int
    tokens: int
    loss: float
    learning_rate: float
    gradient_norm: float
    step_s: float


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """The snapshot of this round is encoded in `slot`.

    Attributes:
        digest: blake3 (32 hex digits) of the codes in the slot.
        loss: mean training loss of the round.
        epoch, position: where our data stands now.
        seconds: duration of the round's training.
    """

    round: int
    slot: int
    steps: int
    tokens: int
    loss: float
    digest: str
    epoch: int
    position: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Applied:
    """The fast weights have taken over the slow weights' move after `round`.

    Attributes:
        distance: root mean square of phi' - theta_s per parameter.
    """

    round: int
    distance: float


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Validation loss of the slow weights, nats per token (per byte with the byte tokenizer)."""

    round: int
    loss: float
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """Training cannot go on; the trainer exits after this.

    Attributes:
        reason: `non_finite`, `out_of_memory` or `error`.
    """

    reason: str
    detail: str


TrainerEvent = Ready | Progress | RoundClosed | Applied | Evaluated | Failed
