"""Checkpoints in the home: what a peer goes on from when all processes have died.

    checkpoints/
      000041-step-2050/       one checkpoint; numbers say the order in which they were written
      000042-step-2100-end/   that of the run's end
        outer.safetensors     slow weights, and outer momentum unless it is zero, fp32 [P]
        trainer.safetensors   fast weights and the optimizer's moments (training/tensor_file.py)
        manifest.json         where it stands, and size and blake3 digest of each file
      ahead-000041-step-2050/ one that was set aside: others go on from an older one
      .partial/               one that is being written
      .trainer-7              the trainer's part of one, until it is whole

Rules
  1. A checkpoint is written aside, fsynced and renamed, the manifest last of its files: under its
     name it is whole. One that does not match its manifest all the same, or holds values that are
     not finite, is refused, and the one before it is used.
  2. The newest is the one of the latest step, whenever it was written. Those of another part of the
     model than was held last are older than all of it; who asks for those of one part gets no
     other.
  3. `keep` checkpoints are kept, and fewer where they would take more than `max_bytes`; the newest
     is never removed, nor is an older one before a newer is whole. Where several experts were
     trained here, the newest of each outlasts all that are not: another that comes to that expert
     when nobody trains it may have no other.
  4. Nothing is begun that the disk has no room for.
  5. One that is set aside counts for none of this. It stays until one of a later step is set aside,
     and is used where there is no other.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import blake3
import torch
from annotated_types import Ge
from pydantic import BaseModel, ConfigDict, FiniteFloat, NonNegativeInt

from peer.runtime.files import replace_file, sync_folder
from peer.training.tensor_file import FileUnusable, TensorFile, write_tensors
from protocol.content.samples import Float32Vector
from protocol.names import size_text
from protocol.run.layout import expert_of_part
from protocol.run.needs import SPARE_BYTES, DiskNeeds, checkpoint_bytes, disk_needs

OUTER_FILE: Final = "outer.safetensors"
TRAINER_FILE: Final = "trainer.safetensors"
MANIFEST_FILE: Final = "manifest.json"
SLOW: Final = "slow"
MOMENTUM: Final = "momentum"
_PARTIAL: Final = ".partial"
_DRAFT: Final = ".trainer-"
_AHEAD: Final = "ahead-"
_STEP: Final = "-step-"
_END: Final = "-end"
Place = TypeVar("Place", Path, str)


class NoRoom(OSError): ...


class FileDigest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: NonNegativeInt
    blake3: str


class Manifest(BaseModel):
    """Where a checkpoint stands, and what its files are.

    Attributes:
        part: of the model (protocol/membership/group.py).
        round: of the last outer step; -1 before the first.
        step: the nominal step.
        epoch, position: of the data (protocol/schedule/data_plan.py).
        debt: nominal steps that rounds have trained too many (protocol/schedule/rounds.py).
        tokens: trained by this peer in all its lives.
        written_s: wall time.
        version: of loco-peer.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    form: Literal[1] = 1
    run_id: str
    part: str
    layout_digest: str
    padded_parameters: NonNegativeInt
    round: int
    step: Annotated[FiniteFloat, Ge(0)]
    epoch: NonNegativeInt
    position: NonNegativeInt
    debt: FiniteFloat
    tokens: NonNegativeInt
    over: bool
    written_s: float
    version: str
    files: dict[str, FileDigest]

    @property
    def line(self) -> tuple[str, str]:
        """Run and part: checkpoints of one line are compared by their steps."""
        return self.run_id, self.part

    def __str__(self) -> str:
        return f"step {int(self.step):,}{' (the end of the run)' if self.over else ''}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest could be read."""

    path: Path
    manifest: Manifest

    @property
    def trainer_file(self) -> Path:
        return self.path / TRAINER_FILE

    def verify(self) -> None:
        """Raises FileUnusable: a file differs from the manifest, or a value is not finite."""
        for name, digest in self.manifest.files.items():
            _check(self.path / name, digest)
        TensorFile(self.path / OUTER_FILE).check_finite()

    def fill(self, slow_P: Float32Vector, momentum_P: Float32Vector) -> None:
        """Fill both vectors, fp32 [P]. Raises FileUnusable."""
        outer = TensorFile(self.path / OUTER_FILE)
        for name, vector in ((SLOW, slow_P), (MOMENTUM, momentum_P)):
            if name == SLOW or name in outer.names:
                outer.read_into(name, torch.from_numpy(vector))
            elif vector.any():  # memory that is never written takes none
                vector.fill(0.0)


