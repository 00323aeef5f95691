"""`loco-peer doctor` looks at live peers, as a machine that has not joined yet."""

from pathlib import Path

import pytest
from swarm import START_S, Swarm, all_averaging, free_port

from peer.observe.event_names import EventName
from peer.options.exit_codes import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

PEER_LOST = EventName.PEER_LOST


def test_doctor_meets_the_peers_of_a_run_and_leaves_no_trace(swarm: Swarm, tmp_path: Path) -> None:
    peers = swarm.at_least(2)
    seen = {peer: len(peer.events()) for peer in peers}
    listen, home = f"127.0.0.1:{free_port()}", ("--home", str(tmp_path / "home"))
    dead = f"127.0.0.1:{free_port()}"
    named = ("--bootstrap", peers[0].address, "--bootstrap", dead)
    done = swarm.loco("doctor", *named, "--listen", listen, *home, timeout_s=START_S)
    told = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    found = {(health, subject): says for health, subject, says in (t for t in told if len(t) == 3)}
    assert f"{peers[0].address} answers in" in done.stdout, done.stdout + done.stderr
    assert "theirs is 0." in found["ok", "clock"]
    assert found["ok", "dial-back"].endswith(f"/tcp/{listen.partition(':')[2]}")
    assert "Mbit/s, a piece of the corpus" in found["ok", "bandwidth"]
    assert dead in found["FAIL", "peer"]
    assert done.returncode == ExitCode.FAILURE, "one that was named does not answer"
    assert f"--announce HOST:{listen.partition(':')[2]}" in done.stdout, "loopback is of no use"
    all_averaging(peers)
    looker = peers[0].wait_event(EventName.PEER_LEFT, after=seen[peers[0]])["remote"]
    assert looker not in {peer.peer_id for peer in peers}
    for peer in peers:
        lost = {e["remote"] for e in peer.events()[seen[peer] :] if e["event"] == PEER_LOST}
        assert not lost & {other.peer_id for other in peers}, peer.report()
