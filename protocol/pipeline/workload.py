"""What a run spec asks of machines: parameters, tokens, and bytes between stages and replicas.

A microbatch is some sequences that go through the model together. Between two stages travels one
value for each token and hidden unit. Training state is counted in fp32: weights, gradient and
AdamW's two moments of each parameter, or Muon's one of those in the matrices of the blocks;
activations are what `slots` speaks of.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, get_args

from protocol.errors import InvalidRunSpec
from protocol.run.pipeline_section import BoundaryCodec
from protocol.run.run_spec import ModelSection, RunSpec

BITS: Final[Mapping[str, int]] = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4, "e3m0": 4}
"""Bits of a value in each codec, scales left out."""
BOUNDARY_CODECS: Final[tuple[str, ...]] = get_args(BoundaryCodec)
BYTE_VOCABULARY: Final = 256
USUAL_VOCABULARY: Final = 50_257
"""GPT-2's, where the spec names a tokenizer that is not read here."""
ADAMW_STATE_BYTES: Final = 16
MUON_STATE_BYTES: Final = 12
"""Training state of a parameter that one or the other trains."""
OF_ONE_MICROBATCH: Final = 4
"""Bytes of a parameter's gradient of one microbatch, which stages hold too (decision 0042)."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A run, as far as its time and memory depend on it.

    Attributes:
        sequences: of one microbatch.
        batch_microbatches: of one inner step of a replica.
        vector_bytes: the whole model, as replicas send it.
        state_bytes: training state of the whole model.
    """

    parameters: int
    num_layers: int
    hidden_size: int
    context_length: int
    sequences: int
    batch_microbatches: int
    inner_steps: int
    vector_bytes: int
    state_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch."""
        return self.sequences * self.context_length

    def boundary_bytes(self, codec: str) -> int:
        """What travels between two stages for one microbatch."""
        return self.tokens * self.hidden_size * BITS[codec] // 8


def workload_of(spec: RunSpec, sequences: int | None = None) -> Workload:
    """Read a run spec; `sequences` of a microbatch stand in it, unless they are given here.

    Raises:
        InvalidRunSpec: its model's sizes are not in it.
    """
    if spec.model.init_from is not None and spec.frozen is None:
        raise InvalidRunSpec(
            "model.init_from names a checkpoint, which is not read here; write the checkpoint's"
            " sizes into [model] of a copy of the run spec, and plan with that"
        )
    each = sequences or spec.microbatch_sequences
    each = min(each, spec.training.batch_size)
    parameters = spec.frozen.parameters if spec.frozen else _parameters(spec)
    return Workload(
        parameters,
        spec.model.num_layers,
        spec.model.hidden_size,
        spec.model.context_length,
        each,
        max(1, spec.training.batch_size // each),
        spec.sync.round_steps,
        parameters * BITS[spec.sync.codec] // 8,
        _state_bytes(spec, parameters),
    )


def _state_bytes(spec: RunSpec, parameters: int) -> int:
    if spec.optimizer.name == "adamw" or spec.model.init_from is not None:
        # Of a checkpoint the sizes are not known here, and AdamW's bytes are the most.
        return parameters * ADAMW_STATE_BYTES
    matrices = spec.model.num_layers * _layer_matrices(spec.model)
    return matrices * MUON_STATE_BYTES + (parameters - matrices) * ADAMW_STATE_BYTES


def _parameters(spec: RunSpec) -> int:
    model = spec.model
    vocabulary = BYTE_VOCABULARY if spec.data.tokenizer == "bytes" else USUAL_VOCABULARY
    embeddings = vocabulary * model.hidden_size * (1 if model.tie_embeddings else 2)
    layer = _layer_matrices(model) + 2 * model.hidden_size  # two norms
    return embeddings + model.num_layers * layer + model.hidden_size


def _layer_matrices(model: ModelSection) -> int:
    hidden = model.hidden_size
    kv_size = hidden // model.num_heads * (model.num_kv_heads or model.num_heads)
    attention = 2 * hidden * hidden + 2 * hidden * kv_size
    return attention + 3 * hidden * model.intermediate_size
