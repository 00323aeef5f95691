"""The files of a data set's tokens, by shard, and the drafts that they begin as.

    tokens-<key>/N.train, N.held-out            a shard that is done
    tokens-<key>/.N.train.*, ...                drafts of the process that tokenises it

A draft gets its name when the shard is whole and on disk. One that was left behind, by a process
that was killed or a machine that stopped, is of no use to anybody.
"""

import shutil
from pathlib import Path
from typing import Final

import blake3

HELD_OUT_OF: Final = 20
"""One document in so many is held out for validation,"""
HELD_OUT_ROWS: Final = 10_000
"""of the first so many of each shard."""
PACKING: Final = ".packing-"
"""Begins the name of a folder in which a corpus is put together."""


def tokens_folder(cache_dir: Path, key: str) -> Path:
    """The folder for the shards of a data set."""
    return cache_dir / f"tokens-{key}"


def outputs(folder: Path, number: int) -> tuple[Path, Path]:
    """The two files of a shard: tokens to train on, and those that are held out."""
    return folder / f"{number}.train", folder / f"{number}.held-out"


def is_done(folder: Path, number: int) -> bool:
    """Whether a shard is tokenised."""
    return all(path.is_file() for path in outputs(folder, number))


def is_document_held_out(shard: str, row: int) -> bool:
    """Whether a document of the shard of this name is for validation alone."""
    if row >= HELD_OUT_ROWS:
        return False
    digest = blake3.blake3(f"held-out/{shard}/{row}".encode()).digest(length=8)
    return int.from_bytes(digest, "big") % HELD_OUT_OF == 0


def remove_drafts(folder: Path) -> None:
    """Remove what processes that have ended left unfinished in a folder of shards."""
    for path in folder.glob(".*"):
        path.unlink(missing_ok=True)


def remove_all_drafts(cache_dir: Path) -> None:
    """Remove what an earlier life left unfinished in the cache; nobody else may be using it."""
    for folder in cache_dir.glob(f"{PACKING}*"):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in cache_dir.glob("tokens-*"):
        remove_drafts(folder)
