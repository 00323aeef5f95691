"""Estimates of what a run takes of a peer: memory by device, disk, tokens, bytes on the line.

They follow from the run spec. With P parameters of the part that a peer holds (the whole model, or
its stage of a pipeline):

    device     training state + 4 P while weights are averaged (or 2 P, weights in bf16, while a
               step is computed) + what sequences that go through at once keep (`step_memory`)
    daemon     phi 4 P, outer momentum 4 P where there is one, a partner's codes, two slots of codes
    process    interpreter, torch and p2pd, whatever the model is
    disk       checkpoints that are kept, one that is being written beside them, one file for each
               state that joiners read, and what is not here yet of the corpus
    line       one vector of codes for each average; with rounds by the line what fills the line

What a layer keeps is counted of its graph (tests/numerics/test_kept_by_layers.py). On an H100 two
models took 0.87 to 1 of the estimate: plain, compiled, and with layers computed again
(docs/results/gpu.md). On a CPU three runs were fitted, and a fourth came within a tenth
(docs/planning.md).

Training state is counted in fp32: weights, gradient and two moments of each parameter, the moments
as `optimizer.moments` says; Muon keeps one of the matrices of the blocks. Figures of the disk are
upper bounds.
"""

from dataclasses import dataclass
from typing import Final

from protocol.errors import InvalidRunSpec
from protocol.gossip.round_length import LEAST_INNER_STEPS, LINE_SHARE

from .families import DecoderConfig, decoder_of, decoder_of_sizes
from .layout import DATA_STAGE, stage_layers
from .run_spec import RunSpec
from .sections import BOUNDARY_BITS
from .ways import CODECS

BYTE_VOCABULARY: Final = 256
USUAL_VOCABULARY: Final = 50_257
"""GPT-2's, where the spec names a tokenizer that is not read here."""
FP32_BYTES: Final = 4
BF16_BYTES: Final = 2
BYTES_PER_LOGIT: Final = 12
"""Log-probabilities and two gradients, in fp32 whatever the precision."""
_BYTES_AT_END: Final = 12
"""The last norm's, for each value of the width."""
FRAGMENTED: Final = 1.5
"""Memory of a CPU's allocator over what is in use: 1.04 to 1.9 in seven models."""
MIN_SLOTS: Final = 2
"""Microbatches that wait for their gradients at a stage, at the least."""
WHOLE_LOGITS_VOCABULARY: Final = 1 << 16
"""Tokens of a vocabulary up to which a step makes whole logits; beyond, those of a few tokens."""
MOST_LOGITS: Final = 1 << 26
"""Values of these logits: 512 tokens at 128k of vocabulary, enough for a fast product."""


def parameters_of(spec: RunSpec) -> int:
    """Parameters of the whole model: as frozen, else by its sizes.

    A founder may freeze a count that its configuration does not make: the larger one is told.
    Raises InvalidRunSpec: the sizes are those of a checkpoint that is not read here.
    """
    if spec.frozen is not None:
        return max(spec.frozen.parameters, _decoder(spec).parameters)
    if spec.model.init_from is not None:
        raise InvalidRunSpec(
            "model.init_from names a checkpoint, which is not read here; write the checkpoint's"
            " sizes into [model] of a copy of the run spec, and plan with that"
        )
    return _decoder(spec).parameters


def _decoder(spec: RunSpec) -> DecoderConfig:
    """The model: as frozen, else by its sizes, which are not a checkpoint's."""
    if spec.frozen is not None:
        return decoder_of(spec.frozen.config)
    return decoder_of_sizes(spec.model, vocabulary_of(spec))


def least_parameters_of(spec: RunSpec) -> int:
    """Parameters that each peer holds at the least; 0 where nothing is known of that here.

    Most stages have layers alone, and a tokenizer that is not read here may be a small one.
    """
    model, stages = spec.model, spec.pipeline.stages
    knows_vocabulary = model.init_from is None and spec.data.tokenizer == "bytes"
    if spec.adapter is not None and spec.frozen is not None:
        return spec.frozen.padded_parameters  # a checkpoint holds adapters alone
    if stages == 1 and (spec.frozen is not None or knows_vocabulary):
        return parameters_of(spec)
    if model.init_from is not None:
        return 0
    return model.num_layers // stages * _decoder(spec).layer_parameters


def vocabulary_of(spec: RunSpec) -> int:
    return BYTE_VOCABULARY if spec.data.tokenizer == "bytes" else USUAL_VOCABULARY


