"""A checkpoint is whole or refused, and what is kept is bounded."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoint_worlds import MANIFEST, P, vectors, write

from peer.daemon.checkpointing import Draft
from peer.state import checkpoints as checkpoints_module
from peer.state.checkpoints import (
    MANIFEST_FILE,
    OUTER_FILE,
    TRAINER_FILE,
    Checkpoint,
    CheckpointStore,
    NoRoom,
    write_outer,
)
from peer.training.messages import Kept
from peer.training.tensor_file import TensorFile, write_tensors


def newest_good(store: CheckpointStore) -> tuple[Checkpoint | None, list[str]]:
    refused: list[str] = []
    tell = lambda path, why: refused.append(f"{path.name}: {why}")
    return store.newest_whole("run", tell), refused


def test_what_was_written_is_read(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    write(store, 1.0)
    written = write(store, 2.0)
    found, refused = newest_good(store)
    assert (found, refused) == (written, [])
    slow_P, momentum_P = vectors(0.0)
    written.fill(slow_P, momentum_P)
    assert (slow_P == 2.0).all()
    assert (momentum_P == -2.0).all()
    assert sorted(written.manifest.files) == [OUTER_FILE, TRAINER_FILE]


def test_momentum_that_is_zero_is_not_written(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    folder = store.begin(P)
    slow_P, momentum_P = vectors(2.0)
    write_outer(folder, slow_P, np.zeros_like(momentum_P))
    assert TensorFile(folder / OUTER_FILE).names == {"slow"}
    slow_P.fill(9.0)
    Checkpoint(folder, MANIFEST).fill(slow_P, momentum_P)
    assert (slow_P == 2.0).all()
    assert not momentum_P.any()


@pytest.mark.parametrize("name", [OUTER_FILE, TRAINER_FILE, MANIFEST_FILE])
@pytest.mark.parametrize("harm", ["cut", "changed", "gone"])
def test_of_a_torn_or_changed_one_the_one_before_is_used(tmp_path, name, harm):
    store = CheckpointStore(tmp_path, keep=3)
    good, bad = write(store, 1.0), write(store, 2.0)
    path = bad.path / name
    data = path.read_bytes()
    match harm:
        case "cut":
            path.write_bytes(data[:-9])
        case "changed":
            path.write_bytes(data[:-9] + b"!" + data[-8:])
        case "gone":
            path.unlink()
    found, refused = newest_good(store)
    assert found == good
    assert len(refused) == 1
    assert name in refused[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_and_the_one_before_is_used(tmp_path, bad):
    store = CheckpointStore(tmp_path, keep=3)
    good, spoilt = write(store, 1.0), write(store, bad, step=2.0)
    found, refused = newest_good(store)
    assert found == good
    assert refused == [
        f"{spoilt.path.name}: momentum in {OUTER_FILE} holds values that are not finite"
    ]


def test_what_was_half_written_is_no_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    good = write(store)
    write_outer(store.begin(P), *vectors(2.0))
    assert newest_good(store) == (good, [])
    assert CheckpointStore(tmp_path, keep=3).begin(P).is_dir()  # what a crash left is no hindrance
    store.discard()
    assert [path.name for path in tmp_path.iterdir()] == [good.path.name]


def test_the_newest_are_kept_and_names_go_on(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for value in range(1, 5):
        write(store, float(value))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000003-step-3", "000004-step-4"]
    write(CheckpointStore(tmp_path, keep=2), 5.0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000004-step-4", "000005-step-5"]


def test_none_takes_the_place_of_one_of_a_later_step(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 200.0)
    for step in (0.0, 1.0, 2.0):
        write(store, step)
    found, _ = newest_good(store)
    assert found is not None
    assert found.path.name == "000001-step-200"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000001-step-200", "000004-step-2"]
    write(store, 201.0)
    found, _ = newest_good(store)
    assert found is not None
    assert found.manifest.step == 201.0


def test_one_that_is_too_many_is_not_said_to_be_there(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 200.0)
    assert write(store, 100.0).path == Path("too many")


def test_those_of_another_part_are_not_in_the_way_of_one_that_is_set_aside(tmp_path):
    store = CheckpointStore(tmp_path, keep=9)
    other = write(store, 500.0, part="stage/0")
    ahead = store.set_aside(write(store, 102.0, part="stage/1"), 100.0)
    assert ahead.is_dir()
    assert other.path.is_dir()
    others_ahead = store.set_aside(other, 100.0)
    later = write(store, 900.0, part="stage/1")
    assert later.path.name == "000003-step-900"
    again = store.set_aside(later, 100.0)
    assert again.is_dir()
    assert others_ahead.is_dir()
    assert not ahead.exists()


def test_the_end_comes_after_a_replica_that_has_overshot_it(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 192.27)
    end = write(store, 192.0, over=True)
    assert end.manifest.step == 192.27
    assert newest_good(store)[0] == end


def test_an_end_says_so_in_its_name_which_an_older_loco_peer_reads_too(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    last, end = write(store, 192.0), write(store, 192.0, over=True)
    assert [each.path.name for each in (last, end)] == ["000001-step-192", "000002-step-192-end"]
    assert [str(each.manifest) for each in (last, end)] == [
        "step 192",
        "step 192 (the end of the run)",
    ]
    assert end.path.name.partition("-step-")[0].isdecimal(), "which is all that was looked at"
    assert write(store, 200.0).path.name == "000003-step-200"


def test_an_end_that_an_older_loco_peer_wrote_comes_after_what_was_there(tmp_path):
    def say(checkpoint: Checkpoint, step: float) -> None:
        manifest = checkpoint.manifest.model_copy(update={"step": step})
        (checkpoint.path / MANIFEST_FILE).write_text(manifest.model_dump_json())

    store = CheckpointStore(tmp_path, keep=9)
    write(store, 192.27)
    end = write(store, 192.0, over=True)
    say(end, 192.0)
    say(write(store, 192.0, over=True), 0.0)  # when it was started once more
    found, _ = newest_good(store)
    assert found is not None
    assert found.path == end.path
    assert found.manifest.step == 192.0


def test_one_that_was_found_torn_is_removed_before_all_others(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    torn = write(store, 500.0)
    (torn.path / OUTER_FILE).write_bytes(b"torn")
    assert newest_good(store)[0] is None
    good = write(store, 100.0)
    assert [path.name for path in tmp_path.iterdir()] == [good.path.name]


def test_a_trainer_that_writes_late_tears_no_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    folder = store.begin(P)
    write_outer(folder, *vectors(1.0))
    part = Draft(folder, store.trainers_draft(1), None, 0.0, 0.0)
    standing = Kept(str(part.path), 40.0, 0, 0, 0)
    part.done_without(store, 3, standing)
    sealed = store.seal(folder, MANIFEST)
    assert sealed is not None
    write_tensors(part.path, {"fast": torch.ones(P)}, {})
    sealed.verify()
    store.begin(P)
    assert not part.path.exists()


def test_where_another_part_is_held_its_checkpoints_come_first(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 200.0)
    for step in (150.0, 160.0):
        write(store, step, part="stage/1")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000002-step-150", "000003-step-160"]


def test_the_newest_of_each_expert_outlasts_older_ones_and_is_found_again(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    for step in (800.0, 900.0):
        write(store, step, part="expert/1")
    for step in (10.0, 20.0, 30.0):
        write(store, step, part="expert/0")
    kept = ["000002-step-900", "000004-step-20", "000005-step-30"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    for part, step in (("expert/0", 30.0), ("expert/1", 900.0)):
        found = store.newest_whole("run", lambda *_: None, part)
        assert found is not None
        assert (found.manifest.part, found.manifest.step) == (part, step)
    assert store.newest_whole("run", lambda *_: None, "expert/2") is None
    write(CheckpointStore(tmp_path, keep=1), 40.0, part="expert/0")
    assert [path.name for path in tmp_path.iterdir()] == ["000006-step-40"], "never more than kept"


def test_one_without_a_manifest_goes_before_all_others(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    torn, good = write(store, 5.0), write(store, 1.0)
    (torn.path / MANIFEST_FILE).unlink()
    write(store, 2.0)
    assert not torn.path.exists()
    assert good.path.exists()


def test_a_bound_in_bytes_keeps_fewer_but_always_the_newest(tmp_path):
    size = sum(f.stat().st_size for f in write(CheckpointStore(tmp_path, keep=9)).path.iterdir())
    store = CheckpointStore(tmp_path, keep=9, max_bytes=2 * size + size // 2)
    for _ in range(4):
        write(store)
    assert len(list(tmp_path.iterdir())) == 2
    tiny = CheckpointStore(tmp_path, keep=9, max_bytes=1)
    write(tiny)
    assert len(list(tmp_path.iterdir())) == 1


def test_nothing_is_begun_that_the_disk_has_no_room_for(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=3)
    good = write(store)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    with pytest.raises(NoRoom, match="1 MB are free; make room"):
        store.begin(P)
    assert newest_good(store)[0] == good


def test_a_disk_that_refuses_at_the_end_leaves_what_was_there(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=1)
    good = write(store)

    def refuse(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints_module, "replace_file", refuse)
    with pytest.raises(OSError, match="No space left"):
        write(store, 2.0)
    assert newest_good(store)[0] == good


def test_other_folders_are_left_alone(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "12").mkdir()
    store = CheckpointStore(tmp_path, keep=1)
    write(store)
    write(store)
    assert {"notes", "12"} < {path.name for path in tmp_path.iterdir()}
    assert newest_good(store)[1] == []


def test_one_that_is_set_aside_stays_and_is_used_where_there_is_no_other(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    between = write(store, 80.0)
    ahead = store.set_aside(write(store, 90.0), 0.0)
    assert not between.path.exists(), "it would be gone on from beside the others' earlier state"
    assert ahead.name == "ahead-000002-step-90"
    found, refused = newest_good(store)
    assert found is not None
    assert (found.path, refused) == (ahead, [])
    assert store.set_aside(found, 0.0) == ahead
    assert ahead.is_dir()
    for value in (1.0, 2.0, 3.0):
        write(store, value)
    found, _ = newest_good(store)
    assert found is not None
    assert found.manifest.step == 3.0
    assert ahead.is_dir()
    assert store.set_aside(found, 0.0) == ahead, "one of a later step stays"
    further = store.set_aside(write(store, 91.0), 0.0)
    assert [path.name for path in tmp_path.glob("ahead-*")] == [further.name], "one is kept"


def test_of_two_that_a_crash_left_aside_the_newer_is_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    older, newer = write(store, 1.0), write(store, 2.0)
    for checkpoint in (older, newer):
        checkpoint.path.rename(tmp_path / f"ahead-{checkpoint.path.name}")
    found, _ = newest_good(store)
    assert found is not None
    assert found.manifest.step == 2.0
    store.set_aside(found, 0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["ahead-000002-step-2"]
