"""One stage of the model: its layers, and at stage 0 the two ends, under the whole model's names.

With these names (`model.layers.3.mlp.up_proj.weight`) the layouts of all stages put together are
that of the whole. A stage's first weights follow from the run's seed and the stage's number, so no
machine ever needs the whole model.

Shapes: B sequences, T tokens, D width of the model, V vocabulary.
"""

import sys
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from peer.training.head_loss import head_loss, takes_few_logits
from protocol.run.layout import DATA_STAGE, stage_layers

SEEDS_PER_RUN: Final = 1 << 16
"""Bound of the stages: no stage has a seed of the run with the next seed."""


def _part_of_family(config: Any, name: str) -> Any:
    """The family's own class of this name, such as `Qwen3DecoderLayer` for `DecoderLayer`."""
    whole: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    prefix = whole.__name__.removesuffix("ForCausalLM")
    return getattr(sys.modules[whole.__module__], prefix + name)


class _StageTrunk(nn.Module):
    """The part that the whole model calls `model`."""

    def __init__(self, config: Any, layers: range, *, ends: bool) -> None:
        super().__init__()
        if ends:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            norm = _part_of_family(config, "RMSNorm")
            self.norm = norm(config.hidden_size, eps=config.rms_norm_eps)
        made = _part_of_family(config, "DecoderLayer")
        self.layers = nn.ModuleDict({str(layer): made(config, layer) for layer in layers})


class StageModule(nn.Module):
    """The layers of one stage, and the two ends at stage 0.

    Attributes:
        holds_data: whether the two ends are here.
    """

    def __init__(self, config: Any, stage: int, stages: int) -> None:
        super().__init__()
        self.config = config
        self.holds_data = stage == DATA_STAGE
        layers = stage_layers(config.num_hidden_layers, stages, stage)
        self.model = _StageTrunk(config, layers, ends=self.holds_data)
        if self.holds_data:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            if config.tie_word_embeddings:
                self.lm_head.weight = self.model.embed_tokens.weight
        self._rotary = _part_of_family(config, "RotaryEmbedding")(config)

    def embed(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """The first part of a path: tokens to [B, T, D], through this stage's layers."""
        return self.through(self.model.embed_tokens(tokens_BT))

    def through(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        positions_1T = torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device)[None]
        rotations = self._rotary(hidden_BTD, position_ids=positions_1T)
        for layer in self.model.layers.values():
            # Without a mask, attention is causal.
            hidden_BTD = layer(hidden_BTD, position_ids=positions_1T, position_embeddings=rotations)
        return hidden_BTD

    def loss(self, hidden_BTD: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """The end of a path: mean cross-entropy, nats per token."""
        hidden_ND, targets_N = self.model.norm(hidden_BTD).flatten(0, 1), targets_BT.reshape(-1)
        if takes_few_logits(self.lm_head.out_features):
            count = torch.tensor(len(targets_N))
            return head_loss(hidden_ND, self.lm_head.weight, targets_N, count)
        return functional.cross_entropy(self.lm_head(hidden_ND).float(), targets_N)


def initial_stage(config: Any, seed: int, stage: int, stages: int) -> StageModule:
    """A stage as its first holder starts it: fp32, on the CPU, from the run's seed.

    Matrices are normal with the configuration's deviation, norms are 1 and biases 0, as the whole
    model's.
    """
    module = StageModule(config, stage, stages).float()
    generator = torch.Generator().manual_seed(seed * SEEDS_PER_RUN + stage)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, config.initializer_range, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
    return module
