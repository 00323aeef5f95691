"""Copies of checkpoints elsewhere: whole, bounded, and of ours alone."""

from pathlib import Path

import pytest
from checkpoint_worlds import write

from peer.state.checkpoints import MANIFEST_FILE, CheckpointStore
from peer.state.home import Home
from peer.state.uploads import UploadFailed, Uploads


def test_what_was_copied_can_be_gone_on_from(tmp_path):
    store = CheckpointStore(tmp_path / "home", keep=3)
    where = Uploads(f"file://{tmp_path}/there", "me", 3, Home(tmp_path / "home")).copy(write(store))
    back = CheckpointStore(tmp_path / "new", keep=3)
    back.directory.mkdir()
    Path(where).rename(back.directory / Path(where).name)
    (found,) = back.newest_first(lambda _, why: pytest.fail(why))
    found.verify()


def test_old_copies_go_and_those_of_others_stay(tmp_path):
    store = CheckpointStore(tmp_path / "home", keep=9)
    other = Uploads(str(tmp_path / "there"), "other", 1, Home(tmp_path / "home"))
    other.copy(write(store))
    ours = Uploads(str(tmp_path / "there"), "me", 2, Home(tmp_path / "home"))
    for _ in range(3):
        ours.copy(write(store))
    there = sorted(path.relative_to(tmp_path / "there") for path in tmp_path.glob("there/*/*"))
    numbers = [(path.parts[0], path.name[:6]) for path in there]
    assert numbers == [("me", "000003"), ("me", "000004"), ("other", "000001")]


def test_a_copy_of_another_stage_stays_though_a_home_that_was_lost_counted_further(tmp_path):
    uploads = Uploads(str(tmp_path / "there"), "me", 1, Home(tmp_path / "home"))
    lost, new = (CheckpointStore(tmp_path / name, keep=9) for name in ("lost", "new"))
    write(lost)
    uploads.copy(write(lost, part="stage/0"))
    copied = uploads.copy(write(new, part="stage/1"))
    assert [str(path) for path in tmp_path.glob("there/me/*")] == [copied]


def test_a_place_that_refuses_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    uploads = Uploads(str(tmp_path / "file"), "me", 1, Home(tmp_path / "home"))
    with pytest.raises(UploadFailed, match="Error"):
        uploads.copy(write(CheckpointStore(tmp_path / "home", keep=1)))


@pytest.mark.parametrize("url", ["nope://bucket/run"])
def test_an_unknown_kind_of_place_is_refused_at_once(tmp_path, url):
    with pytest.raises(UploadFailed, match="cannot be copied to nope"):
        Uploads(url, "me", 1, Home(tmp_path / "home"))


def test_the_manifest_comes_last(tmp_path, monkeypatch):
    uploads = Uploads(str(tmp_path / "there"), "me", 1, Home(tmp_path / "home"))
    names, put_file = list[str](), uploads._files.put_file

    def noted(path: str, target: str) -> None:
        names.append(Path(path).name)
        put_file(path, target)

    monkeypatch.setattr(uploads._files, "put_file", noted)
    uploads.copy(write(CheckpointStore(tmp_path / "home", keep=1)))
    assert names[-1] == MANIFEST_FILE
