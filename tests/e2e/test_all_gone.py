"""All processes of a run are gone at once, and it goes on from what lies in the homes."""

import json
import math
import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from swarm import RUN_SPEC, START_S, Peer, Swarm, all_averaging, has_said, none_blamed, open_swarm

from peer.observe.event_names import EventName
from peer.state.checkpoints import number_of
from protocol.membership.returning import ALONE_S
from protocol.schedule.rounds import LOST_LAG_ROUNDS

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

EVERY = ("--checkpoint-every", "2")
END_ROUNDS = 12
"""Of the lone peer that is compared: some seconds, so that it is killed before its end."""
FIRST_LOSS = math.log(256)
"""Of weights that have learnt nothing, in nats per byte."""
LEARNT = 1.0
TOLERANCE = 0.3
"""Nats: what a round of 20 steps moves the loss of four blocks of 32 bytes by, either way."""
STEPS_A_ROUND = 20
SPEC = RUN_SPEC.replace("inner_steps = 150", f"inner_steps = {STEPS_A_ROUND}\nvalidate_every = 1")
TRAINS_ALONE_S = 240.0


@pytest.fixture
def homes(tmp_path) -> Iterator[Swarm]:
    with open_swarm(tmp_path, SPEC) as swarm:
        yield swarm


def started(swarm: Swarm, name: str, *every: str, spec: str = SPEC) -> Peer:
    swarm.folder("run.toml").write_text(spec)
    return swarm.launch(name, "start", str(swarm.folder("run.toml")), *(every or EVERY))


def losses(peer: Peer) -> dict[int, float]:
    """Validation loss by round."""
    return {event["round"]: event["loss"] for event in peer.events(EventName.VALIDATED)}


def command_of(peer: Peer) -> str:
    """What its user types to have it back."""
    return "start" if peer.name == "founder" else "join"


def kill_together(*peers: Peer) -> None:
    for peer in peers:
        peer.signal_all(signal.SIGKILL)
    for peer in peers:
        peer.process.wait()


def validated(peer: Peer, before: int) -> float:
    """Its newest validation loss of the rounds up to this one: a busy machine leaves some out."""
    known = {round_: loss for round_, loss in losses(peer).items() if round_ <= before}
    return known[max(known)]


def last_step(peer: Peer) -> float:
    """Of the newest round that it has closed."""
    step: float = peer.events(EventName.ROUND_CLOSED)[-1]["step"]
    return step


def checkpoints(peer: Peer) -> list[Path]:
    """Whole ones in its home, oldest first."""
    folders = [path for path in peer.home.checkpoints_dir.iterdir() if number_of(path.name)]
    return sorted(folders, key=lambda path: number_of(path.name))


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text())
    return manifest


@pytest.mark.long
@pytest.mark.parametrize(
    ("names", "founder_is_lost"),
    [(("b", "c"), True), (("b", "c", "d"), False)],
    ids=["lost", "kept"],
)
def test_peers_killed_at_once_go_on_from_the_newest_good_checkpoint(
    homes: Swarm, names: tuple[str, ...], founder_is_lost: bool
) -> None:
    founder = started(homes, "founder")
    founder.wait_event(EventName.ROUND_CLOSED, START_S)
    joiners = [homes.launch(n, "join", "--bootstrap", founder.address, *EVERY) for n in names]
    peers = [founder, *joiners]
    all_averaging(peers, 2)
    for peer in peers:
        peer.wait_for("checkpoints", partial(has_said, peer, EventName.CHECKPOINT_WRITTEN, 3))
    tokens = {peer.name: peer.status()["tokens"] for peer in peers}
    kill_together(*peers)
    if founder_is_lost:
        shutil.rmtree(founder.home.root)
    left = joiners if founder_is_lost else peers
    damaged, *_ = reversed(checkpoints(left[0]))
    (damaged / "outer.safetensors").write_bytes(b"torn")
    good = [(peer, path) for peer in left for path in checkpoints(peer) if path != damaged]
    whose, newest = max(good, key=lambda one: int(manifest_of(one[1])["step"]))
    before = validated(whose, manifest_of(newest)["round"])
    assert before < FIRST_LOSS - LEARNT, "there is something to lose"

    back = [homes.launch(peer.name, command_of(peer), *EVERY) for peer in left]
    all_averaging(back, 2)
    refused = back[0].wait_event(EventName.CHECKPOINT_REFUSED)
    assert refused["path"] == str(damaged)
    (leader,) = (peer for peer in back if peer.events(EventName.RUN_RESUMED))
    resumed = leader.wait_event(EventName.RUN_RESUMED)
    assert resumed["step"] == int(manifest_of(newest)["step"])
    assert leader.status()["tokens"] > resumed["tokens"] > 0.5 * tokens[leader.name]
    for peer in back:
        if peer is not leader:
            assert peer.events(EventName.STATE_RECEIVED)
        first = peer.wait_event(EventName.VALIDATED)
        assert first["loss"] <= before + TOLERANCE, peer.report()
    none_blamed(back)


