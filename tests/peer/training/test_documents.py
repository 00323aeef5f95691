"""Data sets of documents: read by shard, tokenised some at a time, kept when done."""

import gzip
import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from peer.training.corpus import documents as documents_module
from peer.training.corpus import tokenise
from peer.training.corpus.documents import documents, shards_of
from peer.training.corpus.folder import prepare_corpus
from peer.training.corpus.packed import InvalidCorpus
from protocol.run.run_spec import DataSection, ModelSection, RunSpec

pytestmark = pytest.mark.slow
TEXTS = [f"document {number} says " + "a word " * (number % 7 + 1) for number in range(300)]


def spec_of(source: str) -> RunSpec:
    return RunSpec(
        model=ModelSection(context_length=16),
        data=DataSection(source=source, validation_blocks=2),
    )


def rows(column: str) -> list[dict[str, object]]:
    return [{"id": number, column: text} for number, text in enumerate(TEXTS)]


def json_lines(folder: Path, column: str = "text") -> None:
    folder.mkdir(exist_ok=True)
    parts = {"a.jsonl": rows(column)[:100], "b.jsonl.gz": rows(column)[100:]}
    for name, part in parts.items():
        lines = "".join(json.dumps(row) + "\n" for row in part).encode()
        (folder / name).write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)


def trained_text(prepared) -> bytes:
    corpus = prepared.open()
    return bytes(np.asarray(corpus.train, np.uint8))


def test_json_lines_become_the_same_corpus_anywhere(tmp_path: Path) -> None:
    for name in ("one", "two"):
        json_lines(tmp_path / name, "body")
    specs = [spec_of(f"jsonl:{tmp_path / name}/*.jsonl*#body") for name in ("one", "two")]
    one, two = (prepare_corpus(spec, tmp_path / f"c-{i}") for i, spec in enumerate(specs))
    assert one.manifest_digest == two.manifest_digest
    text = trained_text(one)
    held_out = [t for t in TEXTS if t.encode() + b"\0" not in text]
    assert 3 <= len(held_out) <= 40
    order = [text.index(t.encode()) for t in TEXTS if t not in held_out]
    assert order == sorted(order)


def test_what_was_tokenised_is_not_tokenised_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    json_lines(tmp_path / "set")
    source = f"jsonl:{tmp_path / 'set'}/*.jsonl*"
    (tmp_path / "set" / "c.jsonl").write_text('{"text": 7}\n')
    with pytest.raises(InvalidCorpus, match=r"c\.jsonl, line 1: column 'text' holds int, not text"):
        prepare_corpus(spec_of(source), tmp_path / "cache")
    (tmp_path / "set" / "c.jsonl").unlink()
    first = prepare_corpus(spec_of(source), tmp_path / "cache")

    def refuse(*_: object) -> None:
        raise AssertionError("it was tokenised already")

    monkeypatch.setattr(tokenise, "tokenise_shard", refuse)
    again = prepare_corpus(spec_of(source), tmp_path / "cache")
    assert again.manifest_digest == first.manifest_digest
    for shard_file in (tmp_path / "cache").glob("tokens-*/1.train"):
        shard_file.unlink()  # as when the machine stopped in the middle
    with pytest.raises(AssertionError, match="already"):
        prepare_corpus(spec_of(source), tmp_path / "cache")
    monkeypatch.undo()
    assert prepare_corpus(spec_of(source), tmp_path / "cache").manifest_digest == (
        first.manifest_digest
    )


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidCorpus, match="no file matches jsonl:"):
        shards_of("jsonl", f"{tmp_path}/*.jsonl")
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\nnonsense\n')
    (shard,) = shards_of("jsonl", f"{tmp_path}/*.jsonl")
    with pytest.raises(InvalidCorpus, match=r"a\.jsonl, line 2: no JSON object"):
        list(documents(shard))
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(InvalidCorpus, match="too few documents"):
        prepare_corpus(spec_of(f"jsonl:{tmp_path}/*.jsonl"), tmp_path / "cache")


