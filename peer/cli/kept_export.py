"""`export` and `generate` where no daemon runs: from the newest checkpoint of the home."""

import sys
from pathlib import Path

import numpy as np
import torch

from peer.observe.control import NoDaemon
from peer.state.checkpoints import OUTER_FILE, SLOW, Checkpoint, CheckpointStore
from peer.state.home import Home
from peer.training.tensor_file import FileUnusable, TensorFile
from protocol.run.stages import stage_of_part

from .export import ExportFailed, export_weights


def export_kept(home: Home, directory: Path, no_daemon: NoDaemon) -> None:
    """Write the slow weights of the newest checkpoint that is whole, and say which step that is.

    Raises:
        NoDaemon: as given, where there is no checkpoint either.
        ConfigError, HomeError, ExportFailed
    """
    signed = home.run()
    found = None if signed is None else _newest(home, signed.run_id)
    if found is None:
        raise NoDaemon(f"{no_daemon}; there is no checkpoint here either") from no_daemon
    manifest = found.manifest
    stage = stage_of_part(manifest.part)
    if stage is not None:
        raise ExportFailed(
            f"no daemon is running in {home.root}, and its checkpoint holds stage {stage} alone:"
            " start one, which fetches the other stages"
        ) from no_daemon
    print(
        f"no daemon is running in {home.root}: taking its newest checkpoint, of step"
        f" {int(manifest.step):,}",
        file=sys.stderr,
        flush=True,
    )
    weights_P = np.zeros(manifest.padded_parameters, np.float32)
    try:
        TensorFile(found.path / OUTER_FILE).read_into(SLOW, torch.from_numpy(weights_P))
    except FileUnusable as error:
        raise ExportFailed(f"{found.path}: {error}") from error
    export_weights(home, weights_P, directory, round=manifest.round, tokens=manifest.tokens)


def _newest(home: Home, run_id: str) -> Checkpoint | None:
    """The newest of this run whose files are what its manifest says; others are told."""

    def refused(path: Path, why: str) -> None:
        print(f"{path} cannot be used: {why}", file=sys.stderr, flush=True)

    for checkpoint in CheckpointStore(home.checkpoints_dir, keep=1).newest_first(refused):
        if checkpoint.manifest.run_id != run_id:
            continue
        try:
            checkpoint.verify()
        except FileUnusable as error:
            refused(checkpoint.path, str(error))
        else:
            return checkpoint
    return None
