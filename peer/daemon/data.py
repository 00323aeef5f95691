"""The run's corpus here: made from its texts by the founder, taken by digest by all others.

A joiner first looks whether its own machine has the very same one: in the cache, in what its user
names with `--data`, or made from the standard library of the same Python. If not, it takes the
manifest and the held-out blocks from the swarm; pieces come while it trains (peer/corpus). Either
way the corpus is the one that the run spec names by digest.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from peer.ports import Work
from peer.state.fetching import BlobSource
from peer.state.home import HomeError, replace_file
from peer.training.corpus import (
    InvalidCorpus,
    KeptCorpus,
    PreparedCorpus,
    adopt_held_out,
    adopt_manifest,
    describe_corpus,
    kept_corpus,
    prepare_corpus,
    remove_all_drafts,
)
from peer.training.corpus.tokenizer import BYTES, FileTokenizer, tokenizer_file, tokenizer_path
from protocol.errors import InvalidRunSpec
from protocol.run.run_spec import RunSpec


async def freeze_data(
    spec: RunSpec, cache_dir: Path, work: Work, data: str | None = None
) -> tuple[RunSpec, PreparedCorpus]:
    """The founder's part: make the corpus, and name it in the run spec by digest.

    Args:
        data: where this machine has it, if not where the run spec says.

    Raises:
        InvalidRunSpec: the data the spec names cannot be used.
        HomeError: the cache cannot be written.
    """
    with _told(cache_dir):
        await work.run(remove_all_drafts, cache_dir)
        corpus = await work.run(prepare_corpus, spec, cache_dir, data, work.check_cancelled)
        await work.run(_keep_tokenizer, spec.data.tokenizer, cache_dir)
    frozen = {"manifest": corpus.manifest_digest, "tokenizer_digest": corpus.tokenizer_digest}
    section = spec.data.model_copy(update=frozen)
    return spec.model_copy(update={"data": section}), corpus


async def obtain_data(
    spec: RunSpec, cache_dir: Path, source: BlobSource, work: Work, data: str | None = None
) -> PreparedCorpus:
    """A joiner's part: the corpus that the run spec names, from here, or from peers.

    Args:
        data: where this machine has it, if it has.

    Raises:
        InvalidRunSpec: the spec names no corpus, or one that does not fit it.
        HomeError: the cache cannot be written.
        StreamLost, Refused, RemoteProtocolError: the peer could not give it.
    """
    digest, tokenizer = spec.data.manifest, spec.data.tokenizer_digest
    if digest is None or tokenizer is None:
        raise InvalidRunSpec("the run spec does not name its corpus and tokenizer by digest")
    with _told(cache_dir):
        await work.run(remove_all_drafts, cache_dir)
        here = await _tokenizer_here(tokenizer, cache_dir, source, work)
        spec = spec.model_copy(update={"data": spec.data.model_copy(update={"tokenizer": here})})
        kept = await work.run(kept_corpus, cache_dir, digest)
        if data is not None and (kept is None or kept.whole is None):
            return await work.run(_given_here, spec, cache_dir, data, work.check_cancelled)
        if kept is None:
            made = await work.run(_made_here, spec, cache_dir, work.check_cancelled)
            kept = made or await _taken_from_peers(digest, cache_dir, source, work)
        return await work.run(describe_corpus, spec, kept)


@contextmanager
def _told(cache_dir: Path) -> Iterator[None]:
    """Say what goes wrong inside in sentences for people. Raises InvalidRunSpec, HomeError."""
    try:
        yield
    except (InvalidCorpus, ValueError) as error:
        raise InvalidRunSpec(f"data: {error}") from error
    except OSError as error:
        # An error of a write names no file; what is read is told by its name.
        path = Path(os.fsdecode(error.filename)) if error.filename else cache_dir
        if path.is_relative_to(cache_dir):
            raise HomeError(
                f"the corpus cannot be kept in {path}: {error.strerror}; make room or mend that"
                " folder, or give another home with --home"
            ) from error
        raise InvalidRunSpec(
            f"data: cannot read {path}: {error.strerror}; let this user read it, or leave it out"
            " of the source"
        ) from error


async def _tokenizer_here(digest: str, cache_dir: Path, source: BlobSource, work: Work) -> str:
    """Where the run's tokenizer is on this machine; it is fetched if it is not here.

    The founder's name of it means a file of the founder's, or whatever is on the hub.
    """
    if digest == BYTES:
        return BYTES
    path = tokenizer_path(cache_dir, digest)
    if not path.is_file():
        await work.run(replace_file, path, await source.blob(digest))
    return str(path)


async def _taken_from_peers(
    digest: str, cache_dir: Path, source: BlobSource, work: Work
) -> KeptCorpus:
    kept = await work.run(adopt_manifest, await source.blob(digest), digest, cache_dir)
    await work.run(adopt_held_out, kept, await source.blob(kept.manifest.held_out))
    return kept


def _keep_tokenizer(source: str, cache_dir: Path) -> None:
    """Keep the tokenizer's file by digest, for joiners, and for `export` later."""
    if source != BYTES:
        data = tokenizer_file(source)
        replace_file(tokenizer_path(cache_dir, FileTokenizer(data).digest), data)


def _given_here(
    spec: RunSpec, cache_dir: Path, data: str, check: Callable[[], None]
) -> PreparedCorpus:
    """The corpus from where the user says that it is. Raises InvalidCorpus: it is another."""
    made = prepare_corpus(spec, cache_dir, data, check)
    if made.manifest_digest != spec.data.manifest:
        raise InvalidCorpus(
            f"--data {data} is another corpus ({made.manifest_digest}) than the run's"
            f" ({spec.data.manifest}): give the founder's, or leave --data out to fetch it"
        )
    return made


def _made_here(spec: RunSpec, cache_dir: Path, check: Callable[[], None]) -> KeptCorpus | None:
    """The standard library's corpus, if this Python's is the run's."""
    if spec.data.source != "stdlib":
        return None
    try:
        made = prepare_corpus(spec, cache_dir, None, check)
    except (InvalidCorpus, ValueError, OSError):
        return None
    return made.kept if made.manifest_digest == spec.data.manifest else None
