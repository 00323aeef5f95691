"""A user pauses a peer and has it go on: what they type, what `status` shows, what others do."""

import pytest
from swarm import Swarm

from peer.observe.event_names import EventName
from peer.options.exit_codes import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.mark.long
def test_a_paused_peer_rests_and_goes_on(swarm: Swarm) -> None:
    *others, peer = swarm.at_least(3)
    home = ("--home", str(peer.home.root))
    before = len(peer.events())
    assert swarm.loco("resume", *home).returncode == ExitCode.FAILURE
    assert "pausing when this round is done" in swarm.loco("pause", *home).stdout
    paused = peer.wait_event(EventName.TRAINING_PAUSED, after=before)
    assert peer.status()["state"] == "paused"
    again = swarm.loco("pause", *home)
    assert (again.returncode, again.stderr) == (
        ExitCode.FAILURE,
        "loco-peer: this peer is paused already\n",
    )
    for other in others:
        told = lambda other=other: {p["peer_id"]: p["state"] for p in other.status()["peers"]}
        other.wait_for("it sees the pause", lambda: told()[peer.peer_id] == "paused")  # noqa: B023 - called at once
        other.wait_averaging(2)
    assert peer.status()["step"] == paused["step"]
    joiner = swarm.join(peer)
    assert joiner.wait_event(EventName.RUN_RECEIVED)["remote"] == peer.peer_id
    assert swarm.loco("resume", *home).stdout == "training resumed\n"
    peer.wait_event(EventName.TRAINING_RESUMED, after=before)
    peer.wait_averaging()
    assert peer.status()["step"] > paused["step"]


def test_a_peer_that_does_not_run_cannot_be_paused(swarm: Swarm) -> None:
    for command in ("pause", "resume"):
        done = swarm.loco(command, "--home", str(swarm.folder("nobody")))
        assert done.returncode == ExitCode.NO_DAEMON
        assert "no daemon is running" in done.stderr
