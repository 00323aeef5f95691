"""The data of bench/exchange_speed.py: a model's layout, each peer's values, their mean.

The values of a peer are noise of its index, REPEATED values long, again and again: quickly made,
also by who wants the mean of all. Nothing on the way compresses, so repeating helps nobody.
"""

from typing import Final

import torch

from protocol.run.layout import ALIGNMENT, Layout

REPEATED: Final = 1 << 20
SCALE: Final = 0.02
BLOCKS: Final = 12
OF_EMBEDDINGS: Final = 0.1
"""Share of the values that is in no transformer block."""


def model_layout(num_values: int) -> Layout:
    """A layout of about so many values, like a transformer's: embeddings, and blocks."""
    width = ALIGNMENT
    embeddings = int(OF_EMBEDDINGS * num_values) // width
    of_block = (num_values // width - embeddings) // BLOCKS
    attention = of_block // 3
    shapes = {"embeddings": (embeddings, width)}
    for block in range(BLOCKS):
        shapes[f"layers.{block}.attention"] = (attention, width)
        shapes[f"layers.{block}.mlp"] = (of_block - attention, width)
    return Layout.from_shapes(shapes)


def noise(num_values: int, index: int) -> torch.Tensor:
    """The values of one peer."""
    repeated = torch.randn(REPEATED, generator=torch.Generator().manual_seed(index)).mul_(SCALE)
    return repeated.repeat(-(-num_values // REPEATED))[:num_values]


def mean_of_all(num_values: int, num_peers: int) -> torch.Tensor:
    """The mean of the values of all peers."""
    total = torch.stack([noise(REPEATED, index) for index in range(num_peers)]).mean(dim=0)
    return total.repeat(-(-num_values // REPEATED))[:num_values]


def relative_error(found_P: torch.Tensor, true_P: torch.Tensor) -> float:
    """Root mean square of the difference over that of the true values."""
    return float((found_P - true_P).norm() / true_P.norm())
