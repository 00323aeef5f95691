"""A peer of two processes (`--gpus 2`): others see one peer, and nothing stays behind."""

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from swarm import INNER_STEPS, RUN_SPEC, START_S, Peer, Swarm, all_averaging, open_swarm, wait_until

from peer.observe.event_names import EventName

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Swarm]:
    """One of short rounds: two processes of a tiny model are slower than one."""
    with open_swarm(tmp_path, RUN_SPEC.replace(f"= {INNER_STEPS}", "= 20")) as own:
        own.found()
        yield own


def launch(own: Swarm, via: Peer, *more: str) -> Peer:
    return own.launch("box", "join", "--bootstrap", via.address, "--gpus", "2", *more)


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() for process in processes)


def test_a_peer_of_two_processes_averages_and_dies_as_one(own: Swarm) -> None:
    founder = own.founder
    box = launch(own, founder)
    started = box.wait_event(EventName.TRAINER_STARTED, START_S)
    assert (started["ranks"], box.status()["ranks"]) == (2, 2)
    all_averaging([founder, box], 2)
    count = len(box.events())
    trainer = box.trainer()
    ranks = [trainer, *trainer.children()]
    assert len(ranks) == 2
    ranks[1].kill()  # that of the other ends it too: tests/peer/training/test_ranks.py
    died = box.wait_event(EventName.TRAINER_DIED, after=count)
    assert died["reason"] == "died"
    assert "signal 9" in died["detail"]
    assert "rank 1 of 2" in died["detail"]
    wait_until(partial(all_gone, ranks), "both ranks are gone")
    box.wait_event(EventName.TRAINER_STARTED, START_S, after=box.events().index(died))
    all_averaging([founder, box])
    processes = box.processes()
    assert len(processes) >= 5  # daemon, p2pd, table, two ranks
    box.process.send_signal(signal.SIGKILL)
    box.process.wait()
    wait_until(partial(all_gone, processes), "nothing of the peer is left")


def test_a_peer_whose_processes_share_out_the_weights_averages(own: Swarm) -> None:
    founder = own.founder
    box = launch(own, founder, "--shard-weights")
    assert box.wait_event(EventName.TRAINER_STARTED, START_S)["ranks"] == 2
    assert "a part of the weights" in box.wait_event(EventName.STEP_CHOSEN)["detail"]
    all_averaging([founder, box], 2)
