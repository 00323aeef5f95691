"""The line at the bottom of a terminal: a real one (a pty), and what stands on its screen."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from peer.process.bottom_line import BottomLine, bottom_line, keep_drawn, shown
from protocol.schedule.progress import TaskProgress

LIMIT_S = 180.0


def screen_of(written: str) -> list[str]:
    """What a terminal shows of it in the end: whole lines, and the last one."""
    rows = [""]
    for piece in re.split(r"(\r\n|\n|\r\x1b\[K)", written):
        if piece in ("\r\n", "\n"):
            rows.append("")
        elif piece == "\r\x1b[K":
            rows[-1] = ""
        else:
            rows[-1] += piece
    assert not any("\x1b" in row or "\r" in row for row in rows)
    return rows


class Screen:
    """A terminal: the end that a program writes to, and what was written."""

    def __init__(self) -> None:
        self._reader, writer = pty.openpty()
        self.stream: TextIO = os.fdopen(writer, "w")
        self.take: Callable[[], None] = lambda: None

    @property
    def written(self) -> str:
        data = b""
        while select.select([self._reader], [], [], 0)[0]:
            data += os.read(self._reader, 1 << 16)
        return data.decode()


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    """One that is that of this process once it is `taken`: pytest has its own until a test runs."""
    screen = Screen()
    monkeypatch.setenv("TERM", "xterm")
    screen.take = lambda: monkeypatch.setattr(sys, "stderr", screen.stream)
    yield screen
    screen.stream.close()


def test_lines_are_printed_above_it_and_it_goes_in_the_end(screen: Screen) -> None:
    screen.take()
    with bottom_line() as line:
        assert line.show("fetching: 43%")
        print("linked with a peer", file=sys.stderr)
        assert line.show("fetching: 44%")
        written = screen.written
        assert screen_of(written) == ["linked with a peer", "fetching: 44%"]
        print("and another", file=sys.stderr)
    assert screen_of(written + screen.written) == ["linked with a peer", "and another", ""]


def test_a_question_is_not_drawn_over(screen: Screen) -> None:
    screen.take()
    with bottom_line() as line:
        print("join nevertheless? [y/N] ", end="", file=sys.stderr, flush=True)
        assert not line.show("fetching: 43%")
    assert screen.written == "join nevertheless? [y/N] "


def test_words_of_strangers_do_nothing_to_the_terminal(screen: Screen) -> None:
    BottomLine(screen.stream).show("fetching: \x1b]0;mine\x07\x1b[2J\nloco-peer: all is well")
    assert screen_of(screen.written) == [
        r"fetching: \x1b]0;mine\x07\x1b[2J\nloco-peer: all is well"
    ]


def test_without_a_terminal_or_stderr_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with shown("leaving") as tell:
        tell(TaskProgress("waiting"))
    assert sys.stderr is None


def test_it_is_one_line_however_long_the_words_are(screen: Screen) -> None:
    fcntl.ioctl(screen.stream.fileno(), termios.TIOCSWINSZ, struct.pack("4H", 24, 40, 0, 0))
    BottomLine(screen.stream).show("x" * 100)
    assert len(screen_of(screen.written)[-1]) == 39


def test_a_pipe_and_a_dumb_terminal_get_nothing(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert not BottomLine(screen.stream).show("fetching: 43%")
    assert screen.written == ""
    monkeypatch.setenv("TERM", "xterm")
    with (tmp_path / "log").open("w") as file:
        assert not BottomLine(file).show("fetching: 43%")
    assert (tmp_path / "log").read_text() == ""


def drawn_in(seconds: int) -> list[str]:
    """What a command that lasts so long shows, by a clock that moves when it waits."""
    now, shows = [100.0], list[str]()

    def wait(pause_s: float) -> bool:
        now[0] += pause_s
        return now[0] > 100 + seconds

    keep_drawn(
        "exporting", lambda: TaskProgress("writing the file"), shows.append, wait, lambda: now[0]
    )
    return list(filter(None, shows))


def test_a_command_shows_what_lasts_and_no_more() -> None:
    assert drawn_in(2) == []
    (*_, last) = drawn_in(5)
    assert last == "exporting: writing the file; 5 s so far"


def test_a_command_leaves_its_terminal_as_it_was(screen: Screen) -> None:
    screen.take()
    before = sys.stdout, sys.stderr
    with pytest.raises(KeyError), shown("exporting") as tell:
        tell(TaskProgress("fetching stage 2", 1, 4, "stages"))
        raise KeyError
    assert (sys.stdout, sys.stderr) == before
    assert screen.written == ""


SPEC = """
name = "slow"
data.source = "text:{text}"
data.tokenizer = "{tokenizer}"
"""


def freezing(folder: Path, lines: int) -> list[str]:
    """A command that tokenises a text of so many lines."""
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "text.txt").write_text("a b a a b\n" * lines)
    spec = SPEC.format(text=folder / "text.txt", tokenizer=folder / "tokenizer.json")
    (folder / "run.toml").write_text(spec)
    start = ["start", str(folder / "run.toml"), "--home", str(folder / "home")]
    command = "from peer.cli import main; main()"
    return [sys.executable, "-c", command, *start, "--listen", "127.0.0.1:0"]


def written_by(command: list[str], ends: tuple[int, int], until: str) -> str:
    """All that it writes; once this has come it is told to end."""
    reader, writer = ends
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(command, stdout=writer, stderr=writer, env=environment)
    os.close(writer)
    written, is_ending, until_s = b"", False, time.monotonic() + LIMIT_S
    with suppress(OSError):  # a terminal that nobody writes to any more
        while time.monotonic() < until_s and (data := os.read(reader, 1 << 16)):
            written += data
            if not is_ending and re.search(until.encode(), written):
                is_ending = True
                process.terminate()
    process.terminate()
    process.wait(LIMIT_S)
    assert is_ending, written.decode()
    return written.decode()


@pytest.mark.long
@pytest.mark.slow
def test_a_corpus_that_is_frozen_shows_its_progress_in_a_terminal(tmp_path: Path) -> None:
    drawn = r"preparing the data: tokenising, \d+%, \d+ \w+ left, [\d.]+ MB/s \(\d MB of 25 MB\)"
    written = written_by(freezing(tmp_path / "a", 2_500_000), pty.openpty(), drawn)
    rows = screen_of(written)
    said = [row[9:].partition(":")[0] for row in rows if "preparing" in row]
    assert said == ["preparing the data"]
    assert not any("so far" in row or " left" in row for row in rows), "what was drawn is gone"
    assert rows[-1] == ""


@pytest.mark.long
@pytest.mark.slow
def test_the_same_into_a_pipe_is_whole_lines_alone(tmp_path: Path) -> None:
    """Which of the two is told depends on the machine: what it does is looked at each second."""
    told = r" (preparing the data(: tokenising[^\n]*)?|starting the trainer)\n"
    written = written_by(freezing(tmp_path / "a", 500_000), os.pipe(), told)
    assert not {"\x1b", "\r"} & {*written}
    assert "so far" not in written
