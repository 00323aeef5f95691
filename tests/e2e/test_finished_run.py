"""A finished run is started again and again: it stays finished, and its model stays.

In each way of averaging, alone and as two. The last checkpoint is never rotated away, though a
store keeps three and one is due every second; none that is older is written; what is exported is
the model of the last step.
"""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from swarm import RUN_SPEC, START_S, Peer, Swarm, open_swarm, within

from bench.storms.models import Model, Models
from peer.facts import PeerState
from peer.observe.event_names import EventName

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.e2e]

TIMES = 5
LINGER_S = 4.0
"""A finished peer is watched for so long: checkpoints are due every second."""
TOTAL_STEPS = 60
EVERY = ("--checkpoint-every", "1")
FEW_STEPS = RUN_SPEC.replace("total_steps = 1000000", f"total_steps = {TOTAL_STEPS}").replace(
    "inner_steps = 150", "inner_steps = 10"
)
WAYS = {
    "noloco": "",
    "diloco": "diloco = { blocks_per_fragment = 1, overlap_steps = 2 }",
    "streaming": "streaming = { blocks_per_fragment = 1 }",
}


def spec_of(way: str) -> str:
    return FEW_STEPS.replace("[sync]", f'[sync]\nmethod = "{way}"\n{WAYS[way]}')


@pytest.fixture(params=WAYS)
def homes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Swarm]:
    with open_swarm(tmp_path, spec_of(request.param)) as swarm:
        swarm.folder("run.toml").write_text(spec_of(request.param))
        yield swarm


def is_finished(peer: Peer) -> bool:
    return bool(peer.ready()) and peer.status()["state"] == PeerState.FINISHED


def wait_finished(peers: list[Peer]) -> None:
    for peer in peers:
        peer.wait_for("the run is over", partial(is_finished, peer), START_S)


def stop(peers: list[Peer]) -> None:
    for peer in peers:
        peer.process.terminate()
    for peer in peers:
        assert peer.wait_exit() == 0, peer.report()


def models_of(peers: list[Peer]) -> list[Model]:
    return list(Models({peer.name: peer.home.checkpoints_dir for peer in peers}).all())


def exported(swarm: Swarm, peer: Peer) -> bytes:
    """The weights that its user gets."""
    folder = swarm.folder("exported")
    shutil.rmtree(folder, ignore_errors=True)
    done = swarm.loco("export", "--home", str(peer.home.root), "--hf", str(folder))
    assert done.returncode == 0, done.stderr
    return (folder / "model.safetensors").read_bytes()


def entered(swarm: Swarm, num_peers: int) -> list[Peer]:
    founder = swarm.launch("founder", "start", str(swarm.folder("run.toml")), *EVERY)
    others = [
        swarm.launch(f"peer{number}", "join", "--bootstrap", founder.address, *EVERY)
        for number in range(1, num_peers)
    ]
    return [founder, *others]


@pytest.mark.parametrize("num_peers", [1, 2], ids=["alone", "two"])
def test_a_finished_run_that_is_started_again_keeps_its_model(homes: Swarm, num_peers: int) -> None:
    peers = entered(homes, num_peers)
    wait_finished(peers)
    results = {exported(homes, peer) for peer in peers}
    stop(peers)
    last = max(models_of(peers))
    assert (last.step, last.over) == (TOTAL_STEPS, True)
    for _ in range(TIMES):
        peers = [homes.launch(peer.name, "start", *EVERY) for peer in peers]
        wait_finished(peers)
        within(partial(any_closes_a_round, peers), LINGER_S)
        assert exported(homes, peers[0]) in results
        stop(peers)
        found = models_of(peers)
        older = [model for model in found if model.step < TOTAL_STEPS]
        assert [model for model in older if model.written_s > last.written_s] == []
        assert (max(found).step, max(found).over) == (TOTAL_STEPS, True)


def any_closes_a_round(peers: list[Peer]) -> bool:
    return any(peer.events(EventName.ROUND_CLOSED) for peer in peers)