def state_bytes_of(spec: RunSpec, parameters: int, layers: int | None = None) -> int:
    """Weights, gradients and moments of so many parameters; without `layers` those of all."""
    moments = 2 * parameters
    # The sizes of a checkpoint are not known here, and AdamW's state is the largest.
    if spec.optimizer.name == "muon" and spec.model.init_from is None:
        decoder = _decoder(spec)
        layers = decoder.num_hidden_layers if layers is None else layers
        moments -= min(parameters, layers * decoder.layer_matrices)
    weights = 2 * FP32_BYTES * parameters  # and their gradients
    return weights + moments * (FP32_BYTES if spec.optimizer.moments == "fp32" else BF16_BYTES)


def sharding_fault(spec: RunSpec) -> str | None:
    """Why each of several cards cannot have a part of the weights alone; None when it can.

    Adapters leave most weights as they are, and what balances experts comes out of their layers.
    """
    if spec.adapter is None and spec.pipeline.stages == 1 and not _decoder(spec).is_mixture:
        return None
    return "adapters and mixtures of experts need all weights on each GPU; leave it out"


def shards(spec: RunSpec, cards: int, free: int, *, asked: bool, divides: bool) -> bool:
    """Whether each of several cards gets a part of the weights alone.

    That is where it is asked for, or where all weights do not fit into `free` bytes of a card; but
    not where cards divide sequences.
    """
    if cards == 1 or divides or sharding_fault(spec):
        return False
    return asked or card_memory(spec, cards, sharded=False) > free


def resident_parameters(spec: RunSpec, parameters: int) -> int:
    """Those of one layer, and of all that is in none."""
    decoder = _decoder(spec)
    return parameters - (decoder.num_hidden_layers - 1) * decoder.layer_parameters


