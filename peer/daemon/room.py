"""Room on the disk, looked at before anything is trained: a run must not lose its model at its end.

Where not even one checkpoint fits, the run is refused, by its founder before the corpus fills the
disk; where not all fit that are to be kept, that is said, with numbers: what lies there may go, and
an optimizer may take less.
"""

import shutil

import numpy as np

from peer.corpus.store import PieceStore
from peer.observe.event_names import EventName
from peer.observe.events import EventLog
from peer.options.corpus_size import least_corpus_bytes
from peer.state.checkpoints import CheckpointStore
from peer.state.home import HomeError
from protocol.errors import InvalidRunSpec
from protocol.names import size_text
from protocol.run.needs import DiskNeeds, parameters_of
from protocol.run.run_spec import RunSpec


def check_room_to_begin(store: CheckpointStore, spec: RunSpec, data: str | None) -> None:
    """Look whether one checkpoint fits beside the corpus, before that is made or fetched.

    Args:
        data: where this machine has it, if not where the run spec says.

    Raises:
        HomeError: as `check_room`.
    """
    try:
        parameters = parameters_of(spec) // spec.pipeline.stages
    except InvalidRunSpec:  # its sizes are a checkpoint's: `check_room` knows them
        parameters = 0
    _refuse(store, store.needs(parameters, least_corpus_bytes(spec, data)))


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
    needs = store.needs(padded_parameters, _missing_bytes(pieces, max_corpus_bytes))
    _refuse(store, needs)
    there = _free(store) + store.held_bytes()
    if there < needs.total_bytes:
        what = f"checkpoints (--checkpoint-keep {store.keep}) and states for joiners"
        fewer = ", keep fewer with --checkpoint-keep 1" if store.keep > 1 else ""
        said = _sentence(store, needs, there, needs.total_bytes, what)
        events.emit(
            EventName.ROOM_FOUND_SMALL,
            detail=f"{said}. Make room{fewer}, or use a larger disk with --home",
        )


def _refuse(store: CheckpointStore, needs: DiskNeeds) -> None:
    free = _free(store)
    if free < needs.least_bytes and not store.held_bytes():  # one that is there can be gone on from
        raise HomeError(
            f"{_sentence(store, needs, free, needs.least_bytes, 'one checkpoint')}. Make room, or"
            " give a home on a larger disk with --home"
        )


def _sentence(store: CheckpointStore, needs: DiskNeeds, free: int, wanted: int, what: str) -> str:
    corpus = needs.corpus_bytes
    rest = f", {size_text(corpus)} of them for the corpus" if corpus else ""
    return (
        f"{what} may take up to {size_text(wanted)} in {store.directory}{rest}, and"
        f" {size_text(free)} are there for it"
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
