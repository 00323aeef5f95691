"""The run's corpus here: made from its texts by the founder, taken by digest by all others.

A joiner first looks whether its own machine makes the very same file (the standard library of the
same Python does), and fetches it from the swarm if not. Either way it is the file that the run spec
names by digest.
"""

from pathlib import Path

from peer.ports import Work
from peer.state.home import replace_file
from peer.state.service import Fetcher
from peer.training.corpus.packed import InvalidCorpus
from peer.training.corpus.prepare import (
    PreparedCorpus,
    adopt_corpus,
    corpus_path,
    describe_corpus,
    prepare_corpus,
    verify_corpus,
)
from peer.training.tokenizer import BYTES, FileTokenizer, tokenizer_file, tokenizer_path
from protocol.errors import InvalidRunSpec
from protocol.run.run_spec import RunSpec


async def freeze_data(spec: RunSpec, cache_dir: Path, work: Work) -> tuple[RunSpec, PreparedCorpus]:
    """The founder's part: make the corpus, and name it in the run spec by digest.

    Raises:
        InvalidRunSpec: the data the spec names cannot be used.
    """
    try:
        corpus = await work.run(prepare_corpus, spec, cache_dir)
    except (InvalidCorpus, ValueError) as error:
        raise InvalidRunSpec(f"data: {error}") from error
    await work.run(_keep_tokenizer, spec.data.tokenizer, cache_dir)
    frozen = {"manifest": corpus.manifest_digest, "tokenizer_digest": corpus.tokenizer_digest}
    data = spec.data.model_copy(update=frozen)
    return spec.model_copy(update={"data": data}), corpus


async def obtain_data(
    spec: RunSpec, cache_dir: Path, fetcher: Fetcher, work: Work
) -> PreparedCorpus:
    """A joiner's part: the corpus that the run spec names, from here or from a peer.

    Raises:
        InvalidRunSpec: the spec names no corpus, or one that does not fit it.
        StreamLost, Refused, RemoteProtocolError: the peer could not give it.
    """
    digest, tokenizer = spec.data.manifest, spec.data.tokenizer_digest
    if digest is None or tokenizer is None:
        raise InvalidRunSpec("the run spec does not name its corpus and tokenizer by digest")
    kept_tokenizer = tokenizer_path(cache_dir, tokenizer)
    if tokenizer != BYTES and not kept_tokenizer.is_file():
        data = await fetcher.blob(tokenizer)
        await work.run(replace_file, kept_tokenizer, data)
    path = corpus_path(cache_dir, digest)
    if not await work.run(_is_here, path, digest):
        made = await work.run(_made_here, spec, cache_dir)
        if made is not None and made.manifest_digest == digest:
            return made
        path = await work.run(adopt_corpus, await fetcher.blob(digest), digest, cache_dir)
    try:
        return await work.run(describe_corpus, spec, path)
    except (InvalidCorpus, ValueError) as error:
        raise InvalidRunSpec(f"data: {error}") from error


def _keep_tokenizer(source: str, cache_dir: Path) -> None:
    """Keep the tokenizer's file by digest, for joiners, and for `export` later."""
    if source != BYTES:
        data = tokenizer_file(source)
        replace_file(tokenizer_path(cache_dir, FileTokenizer(data).digest), data)


def _is_here(path: Path, digest: str) -> bool:
    try:
        verify_corpus(path, digest)
    except InvalidCorpus:
        return False
    return True


def _made_here(spec: RunSpec, cache_dir: Path) -> PreparedCorpus | None:
    if spec.data.source != "stdlib":
        return None
    try:
        return prepare_corpus(spec, cache_dir)
    except (InvalidCorpus, ValueError):
        return None
