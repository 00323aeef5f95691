"""Processes that make a corpus: heard, and ended with the first failure or the caller."""

import errno
import json
from pathlib import Path

import pytest

from peer.training.corpus import InvalidCorpus
from peer.training.corpus.shard_files import outputs, remove_all_drafts
from peer.training.corpus.tokenise import run_processes

pytestmark = pytest.mark.slow

OBEDIENT = """
import json, os, signal, sys
order = json.loads(sys.stdin.readline())
print(json.dumps({"at": "the place", "pid": os.getpid(), "session": os.getsid(0)}), flush=True)
for said in order:
    if said == "wait":
        sys.stdin.read()  # until the caller ends us, or is gone
    elif said == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        print(json.dumps(said), flush=True)
sys.exit(any("error" in said or "errno" in said for said in order))
"""


class Stop(BaseException):
    """Raised by a caller that is cancelled."""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "obedient.py").write_text(OBEDIENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return "obedient"


class Listener:
    """Keeps what processes say, and stops when told to."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.said: list[dict[str, object]] = []
        self._stop_after = stop_after

    def heard(self, said: dict[str, object]) -> None:
        self.said.append(said)

    def check(self) -> None:
        if len(self.said) == self._stop_after:
            raise Stop

    def all_are_gone(self) -> bool:
        return not any(Path(f"/proc/{said['pid']}").exists() for said in self.said if "pid" in said)


def test_all_are_heard_to_the_end(program: str) -> None:
    listener = Listener()
    run_processes(program, [[{"bytes": n}] for n in range(3)], listener.heard, listener.check)
    assert {said["bytes"] for said in listener.said if "bytes" in said} == {0, 1, 2}
    begun = [said for said in listener.said if "pid" in said]
    assert all(said["pid"] == said["session"] for said in begun), "Ctrl+C is not for them"
    assert len(begun) == 3


def test_the_first_failure_ends_the_others(program: str) -> None:
    listener = Listener()
    with pytest.raises(InvalidCorpus, match="a bad line"):
        run_processes(
            program, [["wait"], [{"error": "a bad line"}]], listener.heard, listener.check
        )
    assert listener.all_are_gone()


def test_a_disk_that_is_full_is_told(program: str) -> None:
    listener, said = Listener(), {"errno": errno.ENOSPC, "path": "/somewhere"}
    with pytest.raises(OSError, match="No space left on device: '/somewhere'"):
        run_processes(program, [[said], ["wait"]], listener.heard, listener.check)


def test_one_that_is_killed_is_told_by_its_place(program: str) -> None:
    listener = Listener()
    said = "killed by signal 9, perhaps for want of memory; it was at the place. Start again"
    with pytest.raises(InvalidCorpus, match=said):
        run_processes(program, [["die"], ["wait"]], listener.heard, listener.check)
    assert listener.all_are_gone()


def test_a_caller_that_is_cancelled_ends_them(program: str) -> None:
    listener = Listener(stop_after=2)
    with pytest.raises(Stop):
        run_processes(program, [["wait"], ["wait"]], listener.heard, listener.check)
    assert len(listener.said) == 2
    assert listener.all_are_gone()


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
