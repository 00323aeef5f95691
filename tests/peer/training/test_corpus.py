"""Corpora: the same everywhere, frozen by digest, nothing held out is trained on."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from peer.training.corpus.blocks import Corpus, PieceCorpus, cut_piece, piece_path
from peer.training.corpus.documents import stdlib_texts
from peer.training.corpus.folder import (
    PACKED,
    adopt_held_out,
    adopt_manifest,
    describe_corpus,
    kept_corpus,
    open_corpus,
    prepare_corpus,
)
from peer.training.corpus.packed import InvalidCorpus, read_header, write_packed
from peer.training.corpus.tokenizer import ByteTokenizer
from protocol.run.run_spec import STDLIB_BYTES, DataSection, ModelSection, RunSpec
from protocol.schedule.progress import nobody


def _spec(source, **data):
    return RunSpec(
        model=ModelSection(context_length=8),
        data=DataSection(source=source, validation_blocks=2, **data),
    )


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for i in range(30):
        (folder / ("deep" if i % 2 else "") / f"{i:02}.txt").write_text(f"text {i} " * 10)
    (folder / "latin1.txt").write_bytes(b"\xe9t\xe9")
    return folder


def test_the_same_texts_give_the_same_digest_anywhere(texts, tmp_path):
    moved = tmp_path / "moved"
    first = prepare_corpus(_spec(f"text:{texts}/**/*.txt"), tmp_path / "cache-1")
    texts.rename(moved)
    second = prepare_corpus(_spec(f"text:{moved}/**/*.txt"), tmp_path / "cache-2")
    assert first.manifest_digest == second.manifest_digest
    assert first.folder != second.folder
    (moved / "00.txt").write_text("other")
    third = prepare_corpus(_spec(f"text:{moved}/**/*.txt"), tmp_path / "cache-2")
    assert third.manifest_digest != first.manifest_digest


def test_no_held_out_text_is_in_a_training_block(texts, tmp_path):
    prepared = prepare_corpus(_spec(f"text:{texts}/**/*.txt"), tmp_path / "cache")
    corpus = open_corpus(prepared.folder, 8, 2)
    assert isinstance(corpus, Corpus)
    train, held_out = bytes(corpus.train), bytes(corpus.held_out)
    trained = corpus.blocks(np.arange(corpus.num_blocks, dtype=np.int64))
    validation = bytes(corpus.validation_blocks(2)[0].astype(np.uint8))
    text = b"".join(bytes(block[:-1].astype(np.uint8)) for block in trained)
    words = [f"text {number} ".encode() for number in range(30)]
    for word in words:
        assert (word in text) == (word in train) != (word in held_out)
    assert validation.startswith(b"text ")
    assert b"\xe9" not in train + held_out
    assert 0 < sum(word in held_out for word in words) < 10


def test_a_packed_file_that_lists_its_texts_as_older_ones_do_is_read(tmp_path):
    text = {"name": "a.txt", "size_bytes": 3, "digest": "0" * 32, "held_out": False}
    header = {"tokenizer_digest": "bytes", "vocabulary_size": 256, "dtype": "|u1"}
    header |= {"train_tokens": 3, "validation_tokens": 0, "files": [text]}
    told = msgspec.msgpack.encode(header)
    data = b"LOCOCRP1" + len(told).to_bytes(4, "big") + told
    (tmp_path / "old").write_bytes(data + bytes(-len(data) % 64) + b"abc")
    found, offset = read_header(tmp_path / "old")
    assert (found.train_tokens, offset) == (3, len(data) + -len(data) % 64)


def test_neighbouring_blocks_share_one_token_and_leave_none_out(texts, tmp_path):
    prepared = prepare_corpus(_spec(f"text:{texts}/**/*.txt"), tmp_path / "cache")
    corpus = open_corpus(prepared.folder, 8, 2)
    assert corpus.num_blocks == prepared.manifest.num_blocks
    first, second = corpus.blocks(np.array([0, 1]))
    assert first[-1] == second[0]
    assert first.shape == (9,)


def test_a_corpus_that_comes_in_pieces_is_the_founders(texts, tmp_path):
    spec = _spec(f"text:{texts}/**/*.txt", piece_kib=16)
    for number in range(40):  # some pieces' worth
        (texts / f"long-{number}.txt").write_text(f"{number} " * 1000)
    founder = prepare_corpus(spec, tmp_path / "founder")
    manifest, cache = founder.manifest, tmp_path / "joiner"
    assert manifest.num_pieces > 3
    with pytest.raises(InvalidCorpus, match="digest"):
        adopt_manifest(manifest.to_bytes() + b"x", manifest.name, cache)
    assert kept_corpus(cache, manifest.name) is None
    kept = adopt_manifest(manifest.to_bytes(), manifest.name, cache)
    with pytest.raises(InvalidCorpus, match="held out"):
        adopt_held_out(kept, bytes(manifest.held_out_bytes))
    adopt_held_out(kept, founder.held_out.read_bytes())
    assert describe_corpus(spec, kept).manifest.num_blocks == manifest.num_blocks
    whole, in_pieces = founder.open(), open_corpus(kept.folder, 8, 2)
    assert isinstance(in_pieces, PieceCorpus)
    assert isinstance(whole, Corpus)
    assert np.array_equal(in_pieces.validation_blocks(2), whole.validation_blocks(2))
    blocks = np.array([0, manifest.num_blocks - 1, manifest.piece_blocks])
    assert in_pieces.missing(blocks) == (0, 1, manifest.num_pieces - 1)
    for piece in range(manifest.num_pieces):
        data = cut_piece(whole.train, manifest, piece)
        assert manifest.is_piece(piece, data)
        assert len(data) == manifest.piece_bytes(piece)
        piece_path(kept.folder, piece).write_bytes(data if piece else data[:-1] + b"x")
    assert in_pieces.missing(blocks) == (0,)  # what is on the disk is not what it should be
    piece_path(kept.folder, 0).write_bytes(cut_piece(whole.train, manifest, 0))
    every = np.arange(manifest.num_blocks, dtype=np.int64)
    assert in_pieces.missing(every) == ()
    assert np.array_equal(in_pieces.blocks(every), whole.blocks(every))


def test_a_file_of_tokens_that_has_changed_is_not_used_again(tmp_path):
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(200))
    prepared = prepare_corpus(_spec(f"tokens:{path}"), tmp_path / "cache")
    kept = kept_corpus(tmp_path / "cache", prepared.manifest_digest)
    assert kept is not None
    assert kept.whole == path
    np.save(path, np.arange(300))
    kept = kept_corpus(tmp_path / "cache", prepared.manifest_digest)
    assert kept is not None
    assert kept.whole is None


@pytest.mark.parametrize("cut", [5, 11, 60, -1])
def test_half_a_file_is_no_corpus(texts, tmp_path, cut):
    prepared = prepare_corpus(_spec(f"text:{texts}/**/*.txt"), tmp_path / "cache")
    broken = tmp_path / "broken.corpus"
    broken.write_bytes((prepared.folder / PACKED).read_bytes()[:cut])
    with pytest.raises(InvalidCorpus):
        open_corpus(broken, 8, 2)
    with pytest.raises(InvalidCorpus):
        open_corpus(tmp_path / "nowhere", 8, 2)


def test_too_little_text_is_said_so(texts, tmp_path):
    with pytest.raises(InvalidCorpus, match=f"no file .*, seen from {Path.cwd()}: put yours there"):
        prepare_corpus(_spec(f"text:{texts}/*.nothing"), tmp_path / "cache")
    (texts / "short.txt").write_text("a")
    with pytest.raises(InvalidCorpus, match="more text"):
        prepare_corpus(_spec(f"text:{texts}/short.txt"), tmp_path / "cache")
    long = _spec(f"text:{texts}/**/*.txt").model_copy(
        update={"model": ModelSection(context_length=100_000)}
    )
    with pytest.raises(InvalidCorpus, match="more text"):
        prepare_corpus(long, tmp_path / "cache")


@pytest.mark.slow
def test_the_standard_library_is_bounded_and_repeats_itself(tmp_path):
    texts = stdlib_texts()
    assert texts == stdlib_texts()
    size_bytes = sum(text.path.stat().st_size for text in texts)
    assert 1_000_000 < size_bytes <= STDLIB_BYTES
    assert not any("test" in text.name.split("/")[:-1] for text in texts)


@pytest.mark.parametrize("suffix", [".npy", ".bin", ".u32"])
def test_a_token_file_is_used_where_it_lies_and_its_end_is_held_out(tmp_path, suffix):
    tokens = np.arange(200).astype({".npy": "<i8", ".bin": "<u2", ".u32": "<u4"}[suffix])
    path = tmp_path / f"tokens{suffix}"
    if suffix == ".npy":
        np.save(path, tokens)
    else:
        tokens.tofile(path)
    prepared = prepare_corpus(_spec(f"tokens:{path}"), tmp_path / "cache")
    assert prepared.whole == path
    corpus = open_corpus(prepared.folder, 8, 2)
    trained = corpus.blocks(np.arange(corpus.num_blocks, dtype=np.int64))
    validation = corpus.validation_blocks(2)
    assert validation.max() == 199
    assert not set(trained.ravel()) & set(validation.ravel())


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path):
    np.save(tmp_path / "t.npy", np.arange(300))
    with pytest.raises(InvalidCorpus, match="token 299"):
        prepare_corpus(_spec(f"tokens:{tmp_path / 't.npy'}"), tmp_path)
    np.save(tmp_path / "negative.npy", np.array([-1, 2]))
    with pytest.raises(InvalidCorpus, match="negative"):
        prepare_corpus(_spec(f"tokens:{tmp_path / 'negative.npy'}"), tmp_path)


def test_a_file_of_tokens_that_is_not_there_is_told_apart_from_one_of_another_type(tmp_path):
    for name, sentence in (("none.bin", "there is no such file"), ("none.txt", "of type .npy")):
        with pytest.raises(InvalidCorpus, match=sentence):
            prepare_corpus(_spec(f"tokens:{tmp_path / name}"), tmp_path)


def test_any_tokenizer_file_will_do(texts, tmp_path):
    vocabulary = {"text": 0, "[UNK]": 1, "</s>": 2} | {str(i): i + 3 for i in range(30)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    spec = _spec(f"text:{texts}/**/*.txt", tokenizer=str(tmp_path))
    prepared = prepare_corpus(spec, tmp_path / "cache")
    assert prepared.manifest.vocabulary_size == 33
    assert prepared.manifest.tokenizer_digest != "bytes"
    corpus = open_corpus(prepared.folder, 8, 2)
    assert set(corpus.blocks(np.array([0]))[0]) <= set(range(33))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"not a tokenizer\.json"):
        prepare_corpus(spec, tmp_path / "cache")


# --- replay ---------------------------------------------------------------------------------------
OLD, NEW = b"o", b"n"


def _letters(folder, letter, count):
    """Texts of one letter, so that tokens say which of them they are of."""
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_bytes(letter * (count // 40))
    return f"text:{folder}/*.txt"


@pytest.mark.parametrize(("old", "share"), [(80_000, 0.25), (2_000, 0.5)], ids=["more", "fewer"])
def test_replay_is_its_share_of_what_is_trained_on_and_held_out(tmp_path, old, share):
    source, replay = _letters(tmp_path / "new", NEW, 8_000), _letters(tmp_path / "old", OLD, old)
    mixed = prepare_corpus(_spec(source, replay=replay, replay_share=share), tmp_path / "cache")
    corpus = open_corpus(mixed.folder, 8, 2)
    for blocks in (corpus.blocks(np.arange(corpus.num_blocks)), corpus.validation_blocks(2_000)):
        told = (blocks == ord(OLD)).sum() / ((blocks == ord(OLD)) | (blocks == ord(NEW))).sum()
        assert told == pytest.approx(share, abs=0.02)
    alone = prepare_corpus(_spec(source), tmp_path / "cache")
    first = open_corpus(alone.folder, 8, 2)
    new = first.blocks(np.arange(first.num_blocks))[:, :-1]
    mine = corpus.blocks(np.arange(corpus.num_blocks))[:, :-1]
    of_new = mine[(mine != ord(OLD)).all(axis=1)][: len(new)]
    assert (of_new == new).all(), "all that is new is there, once"


def test_every_piece_has_its_share_of_replay_for_one_peer_may_train_it_alone(tmp_path):
    source = _letters(tmp_path / "new", NEW, 80_000)
    replay = _letters(tmp_path / "old", OLD, 80_000)
    spec = _spec(source, replay=replay, piece_kib=16)
    mixed = prepare_corpus(spec, tmp_path / "cache")
    corpus, each = open_corpus(mixed.folder, 8, 2), mixed.manifest.piece_blocks
    assert mixed.manifest.num_pieces > 4
    for piece in range(mixed.manifest.num_pieces):
        blocks = corpus.blocks(np.arange(piece * each, min((piece + 1) * each, corpus.num_blocks)))
        assert (blocks == ord(OLD)).mean() == pytest.approx(0.25, abs=0.05)


def test_conversations_that_lie_in_no_held_out_block_keep_their_marks(tmp_path):
    """A mark is a number above the vocabulary, which 256 bytes leave no room for."""
    tokenizer = ByteTokenizer()
    given = np.full(16_000, 256 + ord("q"), "<u2")
    given[::2], held_out = ord("a"), np.full(17, ord("a"), "<u2")
    with (tmp_path / "t").open("w+b") as train, (tmp_path / "h").open("w+b") as held:
        train.write(given.tobytes())
        held.write(held_out.tobytes())
        sizes = given.nbytes, held_out.nbytes
        chats = tmp_path / "chats.bin"
        write_packed(chats, tokenizer, sizes, (train, held), nobody, dtype=given.dtype)
    source = _letters(tmp_path / "new", NEW, 8_000)
    mixed = prepare_corpus(_spec(source, replay=f"tokens:{chats}"), tmp_path / "cache")
    corpus = open_corpus(mixed.folder, 8, 2)
    blocks = corpus.blocks(np.arange(corpus.num_blocks))
    assert set(np.unique(blocks)) == {~ord("q"), 0, ord("a"), ord("n")}


def test_replay_of_the_cached_corpus_is_that_of_its_texts_and_no_held_out_one_is_trained(tmp_path):
    source = _letters(tmp_path / "new", NEW, 8_000)
    (tmp_path / "old").mkdir()
    for number in range(30):
        (tmp_path / "old" / f"{number}.txt").write_text(f"[{number:02}]" * 50)
    old = f"text:{tmp_path}/old/*.txt"
    parent = prepare_corpus(_spec(old), tmp_path / "cache")
    by_texts, by_tokens = (
        prepare_corpus(_spec(source, replay=replay), tmp_path / "cache")
        for replay in (old, f"tokens:{parent.whole}")
    )
    assert by_texts.manifest_digest == by_tokens.manifest_digest
    assert parent.whole is not None
    assert parent.whole.exists()
    held_out = bytes(open_corpus(parent.folder, 8, 2).validation_blocks(1)[0][:4].astype(np.uint8))
    corpus = open_corpus(by_texts.folder, 8, 2)
    trained = corpus.blocks(np.arange(corpus.num_blocks))[:, :-1].astype(np.uint8).tobytes()
    assert held_out.startswith(b"[")
    assert held_out not in trained
    assert b"[" in trained


def test_a_file_of_the_mixed_tokens_is_the_corpus_and_is_not_mixed_again(tmp_path):
    source, replay = _letters(tmp_path / "n", NEW, 8_000), _letters(tmp_path / "o", OLD, 8_000)
    spec = _spec(source, replay=replay)
    founders = prepare_corpus(spec, tmp_path / "founder")
    here = prepare_corpus(spec, tmp_path / "joiner", str(founders.whole))
    assert here.manifest_digest == founders.manifest_digest


def test_replay_made_with_another_tokenizer_is_refused(tmp_path):
    parent = prepare_corpus(_spec(_letters(tmp_path / "o", OLD, 8_000)), tmp_path / "cache")
    words = Tokenizer(WordLevel({"o": 0, "n": 1}, unk_token="n"))
    words.save(str(tmp_path / "tokenizer.json"))
    np.save(tmp_path / "new.npy", np.ones(8_000, np.uint8))
    spec = _spec(
        f"tokens:{tmp_path}/new.npy",
        replay=f"tokens:{parent.whole}",
        tokenizer=str(tmp_path / "tokenizer.json"),
    )
    with pytest.raises(InvalidCorpus, match="made with another tokenizer"):
        prepare_corpus(spec, tmp_path / "cache")
