"""What a run will take, as people read it."""

import json
import re
from pathlib import Path

import pytest

from peer.cli.app import exit_code_of
from peer.cli.new import preset_spec
from peer.options.config import load_config
from peer.options.exit_codes import ExitCode
from peer.options.needs_told import (
    FreeRoom,
    NotAgreed,
    check_agreed,
    corpus_tokens_of,
    misfit,
    say_needs,
    told_corpus,
    told_needs,
)
from protocol.run.families import config_of_sizes
from protocol.run.run_spec import FrozenSection, ModelSection, RunSpec
from protocol.run.sections import AdapterSection

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


GB = 10**9


@pytest.mark.parametrize(
    ("disk", "memory", "on_gpu", "said"),
    [
        (24 * GB, 12 * GB, False, None),
        (23 * GB, 100 * GB, False, "up to 11.9 GB of disk (23.0 GB are free). To join"),
        (100 * GB, 10 * GB, False, "up to 5.5 GB of memory (10.0 GB are free). To join"),
        (100 * GB, 10 * GB, True, None),
        (GB, GB, False, "of disk (1.0 GB are free) and 5.5 GB of memory (1.0 GB are free)"),
    ],
)
def test_what_takes_more_than_half_of_what_is_free_is_asked_for(
    tmp_path: Path, disk, memory, on_gpu, said
):
    spec = preset_spec("125m", "noloco", "adamw")
    free = FreeRoom(disk, memory, GB if on_gpu else None)
    agrees = load_config({"home": tmp_path, "yes": True}, {})
    check_agreed(agrees, spec, free)
    config = load_config({"home": tmp_path}, {})
    if said is None:
        check_agreed(config, spec, free)
        return
    with pytest.raises(NotAgreed, match=re.escape(said)) as raised:
        check_agreed(config, spec, free)
    assert exit_code_of(raised.value) is ExitCode.USAGE


def test_an_expert_that_is_too_large_is_named(tmp_path: Path):
    spec, config = preset_spec("125m", "noloco", "adamw"), load_config({"home": tmp_path}, {})
    said = "the expert 'code' of the run 'llama-125m' may take more than half .* 5.5 GB of memory"
    with pytest.raises(NotAgreed, match=said):
        check_agreed(config, spec, FreeRoom(GB, GB), expert="the expert 'code' of ")


def test_what_fits_depends_on_what_its_user_agreed_to(tmp_path: Path):
    spec = preset_spec("125m", "noloco", "adamw")
    config, agrees = (load_config({"home": tmp_path, "yes": yes}, {}) for yes in (False, True))
    roomy, half, small = FreeRoom(100 * GB, 100 * GB), FreeRoom(100 * GB, 10 * GB), FreeRoom(GB, GB)
    assert misfit(config, spec, roomy) == misfit(agrees, spec, half) == ""
    assert "5.5 GB of memory (10.0 GB are free), more than half" in misfit(config, spec, half)
    for either in (config, agrees):
        assert misfit(either, spec, small).endswith("5.5 GB of memory (1.0 GB are free)")
    assert "of memory of the GPU (1.0 GB are free)" in misfit(
        agrees, spec, FreeRoom(GB * 99, GB * 99, GB)
    )


def test_what_fits_several_cards_together_fits_if_main_memory_holds_the_whole(tmp_path: Path):
    spec, agrees = (
        preset_spec("1b", "noloco", "adamw"),
        load_config({"home": tmp_path, "yes": True}, {}),
    )
    for gpus, memory, lacks in (
        (1, 99, "the GPU (8.0 GB"),
        (8, 99, ""),
        (8, 12, "16.5 GB of memory (12.0 GB"),
    ):
        said = misfit(agrees, spec, FreeRoom(GB * 999, GB * memory, GB * 8, gpus))
        assert (lacks in said) if lacks else said == ""


@pytest.mark.parametrize(
    ("given", "gpu", "lacks"),
    [
        ({}, 99, ""),
        ({"shard-weights": True}, 99, "16.5 GB of memory (12.0 GB"),
        ({"split-context": True}, 8, "of memory of the GPU (8.0 GB"),
    ],
)
def test_cards_share_out_weights_or_do_not_as_they_are_told(tmp_path: Path, given, gpu, lacks):
    spec = preset_spec("1b", "noloco", "adamw")
    agrees = load_config({"home": tmp_path, "yes": True, "gpus": "8", **given}, {})
    said = misfit(agrees, spec, FreeRoom(GB * 999, GB * 12, GB * gpu, 8))
    assert (lacks in said) if lacks else said == ""


def test_adapters_on_several_cards_take_no_state_of_the_whole_model(tmp_path: Path):
    """A checkpoint of 1B parameters, in fp32, and little more."""
    section = preset_spec("1b").model
    text = json.dumps(config_of_sizes(section, 50_257))
    frozen = FrozenSection(
        config=text, layout_digest="0" * 32, parameters=1 << 20, padded_parameters=1 << 20
    )
    base = ModelSection(init_from="a checkpoint", context_length=section.context_length)
    spec = RunSpec(model=base, frozen=frozen, adapter=AdapterSection())
    agrees = load_config({"home": tmp_path, "yes": True, "gpus": "2"}, {})
    assert misfit(agrees, spec, FreeRoom(GB * 99, GB * 99, GB * 12, 2)) == ""


def test_the_programs_themselves_are_not_asked_for(tmp_path: Path):
    """Who joins wants them, whatever the run; many small peers share a small machine."""
    check_agreed(load_config({"home": tmp_path}, {}), RunSpec(), FreeRoom(GB, 200 << 20))


def test_a_joiner_is_told_how_much_of_the_corpus_it_keeps(tmp_path: Path):
    founded = RunSpec.model_validate({"data": {"manifest": "0" * 32}})
    config = load_config({"home": tmp_path}, {})
    limited = load_config({"home": tmp_path, "max-corpus-gb": "7"}, {})
    said = [" ".join(told_needs(founded, None, each)) for each in (config, limited)]
    assert "of the corpus at most a quarter of what is free (--max-corpus-gb)" in said[0]
    assert "of the corpus at most 7.0 GB" in said[1]


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
