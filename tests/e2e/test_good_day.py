"""Start, join, look, leave: what a user does on a good day."""

import json
import math
import os
import signal

import pytest
from swarm import NUM_ROUNDS_ALONE, Peer, Swarm, all_averaging, ending, port_of

from peer.facts import PeerState
from peer.observe.event_names import EventName
from peer.options.exit_codes import ExitCode
from peer.process.terminal import CONSOLE_LOG
from protocol.outcomes import SkipReason

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

UNTRAINED_NATS = math.log(256)
STATUS_TYPES = {
    "peer_id": str,
    "run_id": str,
    "state": str,
    "round": int,
    "step": int,
    "total_steps": int,
    "learning_rate": float,
    "tokens_per_s": float,
    "swarm_tokens_per_s": float,
    "tokens": int,
    "train_loss": float,
    "validation_loss": float,
    "replica_loss": type(None),
    "outcomes": dict,
    "peers": list,
    "metrics": str,
    "part": str,
    "expert": type(None),
    "experts": list,
    "matrix": type(None),
    "microbatches": dict,
    "pipeline": type(None),
    "amendments": list,
    "successor": type(None),
    "ranks": int,
    "codec": str,
    "reach": dict,
    "address": str,
    "address_from": type(None),
    "reachable_from": str,
    "doing": str,
    "since_s": float,
    "problems": list,
    "up_s": float,
    "price_per_hour": type(None),
    "seconds": dict,
}
PEER_TYPES = {
    "peer_id": str,
    "state": str,
    "round": int,
    "rtt_s": float,
    "step": int,
    "validation_loss": float,
    "averages": int,
}


@pytest.fixture
def peers(swarm: Swarm) -> list[Peer]:
    return swarm.at_least(2)


def test_without_a_partner_a_peer_trains_on(swarm):
    seen = swarm.started[0].events()
    num_alone = [event["event"] for event in [*seen, {"event": EventName.PEER_LINKED}]].index(
        EventName.PEER_LINKED
    )
    alone = seen[:num_alone]
    skipped = [event for event in alone if event["event"] == EventName.ROUND_SKIPPED]
    assert len(skipped) >= NUM_ROUNDS_ALONE
    assert {event["reason"] for event in skipped} == {SkipReason.NO_PARTNER}
    assert [event["round"] for event in skipped] == list(range(len(skipped)))
    losses = [event["loss"] for event in alone if event["event"] == EventName.VALIDATED]
    assert losses[-1] < losses[0]


def test_the_ready_line_says_how_to_join(peers):
    for peer in peers:
        ready = peer.ready()
        assert set(ready) == {"peer_id", "addresses", "join", "metrics", "reachable_from"}
        assert all(a.endswith(f"/p2p/{ready['peer_id']}") for a in ready["addresses"])
        assert any(a.startswith("/ip4/127.0.0.1/tcp/") for a in ready["addresses"])
        assert ready["join"] == f"loco-peer join --bootstrap {ready['addresses'][0]}"
        assert peer.metric("loco_tokens_total") > 0


def test_all_average_and_learn(peers):
    known = {peer.peer_id for peer in peers}
    for peer in peers:
        last = peer.events(EventName.ROUND_AVERAGED)[-1]
        assert last["partner"] in known - {peer.peer_id}
        peer.wait_event(EventName.VALIDATED)
        loss = peer.events(EventName.VALIDATED)[-1]["loss"]
        assert loss < UNTRAINED_NATS - 0.5


def test_status_has_exactly_what_is_promised(swarm, peers):
    one, *others = peers
    told = lambda: [peer["validation_loss"] for peer in one.status()["peers"]]
    one.wait_for("all others linked", lambda: len(told()) >= len(others) and None not in told())
    printed = swarm.loco("status", "--json", "--home", str(one.home.root))
    assert printed.returncode == ExitCode.OK, printed.stderr
    status = json.loads(printed.stdout)
    assert status.pop("chosen_inner_steps") is None  # the run gives H
    assert isinstance(status.pop("left_s"), float | None)  # not at once
    assert {key: type(value) for key, value in status.items()} == STATUS_TYPES
    assert set(status["outcomes"]) == {"averaged", "skipped", "recent_share"}
    assert status["outcomes"]["averaged"] > 0
    assert set(status["outcomes"]["skipped"]) <= {str(reason) for reason in SkipReason}
    assert {told["peer_id"] for told in status["peers"]} == {peer.peer_id for peer in others}
    for told in status["peers"]:
        assert isinstance(told.pop("average_s"), float | None)  # it may not have met that one
        assert {key: type(value) for key, value in told.items()} == PEER_TYPES
    assert status["state"] == PeerState.TRAINING
    assert (status["peer_id"], status["metrics"]) == (one.peer_id, one.ready()["metrics"])
    assert {peer.status()["run_id"] for peer in others} == {status["run_id"]}
    shown = swarm.loco("status", "--home", str(one.home.root))
    assert one.peer_id in shown.stdout


def test_one_home_is_for_one_daemon(swarm, peers):
    one = peers[0]
    home = str(one.home.root)
    done = swarm.loco("join", "--bootstrap", one.address, "--home", home)
    assert done.returncode == ExitCode.USAGE
    assert f"in use by the daemon with pid {one.process.pid}" in done.stderr
    assert "Traceback" not in done.stderr


def test_leave_and_sigterm_end_well_and_leave_no_process_behind(swarm, peers):
    one = peers[0]
    by_command = swarm.join(f"localhost:{port_of(one.address)}")
    by_signal = swarm.join(one)
    all_averaging([by_command, by_signal])
    began = {peer: peer.processes() for peer in (by_command, by_signal)}
    done = swarm.loco("leave", "--home", str(by_command.home.root))
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
    by_signal.process.send_signal(signal.SIGTERM)
    for peer in (by_command, by_signal):
        assert peer.wait_exit() == ExitCode.OK, peer.report()
        assert not [process for process in began[peer] if process.is_running()]
        one.wait_event(EventName.PEER_LEFT, remote=peer.peer_id)
    assert {p["peer_id"] for p in one.status()["peers"]}.isdisjoint(
        {by_command.peer_id, by_signal.peer_id}
    )
    again = swarm.loco("leave", "--home", str(by_command.home.root))
    assert again.returncode == ExitCode.NO_DAEMON
    one.wait_averaging()


def test_a_lost_terminal_ends_nothing(swarm, peers):
    """A closed SSH session, and `loco-peer join ... | head`."""
    (nobody_reads, stdout), (screen, terminal) = os.pipe(), os.openpty()
    os.close(nobody_reads)
    with ending(swarm.join(peers[0], outputs=(stdout, terminal))) as peer:
        os.close(stdout)
        os.close(terminal)
        assert b"starting in" in os.read(screen, 1000)
        os.close(screen)  # now it has no terminal any more, and SIGHUP says so
        peer.wait_averaging()
        processes = peer.processes()
        peer.signal_all(signal.SIGHUP)
        peer.wait_averaging()
        assert all(process.is_running() for process in processes)
        said = (peer.home.root / CONSOLE_LOG).read_text()
        assert json.loads(next(line for line in said.splitlines() if line.startswith("{")))["join"]
        assert "linked with" in said
        peer.process.send_signal(signal.SIGTERM)
        assert peer.wait_exit() == ExitCode.OK, peer.report()
        assert peer.events(EventName.CHECKPOINT_WRITTEN)
