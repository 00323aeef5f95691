"""How large a run's model is: parameters, training state and activations, from the run spec alone.

Training state is counted in fp32: weights, gradient and AdamW's two moments of each parameter, or
Muon's one of those in the matrices of the blocks.
"""

from typing import Final

from protocol.errors import InvalidRunSpec

from .run_spec import ModelSection, RunSpec

BYTE_VOCABULARY: Final = 256
USUAL_VOCABULARY: Final = 50_257
"""GPT-2's, where the spec names a tokenizer that is not read here."""
ADAMW_STATE_BYTES: Final = 16
MUON_STATE_BYTES: Final = 12
"""Training state of a parameter that one or the other trains."""
_BYTES_PER_HIDDEN_VALUE: Final = 24 * 4
"""Activations kept per layer, token and hidden value in fp32, roughly."""
_BYTES_PER_LOGIT: Final = 12


def parameters_of(spec: RunSpec) -> int:
    """Parameters of the whole model: the frozen count, else by its sizes.

    Raises:
        InvalidRunSpec: the sizes are a checkpoint's, which is not read here.
    """
    if spec.frozen is not None:
        return spec.frozen.parameters
    if spec.model.init_from is not None:
        raise InvalidRunSpec(
            "model.init_from names a checkpoint, which is not read here; write the checkpoint's"
            " sizes into [model] of a copy of the run spec, and plan with that"
        )
    model = spec.model
    embeddings = vocabulary_of(spec) * model.hidden_size * (1 if model.tie_embeddings else 2)
    return embeddings + model.num_layers * _layer_parameters(model) + model.hidden_size


def least_parameters_of(spec: RunSpec) -> int:
    """Parameters that each peer holds at the least; 0 where nothing is known of that here.

    Most stages have layers alone, and a tokenizer that is not read here may be a small one.
    """
    model, stages = spec.model, spec.pipeline.stages
    knows_vocabulary = model.init_from is None and spec.data.tokenizer == "bytes"
    if stages == 1 and (spec.frozen is not None or knows_vocabulary):
        return parameters_of(spec)
    if model.init_from is not None:
        return 0
    return model.num_layers // stages * _layer_parameters(model)


def vocabulary_of(spec: RunSpec) -> int:
    """Tokens that the model knows, as far as the spec says."""
    return BYTE_VOCABULARY if spec.data.tokenizer == "bytes" else USUAL_VOCABULARY


def state_bytes_of(spec: RunSpec, parameters: int) -> int:
    """Training state of the whole model."""
    if spec.optimizer.name == "adamw" or spec.model.init_from is not None:
        # Of a checkpoint the sizes are not known here, and AdamW's bytes are the most.
        return parameters * ADAMW_STATE_BYTES
    matrices = spec.model.num_layers * _layer_matrices(spec.model)
    return matrices * MUON_STATE_BYTES + (parameters - matrices) * ADAMW_STATE_BYTES


def sequence_bytes(context_length: int, hidden_size: int, num_layers: int, vocabulary: int) -> int:
    """Rough memory of one sequence's activations and logits, in fp32."""
    values = hidden_size * num_layers * _BYTES_PER_HIDDEN_VALUE
    return context_length * (values + vocabulary * _BYTES_PER_LOGIT)


def flops_per_token(spec: RunSpec) -> float:
    """Operations of training on one token, forward and backward.

    Those of the model alone (PaLM, arXiv 2204.02311, appendix B): 6 for each weight of a matrix
    product, 12 L d T for attention.
    """
    model = spec.model
    weights = model.num_layers * _layer_matrices(model) + vocabulary_of(spec) * model.hidden_size
    attention = 12 * model.num_layers * model.hidden_size * model.context_length
    return float(6 * weights + attention)


def _layer_parameters(model: ModelSection) -> int:
    return _layer_matrices(model) + 2 * model.hidden_size  # two norms


def _layer_matrices(model: ModelSection) -> int:
    hidden = model.hidden_size
    kv_size = hidden // model.num_heads * (model.num_kv_heads or model.num_heads)
    attention = 2 * hidden * hidden + 2 * hidden * kv_size
    return attention + 3 * hidden * model.intermediate_size
