"""What the daemon and its trainer say to each other.

The trainer is a child process with one socket pair and shared memory. Commands go down, events come
up (pipe.py). The large things never pass through the socket: slow weights and codes lie in shared
memory (shared.py), and a message names the region and carries the digest.

The order of things, when peers average in pairs:

    daemon                              trainer
                                        Ready
    Load                                theta := phi, or what was kept of it
    TrainRound(r, ...)                  TrainerProgress ...
                                        FragmentSent(0, k)            codes are in its region
                                        RoundClosed(r)
    TrainRound(r+1, ...)                TrainerProgress ...
    Merge(0, k)                         theta += phi' - decoded
                                        FragmentMerged(0, k)
    Evaluate(r)                         Evaluated(r, loss)
    Keep(path)                          Kept(path)              theta and moments are in the file

A round is closed by the trainer itself when its quota is done and nothing holds it up. Its nominal
step goes on rising meanwhile, to the end of the run. Where the model is cut, each fragment is sent
at its own moment, and merged as sync.py says; and where all peers average
(protocol/fragment/fragments.py), what others did to it is followed outside of its flight, too:

    daemon                              trainer
    Yield(p)                            held := phi
                                        Yielded(p)
    (p of phi is written)
    Merge(p, None, ...)                 theta follows what happened to phi

The daemon writes a fragment of phi only from `FragmentSent`, or `Yielded`, to `Merge`. (Load and
Evaluate read all of phi: nothing may be written while they run.)

Where the trainer holds a stage of a pipeline, microbatches travel besides
(protocol/microbatch/trainer_messages.py).

The first frame down the socket is `Begin`: what the process is for.
"""

from typing import Final

from protocol.microbatch.trainer_messages import StageCommand, StageEvent
from protocol.run.layout import Layout
from protocol.run.run_spec import RunSpec, parse_bytes
from protocol.trainer_messages import (
    FragmentMerged,
    FragmentSent,
    Merge,
    TrainerMessage,
    Yield,
    Yielded,
)

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of each parameter: what a layout follows from."""

# --- pieces of the corpus -------------------------------------------------------------------------


class PiecesHere(TrainerMessage, frozen=True):
    """All pieces of the corpus that the trainer said it misses are here."""


class PiecesMissing(TrainerMessage, frozen=True):
    """These pieces of the corpus are needed for the next step, and are not here.

    Nothing is trained before `PiecesHere`; other commands are obeyed meanwhile.
    """

    pieces: tuple[int, ...]


# --- what a trainer process is told at its birth --------------------------------------------------


class TrainerSettings(TrainerMessage, frozen=True):
    """Everything the child needs besides the descriptors it inherits.

    Attributes:
        spec: the run spec's canonical bytes, with this peer's own tau where it has one.
        peer_id: ourselves in the members of a round.
        corpus_path: folder of the corpus (`peer.training.corpus`), or a file of its tokens; empty
        for the children that need no data.
        vocabulary_size: rows of the embedding.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        threads: torch threads; 0 leaves it to torch.
        micro_batch_cap: most sequences per forward pass; 0 is no cap.
        stage: the part of the model that it holds; None is the whole.
        checkpoint_activations: whether a stage keeps less of a forward, and computes it again.
    """

    spec: bytes
    peer_id: str
    corpus_path: str
    vocabulary_size: int
    device: str = "auto"
    threads: int = 0
    micro_batch_cap: int = 0
    stage: int | None = None
    checkpoint_activations: bool = False

    def run_spec(self) -> RunSpec:
        """The parsed run spec. Raises InvalidRunSpec."""
        return parse_bytes(self.spec)


class Begin(TrainerMessage, frozen=True):
    """What a child is to do, `create` or `train`; its memory comes with it as descriptors."""

    task: str
    settings: TrainerSettings
    num_descriptors: int


class ModelCreated(TrainerMessage, frozen=True):
    """Answer of a child that made the initial weights.

    Attributes:
        shapes: of the parameters that were made.
        whole_shapes: of those of the whole model.
        config: the model's config.json.
    """

    shapes: Shapes
    whole_shapes: Shapes
    config: str

    @property
    def layout(self) -> Layout:
        """That of the parameters that were made."""
        return Layout.from_shapes(dict(self.shapes))

    @property
    def whole(self) -> Layout:
        """That of the whole model."""
        return Layout.from_shapes(dict(self.whole_shapes))


# --- messages -------------------------------------------------------------------------------------


class Load(TrainerMessage, frozen=True):
    """Start from the slow weights: theta := phi, fresh optimizer state, nothing on its way.

    Attributes:
        kept: path of a file that `Keep` wrote: fast weights and moments go on from there, with phi
            of the same checkpoint. None begins afresh.
        step, epoch, position: where phi stands; `Kept` says it until a round has begun.
    """

    kept: str | None = None
    step: float = 0.0
    epoch: int = 0
    position: int = 0


class TrainRound(TrainerMessage, frozen=True):
    """Train this round once the one before it is closed.

    Attributes:
        quota: inner steps after which the round is closed.
        members: (peer id, weight) of everyone who takes data in this round, sorted, ourselves
        included.
        epoch: epoch to take data from.
        position: place in the epoch's order up to which our blocks are done (see
        protocol/schedule/data_plan.py).
        start_step: nominal step at which the round begins. (Fragments are sent by the number of
        the round, all the same.)
        stride: nominal steps of one own step.
        total_steps, learning_rate: of the whole run, in whole rounds, and the peak of its schedule,
        as is in force in this round; None where it is as the run spec says.
    """

    round: int
    quota: int
    members: tuple[tuple[str, int], ...]
    epoch: int
    position: int
    start_step: float
    stride: float
    total_steps: int | None = None
    learning_rate: float | None = None


class CloseRound(TrainerMessage, frozen=True):
    """Close this round after the step in progress. Ignored when it is closed already."""

    round: int


class Evaluate(TrainerMessage, frozen=True):
    """Measure the validation loss of the slow weights on the run's fixed blocks."""

    round: int


