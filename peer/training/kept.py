"""What a trainer keeps in a checkpoint: its fast weights and the optimizer's moments, in one file.

Training stands still while it is written, so nothing is waited for but the copy: digest and disk
are the daemon's business (peer/state/checkpoints.py).

    fast                        theta, [P]; none where the trainer did not keep it in time, and
                                nothing else then: the slow weights are gone on from
    exp_avg.N, exp_avg_sq.N     AdamW's moments of the optimizer's N-th vector; none before its
                                first step
    momentum_buffer.N           Muon's, where the N-th is one of its matrices
    own_steps                   since the optimizer was young: for the schedule's warm-up
    moment_steps                steps that the moments have seen
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from .optimizer import FlatOptimizer
from .tensor_file import TensorFile, write_tensors

FAST: Final = "fast"
OWN_STEPS: Final = "own_steps"
MOMENT_STEPS: Final = "moment_steps"


def keep_weights(
    path: Path,
    theta_P: torch.Tensor,
    optimizer: FlatOptimizer | None,
    own_steps: int,
    on_tile: Callable[[], None] = lambda: None,
) -> None:
    """Write fast weights and moments. Raises OSError; what is at `path` is then worth nothing.

    Args:
        optimizer: None where there are no moments.
        own_steps: for the schedule's warm-up (round_machine.py).
        on_tile: called whenever some more is written.
    """
    moments = {} if optimizer is None else optimizer.moments()
    num_steps = 0 if optimizer is None else optimizer.num_steps
    metadata = {OWN_STEPS: str(own_steps), MOMENT_STEPS: str(num_steps)}
    write_tensors(path, {FAST: theta_P, **moments}, metadata, on_tile)


def keep_nothing(path: Path) -> None:
    """Write what a trainer goes on from with the slow weights alone. Raises OSError."""
    write_tensors(path, {}, {OWN_STEPS: "0", MOMENT_STEPS: "0"})


def take_over_weights(
    path: Path,
    theta_P: torch.Tensor,
    optimizer: FlatOptimizer | None,
    on_tile: Callable[[], None] = lambda: None,
) -> int:
    """Go on from what was kept; returns the own steps. Raises FileUnusable."""
    kept = TensorFile(path, on_tile)
    if FAST in kept.names:
        kept.read_into(FAST, theta_P)
    num_steps = kept.number(MOMENT_STEPS)
    if optimizer is not None and num_steps:
        optimizer.take_over(num_steps, kept.read_into)
    return kept.number(OWN_STEPS)