@pytest.mark.long
def test_the_newest_checkpoint_is_gone_on_from_though_an_old_one_is_back_first(
    homes: Swarm,
) -> None:
    founder = started(homes, "founder")
    founder.wait_event(EventName.CHECKPOINT_WRITTEN, START_S)
    other = homes.launch("b", "join", "--bootstrap", founder.address, *EVERY)
    all_averaging([founder, other], 2)
    kill_together(founder)
    since_s = time.monotonic()
    lag = LOST_LAG_ROUNDS * STEPS_A_ROUND
    other.wait_for(
        "a lead that a minute of training alone does not make up for",
        lambda: (
            time.monotonic() - since_s > 2 * ALONE_S
            and last_step(other) - last_step(founder) > 2 * lag
        ),
        TRAINS_ALONE_S,
    )
    kill_together(other)
    newest = int(manifest_of(checkpoints(other)[-1])["step"])

    first = homes.launch("founder", "start", "--alone", *EVERY)
    first.wait_event(EventName.RUN_RESUMED, START_S)
    late = homes.launch("b", "join", *EVERY)
    resumed = late.wait_event(EventName.RUN_RESUMED, START_S)
    assert resumed["step"] == newest
    first.wait_event(EventName.STATE_RECEIVED, START_S)
    all_averaging([first, late], 2)
    assert min(peer.status()["step"] for peer in (first, late)) >= newest
    none_blamed([first, late])


@pytest.mark.long
def test_a_lone_peer_goes_on_bit_for_bit(homes: Swarm) -> None:
    spec = SPEC.replace("1000000", str(END_ROUNDS * STEPS_A_ROUND))
    whole = started(homes, "whole", spec=spec)
    expected = whole.wait_event(EventName.RUN_FINISHED, START_S)
    whole.kill()
    again = homes.folder("again")
    again.mkdir()
    shutil.copy(whole.home.identity_path, again)  # lengths of rounds follow from it
    peer = started(homes, "again", "--checkpoint-every", "0.2", spec=spec)
    peer.wait_event(EventName.CHECKPOINT_WRITTEN, START_S)
    peer.wait_event(EventName.ROUND_CLOSED, START_S, round=1)
    peer.kill()
    assert not peer.events(EventName.RUN_FINISHED)
    peer = homes.launch("again", "start")
    finished = peer.wait_event(EventName.RUN_FINISHED, START_S)
    assert 0 < peer.wait_event(EventName.RUN_RESUMED)["step"] < END_ROUNDS * STEPS_A_ROUND
    ours, theirs = losses(peer), losses(whole)
    both = ours.keys() & theirs.keys()  # a busy machine leaves validations out
    assert {each: ours[each] for each in both} == {each: theirs[each] for each in both}
    same = ("step", "round", "validation_loss")
    assert [finished[key] for key in same] == [expected[key] for key in same]