class Keep(TrainerMessage, frozen=True):
    """Write fast weights and optimizer moments to this file, between two steps (tensor_file.py)."""

    path: str


class Stop(TrainerMessage, frozen=True):
    """Exit."""


SyncCommand = Merge | Yield
TrainerCommand = (
    Load
    | TrainRound
    | CloseRound
    | SyncCommand
    | StageCommand
    | Evaluate
    | Keep
    | PiecesHere
    | Stop
)


class Ready(TrainerMessage, frozen=True):
    """The model is built and calibrated.

    Attributes:
        steps_per_s: inner steps per second of the trainer alone.
        shapes: of the parameters that it trains.
        loops: what codes its weights (`peer.codec.Codec.loops_for`).
    """

    device: str
    precision: str
    micro_batch: int
    steps_per_s: float
    shapes: Shapes = ()
    loops: str = "plain"

    @property
    def layout(self) -> Layout:
        """That of the parameters that it trains."""
        return Layout.from_shapes(dict(self.shapes))


PROGRESS_INTERVAL_S: Final = 0.2
"""Shortest time between two `Progress` of a round, but for that at half the quota."""


class TrainerProgress(TrainerMessage, frozen=True):
    """Where the trainer is; at most every PROGRESS_INTERVAL_S, and once at half the quota.

    Attributes:
        loss: mean training loss of the steps since the last event, nats per token.
        learning_rate: of the last step.
        step_s: mean duration of the steps since the last event.
        step: nominal step reached.
    """

    round: int
    steps: int
    loss: float
    learning_rate: float
    gradient_norm: float
    step_s: float
    step: float


class RoundClosed(TrainerMessage, frozen=True):
    """The round is over; a whole model that is sent then was sent just before.

    Attributes:
        loss: mean training loss of the round.
        epoch, position: where our data stands now.
        seconds: duration of the round's training.
        step: nominal step reached; the round's first if it had no steps.
    """

    round: int
    steps: int
    tokens: int
    loss: float
    epoch: int
    position: int
    seconds: float
    step: float


class Evaluated(TrainerMessage, frozen=True):
    """Validation loss of the slow weights, nats per token (per byte with the byte tokenizer).

    Attributes:
        loss: None where it could not be measured: by a stage that has no loss of its own, or when
        nothing came back from the others.
    """

    round: int
    loss: float | None
    seconds: float


class Kept(TrainerMessage, frozen=True):
    """Fast weights and moments are in the file; or they are not, and training goes on.

    Attributes:
        step: nominal step reached; that of the last round's end where no round is in training.
        epoch, position: where our data stands then.
        tokens: trained in the round in training so far.
        error: why nothing was written; None when all was.
    """

    path: str
    step: float
    epoch: int
    position: int
    tokens: int
    error: str | None = None


MAX_FAILURE_CHARS: Final = 2000
"""Length at which what is said of a failure is cut, standard error too: its last part is told."""


class Failed(TrainerMessage, frozen=True):
    """Training cannot go on; the trainer exits after this.

    Attributes:
        reason: `non_finite`, `out_of_memory`, `error`, or `unusable` before it is ready: device,
        corpus or model cannot be used, and a new try would end like this one.
    """

    reason: str
    detail: str


class Waiting(TrainerMessage, frozen=True):
    """Nothing has come for a while, and the trainer lives; whoever drives it is not told."""


SyncEvent = FragmentSent | FragmentMerged | Yielded
TrainerEvent = (
    Ready
    | TrainerProgress
    | RoundClosed
    | SyncEvent
    | StageEvent
    | Evaluated
    | Kept
    | PiecesMissing
    | Failed
)
Said = TrainerEvent | ModelCreated | Waiting
"""All that a child says."""
