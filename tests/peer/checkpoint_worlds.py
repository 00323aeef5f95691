"""Checkpoints whose slow weights all have one value; files of states."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from peer.state.checkpoints import (
    TRAINER_FILE,
    Checkpoint,
    CheckpointStore,
    Manifest,
    write_outer,
)
from peer.training.tensor_file import write_tensors

P: Final = 64
MANIFEST: Final = Manifest(
    run_id="run",
    part="model",
    layout_digest="layout",
    padded_parameters=P,
    round=3,
    step=40.5,
    epoch=1,
    position=2,
    debt=0.5,
    tokens=1000,
    over=False,
    written_s=1.0,
    version="0",
    files={},
)


def vectors(value: float, size: int = P) -> tuple[np.ndarray, np.ndarray]:
    """Slow weights and outer momentum, fp32 [size]."""
    return np.full(size, value, np.float32), np.full(size, -value, np.float32)


def write(store: CheckpointStore, value: float = 1.0, **said: Any) -> Checkpoint:
    """One of step `value`, unless what is said of its manifest is otherwise."""
    manifest = MANIFEST.model_copy(update={"step": value, **said})
    size = manifest.padded_parameters
    folder = store.begin(size)
    write_outer(folder, *vectors(value, size))
    write_tensors(folder / TRAINER_FILE, {"fast": torch.full((size,), value)}, {})
    return store.seal(folder, manifest) or Checkpoint(Path("too many"), MANIFEST)
