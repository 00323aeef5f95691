"""`export` and `generate` where no daemon gives its state: from the home's newest checkpoint."""

import sys
from pathlib import Path

import numpy as np
import torch

from peer.observe.control import NoDaemon, NotNow
from peer.state.checkpoints import OUTER_FILE, SLOW, CheckpointStore
from peer.state.home import Home
from peer.training.tensor_file import FileUnusable, TensorFile
from protocol.run.stages import stage_of_part

from .export import ExportFailed, export_weights


def export_kept(home: Home, directory: Path, error: NoDaemon | NotNow) -> None:
    """Write the slow weights of the newest checkpoint that is whole, and say which step that is.

    Args:
        error: what asking the daemon came to.

    Raises:
        NoDaemon, NotNow: as given, where there is no checkpoint either.
        ConfigError, HomeError, ExportFailed
    """

    def refused(path: Path, why: str) -> None:
        print(f"{path} cannot be used: {why}", file=sys.stderr, flush=True)

    signed, store = home.run(), CheckpointStore(home.checkpoints_dir, keep=1)
    found = None if signed is None else store.newest_whole(signed.run_id, refused)
    if found is None:
        raise type(error)(f"{error}; the home has no checkpoint either") from error
    manifest = found.manifest
    stage = stage_of_part(manifest.part)
    is_running = isinstance(error, NotNow)
    says = "gives no state now" if is_running else "is not running"
    why = f"the daemon of {home.root} {says}"
    if stage is not None:
        cure = "try again when it trains" if is_running else "start it, to fetch the other stages"
        raise ExportFailed(f"{why}, and its checkpoint holds only stage {stage}: {cure}") from error
    print(
        f"{why}: taking its newest checkpoint, of {manifest}",
        file=sys.stderr,
        flush=True,
    )
    weights_P = np.zeros(manifest.padded_parameters, np.float32)
    try:
        TensorFile(found.path / OUTER_FILE).read_into(SLOW, torch.from_numpy(weights_P))
    except FileUnusable as torn:
        raise ExportFailed(f"{found.path}: {torn}") from torn
    export_weights(home, weights_P, directory, round=manifest.round, tokens=manifest.tokens)
