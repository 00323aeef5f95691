"""A disk that is too small is told before anything is trained, not when the run is over."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from swarm_worlds import simulated, start, toy_spec

from peer.daemon.checkpointing import check_room_to_begin
from peer.observe.event_names import EventName
from peer.state.checkpoints import CheckpointStore
from peer.state.home import HomeError
from protocol.names import size_text
from protocol.run.needs import SPARE_BYTES, disk_needs
from protocol.run.run_spec import STDLIB_BYTES, RunSpec
from simulation.machine import Machine
from simulation.swarm import SwarmOptions, open_swarm

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
        assert "only 21 MB are free" in str(peer.failure)
        assert "--home" in str(peer.failure)
        assert not peer.events(EventName.TRAINER_STARTED)


def test_before_the_corpus_is_made_it_counts_at_its_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(10 * MIB))
    data = {"source": f"text:{tmp_path}/*.txt", "tokenizer": "bytes"}
    store, spec = CheckpointStore(tmp_path / "home", 3), RunSpec.model_validate({"data": data})
    checkpoint = 20 * 885_888  # of the model of a spec that says nothing of it
    has_free(monkeypatch, SPARE_BYTES + checkpoint + 10 * MIB)
    check_room_to_begin(store, spec, None)
    has_free(monkeypatch, SPARE_BYTES + checkpoint + 9 * MIB)
    with pytest.raises(HomeError, match="10 MB of them for the corpus, but only .* MB are free"):
        check_room_to_begin(store, spec, None)
    check_room_to_begin(store, spec, "tokens.bin")  # that are read where they lie
    here = spec.model_copy(update={"data": spec.data.model_copy(update={"manifest": "0" * 32})})
    check_room_to_begin(store, here, None)


def test_before_a_stage_or_a_tokenizer_is_known_a_peer_counts_at_its_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, 3)
    layer = 4 * 128**2 + 3 * 128 * 384 + 2 * 128
    tokenizer = {"data": {"tokenizer": "of-the-hub"}}
    whole = RunSpec.model_validate(tokenizer)
    stages = RunSpec.model_validate(tokenizer | {"pipeline": {"stages": 4}})
    has_free(monkeypatch, SPARE_BYTES + 20 * layer + STDLIB_BYTES)
    check_room_to_begin(store, stages, None)
    has_free(monkeypatch, SPARE_BYTES + 20 * 4 * layer + STDLIB_BYTES)
    check_room_to_begin(store, whole, None)
    has_free(monkeypatch, SPARE_BYTES + 20 * 4 * layer)
    with pytest.raises(HomeError, match="one checkpoint"):
        check_room_to_begin(store, whole, None)


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
        assert f"{size_text(free)} are free" in told["detail"]


@simulated()
async def test_nothing_is_said_where_there_is_room(tmp_path):
    async with open_swarm(1, toy_spec(), tmp_path) as swarm:
        await start(swarm, "a", machine_of={"a": KEEPS})
        assert not swarm["a"].events(EventName.ROOM_FOUND_SMALL)
