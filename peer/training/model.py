"""The model, and its parameters as one flat vector.

Idea: all that averaging does with a model (snapshot, coding, the move of the slow weights) is one
operation on one vector. So each parameter is a view of a part of `theta_P`, and its gradient a view
of the same part of `gradient_P`. Autograd adds into gradients that exist, so the views hold.

Shapes: P padded parameters, B sequences, T tokens of a sequence, V vocabulary.
"""

import json
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from protocol.fragment.fragments import BLOCK_OF
from protocol.run.layout import Layout, LayoutEntry
from protocol.run.needs import WHOLE_LOGITS_VOCABULARY
from protocol.run.run_spec import ModelSection, RunSpec
from protocol.run.sections import known_keys

from .head_loss import head_loss
from .llama import Config, Llama, is_supported

if TYPE_CHECKING:  # to import it takes longer than torch (llama.py)
    from transformers import LlamaConfig


def model_config(spec: RunSpec, vocabulary_size: int) -> "LlamaConfig":
    """`config_of` as an object of transformers. Raises as `config_of` does."""
    from transformers import LlamaConfig

    config: LlamaConfig = LlamaConfig.from_dict(
        dict(config_of(spec, vocabulary_size)), attn_implementation="sdpa"
    )
    return config


def config_of(spec: RunSpec, vocabulary_size: int) -> Config:
    """The config.json of a run's model: the frozen one, else by checkpoint or sizes.

    Raises ValueError where a checkpoint is not of the Llama family, or has too small a vocabulary,
    and OSError where it cannot be read.
    """
    if spec.frozen is not None:
        frozen: dict[str, Any] = json.loads(spec.frozen.config)
        return frozen
    if spec.model.init_from is not None:
        return _of_checkpoint(spec.model.init_from, vocabulary_size)
    return _of_sizes(spec.model, vocabulary_size)


def _of_sizes(section: ModelSection, vocabulary_size: int) -> Config:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": section.hidden_size // section.num_heads,
        "hidden_act": "silu",
        "hidden_size": section.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": section.intermediate_size,
        "max_position_embeddings": section.context_length,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": section.num_heads,
        "num_hidden_layers": section.num_layers,
        "num_key_value_heads": section.num_kv_heads or section.num_heads,
        "pad_token_id": None,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": section.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": section.tie_embeddings,
        "use_cache": False,
        "vocab_size": vocabulary_size,
    }


def _of_checkpoint(source: str, vocabulary_size: int) -> Config:
    from transformers import AutoConfig, LlamaConfig

    config = AutoConfig.from_pretrained(source)
    if not isinstance(config, LlamaConfig):
        raise ValueError(
            f"{source} is a {config.model_type!r} model; only the Llama family is supported"
        )
    if config.vocab_size < vocabulary_size:
        raise ValueError(
            f"{source} has {config.vocab_size} embeddings, the tokenizer {vocabulary_size} tokens"
        )
    config.use_cache = False
    config.dtype = torch.float32
    found: dict[str, Any] = json.loads(known_keys(config.to_json_string(use_diff=True)))
    return found


def initial_module(spec: RunSpec, vocabulary_size: int) -> nn.Module:
    """The model as the founder starts it, on the CPU in fp32: from seed or checkpoint."""
    if spec.frozen is None and spec.model.init_from is not None:
        from transformers import LlamaForCausalLM

        config = model_config(spec, vocabulary_size)
        loaded: nn.Module = LlamaForCausalLM.from_pretrained(
            spec.model.init_from, config=config, dtype=torch.float32
        )
        return loaded
    torch.manual_seed(spec.seed)
    return empty_module(spec, vocabulary_size)


def empty_module(spec: RunSpec, vocabulary_size: int) -> nn.Module:
    """The model with any weights, for callers that get them from elsewhere."""
    config = config_of(spec, vocabulary_size)
    if is_supported(config):
        return Llama(config)
    from transformers import LlamaForCausalLM

    module: nn.Module = LlamaForCausalLM(model_config(spec, vocabulary_size)).float()
    return module


def model_shapes(spec: RunSpec, vocabulary_size: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of each parameter, tied ones once; nothing is allocated."""
    with torch.device("meta"):
        module = empty_module(spec, vocabulary_size)
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


class FlatModel:
    """A module whose parameters are views of one vector. Implements `fragments.FastWeights`."""

    def __init__(self, module: nn.Module, device: torch.device, *, compile: bool = False) -> None:
        module.to(device)
        parameters = dict(module.named_parameters())
        self.device = device
        self.layout = Layout.from_shapes({name: p.shape for name, p in parameters.items()})
        self.theta_P = torch.zeros(self.layout.padded_parameters, device=device)
        self.gradient_P = torch.zeros_like(self.theta_P)
        for entry in self.layout.entries:
            parameter, part = parameters[entry.name], slice(entry.offset, entry.offset + entry.size)
            view = self.theta_P[part].view(entry.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.grad = self.gradient_P[part].view(entry.shape)
        self._module = module
        self._head_VD = _head_apart(module)
        self._forward = torch.compile(module) if compile else module

    def loss(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy, nats per token; int64 [B, T+1] tokens to a scalar."""
        out_BTV = self._forward(input_ids=tokens_BT[:, :-1]).logits
        out_NV, targets_N = out_BTV.flatten(0, 1), tokens_BT[:, 1:].reshape(-1)
        if self._head_VD is not None:
            return head_loss(out_NV, self._head_VD, targets_N)
        return functional.cross_entropy(out_NV.float(), targets_N)

    def groups(
        self, *, without_block_matrices: bool = False
    ) -> list[tuple[list[nn.Parameter], bool]]:
        """Leaves of the vector, matrices and the rest, each with whether it decays.

        Neighbours of one kind are one leaf.
        """
        matrices, rest = list[nn.Parameter](), list[nn.Parameter]()

        def kind(entry: LayoutEntry) -> tuple[bool, bool]:
            return len(entry.shape) >= 2, without_block_matrices and _is_block_matrix(entry)

        for (decays, is_left_out), run in groupby(self.layout.entries, key=kind):
            entries = list(run)
            part = slice(entries[0].offset, entries[-1].offset + entries[-1].padded_size)
            if not is_left_out:
                (matrices if decays else rest).append(self._leaf(part))
        return [(leaves, decays) for leaves, decays in ((matrices, True), (rest, False)) if leaves]

    def block_matrices(self) -> list[nn.Parameter]:
        """The matrices of the transformer blocks, each as a leaf parameter of its own shape."""
        return [
            self._leaf(slice(entry.offset, entry.offset + entry.size), entry.shape)
            for entry in self.layout.entries
            if _is_block_matrix(entry)
        ]

    def _leaf(self, part: slice, shape: tuple[int, ...] = (-1,)) -> nn.Parameter:
        leaf = nn.Parameter(self.theta_P[part].view(shape))
        leaf.grad = self.gradient_P[part].view(shape)
        return leaf


def _head_apart(module: nn.Module) -> torch.Tensor | None:
    """Take a head of many tokens off, so that hidden values come out; None where it stays."""
    head = dict(module.named_children()).get("lm_head")
    if not isinstance(head, nn.Linear) or "bias" in dict(head.named_parameters()):
        return None
    if head.out_features <= WHOLE_LOGITS_VOCABULARY:
        return None
    config = getattr(module, "config", None)
    if getattr(config, "final_logit_softcapping", None):
        return None  # more is done to its logits than a product
    module.add_module("lm_head", nn.Identity())
    return head.weight


def _is_block_matrix(entry: LayoutEntry) -> bool:
    return len(entry.shape) == 2 and BLOCK_OF.search(entry.name) is not None
