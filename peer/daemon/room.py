"""Checks disk space before anything is trained: a run must not lose its model at its end.

If not even one checkpoint fits, the run is refused; its founder checks before the corpus fills the
disk. If one fits but not all that are to be kept, the console says so with numbers: files there may
be deleted, and an optimizer may take less.
"""

import shutil

import numpy as np

from peer.content.store import PieceStore
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.options.needs_told import least_corpus_bytes
from peer.state.checkpoints import CheckpointStore
from peer.state.home import HomeError
from protocol.names import size_text
from protocol.run.needs import DiskNeeds, least_parameters_of
from protocol.run.run_spec import RunSpec


def check_room_to_begin(store: CheckpointStore, spec: RunSpec, data: str | None) -> None:
    """Check that one checkpoint fits beside the corpus, before that is made or fetched.

    What is not known yet counts at its least: `check_room` knows it.

    Args:
        data: this machine's own source of the corpus, if not the run spec's.

    Raises:
        HomeError: as `check_room`.
    """
    _refuse(store, store.needs(least_parameters_of(spec), least_corpus_bytes(spec, data)))


def check_room(
    store: CheckpointStore,
    padded_parameters: int,
    pieces: PieceStore | None,
    max_corpus_bytes: float | None,
    events: EventLog,
) -> None:
    """Check that checkpoints of `padded_parameters` fit beside the rest of the corpus.

    Args:
        pieces: of the corpus; None where all of it is here.

    Raises:
        HomeError: not even one fits; the message says what to do.
    """
    needs = store.needs(padded_parameters, _missing_bytes(pieces, max_corpus_bytes))
    _refuse(store, needs)
    there = _free(store) + store.held_bytes()
    if there < needs.total_bytes:
        what = f"checkpoints (--checkpoint-keep {store.keep}) and states for joiners"
        fewer = ", keep fewer with --checkpoint-keep 1" if store.keep > 1 else ""
        said = _sentence(store, needs, there, needs.total_bytes, what)
        events.emit(
            EventName.ROOM_FOUND_SMALL,
            detail=f"{said}. Free some space{fewer}, or use a larger disk with --home",
        )


def _refuse(store: CheckpointStore, needs: DiskNeeds) -> None:
    free = _free(store)
    if free < needs.least_bytes and not store.held_bytes():  # one that is there can be gone on from
        raise HomeError(
            f"{_sentence(store, needs, free, needs.least_bytes, 'one checkpoint')}. Free some"
            " space, or use a larger disk with --home"
        )


def _sentence(store: CheckpointStore, needs: DiskNeeds, free: int, wanted: int, what: str) -> str:
    corpus = needs.corpus_bytes
    rest = f", {size_text(corpus)} of them for the corpus" if corpus else ""
    return (
        f"{what} may take up to {size_text(wanted)} in {store.directory}{rest}, but only"
        f" {size_text(free)} are free"
    )


def _missing_bytes(pieces: PieceStore | None, most: float | None) -> int:
    if pieces is None:
        return 0
    missing = int(np.count_nonzero(~pieces.here)) * pieces.manifest.piece_bytes(0)
    return missing if most is None else min(missing, int(most))


def _free(store: CheckpointStore) -> int:
    """Free bytes of the disk on which its folder is, or will be."""
    folders = (store.directory, *store.directory.parents)
    return shutil.disk_usage(next(path for path in folders if path.exists())).free
