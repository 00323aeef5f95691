"""What a run spec asks of machines: parameters, tokens, and bytes between stages and replicas.

A microbatch is some sequences that go through the model together. Between two stages travels one
value for each token and hidden unit. Training state is counted in fp32: weights, gradient and
AdamW's two moments of each parameter, or Muon's one of those in the matrices of the blocks;
activations are what `slots` speaks of.
"""

from dataclasses import dataclass
from typing import Final, get_args

from protocol.run.codecs import CODECS
from protocol.run.needs import parameters_of, state_bytes_of
from protocol.run.run_spec import RunSpec
from protocol.run.sections import BOUNDARY_BITS, BoundaryCodec

BOUNDARY_CODECS: Final[tuple[str, ...]] = get_args(BoundaryCodec)
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
        return self.tokens * self.hidden_size * BOUNDARY_BITS[codec] // 8


def workload_of(spec: RunSpec, sequences: int | None = None) -> Workload:
    """Read a run spec; `sequences` of a microbatch stand in it, unless they are given here.

    Raises:
        InvalidRunSpec: its model's sizes are not in it.
    """
    each = sequences or spec.microbatch_sequences
    each = min(each, spec.training.batch_size)
    parameters = parameters_of(spec)
    return Workload(
        parameters,
        spec.model.num_layers,
        spec.model.hidden_size,
        spec.model.context_length,
        each,
        max(1, spec.training.batch_size // each),
        spec.sync.round_steps,
        int(parameters * CODECS[spec.sync.codec].bytes_per_value),
        state_bytes_of(spec, parameters),
    )
