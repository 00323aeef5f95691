"""A stream whose other end is gone goes on in a file, and nobody notices who writes to it."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from peer.process import terminal
from peer.process.terminal import LastingStream


@pytest.fixture(params=["buffered", "PYTHONUNBUFFERED"])
def broken(request):
    """A text stream into a pipe that nobody reads, as stdout is."""
    reader, writer = os.pipe()
    os.close(reader)
    if request.param == "buffered":
        with os.fdopen(writer, "w") as stream:
            yield stream
    else:
        with io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True) as stream:
            yield stream


def test_what_nobody_takes_goes_to_the_file(broken, tmp_path: Path) -> None:
    file = tmp_path / "console.log"
    stream = LastingStream(broken, file)
    print("one", file=stream, flush=True)
    os.write(broken.fileno(), b"a library\n")
    print("two", file=stream, flush=True)
    first, *rest = file.read_text().splitlines()
    assert "Broken pipe" in first
    assert rest == ["one", "a library", "two"]
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_file_may_come_later(broken, tmp_path: Path) -> None:
    file = tmp_path / "log" / "console.log"
    stream = LastingStream(broken, file)
    print("before", file=stream, flush=True)
    file.parent.mkdir()
    print("after", file=stream, flush=True)
    assert file.read_text().splitlines()[1:][-1:] == ["after"]


def test_the_file_is_bounded_and_by_the_next_process_too(broken, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(terminal, "MAX_BYTES", 200)
    file = tmp_path / "console.log"
    stream = LastingStream(broken, file)
    for _ in range(100):
        print("as long as a line is", file=stream, flush=True)
        assert file.stat().st_size < 300
    next_one = LastingStream(broken, file)
    for _ in range(100):
        print("as long as a line is", file=next_one, flush=True)
        assert file.stat().st_size < 300


HANGS_UP = """
import os, signal, subprocess, sys
from peer.process.terminal import outlive_terminal
outlive_terminal()
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=-1)
child.send_signal(signal.SIGHUP)
os.kill(os.getpid(), signal.SIGHUP)
child.stdin.close()
print("lost", flush=True)
sys.exit(child.wait())
"""


@pytest.mark.slow
def test_hanging_up_ends_neither_us_nor_a_child(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", HANGS_UP], stdout=writer, stderr=-1, timeout=60, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
