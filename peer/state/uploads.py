"""Copies of checkpoints, with all that a restore needs, in any place that fsspec knows.

    URL/PEER/000041-step-2050/     files as in the home, the manifest last
    URL/PEER/run-RUN_ID/           run.json, admission, and keys where they were asked for
    URL/cache/                     tokenizer and corpus of the run, named by digest, for all peers

Rules
  1. A folder of a checkpoint is whole when it has its manifest.
  2. As many are kept there as in the home, and the same. Nothing of other runs, and in other peers'
     folders, is removed.
  3. A file named by a digest is copied once, and checked by the restore.
  4. Without `keys` nothing secret leaves the home: of `admission` the statements alone.

`restore` fills an empty home. Everything is verified before it counts: a checkpoint by its
manifest, run.json by its signature, tokenizer and corpus by the digests in the run spec. `run.json`
is written last: until then the home has no run, and a restore that was cut off is begun again. A
home that has that very run, and a whole checkpoint, stays as it is: the same command starts it
again. Pieces of the corpus that were not uploaded come as for any peer.

Source: https://filesystem-spec.readthedocs.io
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from peer.runtime.files import PRIVATE_FILE, replace_file
from peer.training.corpus.blocks import PIECE_SUFFIX, Corpus, cut_piece, piece_path
from peer.training.corpus.folder import (
    HELD_OUT,
    MANIFEST,
    PACKED,
    KeptCorpus,
    adopt_held_out,
    adopt_manifest,
    corpus_folder,
    kept_corpus,
)
from peer.training.corpus.packed import InvalidCorpus
from peer.training.corpus.tokenizer import BYTES, FileTokenizer, tokenizer_path
from peer.training.tensor_file import FileUnusable
from protocol.errors import LocoError
from protocol.run.layout import expert_of_part, part_of_expert
from protocol.run.run_spec import RunSpec
from protocol.run.signed_spec import SignedSpec

from . import checkpoints
from .home import Home, OtherRun, parse_run
from .kept_files import AdmissionFile

FILES: Final = (checkpoints.OUTER_FILE, checkpoints.TRAINER_FILE, checkpoints.MANIFEST_FILE)
CACHE: Final = "cache"


class UploadFailed(LocoError): ...


class Uploads:
    """The copies of a home's checkpoints, run, tokenizer, corpus and, if asked, keys. Blocking."""

    def __init__(
        self, url: str, peer_id: str, keep: int, home: Home, *, keys: bool = False
    ) -> None:
        """Raises UploadFailed: the place cannot be reached."""
        try:
            self._files, self._place = _opened(url)
        except (ValueError, ImportError) as error:
            raise UploadFailed(f"checkpoints cannot be copied to {url}: {error}") from error
        self.url = url
        self._root = f"{self._place}/{peer_id}"
        self._keep = keep
        self._home = home
        self._keys = keys

    def copy(self, checkpoint: checkpoints.Checkpoint) -> str:
        """Copy a checkpoint, and remove old copies. Returns where it is; raises UploadFailed."""
        target = f"{self._root}/{checkpoint.path.name}"
        try:
            self._copy_run()
            self._files.makedirs(target, exist_ok=True)
            if self._files.exists(f"{target}/{checkpoints.MANIFEST_FILE}"):
                self._files.rm(
                    f"{target}/{checkpoints.MANIFEST_FILE}"
                )  # it is not whole while it is replaced
            for name in FILES:
                self._files.put_file(str(checkpoint.path / name), f"{target}/{name}")
            for old in self._too_many(checkpoint):
                self._files.rm(old, recursive=True)
        except Exception as error:  # each kind of storage has errors of its own
            raise UploadFailed(f"{target}: {type(error).__name__}: {error}") from error
        return target

    def copy_data(self, check: Callable[[], None]) -> None:
        """Copy what is missing there of tokenizer and corpus. Raises UploadFailed.

        `check` is called between two files; what it raises ends the copying.
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
        except Exception as error:  # as above; trio.Cancelled is not among these
            raise UploadFailed(f"{place}: {type(error).__name__}: {error}") from error

    def _copy_run(self) -> None:
        if (signed := self._home.run()) is None:
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
        self._files.pipe_file(f"{target}/{self._home.admission_path.name}", kept.to_bytes())

    def _data(self) -> Iterator[tuple[str, Path]]:
        """Name there, and file here, of tokenizer and corpus."""
        if (signed := self._home.run()) is None:
            return
        spec, cache_dir = signed.spec(), self._home.cache_dir
        tokenizer = tokenizer_path(cache_dir, spec.data.tokenizer_digest or "")
        if tokenizer.is_file():
            yield tokenizer.name, tokenizer
        for model in spec.models:
            kept = kept_corpus(cache_dir, model.data.manifest or "")
            if kept is not None:
                yield from _corpus_files(kept)

    def _too_many(self, newest: checkpoints.Checkpoint) -> list[str]:
        """Our folders of this run beyond those that a home keeps; torn ones first.

        The newest is the one that was just copied, whatever its number: a home that was lost may
        have counted further.
        """
        written = sorted(
            _checkpoints(self._files, self._root),
            key=lambda path: (_name(path) == newest.path.name, checkpoints.number_of(_name(path))),
        )
        manifests = {path: _manifest(self._files, path) for path in written}
        run_id = newest.manifest.run_id
        ours = {p: m for p, m in manifests.items() if m is None or m.run_id == run_id}
        return checkpoints.first_to_go(ours)[: -self._keep]


def _corpus_files(kept: KeptCorpus) -> Iterator[tuple[str, Path]]:
    for name in (MANIFEST, HELD_OUT):
        yield f"{kept.folder.name}/{name}", kept.folder / name
    if kept.whole is not None:
        yield f"{kept.folder.name}/{PACKED}", kept.whole
        return
    for path in sorted(kept.folder.glob(f"[0-9]*{PIECE_SUFFIX}")):
        yield f"{kept.folder.name}/{path.name}", path


# --- what is there --------------------------------------------------------------------------------
def _opened(url: str) -> tuple[Any, str]:
    """The file system of a place, and its path in it. Raises ValueError, ImportError."""
    from fsspec.core import url_to_fs  # here: most peers upload nothing

    files, root = url_to_fs(url)
    return files, str(root).rstrip("/")


def _names(files: Any, folder: str) -> list[str]:
    files.invalidate_cache()
    return [str(path).rstrip("/") for path in files.ls(folder, detail=False)]


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _checkpoints(files: Any, folder: str) -> list[str]:
    return [path for path in _names(files, folder) if checkpoints.number_of(_name(path))]


def _manifest(files: Any, path: str) -> checkpoints.Manifest | None:
    """The manifest of a copy; None where it cannot be read: the copy is torn."""
    try:
        return checkpoints.parse_manifest(files.cat_file(f"{path}/{checkpoints.MANIFEST_FILE}"))
    except (FileNotFoundError, ValueError):
        return None


# --- restoring ------------------------------------------------------------------------------------
NEEDLESS: Final = "not needed: this home has the run, and continues from its own checkpoint"


class RestoreFailed(LocoError): ...


def restore(url: str, home: Home, keep: int, expert: str | None = None) -> Iterator[str]:
    """Fill a home that is prepared and locked, if need be. Yields what was done, for people.

    Args:
        url: as it was given to `--checkpoint-upload`, or the folder of one peer below it.
        expert: whose copies are taken, by its name; None takes those of the home's expert, or of
            the one that was written last.

    Raises RestoreFailed; OtherRun: the home has a run, and the uploads are of another.
    """
    try:
        files, root = _opened(url)
    except (ValueError, ImportError) as error:
        raise RestoreFailed(f"cannot restore from {url}: {error}") from error
    restoring = _Restore(url, files, root, home, keep, expert or home.expert())
    try:
        yield from restoring.run()
    except OtherRun:
        raise
    except Exception as error:  # each kind of storage has errors of its own
        if restoring.is_needless:
            yield f"{NEEDLESS} ({url} cannot be read: {error})"
            return
        if isinstance(error, LocoError):
            raise
        raise RestoreFailed(
            f"cannot restore from {url}: {type(error).__name__}: {error}; nothing is lost, the same"
            " command tries again"
        ) from error


def _run_folder(path: str, manifest: checkpoints.Manifest) -> str:
    """The folder with the run, beside a copy of one of its checkpoints."""
    return f"{path.rpartition('/')[0]}/run-{manifest.run_id}"


class _Restore:
    """A home that is filled from copies.

    That is needless where the home has a run and a whole checkpoint. (With a torn one its founder
    would begin the run anew.)
    """

    def __init__(
        self, url: str, files: Any, root: str, home: Home, keep: int, expert: str | None
    ) -> None:
        self._url = url
        self._files = files
        self._root = root
        self._home = home
        self._expert = expert
        self._store = checkpoints.CheckpointStore(home.checkpoints_dir, keep)
        self.is_needless = (run := home.run()) is not None and self._has_checkpoint(run)

    def _has_checkpoint(self, run: SignedSpec) -> bool:
        part = self._part_in(run)
        return self._store.newest_whole(run.run_id, lambda *_: None, part) is not None

    def _part_in(self, run: SignedSpec) -> str | None:
        """The part of which copies are taken; None for any. Raises InvalidRunSpec: no such one."""
        number = None if self._expert is None else run.spec().expert_named(self._expert)
        return None if number is None else part_of_expert(number)

    def run(self) -> Iterator[str]:
        uploaded = self._newest_first()
        if self.is_needless:
            yield f"{NEEDLESS} (the newest there is of {uploaded[0][1]})"
            return
        for path, manifest in uploaded:
            why = self._fetched(path, manifest)
            if why is not None:
                yield f"{path} is torn ({why}); the one before it is tried"
                continue
            folder = _run_folder(path, manifest)
            signed = self._run(folder, manifest.run_id)
            yield f"checkpoint of {manifest}: {path}"
            spec, number = signed.spec(), expert_of_part(manifest.part)
            yield from self._data(spec if number is None else spec.of_expert(number), folder)
            yield self._admission_and_keys(folder)
            self._store.adopt(_name(path))
            self._home.bind_run(signed)
            if number is not None:
                self._home.keep_expert(spec.experts[number].name)
            return
        raise RestoreFailed(f"{self._url} holds no whole checkpoint: see what was said above")

    # --- the checkpoint -------------------------------------------------------------------------
    def _newest_first(self) -> list[tuple[str, checkpoints.Manifest]]:
        """Copies that have a manifest. Raises RestoreFailed: none, or of several runs."""
        if not self._files.exists(self._root):
            raise RestoreFailed(f"there is nothing at {self._url}; look at the URL's spelling")
        folders = _checkpoints(self._files, self._root)
        if not folders:
            peers = [path for path in _names(self._files, self._root) if self._files.isdir(path)]
            folders = [path for peer in peers for path in _checkpoints(self._files, peer)]
        read = [(path, _manifest(self._files, path)) for path in folders]
        whole = [(path, manifest) for path, manifest in read if manifest is not None]
        if not whole:
            raise RestoreFailed(
                f"{self._url} holds no whole checkpoint: give the URL that --checkpoint-upload"
                " was given"
            )
        if len(runs := {manifest.run_id for _, manifest in whole}) > 1:
            raise RestoreFailed(
                f"{self._url} holds checkpoints of {len(runs)} runs ({', '.join(sorted(runs))});"
                " name the folder of one peer: URL/PEER"
            )
        present = self._home.run()
        if present is not None and (there := whole[0][1].run_id) != present.run_id:
            raise OtherRun(
                f"the home {self._home.root} has another run ({present.run_id}) than {self._url}"
                f" ({there}). To go on with the home's: loco-peer start, without --restore. To"
                " restore the other: give it a --home of its own"
            )
        if self._expert is not None:
            whole = self._of_expert(whole, self._expert)
        written = dict(sorted(whole, key=lambda one: one[1].written_s))
        return [(path, written[path]) for path in reversed(checkpoints.by_step(written))]

    def _of_expert(
        self, whole: list[tuple[str, checkpoints.Manifest]], expert: str
    ) -> list[tuple[str, checkpoints.Manifest]]:
        """Raises RestoreFailed: nobody has copied one of that expert."""
        path, manifest = whole[0]
        part = self._part_in(self._run(_run_folder(path, manifest), manifest.run_id))
        if not (of_it := [each for each in whole if each[1].part == part]):
            raise RestoreFailed(
                f"{self._url} holds no whole checkpoint of the expert '{expert}': give the URL"
                " that all peers upload to, or join without --restore"
            )
        return of_it

    def _fetched(self, path: str, manifest: checkpoints.Manifest) -> str | None:
        """Fetch its files aside. Returns why they are torn, or None."""
        partial = self._store.begin(manifest.padded_parameters)
        try:
            for name in FILES:
                (partial / name).touch(PRIVATE_FILE)
                self._files.get_file(f"{path}/{name}", str(partial / name))
            checkpoints.Checkpoint(partial, manifest).verify()
        except (FileNotFoundError, FileUnusable) as error:
            self._store.discard()
            return str(error)
        return None

    # --- the rest -------------------------------------------------------------------------------
    def _run(self, folder: str, run_id: str) -> SignedSpec:
        if not self._files.exists(f"{folder}/run.json"):
            raise RestoreFailed(
                f"{folder}/run.json is not there: an older loco-peer made this upload, of"
                " checkpoints alone. Copy run.json and cache/ of any peer of the run into the home,"
                " and the checkpoint's folder into its checkpoints/; then: loco-peer start"
            )
        try:
            signed = parse_run(self._files.cat_file(f"{folder}/run.json"))
        except ValueError as error:
            raise RestoreFailed(f"{folder}/run.json is damaged ({error})") from error
        if signed.run_id != run_id:
            raise RestoreFailed(f"{folder}/run.json is of another run, {signed.run_id}")
        return signed

    def _admission_and_keys(self, folder: str) -> str:
        home, came = self._home, list[str]()
        for path in (home.admission_path, home.identity_path, home.founder_key_path):
            there = f"{folder}/{path.name}"
            if self._files.exists(there) and not path.exists():
                replace_file(path, self._files.cat_file(there), PRIVATE_FILE)
                came.append(path.name)
        if home.identity_path.name in came:
            return "keys: those of the peer that uploaded them, which must not run any more"
        return "keys: none were uploaded, so this is a new peer"

    def _data(self, spec: RunSpec, folder: str) -> Iterator[str]:
        cache = f"{folder.rpartition('/')[0].rpartition('/')[0]}/{CACHE}"
        digest, name = spec.data.manifest, spec.data.tokenizer_digest
        if name not in (None, BYTES):
            assert name is not None
            there = f"{cache}/{tokenizer_path(self._home.cache_dir, name).name}"
            if self._files.exists(there):
                data = self._files.cat_file(there)
                if FileTokenizer(data).digest != name:
                    raise RestoreFailed(f"{there} is damaged: its digest is another")
                replace_file(tokenizer_path(self._home.cache_dir, name), data)
        assert digest is not None  # no signed run spec is without
        there = f"{cache}/{corpus_folder(self._home.cache_dir, digest).name}"
        if not all(self._files.exists(f"{there}/{name}") for name in (MANIFEST, HELD_OUT)):
            yield "corpus: not uploaded; it comes from other peers, or from --data"
            return
        yield self._corpus(there, digest)

    def _corpus(self, there: str, digest: str) -> str:
        try:
            kept = adopt_manifest(
                self._files.cat_file(f"{there}/{MANIFEST}"), digest, self._home.cache_dir
            )
            adopt_held_out(kept, self._files.cat_file(f"{there}/{HELD_OUT}"))
        except InvalidCorpus as error:
            raise RestoreFailed(f"{there}: {error}") from error
        packed = kept.folder / PACKED
        if self._files.exists(f"{there}/{PACKED}") and not packed.exists():
            aside = packed.with_name(f".{PACKED}")
            self._files.get_file(f"{there}/{PACKED}", str(aside))
            aside.rename(packed)
            if self._is_whole(digest):
                return "corpus: whole"
            packed.unlink()
            return (
                f"corpus: {there}/{PACKED} is damaged, and left out; the corpus comes from other"
                " peers, or from --data. Remove that file, and the next upload writes it again"
            )
        manifest, num_here = kept.manifest, 0
        for path in _names(self._files, there):
            name = _name(path).removesuffix(PIECE_SUFFIX)
            if path.endswith(PIECE_SUFFIX) and name.isdecimal() and int(name) < manifest.num_pieces:
                data = self._files.cat_file(path)
                if manifest.is_piece(int(name), data):
                    replace_file(piece_path(kept.folder, int(name)), data)
                    num_here += 1
        return (
            f"corpus: {num_here} of {manifest.num_pieces} pieces; others come from other peers, or"
            " from --data"
        )

    def _is_whole(self, digest: str) -> bool:
        kept = kept_corpus(self._home.cache_dir, digest)
        assert kept is not None
        try:
            corpus = kept.open()
        except InvalidCorpus:
            return False
        pieces = range(kept.manifest.num_pieces)
        return isinstance(corpus, Corpus) and all(
            kept.manifest.is_piece(piece, cut_piece(corpus.train, kept.manifest, piece))
            for piece in pieces
        )
