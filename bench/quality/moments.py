"""Averages of the first moments of inner optimizers, in int8: AdamW's and Muon's momentum."""

from collections.abc import Sequence
from typing import Final

import torch
from torch.nn import functional

from peer.codec import BLOCK
from peer.training.optimizer import FlatOptimizer

from .exchange import Groups, exchange_of

FIRST: Final = ("exp_avg.", "momentum_buffer.")
"""How the names of first moments begin; second moments stay where they are."""


def average_first_moments(optimizers: Sequence[FlatOptimizer], groups: Groups) -> float:
    """Give all members of a group the mean of their first moments. Returns the bytes sent."""
    parts = [_first_moments(optimizer) for optimizer in optimizers]
    shared = exchange_of("int8").share([_joined(each) for each in parts], groups)
    for group in groups:
        mean = torch.stack([shared.decoded[index] for index in group]).mean(0)
        for index in group:
            _fill(parts[index], mean)
    return shared.sent_bytes


def _first_moments(optimizer: FlatOptimizer) -> list[torch.Tensor]:
    return [each for name, each in optimizer.moments().items() if name.startswith(FIRST)]


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    whole = torch.cat(list(parts))
    return functional.pad(whole, (0, -len(whole) % BLOCK))


def _fill(parts: Sequence[torch.Tensor], values: torch.Tensor) -> None:
    offset = 0
    for part in parts:
        part.copy_(values[offset : offset + len(part)])
        offset += len(part)
