"""All processes of a run are gone at once, and it goes on from what lies in the homes."""

import shutil
import signal
from collections.abc import Iterator
from functools import partial

import pytest
from swarm import RUN_SPEC, START_S, Peer, Swarm, all_averaging, has_said, none_blamed, open_swarm

from peer.observe.event_names import EventName

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

EVERY = ("--checkpoint-every", "2")
LAST_ROUND = 8
"""Of the lone peer that is compared."""
SPEC = RUN_SPEC.replace("inner_steps = 150", "inner_steps = 20\nvalidate_every = 1")


@pytest.fixture
def homes(tmp_path) -> Iterator[Swarm]:
    with open_swarm(tmp_path, SPEC) as swarm:
        yield swarm


def started(swarm: Swarm, name: str) -> Peer:
    swarm.folder("run.toml").write_text(SPEC)
    return swarm.launch(name, "start", str(swarm.folder("run.toml")), *EVERY)


def losses(peer: Peer) -> dict[int, float]:
    """Validation loss by round."""
    return {event["round"]: event["loss"] for event in peer.events(EventName.VALIDATED)}


def kill_together(*peers: Peer) -> None:
    for peer in peers:
        peer.signal_all(signal.SIGKILL)
    for peer in peers:
        peer.process.wait()


def test_a_run_goes_on_without_its_founder_from_the_newest_good_checkpoint(homes: Swarm) -> None:
    founder = started(homes, "founder")
    founder.wait_event(EventName.ROUND_CLOSED, START_S)
    joiners = [
        homes.launch(name, "join", "--bootstrap", founder.address, *EVERY) for name in ("b", "c")
    ]
    all_averaging([founder, *joiners], 2)
    for peer in joiners:
        peer.wait_for("checkpoints", partial(has_said, peer, EventName.CHECKPOINT_WRITTEN, 3))
    tokens = {peer.name: peer.status()["tokens"] for peer in joiners}
    kill_together(founder, *joiners)
    shutil.rmtree(founder.home.root)
    folders = {peer.name: sorted(peer.home.checkpoints_dir.iterdir()) for peer in joiners}
    (folders["b"][-1] / "outer.safetensors").write_bytes(b"torn")

    back = [homes.launch(peer.name, "join", *EVERY) for peer in joiners]
    all_averaging(back, 2)
    refused = back[0].wait_event(EventName.CHECKPOINT_REFUSED)
    assert refused["path"] == str(folders["b"][-1])
    leaders = [peer for peer in back if peer.events(EventName.RUN_RESUMED)]
    assert len(leaders) == 1
    resumed = leaders[0].wait_event(EventName.RUN_RESUMED)
    steps = [int(folder.name.split("-")[-1]) for folder in (folders["b"][-2], folders["c"][-1])]
    assert resumed["step"] == max(steps)
    assert leaders[0].status()["tokens"] > resumed["tokens"] > 0.5 * tokens[leaders[0].name]
    (follower,) = (peer for peer in back if peer not in leaders)
    assert follower.events(EventName.STATE_RECEIVED)
    none_blamed(back)


def test_a_lone_peer_goes_on_bit_for_bit(homes: Swarm) -> None:
    whole = started(homes, "whole")
    whole.wait_event(EventName.VALIDATED, START_S, round=LAST_ROUND)
    whole.kill()
    again = homes.folder("again")
    again.mkdir()
    shutil.copy(whole.home.identity_path, again)  # lengths of rounds follow from it
    peer = started(homes, "again")
    peer.wait_event(EventName.CHECKPOINT_WRITTEN, START_S)
    peer.wait_event(EventName.VALIDATED, START_S, round=2)
    peer.kill()
    peer = homes.launch("again", "start")
    peer.wait_event(EventName.VALIDATED, START_S, round=LAST_ROUND)
    assert peer.wait_event(EventName.RUN_RESUMED)["round"] < LAST_ROUND
    expected, found = losses(whole), losses(peer)
    both = expected.keys() & found.keys()  # a busy machine leaves validations out
    assert {round_: found[round_] for round_ in both} == {
        round_: expected[round_] for round_ in both
    }
    assert LAST_ROUND in both
