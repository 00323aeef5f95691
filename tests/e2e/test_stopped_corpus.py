"""A founder that is stopped while it tokenises: it ends as promised, and leaves nothing."""

import gzip
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from swarm import RUN_SPEC, START_S, Peer, Swarm, ending, open_swarm

from peer.options.exit_codes import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

NUM_SHARDS: Final = 2
MEMBER: Final = gzip.compress(json.dumps({"text": "a word " * 20}).encode() + b"\n", 1) * 500
"""Lines that are small on the disk, however many there are."""
NUM_MEMBERS: Final = 2000
"""So many that nobody is through with a shard before the test has looked."""


@pytest.fixture
def lonely(tmp_path: Path) -> Iterator[Swarm]:
    """A swarm whose run has a corpus that takes long to tokenise."""
    data = tmp_path / "data"
    data.mkdir()
    for number in range(NUM_SHARDS):
        (data / f"{number}.jsonl.gz").write_bytes(MEMBER * NUM_MEMBERS)
    run_spec = RUN_SPEC.replace("[data]", f'[data]\nsource = "jsonl:{data}/*.gz"')
    with open_swarm(tmp_path, run_spec) as swarm:
        swarm.folder("run.toml").write_text(run_spec)
        yield swarm


def drafts(peer: Peer) -> list[Path]:
    """What is unfinished in its cache."""
    return [*peer.home.cache_dir.glob("tokens-*/.*"), *peer.home.cache_dir.glob(".packing-*")]


def started(swarm: Swarm, name: str) -> Peer:
    """A founder in the middle of its corpus."""
    peer = swarm.launch(name, "start", str(swarm.folder("run.toml")))
    peer.wait_for("drafts", lambda: len(drafts(peer)) > 1, START_S)
    return peer


def ends_all(swarm: Swarm, peer: Peer, number: signal.Signals) -> None:
    """A signal to the whole group ends it well, and nothing is left."""
    os.killpg(peer.process.pid, number)
    assert peer.wait_exit() == ExitCode.OK, peer.report()
    assert "Traceback" not in peer.stderr
    assert drafts(peer) == []
    assert swarm.survivors() == []


def test_a_terminals_signal_ends_all_and_leaves_nothing(lonely: Swarm) -> None:
    with ending(started(lonely, "founder")) as peer:
        ends_all(lonely, peer, signal.SIGINT)


def test_what_a_killed_daemon_leaves_goes_at_its_next_start_which_a_service_manager_ends(
    lonely: Swarm,
) -> None:
    with ending(started(lonely, "founder")) as peer:
        peer.process.kill()
        peer.process.wait()
        left = drafts(peer)
    with ending(lonely.launch("founder", "start", str(lonely.folder("run.toml")))) as again:
        again.wait_for("drafts", lambda: set(drafts(again)) - set(left), START_S)
        assert not set(left) & set(drafts(again))
        ends_all(lonely, again, signal.SIGTERM)