def card_memory(spec: RunSpec, cards: int, *, sharded: bool) -> int:
    """Bytes that a card needs at the least, of several that train one model; CUDA's on top.

    That is with one sequence at a time, whose layers are computed again. Sharded, a card has its
    part alone of weights and gradients, and of embedding, head, norms and one layer all.
    """
    held = parameters_of(spec)
    state, on_all = state_bytes_of(spec, held), 2 * FP32_BYTES * held
    if sharded:
        on_all = 2 * FP32_BYTES * resident_parameters(spec, held)
        beside = 0  # averages are merged in main memory
    else:
        state, beside = state - on_all, FP32_BYTES * held
    each = step_memory(spec, 1, recomputes=True, on_gpu=True)
    return on_all + -(-state // cards) + beside + _head_gradients(spec) + each


def flops_per_token(spec: RunSpec) -> float:
    """Operations of training on one token, forward and backward.

    By PaLM (arXiv 2204.02311, appendix B): 6 for each active weight of a matrix product, 12 L d T
    for attention; windows of attention are not counted as less.
    """
    decoder = _decoder(spec)
    layers = decoder.num_hidden_layers
    weights = layers * decoder.active_matrices + decoder.vocab_size * decoder.hidden_size
    attention = 12 * layers * decoder.query_width * spec.model.context_length
    return float(6 * weights + attention)


def training_flops(spec: RunSpec) -> float:
    """Operations of one peer that trains a run from beginning to end; the budget of an expert."""
    steps = spec.total_rounds * spec.sync.round_steps
    return steps * spec.tokens_per_step * flops_per_token(spec)


SPARE_BYTES: Final = 64 << 20
"""Room beside a checkpoint: others write there too."""
KEPT_STATES: Final = 2
"""State files kept for joiners."""


@dataclass(frozen=True, slots=True)
class DiskNeeds:
    """Room for one peer.

    Attributes:
        least_bytes: for one checkpoint.
        corpus_bytes: of the total, for what is still to come of the corpus.
    """

    least_bytes: int
    total_bytes: int
    corpus_bytes: int


def checkpoint_bytes(parameters: int) -> int:
    """Upper bound: slow and fast weights, outer momentum and two moments, in fp32."""
    return 5 * FP32_BYTES * parameters


def disk_needs(
    parameters: int,
    checkpoint_keep: int,
    checkpoint_max_bytes: float | None = None,
    corpus_bytes: int = 0,
) -> DiskNeeds:
    """Room for a peer with so many (padded) parameters.

    All kept checkpoints together take `checkpoint_max_bytes`; the newest stays in any case.
    """
    each = checkpoint_bytes(parameters)
    kept = each * checkpoint_keep
    if checkpoint_max_bytes is not None:
        kept = max(each, min(kept, int(checkpoint_max_bytes)))
    states = KEPT_STATES * 2 * FP32_BYTES * parameters  # slow weights and outer momentum
    beside = corpus_bytes + SPARE_BYTES
    return DiskNeeds(each + beside, kept + each + states + beside, corpus_bytes)


DAEMON_BYTES: Final = 320 << 20
TRAINER_BYTES: Final = 360 << 20
"""Interpreter, libraries and p2pd, measured on a CPU; pages that are shared count once."""
CUDA_BYTES: Final = 2 << 30
"""Memory of the host for CUDA's libraries; a guess that fitted one GPU's host to a tenth."""
CUDA_CONTEXT_BYTES: Final = 800 << 20
"""Memory of a GPU that torch's allocator does not count: measured on an H100."""
TOKEN_BYTES: Final = 8
"""A token of a step, or of what is held out, in the memory of the trainer."""
CODE_SLOTS: Final = 3
"""Two of our own codes, and one of a partner's."""


@dataclass(frozen=True, slots=True)
class Needs:
    """A peer's share of what a run takes; bytes, unless the name says otherwise.

    Attributes:
        parameters: of the whole model.
        cpu_memory: without a GPU; it and `gpu_memory` are for `sequences` at a time.
        sequences: that go through the model at once: the spec's, or one where that is 'auto'.
        most_sequences: that 'auto' comes to, where there is room.
        sequence: each further one, without a GPU.
        gpu_sequence: the same of a GPU.
        host_memory: beside a GPU; the base of adapters is read there first.
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
    gpu_sequence: int
    host_memory: int
    disk: int
    tokens_per_peer: int
    average: int
    steps_per_average: int | None
    step_boundaries: int

    def model_memory(self, *, on_gpu: bool) -> int:
        """Memory of this machine, beyond what the programs take for any run."""
        if on_gpu:
            return self.host_memory - DAEMON_BYTES - CUDA_BYTES
        return self.cpu_memory - DAEMON_BYTES - TRAINER_BYTES

    def bytes_per_hour(self, steps_per_s: float, line_bytes_per_s: float) -> float:
        """Sent at this pace over such a line, which bounds it."""
        averages_per_s = steps_per_s / (self.steps_per_average or LEAST_INNER_STEPS)
        wanted = averages_per_s * self.average + steps_per_s * self.step_boundaries
        share = LINE_SHARE if self.steps_per_average is None else 1.0
        return 3600 * min(wanted, share * line_bytes_per_s)


def needs_of(
    spec: RunSpec,
    checkpoint_keep: int,
    checkpoint_max_bytes: float | None = None,
    *,
    recomputes: bool = False,
    stage: int | None = None,
) -> Needs:
    """For a peer of this run, which may compute layers again for their gradient.

    Where no stage is said, for the one that needs most of a device: the data peers', or the last.
    Raises InvalidRunSpec as `parameters_of`.
    """
    stages = {DATA_STAGE, spec.pipeline.stages - 1} if stage is None else {stage}
    told = (
        _needs_of(spec, checkpoint_keep, checkpoint_max_bytes, recomputes, each) for each in stages
    )
    return max(told, key=lambda needs: needs.gpu_memory)


def _needs_of(
    spec: RunSpec, checkpoint_keep: int, max_bytes: float | None, recomputes: bool, stage: int
) -> Needs:
    whole, (layers, part) = parameters_of(spec), _part_of(spec, stage)
    base = whole if spec.adapter is not None else 0
    gpu_base = base * (FP32_BYTES if spec.training.precision == "fp32" else BF16_BYTES)
    code = int(part * CODECS[spec.sync.codec].bytes_per_value)
    daemon = DAEMON_BYTES + part * FP32_BYTES * (2 if has_momentum(spec) else 1) + CODE_SLOTS * code
    state = state_bytes_of(spec, part, layers) + _beside_state(spec, stage, part)
    tokens = TOKEN_BYTES * spec.model.context_length
    tokens *= spec.training.batch_size + spec.data.validation_blocks
    least, most = _at_once(spec)
    (step, each), (gpu_step, gpu_each) = (
        _step_and_more(spec, least, recomputes, on_gpu, stage) for on_gpu in (False, True)
    )
    return Needs(
        whole,
        daemon + TRAINER_BYTES + state + FP32_BYTES * base + tokens + step,
        CUDA_CONTEXT_BYTES + state + gpu_base + gpu_step,
        least,
        most,
        each,
        gpu_each,
        daemon + CUDA_BYTES + tokens + FP32_BYTES * base,
        disk_needs(part, checkpoint_keep, max_bytes).total_bytes,
        spec.total_rounds * spec.sync.round_steps * spec.tokens_per_step,
        code,
        None if spec.sync.inner_steps == "auto" else spec.sync.round_steps,
        _boundary_bytes(spec),
    )


def has_momentum(spec: RunSpec) -> bool:
    if spec.sync.diloco is not None:
        return spec.sync.diloco.momentum > 0
    return spec.sync.alpha > 0


def _part_of(spec: RunSpec, stage: int) -> tuple[int, int]:
    """Layers and parameters that a peer trains; the data peers' stage has embedding and head."""
    held, decoder, stages = parameters_of(spec), _decoder(spec), spec.pipeline.stages
    if spec.frozen is not None:
        padded = spec.frozen.padded_parameters
        held = padded if spec.adapter is not None else max(held, padded)
    layers = decoder.num_hidden_layers
    own = len(stage_layers(max(layers, stages), stages, stage))
    if stage == DATA_STAGE:
        return own, max(1, held - (layers - own) * decoder.layer_parameters)
    return own, own * decoder.layer_parameters


def _beside_state(spec: RunSpec, stage: int, part: int) -> int:
    """A copy for averages; at a stage a step's sum; and gradients of a head of many tokens."""
    copies = 1 if spec.pipeline.stages == 1 else 2
    return copies * FP32_BYTES * part + (_head_gradients(spec) if stage == DATA_STAGE else 0)


def later_stage_memory(spec: RunSpec, stage: int, *, on_gpu: bool) -> int:
    """Memory that a stage's trainer takes later, beside graphs; it has weights and gradients."""
    layers, part = _part_of(spec, stage)
    moments = state_bytes_of(spec, part, layers) - 2 * FP32_BYTES * part
    backward = step_memory(spec, spec.microbatch_sequences, on_gpu=on_gpu, stage=stage, waiting=0)
    return moments + _beside_state(spec, stage, part) + backward


def _step_and_more(
    spec: RunSpec, sequences: int, recomputes: bool, on_gpu: bool, stage: int
) -> tuple[int, int]:
    """Memory of a step with so many sequences at once, and of each further one."""
    step, more = (
        step_memory(spec, each, recomputes=recomputes, on_gpu=on_gpu, stage=stage)
        for each in (sequences, sequences + 1)
    )
    return step, more - step


def step_memory(
    spec: RunSpec,
    sequences: int,
    *,
    recomputes: bool = False,
    on_gpu: bool = False,
    stage: int = DATA_STAGE,
    waiting: int = MIN_SLOTS,
) -> int:
    """Peak memory of what so many sequences at once keep, and of their gradients.

    The peak is at the loss, where all is kept and log-probabilities of all tokens have their
    gradients, or in the last layer, whose gradients are as much as it keeps. Of layers that are
    computed again the inputs are kept, and at a time one layer's whole.

    Args:
        waiting: microbatches that wait at a stage. It has the gradients of one more in all layers,
            for those of its weights are put off.
    """
    decoder, staged = _decoder(spec), spec.pipeline.stages > 1
    layers, _ = _part_of(spec, stage)
    tokens, each = sequences * spec.model.context_length, _kept_by_layer(spec, on_gpu=on_gpu)
    kept = layers * (FP32_BYTES * decoder.hidden_size if recomputes else each)
    kept, work = (waiting * kept, layers * each) if staged else (kept, (1 + recomputes) * each)
    logits = 0
    if stage == DATA_STAGE:
        logits = tokens * decoder.vocab_size
        logits = BYTES_PER_LOGIT * (min(logits, MOST_LOGITS) if _takes_few_logits(spec) else logits)
        kept += _BYTES_AT_END * decoder.hidden_size
    found = tokens * kept + max(tokens * work, logits)
    return found if on_gpu else int(FRAGMENTED * found)


def _kept_by_layer(spec: RunSpec, *, on_gpu: bool) -> int:
    """Bytes of each token that a layer keeps for its backward pass.

    Residuals and norms are fp32. A compiled layer computes norms and activations again. With a
    window that is no wider than a sequence each layer keeps a mask, and keys for each query's head.
    """
    decoder, tokens = _decoder(spec), spec.model.context_length
    in_bf16 = on_gpu and spec.training.precision != "fp32"
    compiled = in_bf16 and spec.training.compile is not False and spec.pipeline.stages == 1
    value = BF16_BYTES if in_bf16 else FP32_BYTES
    width = (12 if compiled else 26) if in_bf16 else 24
    width += 2 * FP32_BYTES * (decoder.layer_norms - 2)
    width += 2 * value * decoder.experts_per_token * decoder.is_mixture
    heads = 2 * value + 2 * FP32_BYTES * decoder.has_head_norms
    heads *= decoder.query_width + decoder.key_width
    inner = (3 if compiled else 4) * value * decoder.inner_width * decoder.experts_per_token
    has_window = decoder.window is not None and decoder.window <= tokens and not compiled
    heads += 2 * value * (decoder.query_width - decoder.key_width) * has_window
    masked = has_window or (spec.data.mask_documents and not compiled)
    return width * decoder.hidden_size + heads + inner + value * tokens * masked


def _takes_few_logits(spec: RunSpec) -> bool:
    """Whether a step never has whole logits."""
    return _decoder(spec).vocab_size > WHOLE_LOGITS_VOCABULARY


def _head_gradients(spec: RunSpec) -> int:
    """Gradients of a head that is trained on few logits at a time: their sum, and the newest."""
    if spec.adapter is not None or not _takes_few_logits(spec):
        return 0
    decoder = _decoder(spec)
    return 2 * FP32_BYTES * decoder.vocab_size * decoder.hidden_size


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
