"""Making the weights of a stage that nobody holds any longer from its neighbours'.

Idea (CheckFree, arXiv 2506.15461, section 4): adjacent layers do similar work, so a lost stage i
begins best as the mean of the stages before and after it, weighted by how much each still learns:

    W_i = (w_{i-1} W_{i-1} + w_{i+1} W_{i+1}) / (w_{i-1} + w_{i+1})

w_j is the squared length of stage j's last gradient *before* clipping, which makes gradients
equally long and the mean uniform (as in the paper's own code).

Rules
  1. Layers correspond by their places in their stages: of two stages with as many layers, first to
     first and last to last; of others, in proportion.
  2. The first and the last stage have one neighbour, and copy it.
  3. Embedding, last norm and head stand in stage 0 alone: they keep the model's first values.
  4. Optimizer state begins at zero. (The paper trains a rebuilt stage with a 1.1 times higher rate;
     here it has the rate of all.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protocol.content.samples import Float32Vector
from protocol.run.layout import Layout, LayoutEntry, layer_of


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A stage next to the lost one; its last gradient's norm is that before clipping."""

    layout: Layout
    slow_P: Float32Vector
    gradient_norm: float


def rebuild(layout: Layout, slow_P: Float32Vector, neighbours: Sequence[Neighbour]) -> list[str]:
    """Fill the layers of a lost stage, which has the model's first values, in place.

    Returns the parameters that have kept their first values (rule 3), sorted.
    """
    weights = _weights([each.gradient_norm for each in neighbours])
    kept = []
    for entry in layout.entries:
        if layer_of(entry.name) is None:
            kept.append(entry.name)
            continue
        mean = np.zeros(entry.size, np.float32)
        for neighbour, weight in zip(neighbours, weights, strict=True):
            mean += np.float32(weight) * _counterpart(layout, entry, neighbour)
        slow_P[entry.offset : entry.offset + entry.size] = mean
    return kept


def _weights(norms: Sequence[float]) -> list[float]:
    """The neighbours' weights; 1 in sum, and equal while all norms are 0."""
    squares = [norm * norm for norm in norms]
    total = sum(squares)
    return [square / total if total else 1 / len(norms) for square in squares]


def _counterpart(layout: Layout, entry: LayoutEntry, neighbour: Neighbour) -> Float32Vector:
    """The neighbour's values that correspond to this entry (rule 1)."""
    ours, theirs = _layers(layout), _layers(neighbour.layout)
    layer = layer_of(entry.name)
    assert layer is not None, "only layers have counterparts"
    place = ours.index(layer) * len(theirs) // len(ours)
    name = entry.name.replace(f".{layer}.", f".{theirs[place]}.", 1)
    (found,) = (each for each in neighbour.layout.entries if each.name == name)
    return neighbour.slow_P[found.offset : found.offset + found.size]


def _layers(layout: Layout) -> list[int]:
    numbers = {layer_of(entry.name) for entry in layout.entries}
    return sorted(number for number in numbers if number is not None)
