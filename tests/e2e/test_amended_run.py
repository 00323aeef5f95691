"""Runs that their founder amends while two peers train them: faster, then shorter."""

import pytest
from swarm import INNER_STEPS, RUN_SPEC, START_S, Peer, open_swarm

from peer.observe.event_names import EventName
from peer.options.exit_codes import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

STEPS_A_ROUND = 50
SPEC = RUN_SPEC.replace(f"inner_steps = {INNER_STEPS}", f"inner_steps = {STEPS_A_ROUND}")


def wait_finished(peer: Peer) -> None:
    peer.wait_for("the end", lambda: peer.status()["state"] == "finished", START_S)


@pytest.mark.long
def test_both_peers_take_the_new_rate_and_end_at_the_new_end(tmp_path):
    with open_swarm(tmp_path, SPEC) as swarm:
        founder = swarm.found()
        guest = swarm.join(founder, "guest")
        guest.wait_averaging()
        homes = [str(peer.home.root) for peer in (founder, guest)]

        changed = tmp_path / "changed.toml"
        changed.write_text("[optimizer]\nlearning_rate = 0.006\n")
        told = swarm.loco("amend", str(changed), "--home", homes[1])
        assert (told.returncode, "founder's key" in told.stderr) == (ExitCode.FAILURE, True)
        told = swarm.loco("amend", str(changed), "--home", homes[0])
        assert told.returncode == ExitCode.OK, told.stderr
        assert "optimizer.learning_rate: 0.003 -> 0.006" in told.stdout

        total_steps = (founder.status()["step"] // STEPS_A_ROUND + 15) * STEPS_A_ROUND
        changed.write_text(SPEC.replace("1000000", str(total_steps)))  # the rate stays
        told = swarm.loco("amend", str(changed), "--home", homes[0])
        assert (told.returncode, told.stderr) == (ExitCode.OK, "")
        for peer, home in zip((founder, guest), homes, strict=True):
            heard = peer.wait_event(EventName.RUN_AMENDED, version=2)
            assert heard["keys"] == ["training.total_steps"]
            shown = swarm.loco("amend", "--show", "--home", home).stdout
            assert "optimizer.learning_rate = 0.006" in shown
            assert f"training.total_steps = {total_steps}" in shown
        for peer in (founder, guest):
            wait_finished(peer)
            assert peer.wait_event(EventName.RUN_FINISHED)["step"] == total_steps
            assert [each["version"] for each in peer.status()["amendments"]] == [1, 2]


@pytest.mark.long
def test_two_stages_end_at_the_new_end_too(tmp_path):
    spec = (
        RUN_SPEC.replace("num_layers = 1", "num_layers = 2")
        .replace("total_steps = 1000000", "total_steps = 1000000\nmicro_batch = 1")
        .replace(f"inner_steps = {INNER_STEPS}", "inner_steps = 5")
    )
    with open_swarm(tmp_path) as swarm:
        swarm.folder("run.toml").write_text(f"{spec}\n[pipeline]\nstages = 2\n")
        data_peer = swarm.launch("founder0", "start", str(swarm.folder("run.toml")))
        data_peer.wait_event(EventName.TRAINER_STARTED, START_S)
        relay = swarm.join(data_peer)
        data_peer.wait_event(EventName.ROUND_CLOSED, START_S)
        total_steps = (data_peer.status()["step"] // 5 + 6) * 5
        changed = tmp_path / "changed.toml"
        changed.write_text(f"[training]\ntotal_steps = {total_steps}\n")
        told = swarm.loco("amend", str(changed), "--home", str(data_peer.home.root))
        assert (told.returncode, told.stderr) == (ExitCode.OK, "")
        for peer in (data_peer, relay):
            assert peer.wait_event(EventName.RUN_FINISHED, START_S)["step"] == total_steps
            wait_finished(peer)
