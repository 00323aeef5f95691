"""Homes of an earlier loco-peer are read as they were meant: run id, checkpoint, keys."""

from pathlib import Path

import pytest
from recorded_homes import RECORDED, Recorded

from peer.network.identity import load
from peer.state.checkpoints import CheckpointStore
from peer.state.home import Home


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded.name)
def test_a_recorded_home_is_of_its_run_and_at_its_step(tmp_path: Path, recorded: Recorded) -> None:
    home = Home(recorded.unpack(tmp_path))
    signed = home.run()
    assert signed is not None
    assert signed.run_id == recorded.run_id, "the digest of the bytes as they were signed"
    assert signed.spec().to_bytes() == signed.spec_bytes, "nothing that they leave out is added"
    refused: list[str] = []
    store = CheckpointStore(home.checkpoints_dir, keep=3)
    checkpoint = next(store.newest_first(lambda _, why: refused.append(why)))
    checkpoint.verify()
    manifest = checkpoint.manifest
    assert not refused
    assert (manifest.run_id, manifest.part, int(manifest.step)) == (
        recorded.run_id,
        recorded.part,
        recorded.step,
    )
    if recorded.name.endswith("-a"):
        assert load(home.founder_key_path).public_key == signed.founder_public_key
