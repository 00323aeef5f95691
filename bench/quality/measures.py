"""The measures of a run.

replica deviation    sqrt( sum_i |p_i - mean|^2 / (P N) ), as NoLoCo's code has it
perplexity           exp of the mean loss of the replicas, each with its own slow weights
"""

import math
from collections.abc import Sequence

import numpy as np
import torch


def replica_deviation(vectors: Sequence[torch.Tensor], parameters: int) -> float:
    """How far replicas lie from their mean, per parameter; padding (zeros) counts for nothing."""
    mean_P = vectors[0].clone()
    for vector_P in vectors[1:]:
        mean_P.add_(vector_P)
    mean_P.div_(len(vectors))
    squares, apart_P = 0.0, torch.empty_like(mean_P)
    for vector_P in vectors:
        torch.sub(vector_P, mean_P, out=apart_P)
        squares += float(torch.dot(apart_P, apart_P))
    return math.sqrt(squares / (parameters * len(vectors)))


def pearson(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Correlation; None where there are fewer than three points, or nothing varies."""
    if len(x) < 3 or np.std(x) == 0 or np.std(y) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return math.fsum(values) / len(values)


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean; None of a single value."""
    if len(values) < 2:
        return None
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))
