"""What a run takes of a peer, before it does: memory by device, disk, tokens, bytes on the line.

All of it follows from the run spec; nothing is measured here. With P parameters of the part that a
peer holds (the whole model, or its share of a pipeline):

    device     training state (sizes.py) + 4 P while weights are averaged + activations of the
               sequences that go through at once
    daemon     phi 4 P, outer momentum 4 P where there is one, a partner's codes, two slots of codes
    process    interpreter, torch and p2pd, whatever the model is
    disk       checkpoints and states at their most (disk_needs.py)
    line       one vector of codes for each average; with rounds by the line what fills the line

Memory was measured on a CPU alone: the constants fit three runs, and a fourth came within a tenth
(docs/planning.md). On a GPU it was never measured; what the CUDA libraries take is a guess.
"""

import json
from dataclasses import dataclass
from typing import Final

from .codecs import CODECS
from .disk_needs import disk_needs
from .pipeline_section import BOUNDARY_BITS
from .run_spec import RunSpec
from .sizes import parameters_of, sequence_bytes, state_bytes_of, vocabulary_of

FP32_BYTES: Final = 4
SNAPSHOT_BYTES: Final = 4
"""Bytes of a parameter, while a trainer takes a snapshot and moves to what was averaged."""
DAEMON_BYTES: Final = 320 << 20
TRAINER_BYTES: Final = 360 << 20
"""Interpreter, libraries and p2pd, measured on a CPU; pages that are shared count once."""
CUDA_BYTES: Final = 2 << 30
"""Memory of the host for CUDA's libraries; a guess, for nothing was measured on a GPU."""
CUDA_CONTEXT_BYTES: Final = 600 << 20
"""Memory of the GPU before anything is put there; a guess, too."""
DEFAULT_KEEP: Final = 3
WITH_BACKWARD: Final = 1.5
"""What a sequence takes at its most, over what is kept of it for the way back."""
CODE_SLOTS: Final = 3
"""Two of the own codes, and one of a partner's."""
MOST_LINE_SHARE: Final = 0.8
LEAST_AUTO_STEPS: Final = 2
"""With rounds by the line: the share of time in which it is used, and the shortest round."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run takes of one peer; bytes, unless the name says otherwise.

    Attributes:
        parameters: of the whole model.
        cpu_memory: of a peer that trains on its CPU.
        gpu_memory: of the GPU of one that trains there; both with `sequences` at a time.
        sequences: that go through the model at once: the spec's, or one where that is 'auto'.
        most_sequences: that 'auto' comes to, where there is room.
        sequence: what each further sequence adds.
        host_memory: of that peer beside its GPU.
        disk: at most, without the corpus.
        tokens_per_peer: of one that trains from beginning to end at the run's pace.
        average: sent (and received) for one average.
        steps_per_average: None where each peer chooses.
        step_boundaries: sent by a data peer of a pipeline in a step; 0 without stages.
    """

    parameters: int
    cpu_memory: int
    gpu_memory: int
    sequences: int
    most_sequences: int
    sequence: int
    host_memory: int
    disk: int
    tokens_per_peer: int
    average: int
    steps_per_average: int | None
    step_boundaries: int

    def bytes_per_hour(self, steps_per_s: float, line_bytes_per_s: float) -> float:
        """Sent at this pace over such a line: what is wanted, and no more than the line carries."""
        averages_per_s = steps_per_s / (self.steps_per_average or LEAST_AUTO_STEPS)
        wanted = averages_per_s * self.average + steps_per_s * self.step_boundaries
        share = MOST_LINE_SHARE if self.steps_per_average is None else 1.0
        return 3600 * min(wanted, share * line_bytes_per_s)


def needs_of(
    spec: RunSpec, checkpoint_keep: int = DEFAULT_KEEP, checkpoint_max_bytes: float | None = None
) -> Needs:
    """What this run takes of a peer.

    Raises:
        InvalidRunSpec: the model's sizes are those of a checkpoint that is not read here.
    """
    whole = parameters_of(spec)
    stages = spec.pipeline.stages
    part = -(-whole // stages)
    code = int(part * CODECS[spec.sync.codec].bytes_per_value)
    daemon = DAEMON_BYTES + part * FP32_BYTES * (2 if has_momentum(spec) else 1) + CODE_SLOTS * code
    summed = part * FP32_BYTES if stages > 1 else 0  # gradients of a step's microbatches
    state = state_bytes_of(spec, whole) // stages + summed + part * SNAPSHOT_BYTES
    each = int(sequence_memory(spec) * WITH_BACKWARD) // stages
    least, most = _at_once(spec)
    return Needs(
        whole,
        daemon + TRAINER_BYTES + state + each * least,
        CUDA_CONTEXT_BYTES + state + each * least,
        least,
        most,
        each,
        daemon + CUDA_BYTES,
        disk_needs(part, checkpoint_keep, checkpoint_max_bytes=checkpoint_max_bytes).total_bytes,
        spec.total_rounds * spec.sync.round_steps * spec.tokens_per_step,
        code,
        None if spec.sync.inner_steps == "auto" else spec.sync.round_steps,
        _boundary_bytes(spec),
    )


def has_momentum(spec: RunSpec) -> bool:
    """Whether the daemon keeps an outer momentum beside the slow weights."""
    if spec.sync.diloco is not None:
        return spec.sync.diloco.momentum > 0
    return spec.sync.alpha > 0


def sequence_memory(spec: RunSpec) -> int:
    """Activations of one sequence, as fp32 would have them."""
    model = spec.model
    hidden, layers, vocabulary = model.hidden_size, model.num_layers, vocabulary_of(spec)
    if spec.frozen is not None:
        config = json.loads(spec.frozen.config)
        hidden = config.get("hidden_size", hidden)
        layers = config.get("num_hidden_layers", layers)
        vocabulary = config.get("vocab_size", vocabulary)
    return sequence_bytes(model.context_length, hidden, layers, vocabulary)


def _at_once(spec: RunSpec) -> tuple[int, int]:
    """Sequences in one forward pass, at least and at most: 'auto' takes what fits."""
    size, batch = spec.training.micro_batch, spec.training.batch_size
    if isinstance(size, int):
        return min(size, batch), min(size, batch)
    if spec.pipeline.stages > 1:
        return spec.microbatch_sequences, spec.microbatch_sequences
    return 1, batch & -batch


def _boundary_bytes(spec: RunSpec) -> int:
    """Sent by a data peer in a step: each sequence's boundary there, and its gradient's part."""
    if spec.pipeline.stages == 1:
        return 0
    values = spec.tokens_per_step * spec.model.hidden_size
    return 2 * values * BOUNDARY_BITS[spec.pipeline.codec] // 8
