"""A corpus is tokenised in a process of its own, whose end is not the daemon's."""

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from peer.training.corpus import child as child_module
from peer.training.corpus.child import answer_of, prepare_in_child
from peer.training.corpus.folder import prepare_corpus
from peer.training.corpus.packed import InvalidCorpus
from protocol.run.run_spec import DataSection, ModelSection, RunSpec
from protocol.schedule.progress import TaskProgress, nobody

LIMIT_S = 120.0
BACKTRACKS = "(x+x+)+y"
"""Takes time that doubles with each x of a text without y, up to the library's limit."""
HANGS = ("x" * 20 + "a") * 50


def spec_of(folder: Path, pattern: str, word: str) -> RunSpec:
    """A run on some texts of this word, split by the pattern."""
    tokenizer = Tokenizer(models.WordLevel({"x": 0, "a": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    for number in range(3):
        (folder / f"{number}.txt").write_text(word * 300)
    tokenizer_path = str(folder / "tokenizer.json")
    data = DataSection(source=f"text:{folder}/*.txt", tokenizer=tokenizer_path, validation_blocks=2)
    return RunSpec(model=ModelSection(context_length=8), data=data)


def children() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if child_module.PROGRAM in " ".join(child.cmdline())
    ]


async def the_child() -> psutil.Process:
    with trio.fail_after(LIMIT_S):
        while not (found := children()):
            await trio.sleep(0.01)
    return found[0]


@pytest.mark.slow
async def test_the_corpus_is_that_of_this_process(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, " ", "a x ")
    here = prepare_corpus(spec, tmp_path / "here")
    told = list[TaskProgress]()
    made = await prepare_in_child(spec, tmp_path / "apart", tell=told.append)
    assert made.manifest_digest == here.manifest_digest
    assert {each.share for each in told[-1:]} == {1.0}, "how far it is comes through the pipe"
    assert made.whole is not None
    assert not children()
    with pytest.raises(InvalidCorpus, match="no file matches"):
        await prepare_in_child(spec, tmp_path / "apart", "text:nowhere/*.txt")


@pytest.mark.slow
async def test_a_tokenizer_that_hangs_is_told_and_stopped(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, BACKTRACKS, HANGS)
    with pytest.raises(InvalidCorpus, match=r"said nothing for 3 s, and was stopped: .*'/.*json'"):
        await prepare_in_child(spec, tmp_path / "cache", silence_s=3.0)
    assert not children()


@pytest.mark.slow
def test_a_panic_of_the_tokenizer_is_told(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, BACKTRACKS, "x")
    told = {"spec": spec.to_bytes().decode(), "cache_dir": str(tmp_path), "source": None}
    assert "retry-limit" in answer_of(told, nobody)["invalid"]


@pytest.mark.slow
async def test_a_child_that_is_killed_is_told_and_one_that_is_not_wanted_ends(
    tmp_path: Path,
) -> None:
    spec = spec_of(tmp_path, BACKTRACKS, HANGS)
    with pytest.RaisesGroup(pytest.RaisesExc(InvalidCorpus, match="was killed by signal 9")):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(prepare_in_child, spec, tmp_path / "cache")
            (await the_child()).kill()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(prepare_in_child, spec, tmp_path / "cache")
        child = await the_child()
        nursery.cancel_scope.cancel()
    assert not child.is_running()


@pytest.mark.slow
async def test_a_child_that_hangs_ends_with_its_daemon_and_before_it_where_memory_is_short(
    tmp_path: Path,
) -> None:
    """The daemon's end closes the pipe, as here."""
    spec, pipes = spec_of(tmp_path, BACKTRACKS, HANGS), list[trio.abc.SendStream]()
    open_process = trio.lowlevel.open_process

    async def opened(*given: Any, **options: Any) -> trio.Process:
        process = await open_process(*given, **options)
        assert process.stdin is not None
        pipes.append(process.stdin)
        return process

    with pytest.MonkeyPatch.context() as patch, pytest.raises(BaseExceptionGroup) as ended:
        patch.setattr(trio.lowlevel, "open_process", opened)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(prepare_in_child, spec, tmp_path / "cache")
            child = await the_child()
            with trio.fail_after(LIMIT_S):
                while not list(tmp_path.glob("cache/.packing-*")):
                    await trio.sleep(0.05)
                began_s = child.cpu_times().user
                while child.cpu_times().user < began_s + 0.3:
                    await trio.sleep(0.05)
            score = Path(f"/proc/{child.pid}/oom_score_adj").read_text()
            assert score.strip() == child_module.FIRST_TO_GO
            await trio.aclose_forcefully(pipes[0])
    assert f"was killed by signal {signal.SIGIO.value}" in str(ended.value.exceptions[0])


def test_errors_of_the_system_are_told_in_all_three_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), tmp_path / "full")

    monkeypatch.setattr(child_module, "prepare_corpus", fill)
    told = {"spec": RunSpec().to_bytes().decode(), "cache_dir": "there", "source": None}
    answer = json.loads(json.dumps(answer_of(told, nobody)))
    with pytest.raises(OSError, match="No space left") as raised:
        child_module._taken(answer, tmp_path)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path / "full"))
