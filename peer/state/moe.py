"""Experts of one size as one mixture: a Mixtral whose blocks hold what each of them has learned.

A block of Llama is one of Mixtral with a single expert. So each expert's feed-forward matrices
become an expert of the block, and all else is the mean of theirs. Each block's gate follows in
closed form from texts of the domains: with the inputs X of its feed-forward part, and Y whose
domain each token is of (one column each),

    W = Y' X (X' X + ridge * n * mean(X^2) * I)^-1,  each row scaled to a length of 1 / TEMPERATURE

Experts that were trained apart seldom fit into one mixture without further training: means of
weights that lie far from each other are worse than each of them. So the result is measured.

Sources: Sukhbaatar et al., "Branch-Train-MiX" (arXiv 2403.07816) for the merge; DUME (arXiv
2603.29765) for the gate.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from protocol.errors import LocoError

from .ensemble_reader import ExpertEnsemble, true_log_probs
from .export_folder import MARKER, WEIGHTS_FILE

RIDGE: Final = 0.01
TEMPERATURE: Final = 0.1
"""The smaller, the surer a gate is of its best experts."""
ENSEMBLE: Final = "ensemble"
MIXTURE: Final = "mixture"
_FEED_FORWARD: Final = {"mlp.gate_proj": "w1", "mlp.up_proj": "w3", "mlp.down_proj": "w2"}
"""Names of a block's matrices: Llama's, and those of a Mixtral's expert on the disk."""
_AGREEING: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)


class NoMixture(LocoError):
    """These experts make no Mixtral; the message says why."""


@dataclass(frozen=True, slots=True)
class Domain:
    """Blocks of an expert's domain: some for the gates, others to measure with; [B, T+1]."""

    name: str
    for_gates_BT: npt.NDArray[np.int64]
    measured_BT: npt.NDArray[np.int64]


def merged(ensemble: ExpertEnsemble, domains: Sequence[Domain], folder: Path) -> Any:
    """Write the mixture into a new folder, and load it.

    Raises NoMixture: the experts differ in sizes, or have parts that Mixtral has not.
    """
    configs = [model.config for model in ensemble.models]
    _check(ensemble.names, configs)
    top = min(ensemble.rules["top"], len(ensemble.names))
    folder.mkdir(parents=True)
    _mixtral_config(configs[0], len(configs), top).save_pretrained(folder)
    tensors = _merged_tensors([model.state_dict() for model in ensemble.models], configs[0])
    ensemble.tokenizer.save_pretrained(folder)
    _save(tensors, folder)
    mixture: Any = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    tensors |= _gates(mixture, domains)
    _save(tensors, folder)
    origin = {"experts": ensemble.names, "stages": 1}
    (folder / MARKER).write_text(json.dumps(origin, indent=2) + "\n")
    return AutoModelForCausalLM.from_pretrained(folder).float().eval()


def compared(
    ensemble: ExpertEnsemble, mixture: Any, domains: Sequence[Domain]
) -> dict[str, list[float]]:
    """Nats per token on each domain: of each expert, the ensemble and the mixture."""
    rows: dict[str, list[float]] = {name: [] for name in (*ensemble.names, ENSEMBLE, MIXTURE)}
    for domain in domains:
        blocks_BT = torch.from_numpy(domain.measured_BT)
        each = torch.stack([true_log_probs(model, blocks_BT) for model in ensemble.models])
        together = torch.stack([ensemble.together(block) for block in each.unbind(1)])
        for row, said in zip(
            rows.values(), (*each, together, true_log_probs(mixture, blocks_BT)), strict=True
        ):
            row.append(-float(said.mean()))
    return rows


def _check(names: Sequence[str], configs: Sequence[Any]) -> None:
    first, *others = configs
    if len(configs) < 2:
        raise NoMixture(f"a mixture needs two experts, and {names[0]} is the only one that answers")
    for name, config in zip(names, configs, strict=True):
        if not isinstance(config, LlamaConfig):
            raise NoMixture(f"{name} is a {config.model_type!r} model, and only Llama's fit")
        if config.attention_bias or config.mlp_bias:
            raise NoMixture(f"{name} has biases, which Mixtral has not")
    for name, config in zip(names[1:], others, strict=True):
        for key in _AGREEING:
            here, there = getattr(first, key), getattr(config, key)
            if here != there:
                raise NoMixture(
                    f"{names[0]} has {key} = {here} and {name} {there}: a mixture needs experts of"
                    " one size"
                )


