"""Peers that end: within their grace, with a checkpoint first, whatever goes wrong around them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from swarm_worlds import simulated, start, toy_spec

from peer.daemon.checkpointing import CheckpointPlan
from peer.observe.event_names import EventName
from peer.state.checkpoints import Checkpoint, CheckpointStore, Manifest
from peer.state.home import Home
from peer.state.uploads import Uploads
from protocol.admission.statements import Verdict
from protocol.errors import Refused
from simulation.machine import Machine
from simulation.network import LinkModel
from simulation.swarm import (
    GRACE_S,
    LoggedEvent,
    SimulatedPeer,
    open_swarm,
)
from simulation.trainer import SimulatedSpeed
from simulation.work import SimulatedWork

pytestmark = pytest.mark.slow

ROUNDS = 40
KEEPS = Machine(checkpoint_every_s=0.0)
"""Writes a checkpoint only when its peer ends."""
THIN = LinkModel(bandwidth_bytes_per_s=200.0)


async def left(peer: SimulatedPeer) -> float:
    """Have it leave; how long that took."""
    asked_s = trio.current_time()
    peer.peer.request_stop()
    await peer.ended.wait()
    return trio.current_time() - asked_s


def only(peer: SimulatedPeer, name: EventName) -> LoggedEvent:
    (event,) = peer.events(name)
    return event


@simulated()
async def test_a_link_that_the_other_ends_while_we_take_leave_of_it_is_no_bug(tmp_path):
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        await start(swarm, *"ab", machine_of=dict.fromkeys("ab", KEEPS))
        a, b = swarm["a"], swarm["b"]
        await swarm.until(lambda: a.facts.averaged > 1)
        swarm.internet.link(a.peer_id, b.peer_id).model = THIN
        a.peer.request_stop()
        await swarm.until(lambda: bool(a.events(EventName.CHECKPOINT_WRITTEN)))
        await b.links.say_leaving()  # it comes while a is still saying the same, and ends the link
        await a.ended.wait()
        assert a.failure is None
        only(a, EventName.PEER_LEFT)


@simulated()
async def test_a_trainer_that_does_not_answer_keeps_no_peer_from_leaving(tmp_path):
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        await start(swarm, "a", machine_of={"a": KEEPS})
        peer = swarm["a"]
        await swarm.until(lambda: peer.facts.round == 3 and peer.facts.fraction > 0.4)
        step, (*_, closed) = peer.facts.step, peer.events(EventName.ROUND_CLOSED)
        peer.gate.close()  # as one that waits for microbatches of a relay that is gone
        assert await left(peer) < GRACE_S
        written = only(peer, EventName.CHECKPOINT_WRITTEN)
        assert "the trainer ended, or took too long" in written["missing"]
        assert (written["round"], written["step"]) == (closed["round"], closed["step"])
        assert written["step"] < step
        weights = peer.slow_weights()

        peer.gate.open()
        back = swarm.resume("a")
        await swarm.until(lambda: bool(back.events(EventName.ROUND_OPENED)))
        assert only(back, EventName.RUN_RESUMED)["step"] == written["step"]
        assert back.events(EventName.ROUND_OPENED)[0]["step"] == written["step"]
        assert np.array_equal(back.slow_weights(), weights)
        await swarm.until(lambda: back.facts.step > step)
        assert not back.events(EventName.TRAINER_DIED)


@simulated()
async def test_what_a_whole_checkpoint_has_already_is_not_written_without_the_trainer(tmp_path):
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        await start(swarm, "a", machine_of={"a": Machine(checkpoint_every_s=0.1)})
        peer = swarm["a"]
        await swarm.until(lambda: peer.facts.round == 3 and peer.facts.fraction > 0.4)
        before = peer.events(EventName.CHECKPOINT_WRITTEN)
        peer.gate.close()
        assert await left(peer) < GRACE_S
        assert peer.events(EventName.CHECKPOINT_WRITTEN) == before
        assert "has all the rest, and stays" in only(peer, EventName.CHECKPOINT_FAILED)["detail"]


@simulated()
async def test_who_leaves_while_its_trainer_starts_keeps_the_slow_weights(tmp_path):
    dies = Machine(
        SimulatedSpeed(die_at_steps=frozenset({65}), start_s=5.0), checkpoint_every_s=0.0
    )
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        await start(swarm, "a", machine_of={"a": dies})
        peer = swarm["a"]
        await swarm.until(lambda: bool(peer.events(EventName.TRAINER_DIED)))
        assert await left(peer) < GRACE_S / 2
        assert only(peer, EventName.CHECKPOINT_WRITTEN)["missing"] == "the trainer was starting"


@simulated()
async def test_the_last_checkpoint_waits_for_nobody_else(tmp_path):
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        await start(swarm, *"ab", machine_of=dict.fromkeys("ab", KEEPS))
        a, b = swarm["a"], swarm["b"]
        accepted = lambda: [e for p in (a, b) for e in p.events(EventName.PROPOSAL_ACCEPTED)]
        await swarm.until(lambda: a.facts.averaged > 1)
        so_far = len(accepted())
        await swarm.until(lambda: len(accepted()) > so_far)
        swarm.isolate("b")  # in the midst of an exchange
        assert GRACE_S / 2 < await left(a) < GRACE_S  # it was waited for
        asked, written = only(a, EventName.LEAVING), only(a, EventName.CHECKPOINT_WRITTEN)
        assert written["monotonic_s"] - asked["monotonic_s"] < GRACE_S / 4


@simulated()
async def test_a_ban_ends_a_peer_with_its_last_checkpoint_written(tmp_path):
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        await start(swarm, *"abc", machine_of=dict.fromkeys("abc", KEEPS))
        banned, door = swarm["c"], swarm["a"].parts.admission
        await swarm.until(lambda: banned.facts.round == 3 and banned.facts.fraction > 0.4)
        step = banned.facts.step
        swarm["a"].links.tell_statements(door.rule(Verdict.BAN, banned.peer_id))
        await banned.ended.wait()
        assert isinstance(banned.failure, Refused)
        asked, written = only(banned, EventName.LEAVING), only(banned, EventName.CHECKPOINT_WRITTEN)
        assert asked["reason"] == "banned"
        assert (written["step"] >= step, written.get("missing")) == (True, None)
        assert written["monotonic_s"] - asked["monotonic_s"] < GRACE_S


def uploads_to(monkeypatch: pytest.MonkeyPatch, place: Path, seconds: float) -> None:
    """Have all peers copy the checkpoint that they end with to this place, which takes so long."""
    work = SimulatedWork.run

    def plan(peer: SimulatedPeer) -> CheckpointPlan:
        return CheckpointPlan(0.0, Uploads(str(place), peer.name, 3, Home(place / "home")))

    async def run(self: SimulatedWork, *what: Any, may_be_cut_off: bool = False) -> Any:
        await trio.sleep(seconds if may_be_cut_off else 0.0)
        return await work(self, *what)

    monkeypatch.setattr(SimulatedPeer, "_checkpoint_plan", plan)
    monkeypatch.setattr(SimulatedWork, "run", run)


@simulated()
async def test_the_checkpoint_of_a_peer_that_leaves_is_copied_elsewhere(tmp_path, monkeypatch):
    uploads_to(monkeypatch, tmp_path / "there", seconds=3.0)
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        await start(swarm, "a")
        peer = swarm["a"]
        await swarm.until(lambda: peer.facts.round == 3)
        assert await left(peer) < GRACE_S
        copied = Path(only(peer, EventName.CHECKPOINT_COPIED)["path"])
        written = Path(only(peer, EventName.CHECKPOINT_WRITTEN)["path"])
        assert copied == tmp_path / "there" / "a" / written.name
        assert (copied / "manifest.json").is_file()


@simulated()
async def test_a_place_that_takes_long_keeps_no_peer_from_leaving(tmp_path, monkeypatch):
    uploads_to(monkeypatch, tmp_path / "there", seconds=100.0)
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        await start(swarm, "a")
        peer = swarm["a"]
        await swarm.until(lambda: peer.facts.round == 3)
        assert await left(peer) < GRACE_S
        only(peer, EventName.CHECKPOINT_WRITTEN)
        assert "--grace" in only(peer, EventName.CHECKPOINT_FAILED)["detail"]


@simulated()
async def test_who_exits_when_the_run_is_over_copies_its_end_first(tmp_path, monkeypatch):
    uploads_to(monkeypatch, tmp_path / "there", seconds=100.0)
    async with open_swarm(1, toy_spec(4), tmp_path) as swarm:
        peer = swarm.found("a", Machine(exit_when_done=True))
        await peer.ready.wait()
        await swarm.until(lambda: "copying" in peer.facts.doing)
        assert peer.facts.doing == f"copying the last checkpoint to {tmp_path / 'there'}"
        await peer.ended.wait()
        assert peer.failure is None
        only(peer, EventName.CHECKPOINT_COPIED)


@simulated()
async def test_an_end_that_is_kept_at_the_second_try_is_copied_too(tmp_path, monkeypatch):
    uploads_to(monkeypatch, tmp_path / "there", seconds=1.0)
    seal, tries = CheckpointStore.seal, list[Path]()

    def refused_once(self: CheckpointStore, partial: Path, manifest: Manifest) -> Checkpoint | None:
        tries.append(partial)
        if len(tries) == 1:
            raise OSError("the disk has no room")
        return seal(self, partial, manifest)

    monkeypatch.setattr(CheckpointStore, "seal", refused_once)
    async with open_swarm(1, toy_spec(4), tmp_path) as swarm:
        peer = swarm.found("a", Machine(exit_when_done=True))
        await peer.ended.wait()
        assert peer.failure is None
        assert only(peer, EventName.CHECKPOINT_WRITTEN)["over"]
        only(peer, EventName.CHECKPOINT_COPIED)


@simulated()
async def test_who_ends_at_once_misses_no_copy_that_nobody_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("simulation.swarm.GRACE_S", 0.0)
    async with open_swarm(1, toy_spec(ROUNDS), tmp_path) as swarm:
        await start(swarm, "a", machine_of={"a": Machine(checkpoint_every_s=0.1)})
        peer = swarm["a"]
        await swarm.until(lambda: peer.facts.round == 3)
        await left(peer)
        said = [event["detail"] for event in peer.events(EventName.CHECKPOINT_FAILED)]
        assert not [detail for detail in said if "copied" in detail]
