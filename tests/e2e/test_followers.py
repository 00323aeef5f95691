"""A founder goes on with its model in another run, and a peer follows by itself, in a new process.

Both runs are private, so the guest has to be known in the second one, too.
"""

import pytest
from swarm import INNER_STEPS, RUN_SPEC, START_S, Swarm, open_swarm

from peer.observe.event_names import EventName
from peer.options.exit_codes import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.long]

H = 20
SPEC = RUN_SPEC.replace(f"inner_steps = {INNER_STEPS}", f"inner_steps = {H}")
SOURCE = '[data]\nsource = "text:{folder}/old.txt"'
PRIVATE = f"""{SPEC.replace("[data]", SOURCE)}
[admission]
mode = "invite"
"""


def done(swarm: Swarm, *words: str) -> str:
    told = swarm.loco(*words)
    assert told.returncode == ExitCode.OK, told.stderr
    return str(told.stdout)


def test_a_guest_follows_into_the_next_run_and_comes_back_to_that(tmp_path):
    for name in ("old", "more"):
        (tmp_path / f"{name}.txt").write_text(f"Read some {name} lines, and once more.\n" * 4000)
    with open_swarm(tmp_path, PRIVATE.replace("{folder}", str(tmp_path))) as swarm:
        founder = swarm.found()
        home = str(founder.home.root)
        line = done(swarm, "invite", "--home", home, "--expires", "1h")
        invited = swarm.environment | dict([line.split()[0].split("=", 1)])
        join = ("join", "--bootstrap", founder.address, "--follow")
        guest = swarm.launch("guest", *join, environment=invited)
        guest.wait_averaging()
        first, peer_id = guest.status()["run_id"], guest.peer_id

        shorter = tmp_path / "shorter.toml"
        steps = (founder.status()["step"] // H + 6) * H
        shorter.write_text(f"[training]\ntotal_steps = {steps}\n")
        done(swarm, "amend", str(shorter), "--home", home)
        for peer in (founder, guest):
            peer.wait_event(EventName.RUN_FINISHED, START_S)

        following = str(tmp_path / "next.toml")
        data = ("--data", f"text:{tmp_path}/more.txt", "--replay", "0.05")
        done(swarm, "extend", following, *data, "--steps", "1000000", "--home", home)
        other = swarm.launch("second", "start", following)
        other.wait_event(EventName.ROUND_OPENED, START_S, round=1)
        second = other.status()["run_id"]
        said = done(swarm, "amend", "--successor", str(other.home.root), "--home", home)
        assert second in said
        assert other.address in said

        guest.wait_event(EventName.SUCCESSOR_NAMED, successor=second)
        guest.wait_event(EventName.RUN_RECEIVED, START_S, run_id=second)
        guest.wait_averaging()
        told = guest.status()
        assert (told["run_id"], told["peer_id"]) == (second, peer_id)
        left = guest.home.old_runs_dir / first
        assert (left / "run.json").is_file(), "the old run is put away, and whole"
        assert list((left / "checkpoints").iterdir())
        assert founder.status()["state"] == "finished", "it serves those who come later"

        guest.kill()
        guest = swarm.launch("guest", *join, environment=invited)  # as a service says it again
        guest.wait_averaging()
        assert guest.status()["run_id"] == second