def _mixtral_config(config: LlamaConfig, experts: int, top: int) -> MixtralConfig:
    given = config.to_dict()
    shared = (*_AGREEING, "hidden_act", "max_position_embeddings", "rms_norm_eps")
    # The base is a key of its own before transformers 5, and among others since.
    rope = [key for key in ("rope_theta", "rope_parameters") if given.get(key) is not None]
    kept = {key: given[key] for key in (*shared, *rope, "bos_token_id", "eos_token_id")}
    made = MixtralConfig(
        **kept, num_local_experts=experts, num_experts_per_tok=top, sliding_window=None
    )
    made.architectures, made.dtype = ["MixtralForCausalLM"], torch.float32
    return made


def _merged_tensors(
    states: Sequence[dict[str, torch.Tensor]], config: LlamaConfig
) -> dict[str, torch.Tensor]:
    """The mixture by the names that it has on the disk, in every version of transformers."""
    merged_, experts = dict[str, torch.Tensor](), len(states)
    for name in states[0]:
        block, _, matrix = name.removesuffix(".weight").partition(".mlp.")
        if matrix:
            short = _FEED_FORWARD[f"mlp.{matrix}"]
            for number, state in enumerate(states):
                at = f"{block}.block_sparse_moe.experts.{number}.{short}.weight"
                merged_[at] = state[name].clone()
        elif not (name == "lm_head.weight" and config.tie_word_embeddings):
            merged_[name] = torch.stack([state[name] for state in states]).mean(0)
    for layer in range(config.num_hidden_layers):
        merged_[_gate(layer)] = torch.zeros(experts, config.hidden_size)
    return merged_


def _gate(layer: int) -> str:
    return f"model.layers.{layer}.block_sparse_moe.gate.weight"


def _save(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


# --- gates ----------------------------------------------------------------------------------------
@torch.no_grad()
def _gates(mixture: Any, domains: Sequence[Domain]) -> dict[str, torch.Tensor]:
    """The gate of each block, which sends tokens of a domain to its expert.

    Inputs are those in the mixture without gates, where all experts are alike to it.
    """
    width, count = mixture.config.hidden_size, len(domains)
    squares = [torch.zeros(width, width) for _ in mixture.model.layers]
    sums = [torch.zeros(count, width) for _ in mixture.model.layers]
    tokens = 0
    with _inputs_of_experts(mixture) as inputs:
        for number, domain in enumerate(domains):
            for block in torch.from_numpy(domain.for_gates_BT[:, :-1]).split(1):
                inputs.clear()
                mixture(block, use_cache=False)
                tokens += block.numel()
                for layer, seen in inputs.items():
                    squares[layer] += seen.T @ seen
                    sums[layer][number] += seen.sum(0)
    gates = {}
    for layer, (square, total) in enumerate(zip(squares, sums, strict=True)):
        mean_square = square.trace() / (tokens * width)
        ridge = RIDGE * tokens * mean_square * torch.eye(width)
        gate = torch.linalg.solve(square + ridge, total.T).T
        gates[_gate(layer)] = (gate / gate.norm(dim=1, keepdim=True) / TEMPERATURE).contiguous()
    return gates


@contextmanager
def _inputs_of_experts(mixture: Any) -> Iterator[dict[int, torch.Tensor]]:
    """Inputs of each block's experts, by layer, while texts run through the model."""
    seen = dict[int, torch.Tensor]()

    def note(layer: int) -> Any:
        def hook(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            seen[layer] = given[0].reshape(-1, given[0].shape[-1])

        return hook

    hooks = [
        getattr(layer, "mlp", None) or layer.block_sparse_moe for layer in mixture.model.layers
    ]
    handles = [part.register_forward_pre_hook(note(n)) for n, part in enumerate(hooks)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
