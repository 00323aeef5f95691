"""Copies of checkpoints elsewhere: any place that fsspec knows, by its URL.

    URL/PEER/000041-step-2050/      files as in the home, the manifest last

Rules
  1. A folder there is whole when it has its manifest.
  2. As many are kept there as in the home; of other peers' folders nothing is touched.

A copy is brought back by copying its folder to `checkpoints/` in a home of the run.

Source: https://filesystem-spec.readthedocs.io
"""

from typing import Any, Final

from protocol.errors import LocoError

from .checkpoints import MANIFEST_FILE, OUTER_FILE, TRAINER_FILE, Checkpoint, number_of

ORDER: Final = (OUTER_FILE, TRAINER_FILE, MANIFEST_FILE)


class UploadFailed(LocoError):
    """A checkpoint was not copied; the message says why."""


class Uploads:
    """The copies of one peer's checkpoints. Blocking."""

    def __init__(self, url: str, peer_id: str, keep: int) -> None:
        """Raises UploadFailed: no such place can be reached from here."""
        from fsspec.core import url_to_fs  # here: most peers upload nothing

        try:
            self._files, root = url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise UploadFailed(f"checkpoints cannot be copied to {url}: {error}") from error
        self._url = url
        self._root = f"{str(root).rstrip('/')}/{peer_id}"
        self._keep = keep

    def __repr__(self) -> str:
        return f"<Uploads to {self._url}>"

    def copy(self, checkpoint: Checkpoint) -> str:
        """Copy a checkpoint, and remove old copies. Returns where it is; raises UploadFailed."""
        target = f"{self._root}/{checkpoint.path.name}"
        try:
            self._files.makedirs(target, exist_ok=True)
            for name in ORDER:
                self._files.put_file(str(checkpoint.path / name), f"{target}/{name}")
            for old in self._copies()[: -self._keep]:
                self._files.rm(old, recursive=True)
        except Exception as error:  # each kind of storage has errors of its own
            raise UploadFailed(f"{target}: {type(error).__name__}: {error}") from error
        return target

    def _copies(self) -> list[str]:
        """Folders of ours, oldest first."""
        listed: list[Any] = self._files.ls(self._root, detail=False)
        paths = [str(path).rstrip("/") for path in listed]
        named = [path for path in paths if number_of(path.rsplit("/", 1)[-1])]
        return sorted(named, key=lambda path: number_of(path.rsplit("/", 1)[-1]))
