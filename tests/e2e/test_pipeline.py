"""Pipelines of real processes: a data peer and a relay train one model, and a dead trainer ends
nothing; two data peers make the same plan of what all have measured."""

import signal
from collections.abc import Iterator

import pytest
from swarm import INNER_STEPS, RUN_SPEC, START_S, Swarm

from peer.observe.event_names import EventName
from protocol.membership.group import Group
from protocol.run.stages import part_of_stage

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

STEPS = 60
FALLEN_NATS = 0.5
SPEC = (
    RUN_SPEC.replace("num_layers = 1", "num_layers = 2")
    .replace("total_steps = 1000000", f"total_steps = {STEPS}\nmicro_batch = 1")
    .replace(f"inner_steps = {INNER_STEPS}", "inner_steps = 10")
    + "\n[pipeline]\nstages = 2\n"
)


@pytest.fixture
def pipeline(tmp_path) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path, SPEC)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield swarm
    finally:
        swarm.close()
        signal.signal(signal.SIGTERM, before)


def test_two_stages_train_to_the_end_though_a_trainer_is_killed(pipeline: Swarm) -> None:
    (pipeline.folder("run.toml")).write_text(SPEC)
    data_peer = pipeline.launch("founder0", "start", str(pipeline.folder("run.toml")))
    data_peer.wait_event(EventName.TRAINER_STARTED, START_S)
    waiting = lambda: "holds stage 1" in data_peer.status()["doing"]
    data_peer.wait_for("a peer of the other stage", waiting, START_S)
    assert data_peer.events(EventName.ROUND_CLOSED) == []

    relay = pipeline.join(data_peer)
    data_peer.wait_event(EventName.ROUND_CLOSED, START_S)
    run_id = data_peer.status()["run_id"]
    for peer, stage in ((data_peer, 0), (relay, 1)):
        (entered,) = peer.events(EventName.GROUP_ENTERED)
        assert entered["group"] == Group(run_id, part_of_stage(stage)).digest
    first = data_peer.wait_event(EventName.VALIDATED, START_S)["loss"]

    relay.trainer().send_signal(signal.SIGKILL)
    relay.wait_event(EventName.TRAINER_DIED, START_S)
    finished = data_peer.wait_event(EventName.RUN_FINISHED, START_S)
    relay.wait_event(EventName.RUN_FINISHED, START_S)
    assert finished["validation_loss"] < first - FALLEN_NATS
    assert relay.events(EventName.VALIDATED) == []


def test_two_data_peers_plan_from_one_snapshot(pipeline: Swarm) -> None:
    endless = SPEC.replace(f"total_steps = {STEPS}", "total_steps = 1000000")
    (pipeline.folder("run.toml")).write_text(endless)
    first = pipeline.launch("founder0", "start", str(pipeline.folder("run.toml")))
    first.wait_event(EventName.TRAINER_STARTED, START_S)
    relay = pipeline.join(first)
    relay.wait_event(EventName.TRAINER_STARTED, START_S)
    second = pipeline.join(first)
    second.wait_event(EventName.TRAINER_STARTED, START_S)

    def agree() -> bool:
        one, other = (peer.status()["pipeline"] for peer in (first, second))
        same = one["plan"] == other["plan"] and one["snapshot"] == other["snapshot"]
        return same and one["plan"] is not None and bool(one["paths"] and other["paths"])

    first.wait_for("the plan that the other data peer has", agree, START_S)
    shown = first.status()["pipeline"]
    assert shown["planned_s"] > 0
    assert len(shown["links"]) == 2
    assert len(shown["paths"]) == 4
