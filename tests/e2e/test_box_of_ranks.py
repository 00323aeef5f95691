"""Peers of several processes (`--gpus N`): others see one peer, and nothing stays behind."""

import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from swarm import (
    INNER_STEPS,
    RUN_SPEC,
    START_S,
    Event,
    Peer,
    Swarm,
    all_averaging,
    none_blamed,
    open_swarm,
    wait_until,
)

from peer.observe.event_names import EventName

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Swarm]:
    """One of short rounds: two processes of a tiny model are slower than one."""
    with open_swarm(tmp_path, RUN_SPEC.replace(f"= {INNER_STEPS}", "= 20")) as own:
        own.found()
        yield own


def launch(own: Swarm, via: Peer, ranks: int, *more: str) -> Peer:
    command = ["join", "--bootstrap", via.address, "--gpus", str(ranks), *more]
    return own.launch(f"box{ranks}", *command)


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() for process in processes)


def kill_a_rank(box: Peer, count: int) -> Event:
    """kill -9 of one of so many ends all; they are started again. Returns `TrainerStarted`."""
    seen = len(box.events())
    trainer = box.trainer()
    ranks = [trainer, *trainer.children()]
    assert len(ranks) == count
    ranks[-1].kill()  # that of the other ends it too: tests/peer/training/test_ranks.py
    died = box.wait_event(EventName.TRAINER_DIED, after=seen)
    assert died["reason"] == "died"
    assert re.search(f"rank {count - 1} of {count} was killed by signal 9", died["detail"])
    wait_until(partial(all_gone, ranks), "all ranks are gone")
    return box.wait_event(EventName.TRAINER_STARTED, START_S, after=box.events().index(died))


def has_averaged_with(peer: Peer, others: list[Peer], since: int = 0) -> bool:
    seen = peer.events()[since:]
    partners = {each["partner"] for each in seen if each["event"] == EventName.ROUND_AVERAGED}
    return partners >= {other.peer_id for other in others}


def all_with_each_other(peers: list[Peer]) -> None:
    """Until each has averaged with each of the others, from now on."""
    since = {peer: len(peer.events()) for peer in peers}
    for peer in peers:
        others = [other for other in peers if other is not peer]
        peer.wait_for(
            "averages with each of the others",
            partial(has_averaged_with, peer, others, since[peer]),
            START_S,
        )


@pytest.mark.long
def test_a_peer_whose_processes_divide_sequences_averages(own: Swarm) -> None:
    founder = own.founder
    box = launch(own, founder, 2, "--split-context")
    started = box.wait_event(EventName.TRAINER_STARTED, START_S)
    assert started["ranks"] == 2
    chosen = box.wait_event(EventName.STEP_CHOSEN)
    assert chosen["detail"] == "each sequence is divided between 2 processes"
    all_averaging([founder, box], 2)
    wait_until(lambda: box.status()["validation_loss"] is not None, "it has measured its loss")


@pytest.mark.long
def test_a_peer_of_two_processes_averages_and_dies_as_one(own: Swarm) -> None:
    founder = own.founder
    box = launch(own, founder, 2)
    started = box.wait_event(EventName.TRAINER_STARTED, START_S)
    assert (started["ranks"], box.status()["ranks"]) == (2, 2)
    all_averaging([founder, box], 2)
    kill_a_rank(box, 2)
    all_averaging([founder, box])
    processes = box.processes()
    assert len(processes) >= 4  # daemon, p2pd, two ranks
    box.process.send_signal(signal.SIGKILL)
    box.process.wait()
    wait_until(partial(all_gone, processes), "nothing of the peer is left")


@pytest.mark.long
def test_a_peer_whose_processes_share_out_the_weights_averages(own: Swarm) -> None:
    founder = own.founder
    box = launch(own, founder, 2, "--shard-weights")
    assert box.wait_event(EventName.TRAINER_STARTED, START_S)["ranks"] == 2
    assert "a part of the weights" in box.wait_event(EventName.STEP_CHOSEN)["detail"]
    all_averaging([founder, box], 2)


@pytest.mark.long
def test_boxes_of_one_and_three_average_with_one_alone_and_one_loses_a_rank(own: Swarm) -> None:
    peers = [own.founder, *(launch(own, own.founder, ranks) for ranks in (1, 3))]
    for peer, ranks in zip(peers, (1, 1, 3), strict=True):
        started = peer.wait_event(EventName.TRAINER_STARTED, START_S)
        assert (started["ranks"], peer.status()["ranks"]) == (ranks, ranks)
    all_with_each_other(peers)
    box = peers[-1]
    closed = box.events(EventName.ROUND_CLOSED)[-1]
    again = kill_a_rank(box, 3)
    first = box.wait_event(EventName.ROUND_CLOSED, START_S, after=box.events().index(again))
    assert first["round"] > closed["round"]
    assert first["step"] > closed["step"]  # so what is lost is of the round that was under way
    all_with_each_other(peers)
    assert box.metric("loco_trainer_restarts_total", reason="died") == 1
    for other in peers[:-1]:
        harm = {EventName.TRAINER_DIED, EventName.PEER_LOST}
        assert not [event for event in other.events() if event["event"] in harm]
    none_blamed(peers)
