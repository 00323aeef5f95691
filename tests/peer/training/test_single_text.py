"""A corpus of one text holds out its tail; texts that cannot be read are named."""

import numpy as np
import pytest

from peer.training.corpus import packed
from peer.training.corpus.folder import PACKED, open_corpus, prepare_corpus
from peer.training.corpus.packed import InvalidCorpus, read_header, read_parts, tail_start
from protocol.run.run_spec import DataSection, ModelSection, RunSpec

LINES = "".join(f"line {number} of a long text\n" for number in range(400))


def spec_of(source, **data):
    return RunSpec(
        model=ModelSection(context_length=8),
        data=DataSection(source=source, validation_blocks=2, **data),
    )


def tokens_of(prepared):
    """What is trained on, and what is held out, as text: a token is a byte."""
    header, offset = read_header(prepared.folder / PACKED)
    tokens = (prepared.folder / PACKED).read_bytes()[offset:]
    return tokens[: header.train_tokens].decode(), tokens[header.train_tokens :].decode()


@pytest.mark.parametrize("part_bytes", [1 << 20, 100])
def test_the_tail_of_one_text_is_held_out_from_the_beginning_of_a_line(
    tmp_path, monkeypatch, part_bytes
):
    monkeypatch.setattr(packed, "PART_BYTES", part_bytes)
    (tmp_path / "one.txt").write_text(LINES)
    prepared = prepare_corpus(spec_of(f"text:{tmp_path}/*.txt"), tmp_path / "cache")
    train, held_out = tokens_of(prepared)
    assert train.rstrip("\0") + held_out.rstrip("\0") == LINES
    assert held_out.startswith("line ")
    assert len(held_out) == pytest.approx(len(LINES) / 20, abs=40)
    corpus = open_corpus(prepared.folder, 8, 2)
    assert np.array_equal(corpus.validation_blocks(2)[0], list(held_out[:9].encode()))


def test_a_text_without_lines_is_cut_between_two_characters(tmp_path):
    path = tmp_path / "one.txt"
    for number in range(4):
        path.write_text("x" * number + "\u20ac" * 200)  # three bytes each
        start, size = tail_start(path), path.stat().st_size
        parts = "".join(read_parts(path, 0, start)), "".join(read_parts(path, start, size))
        assert "".join(parts) == path.read_text()
        assert len(parts[1]) == 10


def test_of_many_texts_of_which_one_can_be_read_its_tail_is_held_out(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "good.txt").write_text(LINES)
    prepared = prepare_corpus(spec_of(f"text:{tmp_path}/*.txt"), tmp_path / "cache")
    assert all(tokens_of(prepared))


def test_texts_are_chosen_for_validation_among_those_that_can_be_read(tmp_path):
    """Whichever those are: the name that is chosen of all may be that of one that cannot."""
    names = [f"{number}.txt" for number in range(3)]
    for binary in names:
        for name in names:
            (tmp_path / name).write_bytes(b"\xff" if name == binary else LINES.encode())
        cache = tmp_path / f"cache-{binary}"
        prepared = prepare_corpus(spec_of(f"text:{tmp_path}/*.txt"), cache)
        assert [len(part) for part in tokens_of(prepared)] == [len(LINES) + 1] * 2


@pytest.mark.parametrize("count", [1, 5])
def test_binary_files_are_named_with_the_reason(tmp_path, count):
    for number in range(count):
        (tmp_path / f"{number}.bin").write_bytes(b"ab\x80\xff")
    with pytest.raises(InvalidCorpus, match=r"0\.bin \(byte 0x80 is not UTF-8\).*convert it"):
        prepare_corpus(spec_of(f"text:{tmp_path}/*.bin"), tmp_path / "cache")
