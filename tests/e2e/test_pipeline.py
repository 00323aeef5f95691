"""Pipelines of real processes: a data peer and a relay train one model, and a dead trainer ends
nothing; two data peers make the same plan of what all have measured."""

import signal
from collections.abc import Iterator
from functools import partial

import pytest
from swarm import (
    INNER_STEPS,
    RUN_SPEC,
    START_S,
    Peer,
    Swarm,
    has_said,
    none_blamed,
    open_swarm,
    wait_until,
)

from peer.observe.event_names import EventName
from protocol.membership.group import Group
from protocol.run.layout import part_of_stage

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

STEPS = 60
NO_END = 1_000_000
FALLEN_NATS = 0.5
EVERY = ("--checkpoint-every", "2")
SPEC = (
    RUN_SPEC.replace("num_layers = 1", "num_layers = 2")
    .replace("total_steps = 1000000", f"total_steps = {STEPS}\nmicro_batch = 1")
    .replace(f"inner_steps = {INNER_STEPS}", "inner_steps = 10")
    + "\n[pipeline]\nstages = 2\n"
)


@pytest.fixture
def pipeline(tmp_path) -> Iterator[Swarm]:
    with open_swarm(tmp_path, SPEC) as swarm:
        yield swarm


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


@pytest.mark.long
def test_a_stage_that_all_have_left_is_rebuilt_from_its_neighbours(pipeline: Swarm) -> None:
    """Long: the test below rebuilds a stage too, and tests/peer/daemon/test_rebuilding.py."""
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
    newcomer.wait_for("a step more", lambda: newcomer.status()["step"] > step, START_S)


@pytest.mark.long
def test_training_goes_on_without_a_stage_that_nobody_holds_any_more(pipeline: Swarm) -> None:
    spec = SPEC.replace(f"= {STEPS}\n", f"= {NO_END}\n").replace("num_layers = 2", "num_layers = 3")
    data_peer = founded(pipeline, spec.replace("stages = 2", "stages = 3\nvisited = 2"))
    address = data_peer.address
    relays = [
        pipeline.launch(f"relay{stage}", "join", "--bootstrap", address, "--stage", str(stage))
        for stage in (1, 2)
    ]
    data_peer.wait_event(EventName.ROUND_CLOSED, START_S)
    relays[1].kill()
    assert data_peer.wait_event(EventName.STAGE_LEFT_OUT, START_S)["stage"] == 2
    assert data_peer.status()["doing"] == "training without stage 2, which nobody holds"
    step = data_peer.status()["step"]
    data_peer.wait_for("steps without it", lambda: data_peer.status()["step"] > step + 5, START_S)

    newcomer = pipeline.join(data_peer)
    assert data_peer.wait_event(EventName.STAGE_TAKEN_IN, START_S)["stage"] == 2
    rebuilt = newcomer.wait_event(EventName.STAGE_REBUILT, START_S)
    assert (rebuilt["stage"], rebuilt["untrained"]) == (2, [])
    assert rebuilt["remotes"] == [relays[0].peer_id]
    assert data_peer.status()["microbatches"]["without"] > 0
    none_blamed([data_peer, relays[0], newcomer])


@pytest.mark.long
def test_a_data_peer_goes_over_to_a_stage_that_has_lost_its_last_relay(pipeline: Swarm) -> None:
    founder = founded(pipeline, SPEC.replace(f"= {STEPS}\n", f"= {NO_END}\n"))
    relay = pipeline.join(founder)
    founder.wait_event(EventName.ROUND_CLOSED, START_S)
    other = pipeline.join(founder)
    other.wait_event(EventName.ROUND_CLOSED, START_S)
    relay.kill()

    both = (founder, other)
    gone = lambda: [peer for peer in both if peer.events(EventName.STAGE_REBUILT)]
    (moved,) = wait_until(gone, "one of them takes the stage", timeout_s=300, peers=both)
    (stayed,) = (peer for peer in both if peer is not moved)
    (rebuilt,) = moved.events(EventName.STAGE_REBUILT)
    assert (rebuilt["stage"], rebuilt["remotes"]) == (1, [stayed.peer_id])
    stayed.wait_event(EventName.ROUND_CLOSED, START_S, round=stayed.status()["round"])
    none_blamed(both)


@pytest.mark.long
def test_two_data_peers_plan_from_one_snapshot(pipeline: Swarm) -> None:
    """Long: plans are made anew every 20 s. In virtual time: test_planned_paths_swarm.py."""
    first = founded(pipeline, SPEC.replace(f"= {STEPS}\n", f"= {NO_END}\n"))
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
    assert {path.split(":")[0] for path in shown["paths"]} == {"1"}


@pytest.mark.long
def test_all_are_killed_and_each_stage_comes_back_from_its_own_checkpoint(
    pipeline: Swarm,
) -> None:
    """Long: two lives of two peers, and rounds of both stages in each."""
    pipeline.folder("run.toml").write_text(SPEC.replace(f"= {STEPS}\n", f"= {NO_END}\n"))
    data_peer = pipeline.launch("founder0", "start", str(pipeline.folder("run.toml")), *EVERY)
    data_peer.wait_event(EventName.TRAINER_STARTED, START_S)
    relay = pipeline.launch("relay1", "join", "--bootstrap", data_peer.address, *EVERY)
    both = (data_peer, relay)
    first = data_peer.wait_event(EventName.VALIDATED, START_S)["loss"]
    fallen = lambda: data_peer.events(EventName.VALIDATED)[-1]["loss"] < first - FALLEN_NATS
    data_peer.wait_for("the loss falls", fallen, START_S)
    for peer in both:
        enough = len(peer.events(EventName.CHECKPOINT_WRITTEN)) + 1
        peer.wait_for("a checkpoint", partial(has_said, peer, EventName.CHECKPOINT_WRITTEN, enough))
    for peer in both:
        peer.signal_all(signal.SIGKILL)
    for peer in both:
        peer.process.wait()
    kept = {peer.name: newest_step(peer) for peer in both}

    back = (
        pipeline.launch("founder0", "start", *EVERY),
        pipeline.launch("relay1", "join", *EVERY),
    )
    for peer in back:
        resumed = peer.wait_event(EventName.RUN_RESUMED, START_S)
        assert resumed["step"] == kept[peer.name]
    for peer, stage in zip(back, (0, 1), strict=True):
        assert peer.status()["part"] == part_of_stage(stage)
        peer.wait_event(EventName.ROUND_CLOSED, START_S)
        on = lambda peer=peer: peer.status()["step"] > max(kept.values())
        peer.wait_for("it trains on", on, START_S)
        assert not peer.events(EventName.STAGE_REBUILT)
    assert back[0].wait_event(EventName.VALIDATED, START_S)["loss"] < first - FALLEN_NATS / 2
    none_blamed(back)


def newest_step(peer: Peer) -> int:
    """Of its newest checkpoint."""
    whole = peer.home.checkpoints_dir.glob("*-step-*")  # it may have been killed in writing another
    return max(int(path.name.split("-")[-1]) for path in whole)
