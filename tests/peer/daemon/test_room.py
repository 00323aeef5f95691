"""A disk that is too small is told before anything is trained, not when the run is over."""

import math
import shutil
from types import SimpleNamespace

import pytest
from swarm_worlds import simulated, start, toy_spec

from peer.observe.event_names import EventName
from peer.simulation.machine import Machine
from peer.simulation.swarm import SwarmOptions, open_swarm
from peer.state.home import HomeError
from protocol.run.disk_needs import disk_needs

MIB = 1 << 20
PARAMETERS = 1 << 12
KEEPS = Machine(checkpoint_every_s=5.0)


def has_free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free_bytes))


@simulated()
async def test_a_run_is_refused_where_no_checkpoint_fits(tmp_path, monkeypatch):
    has_free(monkeypatch, 20 * MIB)
    async with open_swarm(1, toy_spec(), tmp_path) as swarm:
        peer = swarm.found("a", KEEPS)
        await peer.ended.wait()
        assert isinstance(peer.failure, HomeError)
        assert "20 MiB are there" in str(peer.failure)
        assert "--home" in str(peer.failure)
        assert not peer.events(EventName.TRAINER_STARTED)


@simulated()
async def test_less_room_than_all_checkpoints_take_is_told_before_training(tmp_path, monkeypatch):
    free = disk_needs(PARAMETERS, 1).least_bytes
    has_free(monkeypatch, free)
    async with open_swarm(
        1, toy_spec(), tmp_path, SwarmOptions(padded_parameters=PARAMETERS)
    ) as swarm:
        await start(swarm, "a", machine_of={"a": KEEPS})
        (told,) = swarm["a"].events(EventName.ROOM_FOUND_SMALL)
        assert "--checkpoint-keep 1" in told["detail"]
        assert f"{math.ceil(free / MIB)} MiB are there" in told["detail"]


@simulated()
async def test_nothing_is_said_where_there_is_room(tmp_path):
    async with open_swarm(1, toy_spec(), tmp_path) as swarm:
        await start(swarm, "a", machine_of={"a": KEEPS})
        assert not swarm["a"].events(EventName.ROOM_FOUND_SMALL)