class CheckpointStore:
    """The checkpoints of one home, `keep` of them, in `max_bytes` (rule 3). Its methods block."""

    def __init__(self, directory: Path, keep: int, max_bytes: float | None = None) -> None:
        self.directory = directory
        self.keep = keep
        self._max_bytes = max_bytes
        self._torn: set[Path] = set()

    def needs(self, padded_parameters: int, corpus_bytes: int = 0) -> DiskNeeds:
        return disk_needs(padded_parameters, self.keep, self._max_bytes, corpus_bytes)

    def held_bytes(self) -> int:
        return sum(_size(path) for path in self._folders())

    # --- writing --------------------------------------------------------------------------------
    def begin(self, padded_parameters: int) -> Path:
        """An empty folder for the files of a new checkpoint. Raises OSError (NoRoom)."""
        self.discard()
        partial = self.directory / _PARTIAL
        partial.mkdir(parents=True)
        wanted = checkpoint_bytes(padded_parameters) + SPARE_BYTES
        free = shutil.disk_usage(partial).free
        if free < wanted:
            raise NoRoom(
                f"a checkpoint needs {size_text(wanted)} in {self.directory}, and {size_text(free)}"
                " are free; make room, or keep fewer with --checkpoint-keep"
            )
        return partial

    def seal(self, partial: Path, manifest: Manifest) -> Checkpoint | None:
        """Make the folder a checkpoint, and apply rule 3; None where it is itself too many.

        Raises OSError: older checkpoints are as they were.
        """
        files = {name: _sealed(partial / name) for name in (OUTER_FILE, TRAINER_FILE)}
        manifest = manifest.model_copy(update={"files": files, "step": self._step_of(manifest)})
        replace_file(partial / MANIFEST_FILE, manifest.model_dump_json(indent=1).encode())
        path = self._next_folder(f"{int(manifest.step)}{_END if manifest.over else ''}")
        partial.rename(path)
        sync_folder(self.directory)
        self._remove_old()
        return Checkpoint(path, manifest) if path.is_dir() else None

    def _next_folder(self, step: str) -> Path:
        names = [path.name.removeprefix(_AHEAD) for path in (*self._folders(), *self._set_aside())]
        number = max(map(number_of, names), default=0) + 1
        return self.directory / f"{number:06d}{_STEP}{step}"

    def _step_of(self, manifest: Manifest) -> float:
        """The step of a checkpoint; the end's is no earlier than those before."""
        if not manifest.over:
            return manifest.step
        return max([manifest.step, *_steps(self._folders(), manifest.line).values()])

    def adopt(self, name: str) -> None:
        """Make what was begun, and filled with a copy, a checkpoint. Raises OSError.

        Another may have its name: of an expert that was trained here before, or torn.
        """
        target = self.directory / name
        if target.exists():
            target = self._next_folder(name.partition(_STEP)[2])
        (self.directory / _PARTIAL).rename(target)
        sync_folder(self.directory)

    def trainers_draft(self, number: int) -> Path:
        """The file that a trainer writes its part to, which is then moved into a checkpoint."""
        return self.directory / f"{_DRAFT}{number}"

    def discard(self) -> None:
        shutil.rmtree(self.directory / _PARTIAL, ignore_errors=True)
        for draft in self.directory.glob(f"{_DRAFT}*"):
            draft.unlink(missing_ok=True)

    def set_aside(self, checkpoint: Checkpoint, step: float) -> Path:
        """Set this one aside (rule 5); others go on from an earlier `step`. Raises OSError.

        Those of its line after `step` are removed, and of those set aside all but the latest, whose
        folder is returned.
        """
        path = checkpoint.path
        if path not in self._set_aside():
            path = path.rename(self.directory / f"{_AHEAD}{path.name}")
            sync_folder(self.directory)
        aside = _steps(self._set_aside(), checkpoint.manifest.line)
        others = _steps(self._folders(), checkpoint.manifest.line)
        *earlier, latest = sorted(aside, key=aside.__getitem__)
        for other in (*earlier, *(path for path, at in others.items() if at > step)):
            shutil.rmtree(other, ignore_errors=True)
        return latest

    def _remove_old(self) -> None:
        there = self._folders()
        whole = _manifests(path for path in there if path not in self._torn)
        folders = [*(path for path in there if path in self._torn), *first_to_go(whole)]
        sizes = {path: _size(path) for path in folders}
        while len(folders) > 1 and (
            len(folders) > self.keep
            or (self._max_bytes is not None and sum(sizes[p] for p in folders) > self._max_bytes)
        ):
            shutil.rmtree(folders.pop(0), ignore_errors=True)

    # --- reading --------------------------------------------------------------------------------
    def newest_first(
        self, refused: Callable[[Path, str], None], part: str | None = None
    ) -> Iterator[Checkpoint]:
        """Checkpoints of a part, or all, whose manifests can be read.

        `refused` is told of each folder whose manifest cannot be, and why.
        """
        places = self._folders(), self._set_aside()
        for manifests in [_manifests(folders, refused) for folders in places]:
            ours = {path: m for path, m in manifests.items() if m and part in (None, m.part)}
            for path in reversed(by_step(ours)):
                yield Checkpoint(path, ours[path])

    def newest_whole(
        self, run_id: str, refused: Callable[[Path, str], None], part: str | None = None
    ) -> Checkpoint | None:
        """The newest of a run, and of that part of it if one is given, that `verify` passes.

        `refused` is told of others, as above; those are from now on the first to go.
        """
        for checkpoint in self.newest_first(refused, part):
            if checkpoint.manifest.run_id != run_id:
                refused(checkpoint.path, f"it is of run {checkpoint.manifest.run_id}")
                continue
            try:
                checkpoint.verify()
            except FileUnusable as error:
                self._torn.add(checkpoint.path)
                refused(checkpoint.path, str(error))
            else:
                return checkpoint
        return None

    def _folders(self) -> list[Path]:
        """Folders of checkpoints, in the order in which they were written."""
        if not self.directory.is_dir():
            return []
        named = (path for path in self.directory.iterdir() if number_of(path.name))
        return sorted(named, key=lambda path: number_of(path.name))

    def _set_aside(self) -> list[Path]:
        """Folders that were set aside; two where a crash came between."""
        return sorted(self.directory.glob(f"{_AHEAD}*"))


