"""A pipeline of real processes: a data peer and a relay train one model, and a dead trainer ends
nothing."""

import signal
from collections.abc import Iterator

import pytest
from swarm import INNER_STEPS, RUN_SPEC, START_S, Peer, Swarm

from peer.observe.event_names import EventName
from protocol.membership.group import Group
from protocol.run.stages import part_of_stage

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

STEPS = 60
NO_END = 1_000_000
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


def founded(pipeline: Swarm, spec: str) -> Peer:
    """The data peer of a run that waits for a relay."""
    (pipeline.folder("run.toml")).write_text(spec)
    data_peer = pipeline.launch("founder0", "start", str(pipeline.folder("run.toml")))
    data_peer.wait_event(EventName.TRAINER_STARTED, START_S)
    wait_missing(data_peer)
    return data_peer


def wait_missing(data_peer: Peer) -> None:
    waiting = lambda: "holds stage 1" in data_peer.status()["doing"]
    data_peer.wait_for("a peer of the other stage", waiting, START_S)


def test_two_stages_train_to_the_end_though_a_trainer_is_killed(pipeline: Swarm) -> None:
    data_peer = founded(pipeline, SPEC)
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


def test_a_stage_that_all_have_left_is_rebuilt_from_its_neighbours(pipeline: Swarm) -> None:
    data_peer = founded(pipeline, SPEC.replace(f"= {STEPS}\n", f"= {NO_END}\n"))
    relay = pipeline.join(data_peer)
    data_peer.wait_event(EventName.ROUND_CLOSED, START_S)
    relay.kill()
    wait_missing(data_peer)
    step = data_peer.status()["step"]

    newcomer = pipeline.join(data_peer)
    rebuilt = newcomer.wait_event(EventName.STAGE_REBUILT, START_S)
    assert (rebuilt["stage"], rebuilt["untrained"]) == (1, [])
    assert rebuilt["remotes"] == [data_peer.peer_id]
    data_peer.wait_event(EventName.ROUND_CLOSED, START_S, round=data_peer.status()["round"])
    assert newcomer.status()["step"] > step
