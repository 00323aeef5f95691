"""Replicas of many runs that train at once, for long studies: on a GPU, or on a core.

Weights are [R, P], one row a replica; the small Llama of the run spec is computed for all rows by
batched products, and AdamW steps all rows. Arithmetic is that of peer/training (the same loss and
the same steps but for rounding; tests/bench/test_bench_hostile_long.py); it has one optimizer, one
kind of model and fp32 only.

Shapes: R replicas, P padded parameters, B sequences, T tokens, D width, H heads, V vocabulary.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.nn import functional

from peer.training.model import FlatModel, config_of, initial_module
from peer.training.optimizer import CLIP_EPSILON
from protocol.run.layout import ALIGNMENT
from protocol.run.run_spec import RunSpec

_LEVELS: Final = 127.0
_LOW_HALF: Final = 0xFFFF


def quantised(values: torch.Tensor) -> torch.Tensor:
    """What int8 codes of these values say (peer/codec/codecs.py); what is no number stays so."""
    blocks = values.reshape(-1, ALIGNMENT)
    scale = blocks.abs().amax(1, keepdim=True) / _LEVELS
    scale.view(torch.int32).add_(_LOW_HALF).bitwise_and_(~_LOW_HALF)  # up to bf16
    divisor = torch.where(scale == 0, 1.0, scale)
    return (torch.round(blocks / divisor) * scale).reshape(values.shape)


def lengths(values: torch.Tensor) -> torch.Tensor:
    """Root mean square of each row."""
    norms: torch.Tensor = torch.linalg.vector_norm(values, dim=-1)
    return norms / math.sqrt(values.shape[-1])


def of_length(values: torch.Tensor, length: float | torch.Tensor) -> torch.Tensor:
    """The vector in that direction whose root mean square is `length`."""
    return values * (length / lengths(values).clamp(min=1e-30))


class Stack:
    """R replicas, all with the first weights of the seed."""

    def __init__(self, spec: RunSpec, vocabulary: int, rows: int, device: torch.device) -> None:
        model = FlatModel(initial_module(spec, vocabulary), torch.device("cpu"))
        self.layout, self.device = model.layout, device
        self._config, self._section = config_of(spec, vocabulary), spec.optimizer
        self.theta_RP = model.theta_P.to(device).repeat(rows, 1)
        self._gradient_RP = torch.zeros_like(self.theta_RP)
        self._first_RP, self._second_RP = torch.zeros(2, *self.theta_RP.shape, device=device)
        self._decay_P = torch.zeros_like(self.theta_RP[0])
        for entry in self.layout.entries:
            if len(entry.shape) > 1:
                self._decay_P[entry.offset : entry.offset + entry.size] = 1.0
        self._steps = 0
        self._rows_at_once = 16 if device.type == "cpu" else 1024

    @torch.no_grad()
    def losses(self, weights_RP: torch.Tensor, tokens_RBT: torch.Tensor) -> torch.Tensor:
        """Losses of the rows, each on its own tokens, in nats per token."""
        tokens_RBT = tokens_RBT.to(self.device)
        parts = zip(
            weights_RP.split(self._rows_at_once),
            tokens_RBT.split(self._rows_at_once),
            strict=True,
        )
        return torch.cat([self._loss(self._leaves(rows), tokens) for rows, tokens in parts])

    def step(self, tokens_RBT: torch.Tensor, rate: float) -> None:
        """One inner step of all."""
        size = self._rows_at_once
        for start, tokens in enumerate(tokens_RBT.to(self.device).split(size)):
            rows = slice(start * size, start * size + len(tokens))
            leaves = {
                name: leaf.requires_grad_()
                for name, leaf in self._leaves(self.theta_RP[rows].detach()).items()
            }
            loss = self._loss(leaves, tokens).sum()
            found = torch.autograd.grad(loss, list(leaves.values()))
            for entry, value in zip(self.layout.entries, found, strict=True):
                part = slice(entry.offset, entry.offset + entry.size)
                self._gradient_RP[rows, part] = value.reshape(len(tokens), -1)
        self._adamw(rate)

    @torch.no_grad()
    def _adamw(self, rate: float) -> None:
        section, gradient_RP = self._section, self._gradient_RP
        first, second = section.betas
        self._steps += 1
        norm_R = torch.linalg.vector_norm(gradient_RP, dim=1, keepdim=True)
        gradient_RP.mul_((section.clip_norm / (norm_R + CLIP_EPSILON)).clamp(max=1.0))
        self._first_RP.lerp_(gradient_RP, 1 - first)
        self._second_RP.mul_(second).addcmul_(gradient_RP, gradient_RP, value=1 - second)
        self.theta_RP.mul_(1 - rate * section.weight_decay * self._decay_P)
        root_RP = (self._second_RP / (1 - second**self._steps)).sqrt_().add_(1e-8)
        self.theta_RP.addcdiv_(self._first_RP, root_RP, value=-rate / (1 - first**self._steps))

    def _leaves(self, weights_RP: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            entry.name: weights_RP[:, entry.offset : entry.offset + entry.size].view(
                len(weights_RP), *entry.shape
            )
            for entry in self.layout.entries
        }

    def _loss(self, leaves: Mapping[str, torch.Tensor], tokens_RBT: torch.Tensor) -> torch.Tensor:
        config: Mapping[str, Any] = self._config
        rows, batch, length = tokens_RBT.shape[0], tokens_RBT.shape[1], tokens_RBT.shape[2] - 1
        heads = config["num_attention_heads"]
        width = config["hidden_size"] // heads
        tied = [name for name in leaves if "embed_tokens" in name or "lm_head" in name]
        inputs = tokens_RBT[:, :, :-1].reshape(rows, -1, 1)
        embedding = leaves[next((n for n in tied if "embed_tokens" in n), tied[0])]
        x = embedding.gather(1, inputs.expand(-1, -1, embedding.shape[2]))
        rotation = self._rotation(length, width)

        def weight(layer: int, name: str) -> torch.Tensor:
            return leaves[f"model.layers.{layer}.{name}.weight"]

        def linear(values: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
            return torch.bmm(values, matrix.transpose(1, 2))

        def norm(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            mean = values.pow(2).mean(-1, keepdim=True)
            return scale[:, None] * (values * torch.rsqrt(mean + config["rms_norm_eps"]))

        def split(values: torch.Tensor) -> torch.Tensor:
            return values.reshape(rows * batch, length, heads, width).transpose(1, 2)

        for layer in range(config["num_hidden_layers"]):
            normed = norm(x, weight(layer, "input_layernorm"))
            query, key, value = (
                split(linear(normed, weight(layer, f"self_attn.{name}_proj"))) for name in "qkv"
            )
            seen = functional.scaled_dot_product_attention(
                _rotated(query, *rotation), _rotated(key, *rotation), value, is_causal=True
            )
            seen = seen.transpose(1, 2).reshape(rows, batch * length, -1)
            x = x + linear(seen, weight(layer, "self_attn.o_proj"))
            normed = norm(x, weight(layer, "post_attention_layernorm"))
            gate = functional.silu(linear(normed, weight(layer, "mlp.gate_proj")))
            gated = gate * linear(normed, weight(layer, "mlp.up_proj"))
            x = x + linear(gated, weight(layer, "mlp.down_proj"))
        head = leaves[next((n for n in tied if "lm_head" in n), tied[0])]
        logits = linear(norm(x, leaves["model.norm.weight"]), head)
        targets = tokens_RBT[:, :, 1:].reshape(-1)
        nats = functional.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
        return nats.view(rows, -1).mean(1)

    def _rotation(self, length: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        base = self._config["rope_parameters"]["rope_theta"]
        places = torch.arange(0, width, 2, dtype=torch.float, device=self.device) / width
        positions = torch.arange(length, device=self.device)[:, None].float()
        angles = positions * (1.0 / base**places)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = heads.shape[-1] // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return heads * cos + turned * sin
