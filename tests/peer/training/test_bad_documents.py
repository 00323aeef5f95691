"""Documents and shards that are broken: told by their places, and harmless where they can be."""

import gzip
import os
import re
import stat
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from peer.training.corpus.documents import Shard, documents, glob_texts, shards_of
from peer.training.corpus.packed import InvalidCorpus
from peer.training.corpus.tokenise import outputs, tokenise_shard
from peer.training.corpus.tokenizer import ByteTokenizer

LINE = b'{"text": "a word or two"}\n'


def texts_of(path: Path) -> list[str]:
    kind = "parquet" if path.suffix == ".parquet" else "jsonl"
    (shard,) = shards_of(kind, str(path))
    return [text for _, ((text, _),) in documents(shard)]


def test_a_file_that_is_cut_off_is_told_with_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(LINE * 3)[:-9])
    said = r"a\.jsonl\.gz(, line \d and after)?: cannot be read: Compressed file ended.*again"
    with pytest.raises(InvalidCorpus, match=said):
        texts_of(path)
    path.write_bytes(gzip.compress(LINE * 3) + gzip.compress(LINE)[:10] + b"\xff" * 9)
    with pytest.raises(InvalidCorpus, match=r"a\.jsonl\.gz, line 3 and after: .*invalid"):
        texts_of(path)
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 and nothing more PAR1")
    with pytest.raises(InvalidCorpus, match=r"a\.parquet: cannot be read: .*leave it out"):
        texts_of(path)


def test_rows_of_parquet_are_counted_over_batches(tmp_path: Path) -> None:
    rows = [{"text": "x"}] * 1500 + [{"text": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(InvalidCorpus, match=r"a\.parquet, row 1500: column 'text' holds NoneType"):
        texts_of(tmp_path / "a.parquet")


def test_half_a_character_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE + b'{"text": "half \\ud83d, whole \\ud83d\\ude00"}\n')
    assert texts_of(path) == ["a word or two", "half \N{REPLACEMENT CHARACTER}, whole \U0001f600"]


def test_a_line_that_is_nested_too_deeply_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE + b"\n" + b"[" * 200_000 + b"\n")
    with pytest.raises(InvalidCorpus, match=r"a\.jsonl, line 3: no JSON object .*; mend or"):
        texts_of(path)


def test_a_name_that_is_not_utf_8_is_told(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl")).write_bytes(LINE)
    with pytest.raises(InvalidCorpus, match=r"'caf\\udce9\.jsonl' is not UTF-8: rename"):
        shards_of("jsonl", f"{tmp_path}/*.jsonl")
    with pytest.raises(InvalidCorpus, match=r"'caf\\udce9\.jsonl' is not UTF-8: rename"):
        glob_texts(f"{tmp_path}/*.jsonl")


class Picky(ByteTokenizer):
    """Panics at one text, as the Rust of a library does."""

    def encode(self, text: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """One token a byte, mostly."""
        if text == "bad":
            raise Panic("index out of bounds")
        return super().encode(text)


class Panic(BaseException):
    """No Exception."""


def test_what_the_tokenizer_cannot_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE + b'{"text": "bad"}\n' + LINE)
    (shard,) = shards_of("jsonl", str(path))
    said = f"{path}, line 2: the tokenizer cannot read it (Panic: index out of bounds); mend or"
    with pytest.raises(InvalidCorpus, match=re.escape(said)):
        tokenise_shard(shard, Picky(), outputs(tmp_path, 0))
    assert [each.name for each in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_disk_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE)
    (shard,) = shards_of("jsonl", str(path))
    nowhere = tmp_path / "nowhere"
    with pytest.raises(OSError, match=re.escape(f"{nowhere}/.0.train.")):
        tokenise_shard(shard, ByteTokenizer(), outputs(nowhere, 0))


def test_a_shard_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch) -> None:
    """After a power cut an empty file would pass for a shard in which nothing is held out."""
    synced: set[int] = set()

    def sync(fd: int) -> None:
        if stat.S_ISREG((file := os.fstat(fd)).st_mode):  # its folder comes after the name
            assert not names[0].exists()
            synced.add(file.st_ino)

    monkeypatch.setattr(os, "fsync", sync)
    path, names = tmp_path / "a.jsonl", outputs(tmp_path, 0)
    path.write_bytes(LINE)
    (shard,) = shards_of("jsonl", str(path))
    tokenise_shard(shard, ByteTokenizer(), names)
    assert {name.stat().st_ino for name in names} == synced


def test_shards_of_streams_say_their_places() -> None:
    shard = Shard("hf", "000002", "", "set:train", "text", 2, 5)
    assert shard.place_of(7) == "hf:set:train, shard 2 of 5, row 7"
