"""A machine and its disk are gone, and the run comes back from what was uploaded."""

import shutil
from pathlib import Path

import pytest
from swarm import RUN_SPEC, START_S, open_swarm

from peer.observe.event_names import EventName

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

SPEC = RUN_SPEC.replace("inner_steps = 150", "inner_steps = 20")


def test_a_run_whose_home_is_gone_comes_back_at_its_step(tmp_path: Path) -> None:
    there = tmp_path / "there"
    upload = ("--checkpoint-every", "1", "--checkpoint-upload", str(there))
    with open_swarm(tmp_path, SPEC) as swarm:
        swarm.folder("run.toml").write_text(SPEC)
        peer = swarm.launch("first", "start", str(swarm.folder("run.toml")), *upload)
        peer.wait_event(EventName.CHECKPOINT_COPIED, START_S)
        peer.wait_for("the corpus is there", lambda: [*there.rglob("tokens.bin")])
        peer.wait_event(EventName.CHECKPOINT_COPIED, after=len(peer.events()), timeout_s=START_S)
        before = max(
            int(path.parent.name.rpartition("-")[2])
            for path in there.glob("*/*-step-*/manifest.json")
        )
        first_id = peer.peer_id
        peer.kill()
        shutil.rmtree(peer.home.root)
        back = swarm.launch("second", "start", "--restore", str(there))
        resumed = back.wait_event(EventName.RUN_RESUMED, START_S)
        assert resumed["step"] >= before > 0
        assert back.peer_id != first_id
        back.wait_event(EventName.ROUND_CLOSED, START_S)
        assert "corpus: whole" in back.stderr
