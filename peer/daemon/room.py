"""Room on the disk, looked at before anything is trained: a run must not lose its model at its end.

Where not even one checkpoint fits, the run is refused; where not all fit that are to be kept, that
is said, with numbers: what lies there may go, and an optimizer may take less.
"""

import math
import shutil
from pathlib import Path
from typing import Final

import numpy as np

from peer.corpus.store import PieceStore
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.state.checkpoints import CheckpointStore
from peer.state.home import HomeError
from protocol.run.disk_needs import DiskNeeds

MIB: Final = 1 << 20


def check_room(
    store: CheckpointStore,
    padded_parameters: int,
    pieces: PieceStore | None,
    max_corpus_bytes: float | None,
    events: EventLog,
) -> None:
    """Look whether checkpoints of so many parameters fit beside what is still to come.

    Args:
        pieces: of the corpus; None where all of it is here.

    Raises:
        HomeError: not even one fits; the message says what to do.
    """
    held = store.held_bytes()
    needs = store.needs(padded_parameters, _missing_bytes(pieces, max_corpus_bytes))
    free = shutil.disk_usage(_existing(store.directory)).free
    if free < needs.least_bytes and not held:  # one that is there can be gone on from
        raise HomeError(
            f"{_sentence(store, needs, free, needs.least_bytes, 'one checkpoint')}. Make room, or"
            " give a home on a larger disk with --home"
        )
    if free + held < needs.total_bytes:
        what = f"checkpoints (--checkpoint-keep {store.keep}) and states for joiners"
        fewer = ", keep fewer with --checkpoint-keep 1" if store.keep > 1 else ""
        said = _sentence(store, needs, free + held, needs.total_bytes, what)
        events.emit(
            EventName.ROOM_FOUND_SMALL,
            detail=f"{said}. Make room{fewer}, or use a larger disk with --home",
        )


def _sentence(store: CheckpointStore, needs: DiskNeeds, free: int, wanted: int, what: str) -> str:
    corpus = needs.corpus_bytes
    rest = f", {_mib(corpus)} of them for the corpus" if corpus else ""
    return (
        f"{what} may take up to {_mib(wanted)} in {store.directory}{rest}, and {_mib(free)} are"
        " there for it"
    )


def _mib(count: int) -> str:
    return f"{math.ceil(count / MIB):,} MiB"


def _missing_bytes(pieces: PieceStore | None, most: float | None) -> int:
    if pieces is None:
        return 0
    missing = int(np.count_nonzero(~pieces.here)) * pieces.manifest.piece_bytes(0)
    return missing if most is None else min(missing, int(most))


def _existing(folder: Path) -> Path:
    """The folder itself, or the first above it that is there."""
    return next(path for path in (folder, *folder.parents) if path.exists())
