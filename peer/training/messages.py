"""The conversation of the daemon and its trainer.

The trainer is a child process with one socket pair and shared memory. Commands go down, events come
up (pipe.py). Slow weights and codes lie in shared memory (shared.py); a message names the region
and carries the digest.

When peers average in pairs:

    daemon                              trainer
                                        Ready
    Load                                theta := phi, or what was kept of it
    TrainRound(r, ...)                  TrainerProgress ...
                                        FragmentSent(0, k)            codes are in its region
                                        RoundClosed(r)
    TrainRound(r+1, ...)                TrainerProgress ...
    Try(0, k, blocks)                   Tried(0, k, gain)       theta is as before
    Merge(0, k)                         theta += phi' - decoded
                                        FragmentMerged(0, k)
    Evaluate(r)                         Evaluated(r, loss)
    Evaluate(r, tokens)                 Evaluated(r, loss, log_probs)
    Keep(path)                          Kept(path)              theta and moments are in the file

`Try` is optional: it asks what the merge would do to the loss on held-out blocks.

The trainer closes a round when its quota is done and nothing holds it up; until then its nominal
step goes on rising, to the end of the run. Where the model is cut, each fragment is sent and merged
at its own moment (sync.py). Where all peers average (protocol/fragment/fragments.py), theta follows
steps of others outside of a fragment's flight, too:

    daemon                              trainer
    Yield(p)                            held := phi
                                        Yielded(p)
    (p of phi is written)
    Merge(p, None, ...)                 theta follows what happened to phi

The daemon writes a fragment of phi only from `FragmentSent`, or `Yielded`, to `Merge`. (Load and
Evaluate read all of phi: nothing may be written while they run.)

A trainer that holds a stage of a pipeline also says what stands in
protocol/microbatch/trainer_messages.py. The first frame down the socket is `Begin`.
"""

from typing import Final

from msgspec import field

from protocol.microbatch.trainer_messages import StageCommand, StageEvent
from protocol.run.layout import Layout
from protocol.run.run_spec import RunSpec, parse_bytes
from protocol.trainer_messages import (
    FragmentMerged,
    FragmentSent,
    Merge,
    TrainerMessage,
    TrainerTime,
    Tried,
    Try,
    Yield,
    Yielded,
)

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of each parameter."""


class PiecesHere(TrainerMessage, frozen=True):
    """All pieces that `PiecesMissing` named are here."""


class PiecesMissing(TrainerMessage, frozen=True):
    """The next step needs these pieces: nothing is trained before `PiecesHere`."""

    pieces: tuple[int, ...]


class TrainerSettings(TrainerMessage, frozen=True):
    """Settings of a child.

    Attributes:
        spec: the run spec's canonical bytes, with this peer's own tau where it has one.
        corpus_path: folder of the corpus (`peer.training.corpus`), or a file of its tokens; empty
        for the children that need no data.
        vocabulary_size: rows of the embedding.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        threads: torch threads; 0 leaves it to torch.
        micro_batch_cap: most sequences per forward pass; 0 is no cap.
        stage: None is the whole model.
        checkpoint_activations: whether layers keep less of a forward, and compute it again, even
            where memory suffices.
        shard_weights: whether each rank has a part of the weights alone, even where all fit.
        devices: of all processes that train together, if there are several (ranks/group.py); rank
            is the number of this one. `threads` is of all.
        split_context: whether these divide each sequence between them, and not the batch.
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
    shard_weights: bool = False
    devices: tuple[str, ...] = ()
    rank: int = 0
    split_context: bool = False

    @property
    def ranks(self) -> int:
        return len(self.devices) or 1

    @property
    def divide_sequences(self) -> bool:
        return self.split_context and self.ranks > 1

    @property
    def own_device(self) -> str:
        return self.devices[self.rank] if self.devices else self.device

    def run_spec(self) -> RunSpec:
        return parse_bytes(self.spec)


class Begin(TrainerMessage, frozen=True):
    """A task, `create`, `train` or `follow`; its memory comes with it as descriptors."""

    task: str
    settings: TrainerSettings
    num_descriptors: int


class ModelCreated(TrainerMessage, frozen=True):
    """Answer of a child that made the initial weights.

    Attributes:
        shapes: of the parameters that were made; whole_shapes are those of the whole model.
        config: the model's config.json.
        base: digest of the checkpoint that adapters are made for.
    """

    shapes: Shapes
    whole_shapes: Shapes
    config: str
    base: str | None = None

    @property
    def layout(self) -> Layout:
        return Layout.from_shapes(dict(self.shapes))

    @property
    def whole(self) -> Layout:
        return Layout.from_shapes(dict(self.whole_shapes))


