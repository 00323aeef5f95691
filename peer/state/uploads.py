"""Copies of checkpoints elsewhere, with all that a restore needs: any place that fsspec knows.

    URL/PEER/000041-step-2050/     files as in the home, the manifest last
    URL/PEER/run-RUN_ID/           run.json, admission, and keys where they were asked for
    URL/cache/                     tokenizer and corpus of the run, named by digest, for all peers

Rules
  1. A folder of a checkpoint is whole when it has its manifest.
  2. As many are kept there as in the home, those of the latest steps: none of the same run is
     removed for one of an earlier step. Of other runs, and in other peers' folders, nothing is.
  3. What is named by a digest is copied once. Its checking is the restore's (restoring.py).
  4. Without `keys` nothing secret leaves the home: of `admission` the statements alone.

Source: https://filesystem-spec.readthedocs.io
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from peer.training.corpus import kept_corpus
from peer.training.corpus.folder import HELD_OUT, MANIFEST, PACKED
from peer.training.corpus.tokenizer import tokenizer_path
from protocol.errors import LocoError

from .admission_file import AdmissionFile
from .checkpoints import (
    MANIFEST_FILE,
    OUTER_FILE,
    TRAINER_FILE,
    Checkpoint,
    Manifest,
    by_step,
    number_of,
    parse_manifest,
)
from .home import Home

ORDER: Final = (OUTER_FILE, TRAINER_FILE, MANIFEST_FILE)
CACHE: Final = "cache"
PIECE_SUFFIX: Final = ".piece"


class UploadFailed(LocoError):
    """A checkpoint was not copied; the message says why."""


class Uploads:
    """The copies of one peer's checkpoints. Blocking.

    Args:
        home: whose run, tokenizer and corpus are copied too; None copies checkpoints alone.
        keys: copy the keys of that home as well.

    Attributes:
        url: where they go.
    """

    def __init__(
        self, url: str, peer_id: str, keep: int, home: Home | None = None, *, keys: bool = False
    ) -> None:
        """Raises UploadFailed: no such place can be reached from here."""
        from fsspec.core import url_to_fs  # here: most peers upload nothing

        try:
            self._files, root = url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise UploadFailed(f"checkpoints cannot be copied to {url}: {error}") from error
        self.url = url
        self._place = str(root).rstrip("/")
        self._root = f"{self._place}/{peer_id}"
        self._keep = keep
        self._home = home
        self._keys = keys

    def copy(self, checkpoint: Checkpoint) -> str:
        """Copy a checkpoint, and remove old copies. Returns where it is; raises UploadFailed."""
        target = f"{self._root}/{checkpoint.path.name}"
        try:
            self._copy_run()
            self._files.makedirs(target, exist_ok=True)
            if self._files.exists(f"{target}/{MANIFEST_FILE}"):
                self._files.rm(f"{target}/{MANIFEST_FILE}")  # it is not whole while it is replaced
            for name in ORDER:
                self._files.put_file(str(checkpoint.path / name), f"{target}/{name}")
            for old in self._too_many(checkpoint):
                self._files.rm(old, recursive=True)
        except Exception as error:  # each kind of storage has errors of its own
            raise UploadFailed(f"{target}: {type(error).__name__}: {error}") from error
        return target

    def copy_data(self, check: Callable[[], None]) -> None:
        """Copy what is here of tokenizer and corpus, and not there. Raises UploadFailed.

        Args:
            check: called between two files; what it raises ends the copying.
        """
        place = f"{self._place}/{CACHE}"
        try:
            self._files.invalidate_cache()
            there = self._files.find(place, detail=True)
            sizes = {str(path): about["size"] for path, about in there.items()}
            for name, path in self._data():
                check()
                target = f"{place}/{name}"
                if sizes.get(target) == path.stat().st_size:
                    continue  # one that was torn is shorter
                self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
                self._files.put_file(str(path), target)
        except Exception as error:  # as above; trio.Cancelled is none of these
            raise UploadFailed(f"{place}: {type(error).__name__}: {error}") from error

    def _copy_run(self) -> None:
        """Run spec and admission, and the keys where they were asked for."""
        signed = None if self._home is None else self._home.run()
        if self._home is None or signed is None:
            return
        target = f"{self._root}/run-{signed.run_id}"
        self._files.makedirs(target, exist_ok=True)
        paths = [self._home.run_path]
        if self._keys:
            paths += [self._home.identity_path, self._home.founder_key_path]
        for path in paths:
            if path.exists():
                self._files.put_file(str(path), f"{target}/{path.name}")
        kept = AdmissionFile(self._home.admission_path).read()
        if not self._keys:
            kept = replace(kept, secret=None, own_pass=b"")
        with tempfile.TemporaryDirectory() as folder:
            aside = Path(folder) / self._home.admission_path.name
            AdmissionFile(aside).write(kept)
            self._files.put_file(str(aside), f"{target}/{aside.name}")

    def _data(self) -> Iterator[tuple[str, Path]]:
        """Name there, and file here, of all that is named by a digest of the run's."""
        signed = None if self._home is None else self._home.run()
        if self._home is None or signed is None:
            return
        data, cache_dir = signed.spec().data, self._home.cache_dir
        tokenizer = tokenizer_path(cache_dir, data.tokenizer_digest or "")
        if tokenizer.is_file():
            yield tokenizer.name, tokenizer
        kept = None if data.manifest is None else kept_corpus(cache_dir, data.manifest)
        if kept is None:
            return
        for name in (MANIFEST, HELD_OUT):
            yield f"{kept.folder.name}/{name}", kept.folder / name
        if kept.whole is not None:
            yield f"{kept.folder.name}/{PACKED}", kept.whole
            return
        for path in sorted(kept.folder.glob(f"[0-9]*{PIECE_SUFFIX}")):
            yield f"{kept.folder.name}/{path.name}", path

    def _too_many(self, newest: Checkpoint) -> list[str]:
        """Folders of ours, of this run, beyond those of the latest steps; torn ones first.

        The newest is the one that was just copied, whatever its number: a home that was lost may
        have counted further.
        """
        self._files.invalidate_cache()
        listed: list[Any] = self._files.ls(self._root, detail=False)
        paths = [str(path).rstrip("/") for path in listed]
        names = {path: path.rpartition("/")[2] for path in paths}
        written = sorted(
            (path for path, name in names.items() if number_of(name)),
            key=lambda path: (names[path] == newest.path.name, number_of(names[path])),
        )
        manifests = {path: manifest_there(self._files, path) for path in written}
        run_id = newest.manifest.run_id
        ours = {p: m for p, m in manifests.items() if m is None or m.run_id == run_id}
        return by_step(ours)[: -self._keep]


def manifest_there(files: Any, path: str) -> Manifest | None:
    """The manifest of a copy; None where it has none that can be read, so that it is torn."""
    try:
        return parse_manifest(files.cat_file(f"{path}/{MANIFEST_FILE}"))
    except (FileNotFoundError, ValueError):
        return None