def write_outer(folder: Path, slow_P: Float32Vector, momentum_P: Float32Vector) -> None:
    """Copy slow weights and outer momentum, fp32 [P], to their file. Raises OSError.

    No lock is held: a value that an outer step writes meanwhile is the old one or the new one, and
    a peer can go on from either.
    """
    vectors = {SLOW: torch.from_numpy(slow_P)}
    if momentum_P.any():
        vectors[MOMENTUM] = torch.from_numpy(momentum_P)
    write_tensors(folder / OUTER_FILE, vectors, {})


def by_step(manifests: Mapping[Place, Manifest | None]) -> list[Place]:
    """Places of checkpoints in the order of rule 2, the newest last.

    `manifests` are in the order in which they were written; places without one come first.
    """
    last = next((m for m in reversed([*manifests.values()]) if m is not None), None)
    reached, ranks = 0.0, dict[Place, tuple[bool, float]]()
    for place, manifest in manifests.items():
        ranks[place] = False, -1.0
        if manifest is None or last is None:
            continue
        step, is_held = manifest.step, manifest.line == last.line
        if is_held:
            reached = max(reached, step)
            if manifest.over and step > 0:  # of an older loco-peer, whose ends said less
                step = reached
        ranks[place] = is_held, step
    return sorted(manifests, key=ranks.__getitem__)


def first_to_go(manifests: Mapping[Place, Manifest | None]) -> list[Place]:
    """Places of checkpoints in the order of rule 3, the last to be removed last."""
    ordered = by_step(manifests)
    newest = dict[tuple[str, str], Place]()
    for place in ordered:
        manifest = manifests[place]
        if manifest is not None and expert_of_part(manifest.part) is not None:
            newest[manifest.line] = place
    return sorted(ordered, key=lambda place: place in newest.values())


def _manifests(
    folders: Iterable[Path], refused: Callable[[Path, str], None] = lambda *_: None
) -> dict[Path, Manifest | None]:
    """The manifest of each; None where it cannot be read."""
    found: dict[Path, Manifest | None] = {}
    for path in folders:
        try:
            found[path] = parse_manifest((path / MANIFEST_FILE).read_bytes())
        except (OSError, ValueError) as error:
            found[path] = None
            refused(path, f"{MANIFEST_FILE}: {error}")
    return found


def _steps(folders: Iterable[Path], line: tuple[str, str]) -> dict[Path, float]:
    return {path: m.step for path, m in _manifests(folders).items() if m and m.line == line}


def parse_manifest(data: bytes) -> Manifest:
    """Raises ValueError."""
    manifest = Manifest.model_validate(json.loads(data))
    if set(manifest.files) != {OUTER_FILE, TRAINER_FILE}:
        raise ValueError(f"it names other files: {', '.join(manifest.files)}")
    return manifest


def _check(path: Path, expected: FileDigest) -> None:
    try:
        found = _digest(path)
    except OSError as error:
        raise FileUnusable(f"{path.name}: {error.strerror}") from error
    if found != expected:
        raise FileUnusable(
            f"{path.name} has {found.bytes} bytes and digest {found.blake3[:16]}, the manifest says"
            f" {expected.bytes} and {expected.blake3[:16]}"
        )


def _digest(path: Path) -> FileDigest:
    hasher = blake3.blake3(max_threads=1)
    hasher.update_mmap(path)
    return FileDigest(bytes=path.stat().st_size, blake3=hasher.hexdigest())


def _sealed(path: Path) -> FileDigest:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return _digest(path)


def number_of(name: str) -> int:
    """The number of a checkpoint by its folder's name; 0 for another folder."""
    digits = name.partition(_STEP)[0]
    return int(digits) if digits.isdecimal() and name != digits else 0


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())
