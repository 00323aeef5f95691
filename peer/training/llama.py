"""A decoder of the Llama family in plain torch, bit for bit that of transformers.

A trainer needs one forward pass of one family, and to import transformers takes longer than all
else that it imports, torch included. Only reading a checkpoint, and configurations that are not
here, need it. Names and first values of parameters, and the signature of the forward, are those of
transformers (tests/numerics/test_llama.py).

Shapes: B sequences, T tokens, D width of the model, H heads, d width of a head, V vocabulary.

Sources: Llama (arXiv 2302.13971), with norms by the root mean square (arXiv 1910.07467), rotary
positions (arXiv 2104.09864), SwiGLU (arXiv 2002.05202), and heads in groups that share keys and
values (arXiv 2305.13245).
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn import functional

Config = Mapping[str, Any]
"""A config.json of the family, with the keys of transformers."""
_SUPPORTED: Final = {
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "model_type": ("llama",),
    "pad_token_id": (None,),
    "rope_scaling": (None,),
}
"""Values of the keys that are no sizes; each may be left out."""
_SIZES: Final = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
"""Keys that transformers has defaults for, and we have none."""


def is_supported(config: Config) -> bool:
    """Whether `Llama` can be this model."""
    rope = config.get("rope_parameters") or {}
    return (
        all(key in config for key in _SIZES)
        and all(config.get(key, values[0]) in values for key, values in _SUPPORTED.items())
        and config.get("initializer_range") != 0  # transformers takes its default then
        and rope.keys() <= {"rope_theta", "rope_type"}
        and (not rope or "rope_theta" in rope)
        and rope.get("rope_type", "default") == "default"
    )


class Output(NamedTuple):
    """[B, T, V]."""

    logits: torch.Tensor


class Llama(nn.Module):
    """The whole model, with its first weights from torch's generator, in fp32."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = _Trunk(config)
        deviation = config.get("initializer_range", 0.02)
        _draw(self.model, deviation)
        width, vocabulary_size = config["hidden_size"], config["vocab_size"]
        self.lm_head = nn.Linear(width, vocabulary_size, bias=False)
        _draw(self.lm_head, deviation)
        if config.get("tie_word_embeddings", False):
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> Output:
        """Positions that begin anew begin a document: attention does not cross its beginning."""
        return Output(self.lm_head(self.model(input_ids, position_ids)))


class _Trunk(nn.Module):
    inverse_d: torch.Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config.get("rms_norm_eps", 1e-6)
        layers = config["num_hidden_layers"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], width)
        self.layers = nn.ModuleList(_Layer(config, eps) for _ in range(layers))
        self.norm = _Norm(width, eps)
        rope = config.get("rope_parameters") or config
        base, head_width = rope.get("rope_theta", 10_000.0), _head_width(config)
        places = torch.arange(0, head_width, 2, dtype=torch.float) / head_width
        self.register_buffer("inverse_d", 1.0 / base**places, persistent=False)

    def forward(self, tokens_BT: torch.Tensor, positions_BT: torch.Tensor | None) -> torch.Tensor:
        """[B, T, D]."""
        hidden_BTD = self.embed_tokens(tokens_BT)
        if positions_BT is None:
            seen = None
            positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[:, None]
        else:
            seen, positions = _own_documents(positions_BT), positions_BT[:, None, :, None]
        angles = positions.float() * self.inverse_d
        angles = torch.cat((angles, angles), dim=-1)
        rotation = angles.cos(), angles.sin()
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD, rotation, seen)
        out: torch.Tensor = self.norm(hidden_BTD)
        return out


class _Layer(nn.Module):
    def __init__(self, config: Config, eps: float) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config["hidden_size"], config["intermediate_size"])
        self.input_layernorm = _Norm(config["hidden_size"], eps)
        self.post_attention_layernorm = _Norm(config["hidden_size"], eps)

    def forward(
        self,
        hidden_BTD: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        seen: torch.Tensor | None,
    ) -> torch.Tensor:
        hidden_BTD = hidden_BTD + self.self_attn(self.input_layernorm(hidden_BTD), rotation, seen)
        out: torch.Tensor = hidden_BTD + self.mlp(self.post_attention_layernorm(hidden_BTD))
        return out


class _Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        heads, width = config["num_attention_heads"], config["hidden_size"]
        kv_heads = config.get("num_key_value_heads") or heads
        self._head_width = _head_width(config)
        self._shares = kv_heads < heads
        self.q_proj = nn.Linear(width, heads * self._head_width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self._head_width, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self._head_width, bias=False)
        self.o_proj = nn.Linear(heads * self._head_width, width, bias=False)

    def forward(
        self,
        hidden_BTD: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        seen: torch.Tensor | None,
    ) -> torch.Tensor:
        heads_BTHd = (*hidden_BTD.shape[:2], -1, self._head_width)
        q, k, v = (
            project(hidden_BTD).view(heads_BTHd).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(
            _rotated(q, *rotation),
            _rotated(k, *rotation),
            v,
            attn_mask=seen,
            is_causal=seen is None,
            scale=self._head_width**-0.5,
            enable_gqa=self._shares,
        )
        mixed_BTD = mixed.transpose(1, 2).reshape(*hidden_BTD.shape[:2], -1)
        out: torch.Tensor = self.o_proj(mixed_BTD)
        return out


class _Mlp(nn.Module):
    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner_width, bias=False)
        self.up_proj = nn.Linear(width, inner_width, bias=False)
        self.down_proj = nn.Linear(inner_width, width, bias=False)

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        gated = functional.silu(self.gate_proj(hidden_BTD)) * self.up_proj(hidden_BTD)
        out: torch.Tensor = self.down_proj(gated)
        return out


class _Norm(nn.Module):
    """Divides by the root mean square, in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        exact = hidden.to(torch.float32)
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self._eps)
        return self.weight * exact.to(hidden.dtype)


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Queries or keys [B, H, T, d], turned by their places [T, d], or [B, 1, T, d]."""
    half = heads.shape[-1] // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return (heads * cos) + (turned * sin)


def _own_documents(positions_BT: torch.Tensor) -> torch.Tensor:
    """The tokens that each sees, [B, 1, T, T]: those before it in its document, and itself."""
    documents_BT = (positions_BT == 0).cumsum(dim=1)
    same = documents_BT[:, :, None] == documents_BT[:, None, :]
    return same.tril()[:, None]


def _head_width(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _draw(module: nn.Module, deviation: float) -> None:
    """First weights of matrices, in the order of their names."""
    for each in module.modules():
        if isinstance(each, nn.Linear | nn.Embedding):
            nn.init.normal_(each.weight, 0.0, deviation)
