"""What a run will take, as people read it."""

from pathlib import Path

import pytest

from peer.cli.new import preset_spec
from peer.options.config import load_config
from peer.options.needs_told import (
    corpus_tokens_of,
    say_needs,
    told_corpus,
    told_needs,
)
from protocol.run.run_spec import RunSpec

MANY, FEW = "learnt by heart", "never read"


@pytest.mark.parametrize(
    ("per_peer", "corpus", "warned"),
    [(11, 1, MANY), (10, 1, None), (1, 4, None), (1, 5, FEW)],
)
def test_less_than_an_epoch_and_more_than_ten_are_said(per_peer, corpus, warned):
    said = " ".join(told_corpus(per_peer, corpus))
    assert said.startswith("corpus  ")
    assert [word for word in (MANY, FEW) if word in said] == ([warned] if warned else [])


def test_of_an_unknown_corpus_nothing_is_said():
    assert list(told_corpus(1, None)) == []
    assert corpus_tokens_of(preset_spec("125m"), "parquet:nowhere/*.parquet") is None
    assert corpus_tokens_of(preset_spec("125m"), "text:nowhere/*.txt") is None


def test_files_are_counted_by_their_sizes(tmp_path: Path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("x" * 4000)
    tree = preset_spec("125m").model_dump()
    tree["data"]["source"] = f"text:{tmp_path}/*.txt"
    assert corpus_tokens_of(RunSpec.model_validate(tree)) == 2000, "four bytes a token"
    tree["data"]["tokenizer"] = "bytes"
    assert corpus_tokens_of(RunSpec.model_validate(tree)) == 8000


def test_every_subject_has_its_line_and_estimates_are_called_so(tmp_path: Path):
    config = load_config({"home": tmp_path, "max-upload-mbps": "8", "checkpoint-keep": "1"}, {})
    lines = told_needs(preset_spec("125m"), 10**9, config)
    subjects = [line.split()[0] for line in lines if not line.startswith((" ", "("))]
    assert subjects == ["model", "memory", "disk", "tokens", "corpus", "line"]
    assert "(1 kept)" in " ".join(lines)
    assert any("on 8 Mbit/s" in line for line in lines)
    assert any("2.9 GB an hour" in line for line in lines), "0.8 of 8 Mbit/s"
    assert lines[-1].startswith("(estimates: ")
    assert max(map(len, lines)) <= 104


def test_a_checkpoints_sizes_are_not_guessed():
    spec = RunSpec.model_validate({"model": {"init_from": "some/model"}})
    assert "some/model, which is not read yet" in " ".join(told_needs(spec))


def test_who_founds_is_told_before_and_who_joins_when_the_run_is_known(tmp_path: Path, capsys):
    spec, config = preset_spec("demo"), load_config({"home": tmp_path}, {})
    say_needs(config, spec, corpus_tokens_of(spec, config.data))
    assert "885.9k parameters" in capsys.readouterr().err
    say_needs(config, spec, 10_000, again=True)
    said = capsys.readouterr().err
    assert "parameters" not in said, "not a second time"
    assert MANY in said
    say_needs(config, spec, 10_000_000)
    assert "885.9k parameters" in capsys.readouterr().err
    say_needs(load_config({"home": tmp_path, "log-format": "json"}, {}), spec, 1)
    assert capsys.readouterr().err == ""
