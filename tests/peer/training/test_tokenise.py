"""Tokenising that is ended half-way, by its caller or by a crash: what it leaves, and what not."""

import gzip
import json
from pathlib import Path

import pytest

from peer.training.corpus import tokenise
from peer.training.corpus.packed import token_dtype
from peer.training.corpus.tokenise import outputs, pack_documents, remove_all_drafts
from peer.training.corpus.tokenizer import ByteTokenizer
from protocol.schedule.progress import TaskProgress, nobody


class Stop(BaseException):
    """Raised by a caller that is cancelled."""


def test_a_caller_that_is_cancelled_ends_it_and_keeps_whole_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenise, "PART_BYTES", 10)
    for number in range(2):
        lines = (json.dumps({"text": f"document {row}"}) + "\n" for row in range(40))
        (tmp_path / f"{number}.jsonl").write_text("".join(lines))
    checks = 0

    def check(_: TaskProgress) -> None:
        nonlocal checks
        checks += 1
        if checks == 60:
            raise Stop

    cache = tmp_path / "cache"
    with pytest.raises(Stop):
        pack_documents("jsonl", f"{tmp_path}/*.jsonl", ByteTokenizer(), cache, cache / "x", check)
    (folder,) = cache.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["0.held-out", "0.train"]
    pack_documents("jsonl", f"{tmp_path}/*.jsonl", ByteTokenizer(), cache, cache / "x", nobody)
    whole = (cache / "x").read_bytes()
    monkeypatch.undo()
    for path in (*folder.iterdir(), cache / "x"):
        path.unlink()
    pack_documents("jsonl", f"{tmp_path}/*.jsonl", ByteTokenizer(), cache, cache / "x", nobody)
    assert (cache / "x").read_bytes() == whole, "however many are tokenised at once"


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_it_tells_how_far_it_is_in_bytes_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """Of one that is packed, too, whose text is of another size than the file."""
    monkeypatch.setattr(tokenise, "PART_BYTES", 10_000)
    lines = "".join(json.dumps({"text": f"document {row}"}) + "\n" for row in range(20_000))
    data, path = lines.encode(), tmp_path / f"a.{suffix}"
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    told = list[TaskProgress]()
    source, cache = f"{tmp_path}/*.{suffix}", tmp_path / "cache"
    pack_documents("jsonl", source, ByteTokenizer(), cache, cache / "x", told.append)
    shares = [each.share or 0.0 for each in told if each.part == "tokenising"]
    assert {each.total for each in told if each.part == "tokenising"} == {path.stat().st_size}
    assert shares == sorted(shares)
    assert len({round(share, 1) for share in shares}) > 3, "it moves within a file"
    assert shares[-1] == 1.0


def test_many_at_once_are_what_each_is_alone() -> None:
    tokenizer, texts = ByteTokenizer(), ["", "a", "é" * 3]
    tokens = [tokens.tolist() for tokens in tokenizer.encode_all(texts)]
    assert tokens == [tokenizer.encode(text).tolist() for text in texts]
    assert token_dtype(tokenizer.vocabulary_size) == "u1"


def test_what_was_left_behind_is_removed_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "tokens-1"
    for path in (tmp_path / ".packing-1", folder, tmp_path / "corpus-1"):
        path.mkdir()
    done, kept = outputs(folder, 0), tmp_path / "corpus-1" / ".keep"
    left = (path.with_name(f".{path.name}.x1y2") for path in outputs(folder, 1))
    for path in (*done, *left, tmp_path / ".packing-1" / "x", kept):
        path.write_text(json.dumps("x"))
    remove_all_drafts(tmp_path)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {*done, kept}
    remove_all_drafts(tmp_path / "nowhere")