def test_parquet_files_give_the_tokens_of_the_same_json_lines(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for name, part in (("a", rows("text")[:100]), ("b", rows("text")[100:])):
        pq.write_table(pa.Table.from_pylist(part), tmp_path / "set" / f"{name}.parquet")
    prepared = prepare_corpus(spec_of(f"parquet:{tmp_path / 'set'}/*.parquet"), tmp_path / "c")
    text = trained_text(prepared)
    assert sum(t.encode() + b"\0" in text for t in TEXTS) > 250
    with pytest.raises(InvalidCorpus, match="no column 'body', but id, text: add #COLUMN"):
        list(documents(shards_of("parquet", f"{tmp_path / 'set'}/*.parquet#body")[0]))


@pytest.mark.long
def test_a_set_of_datasets_is_read_as_a_stream(tmp_path: Path) -> None:
    table = datasets.table.InMemoryTable.from_pylist(rows("text"))
    whole = datasets.Dataset(table, fingerprint="made")  # to compute one fails with some pyarrows
    whole.save_to_disk(str(tmp_path / "set"), num_shards=3)
    shards = shards_of("hf", str(tmp_path / "set"))
    assert len(shards) > 1
    assert [text for shard in shards for _, ((text, _),) in documents(shard)] == TEXTS
    assert len(shards_of("hf", f"{tmp_path / 'set'}:train")) == len(shards)
    with pytest.raises(InvalidCorpus, match="the folder holds one split, train, and no test"):
        shards_of("hf", f"{tmp_path / 'set'}:test")
    (tmp_path / "files").mkdir()
    for name, part in (("a", rows("text")[:150]), ("b", rows("text")[150:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (tmp_path / "files" / f"{name}.jsonl").write_text(lines)
    stream = shards_of("hf", f"{tmp_path / 'files'}:train#text")
    assert [text for shard in stream for _, ((text, _),) in documents(shard)] == TEXTS
    prepared = prepare_corpus(spec_of(f"hf:{tmp_path / 'files'}"), tmp_path / "cache")
    assert prepared.manifest.num_blocks > 100
    with pytest.raises(InvalidCorpus, match="no column 'body'"):
        list(documents(shards_of("hf", f"{tmp_path / 'files'}#body")[0]))
    with pytest.raises(InvalidCorpus, match="cannot open hf:"):
        shards_of("hf", f"{tmp_path / 'files'}:nowhere")


def test_a_saved_set_of_several_splits_gives_the_one_that_is_named(tmp_path: Path) -> None:
    tables = {
        split: datasets.table.InMemoryTable.from_pylist([{"text": f"of {split}"}])
        for split in ("train", "test")
    }
    splits = {name: datasets.Dataset(table, fingerprint=name) for name, table in tables.items()}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "set"))
    for named, split in ((":test", "test"), (":train", "train"), ("", "train")):
        (shard,) = shards_of("hf", f"{tmp_path / 'set'}{named}")
        assert [text for _, ((text, _),) in documents(shard)] == [f"of {split}"]


@contextmanager
def open_files_at_most(more: int) -> Iterator[None]:
    """Let this process open only so many files beyond those that are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    are_open = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (are_open + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_data_set_may_have_more_shards_than_files_can_be_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        (tmp_path / f"{number:02d}.jsonl").write_text('{"text": "x"}\n')

    def tokenised(shards, tokenizer: object, folder: Path, *_: object) -> None:
        for number in range(len(shards)):
            (folder / f"{number}.train").write_bytes(b"%02d" % number * 100)
            (folder / f"{number}.held-out").write_bytes(b"h" * 100)

    monkeypatch.setattr(tokenise, "_tokenise", tokenised)
    with open_files_at_most(20):
        prepared = prepare_corpus(spec_of(f"jsonl:{tmp_path}/*.jsonl"), tmp_path / "cache")
    assert trained_text(prepared) == b"".join(b"%02d" % number * 100 for number in range(40))


@pytest.mark.parametrize("saved", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_folder_that_holds_another_data_set_now_is_tokenised_again(
    tmp_path: Path, *, saved: bool
) -> None:
    folder, digests = tmp_path / "set", []
    for word in ("old", "new"):
        shutil.rmtree(folder, ignore_errors=True)
        found = [{"text": f"{word} {number}"} for number in range(100)]
        if saved:
            table = datasets.table.InMemoryTable.from_pylist(found)
            datasets.Dataset(table, fingerprint="made").save_to_disk(str(folder))
        else:
            folder.mkdir()
            (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
        shards = shards_of("hf", str(folder))
        assert shards == shards_of("hf", str(folder))
        digests.append(shards[0].identity)
        prepared = prepare_corpus(spec_of(f"hf:{folder}"), tmp_path / "cache")
        assert trained_text(prepared).startswith(word.encode())
    assert len(set(digests)) == 2


@pytest.mark.parametrize("commit", ["", "0123abc"])
def test_a_data_set_of_the_hub_is_known_by_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: str
) -> None:
    asked: list[dict[str, object]] = []
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows("text")))

    def load(name: str, config: str | None, **options: object) -> object:
        asked.append({"name": name, "config": config, **options})
        return stream

    def tokenised(shards, tokenizer: object, folder: Path, *_: object) -> None:
        folders.append(folder)
        for part in ("train", "held-out"):
            (folder / f"0.{part}").write_bytes(b"x" * 100)

    folders: list[Path] = []
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(documents_module, "_revision_of", lambda _: commit)
    monkeypatch.setattr(tokenise, "_tokenise", tokenised)
    (shard,) = shards_of("hf", "some/set,en:train")
    assert asked == [
        {
            "name": "some/set",
            "config": "en",
            "split": "train",
            "streaming": True,
            "revision": commit or None,
        }
    ]
    assert (shard.identity, shard.revision) == (commit, commit)
    prepare_corpus(spec_of("hf:some/set,en"), tmp_path / "cache")
    assert folders[0].exists() == bool(commit)


def test_a_hub_that_cannot_be_asked_knows_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    assert documents_module._revision_of("some/set") == ""
