"""`loco-peer export --swarm`: each peer's loss, the mean's, and a model that holds the mean."""

import json
from pathlib import Path

import pytest
from swarm import START_S, Swarm
from transformers import AutoModelForCausalLM

from peer.options.exit_codes import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.mark.long
def test_the_mean_of_all_peers_is_measured_and_written(swarm: Swarm, tmp_path: Path) -> None:
    peers = swarm.at_least(3)
    home = ("--home", str(peers[0].home.root))
    done = swarm.loco(
        "export", "--swarm", "--hf", str(tmp_path / "mean"), *home, timeout_s=3 * START_S
    )
    assert done.returncode == ExitCode.OK, done.stderr
    title, *rows, mean, wrote = done.stdout.splitlines()
    assert title.split() == ["peer", "step", "validation"]
    assert {row.split()[0] for row in rows} == {peer.peer_id[-8:] for peer in peers}
    losses = [float(row.split()[2]) for row in rows if "left out" not in row]
    assert len(losses) == len(peers)
    assert mean.split()[:3] == ["mean", "of", str(2 * len(peers) - len(rows))]
    assert float(mean.split()[3]) <= max(losses), "replicas are better averaged than apart"
    assert wrote == f"wrote {tmp_path / 'mean'}"
    AutoModelForCausalLM.from_pretrained(tmp_path / "mean")
    assert json.loads((tmp_path / "mean" / "loco_peer.json").read_text())["run"] == "e2e"