class Load(TrainerMessage, frozen=True):
    """Start from the slow weights: theta := phi, fresh optimizer state, nothing in flight.

    Attributes:
        kept: a file that `Keep` wrote: fast weights and moments go on from there, with phi of the
            same checkpoint. None begins afresh.
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
        members: (peer id, weight) of all that take data in this round, sorted, ourselves included.
        position: place in the epoch's order up to which our blocks are done
            (protocol/schedule/data_plan.py).
        start_step: nominal step at which the round begins. (Where all peers average, fragments are
            sent by the number of the round all the same.)
        stride: nominal steps of one own step.
        total_steps, learning_rate: of the whole run, in whole rounds, and the peak of its schedule,
            in force in this round; None where the run spec's are.
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
    """Measure the loss of the slow weights on the run's fixed blocks, or on other tokens.

    Attributes:
        tokens: sequences of one length, uint32; empty for the fixed blocks.
        sequences: how many they are.
    """

    round: int
    tokens: bytes = b""
    sequences: int = 0


class Keep(TrainerMessage, frozen=True):
    """Write fast weights and optimizer moments to this file (tensor_file.py)."""

    path: str


class Stop(TrainerMessage, frozen=True): ...


SyncCommand = Merge | Try | Yield
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
        loops: what codes its weights (`peer.codec.Codec.loops_for`).
        measures: whether it answers `Try`: a stage has no loss of its own.
        ranks: processes that train together, one for each device.
        compiled: whether new shapes may take as long as a start.
        notes: how a step is computed, where not plainly, in sentences.
    """

    device: str
    precision: str
    micro_batch: int
    steps_per_s: float
    shapes: Shapes = ()
    loops: str = "plain"
    measures: bool = False
    ranks: int = 1
    compiled: bool = False
    notes: tuple[str, ...] = ()

    @property
    def layout(self) -> Layout:
        return Layout.from_shapes(dict(self.shapes))


PROGRESS_INTERVAL_S: Final = 0.2
"""Shortest time between two `TrainerProgress` of a round, except the one at half the quota."""


class TrainerProgress(TrainerMessage, frozen=True):
    """Told at most every PROGRESS_INTERVAL_S, and once at half the quota.

    Attributes:
        loss: mean training loss of the steps since the last event, nats per token.
        step_s: mean duration of those steps.
        step: nominal step reached.
        spent_s: what the time since the last event that tells it went into; since the trainer is
            ready, at first.
    """

    round: int
    steps: int
    loss: float
    learning_rate: float
    gradient_norm: float
    step_s: float
    step: float
    spent_s: dict[TrainerTime, float] = field(default_factory=dict)


class RoundClosed(TrainerMessage, frozen=True):
    """The round is over; a whole model that is averaged in pairs was sent just before.

    Attributes:
        loss: mean training loss of the round.
        epoch, position: where our data stands now.
        seconds: duration of the round's training.
        step: nominal step reached.
        spent_s: as in `TrainerProgress`.
        processor_s: what this process took of processors, since the round before was closed.
    """

    round: int
    steps: int
    tokens: int
    loss: float
    epoch: int
    position: int
    seconds: float
    step: float
    spent_s: dict[TrainerTime, float] = field(default_factory=dict)
    processor_s: float = 0.0


class Evaluated(TrainerMessage, frozen=True):
    """Validation loss of the slow weights, nats per token (per byte with the byte tokenizer).

    Attributes:
        loss: None from a stage that has none of its own, or where nothing came back from the
            others.
        log_probs: fp32, of each token but the first of its sequence; empty of the fixed blocks.
    """

    round: int
    loss: float | None
    seconds: float
    log_probs: bytes = b""


class Kept(TrainerMessage, frozen=True):
    """Fast weights and moments are in the file; or they are not, and training goes on.

    Attributes:
        step: nominal step reached; that of the last round's end where no round is in training.
        epoch, position: where our data stands then.
        tokens: trained in the round in training so far.
        error: why nothing was written.
    """

    path: str
    step: float
    epoch: int
    position: int
    tokens: int
    error: str | None = None


class StepChosen(TrainerMessage, frozen=True):
    """How a step is computed from now on, as in `Ready.notes`."""

    notes: tuple[str, ...]


class Failed(TrainerMessage, frozen=True):
    """The trainer exits after this.

    Attributes:
        reason: `non_finite`, `out_of_memory`, `error`, or `unusable` before it is ready: device,
            corpus or model cannot be used, and a new try would end like this one.
    """

    reason: str
    detail: str


class Waiting(TrainerMessage, frozen=True):
    """The trainer lives, and has nothing to say; receivers of events do not see it."""


SyncEvent = FragmentSent | FragmentMerged | Tried | Yielded
TrainerEvent = (
    Ready
    | TrainerProgress
    | RoundClosed
    | SyncEvent
    | StageEvent
    | Evaluated
    | Kept
    | PiecesMissing
    | StepChosen
    | Failed
)
Said = TrainerEvent | ModelCreated | Waiting
